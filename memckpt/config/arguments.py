"""Settings from outside Python: options of argparse, and environment variables.

    MEMCKPT_RUN_DIR                --run-dir                   the run directory
    MEMCKPT_RESUME                 --resume                    auto, require, exact, never, or a step number
    MEMCKPT_AUTO=1                                             Lightning finds the callback by itself
    MEMCKPT_DISABLE=1                                          no protection, although the script asks for it
    MEMCKPT_REDO=lazy              --memckpt-redo lazy         a field of MemckptConfig
    MEMCKPT_PEERS_DATA=4           --memckpt-peers-data 4      a field of one of its parts
    MEMCKPT_PEERS=none             --memckpt-peers off         a part that is switched off

An option wins over its variable, a variable over a default. ``none`` means None where a field allows it. MEMCKPT_NODE
is read by the agent's address; MEMCKPT_RACK and MEMCKPT_ZONE by the placement of peers. MEMCKPT_RESTART_COUNT
and MEMCKPT_LAUNCHER are set by ``memckpt run`` and ``memckpt worker``, MEMCKPT_OBSERVERS by them and ``memckpt drill``.
"""

from __future__ import annotations

import argparse
import logging
import os
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

from memckpt.config import MemckptConfig, ResumeChoice, check_resume, parse_resume
from memckpt.config.checks import parse_text, require
from memckpt.config.observers import OBSERVERS, observers_from_environment
from memckpt.config.settings import KIND, PREFIX, Setting, describe_settings, from_mapping
from memckpt.errors import ConfigurationError

_RESUME_HELP = (
    "auto: continue if a state is held, else start; require: continue or fail; exact: continue exactly, start where "
    "nothing is held, or fail; never: drop the held state and start; a number: continue at that step"
)
RUN_DIR = "MEMCKPT_RUN_DIR"
RESUME = "MEMCKPT_RESUME"
AUTO = "MEMCKPT_AUTO"
DISABLE = "MEMCKPT_DISABLE"
#: Variables for the location of a node and its agent, read elsewhere.
_ADDRESS = frozenset({"MEMCKPT_NODE", "MEMCKPT_RACK", "MEMCKPT_ZONE"})
#: Set for attempts: by `memckpt run` the number of restarts, by `memckpt worker` the process id of the launcher, which
#: is not always their parent.
RESTART_COUNT = "MEMCKPT_RESTART_COUNT"
LAUNCHER = "MEMCKPT_LAUNCHER"
_log = logging.getLogger("memckpt")


class ProtectionArguments(NamedTuple):
    """The three arguments of ``memckpt.attach`` and of every adapter."""

    run_dir: str
    resume: ResumeChoice | int
    config: MemckptConfig


# argparse


def add_arguments(parser: argparse.ArgumentParser, *, run_dir: str | None = None) -> None:
    """Add ``--run-dir``, ``--resume`` and one ``--memckpt-...`` option for each setting; `from_args` reads them.

    Defaults are read from the environment; ConfigurationError: one is invalid. `run_dir`: the default of ``--run-dir``
    if MEMCKPT_RUN_DIR is not set; None: the option is required then.
    """
    group = parser.add_argument_group("memckpt", "protection of every step; docs/configuration.md")
    directory = run_dir_from_environment() or run_dir
    fallback = "" if run_dir is None else f", or {run_dir}"
    resume = resume_from_environment()
    group.add_argument(
        "--run-dir",
        type=_argument(_directory),
        default=directory,
        required=directory is None,
        help=f"names the run; the same directory continues it (default: {RUN_DIR}{fallback})".replace("%", "%%"),
    )
    group.add_argument(
        "--resume",
        type=_argument(parse_resume),
        default="auto" if resume is None else resume,
        metavar="auto|require|exact|never|STEP",
        help=f"{_RESUME_HELP} (default: {RESUME}, or auto)",
    )
    for setting in describe_settings():
        default = "none" if setting.default in (None, ()) else setting.default
        condition = f"with {' or '.join(setting.variants)}; " if setting.variants else ""
        group.add_argument(
            setting.option,
            dest=setting.destination,
            type=_argument(setting.parse),
            default=argparse.SUPPRESS,
            # A bool may be given without a value.
            nargs="?" if setting.kind is bool else None,
            const=True if setting.kind is bool else None,
            metavar="|".join(setting.choices) or (setting.kind.__name__.upper() if setting.kind else None),
            help=f"{setting.help} ({condition}default: {setting.variable}, or {default})".replace("%", "%%"),
        )


def from_args(args: argparse.Namespace) -> ProtectionArguments:
    """The values of the options of `add_arguments`; for options not given, those of their environment variables."""
    given = {
        setting: getattr(args, setting.destination)
        for setting in describe_settings()
        if hasattr(args, setting.destination)
    }
    variables = _beside(given, _from_variables(os.environ, given))

    def name(setting: Setting) -> str:
        return setting.variable if setting in variables and setting not in given else setting.option

    return ProtectionArguments(args.run_dir, args.resume, _assemble({**variables, **given}, name))


def _beside(given: Mapping[Setting, Any], variables: Mapping[Setting, Any]) -> dict[Setting, Any]:
    """The variables that apply in addition to options.

    An option of a part overrides a variable that switches the part off. An option that selects a variant hides
    variables of other variants.
    """
    wanted = {setting.part for setting in given}
    chosen = {setting.path: value for setting, value in given.items() if setting.is_part}
    return {
        setting: value
        for setting, value in variables.items()
        if not (setting.is_part and value == "off" and setting.path in wanted)
        and not (setting.variants and chosen.get(setting.part, setting.variants[0]) not in setting.variants)
    }


def _assemble(given: Mapping[Setting, Any], name: Callable[[Setting], str]) -> MemckptConfig:
    """The configuration with these settings, and defaults for others. Errors call a setting by its `name`."""
    _check_variants(given, name)
    config: MemckptConfig = from_mapping(_nested(given))
    return config


def _check_variants(given: Mapping[Setting, Any], name: Callable[[Setting], str]) -> None:
    """Refuse a setting that the selected variant of its part does not have. A part that is switched off accepts any."""
    parts = {setting.path: setting for setting in describe_settings() if setting.is_part}
    for setting in given:
        part = parts.get(setting.part)
        if part is None or not setting.variants:
            continue
        chosen = given.get(part)
        if chosen != "off" and chosen not in setting.variants:
            equals = " " if name(part) == part.option else "="
            expected = f"{name(part)}{equals}{' or '.join(setting.variants)}"
            raise ConfigurationError(f"{name(setting)}: expected {expected} beside it, found {chosen or 'nothing'}")


def _nested(given: Mapping[Setting, Any]) -> dict[str, Any]:
    """The mapping that a file would hold. A part's variant is given by the part's setting or implied by its fields."""
    values: dict[str, Any] = {}
    off = []
    for setting, value in given.items():
        *parents, name = setting.path.split(".")
        place = values
        for parent in parents:
            place = place.setdefault(parent, {})
        if not setting.is_part:
            place[name] = value
            if setting.variants:
                place.setdefault(KIND, setting.variants[0])
        elif value == "off":
            off.append((place, name))
        elif value != "on":
            place.setdefault(name, {})[KIND] = value
    for place, name in off:
        place[name] = None
    return values


def _argument(read: Callable[[str], Any]) -> Callable[[str], Any]:
    """A converter for argparse, which shows the message of our own error class with the option's name."""

    def convert(text: str) -> Any:
        try:
            return read(text)
        except ConfigurationError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return convert


def _directory(text: str, name: str = "") -> str:
    if not text:  # Path("") is the current directory
        raise ConfigurationError(f"{name}expected a directory, found ''")
    return text


# Environment variables


def run_dir_from_environment(environment: Mapping[str, str] = os.environ) -> str | None:
    """MEMCKPT_RUN_DIR; None where it is not set. Raises ConfigurationError: it is empty."""
    found = environment.get(RUN_DIR)
    return None if found is None else _directory(found, f"{RUN_DIR}: ")


def resume_from_environment(environment: Mapping[str, str] = os.environ) -> ResumeChoice | int | None:
    """MEMCKPT_RESUME; None where it is not set. Raises ConfigurationError: it is no resume argument."""
    found = environment.get(RESUME)
    return None if found is None else parse_resume(found, name=RESUME)


def auto_from_environment(environment: Mapping[str, str] = os.environ) -> bool:
    """MEMCKPT_AUTO; False where it is not set. Raises ConfigurationError."""
    return _truth(AUTO, environment)


def disabled_by_environment(environment: Mapping[str, str] = os.environ) -> bool:
    """MEMCKPT_DISABLE; False where it is not set. Raises ConfigurationError."""
    return _truth(DISABLE, environment)


def _truth(name: str, environment: Mapping[str, str]) -> bool:
    found = environment.get(name)
    try:
        return found is not None and bool(parse_text(bool, found))
    except ConfigurationError:
        raise ConfigurationError(f"{name}: expected 1 or 0, found {found!r}") from None


def config_from_environment(environment: Mapping[str, str] = os.environ) -> MemckptConfig:
    """The configuration from the variables; fields without one keep their defaults. Raises ConfigurationError.

    A variable with the prefix MEMCKPT_ that names no field causes a warning.
    """
    return _assemble(_from_variables(environment), lambda setting: setting.variable)


def _from_variables(environment: Mapping[str, str], options: Collection[Setting] = ()) -> dict[Setting, Any]:
    """The values of all variables but those of `options`, which are given on the command line."""
    given: dict[Setting, Any] = {}
    known = {RUN_DIR, RESUME, AUTO, DISABLE, OBSERVERS, RESTART_COUNT, LAUNCHER, *_ADDRESS}
    for setting in describe_settings():
        known.add(setting.variable)
        if setting.variable in environment and setting not in options:
            try:
                given[setting] = setting.parse(environment[setting.variable])
            except ConfigurationError as error:
                place = f"; the location is set by {setting.variable}_URL" if setting.path == "storage" else ""
                raise ConfigurationError(f"{setting.variable}: {error}{place}") from None
    for name in sorted(set(environment) - known):
        if name.startswith(f"{PREFIX.upper()}_"):
            _log.warning("memckpt: the environment variable %s names no setting and is ignored", name)
    return given


def with_environment(
    run_dir: str | os.PathLike[str] | None,
    resume: ResumeChoice | int | None,
    config: MemckptConfig | Mapping[str, Any] | None,
) -> ProtectionArguments:
    """The arguments passed in Python, with each None replaced by the environment's value. Raises ConfigurationError.

    An observer may change the settings. Where one has a run directory, that replaces the script's and is continued.
    """
    settings: Any = config_from_environment() if config is None else config
    settings = from_mapping(settings) if isinstance(settings, Mapping) else settings
    if not isinstance(settings, MemckptConfig):
        remedy = f"; a directory is given as run_dir={settings!r}" if isinstance(settings, str | os.PathLike) else ""
        expected = "a MemckptConfig, or a mapping of its fields"
        raise ConfigurationError(f"config: expected {expected}, found {settings!r}{remedy}")
    for observer in observers_from_environment():
        settings = observer.change_config(settings)
        if observer.run_dir is not None:
            run_dir, resume = observer.run_dir, "auto"
    require(run_dir is None or isinstance(run_dir, str | os.PathLike), "run_dir", "a directory", run_dir)
    directory = run_dir_from_environment() if run_dir is None else _directory(os.fspath(run_dir), "run_dir: ")
    if directory is None:
        raise ConfigurationError(f"run_dir: expected a directory as argument or in {RUN_DIR}, found neither")
    if resume is None:
        resume = resume_from_environment()
    return ProtectionArguments(directory, check_resume("auto" if resume is None else resume), settings)
