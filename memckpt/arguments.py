"""Settings from outside Python: options of argparse, environment variables, and nested mappings from files.

    MEMCKPT_RUN_DIR                --run-dir                   the run directory
    MEMCKPT_RESUME                 --resume                    auto, require, never, or a step number
    MEMCKPT_REDO=lazy              --memckpt-redo lazy         a field of MemckptConfig
    MEMCKPT_AGENT_THREADS=2        --memckpt-agent-threads 2   a field of its AgentConfig
    MEMCKPT_STORAGE_URL=...        --memckpt-storage-url ...   a field of its StorageConfig
    MEMCKPT_STORAGE=none           --memckpt-storage off       no storage tier

An option that is given wins over its variable, a variable over a default. ``none`` stands for None where a field
allows it. MEMCKPT_NODE and MEMCKPT_RUNTIME_DIR belong to the agent's address and are read there.

Names, types, defaults and help texts are those of the dataclasses in :mod:`memckpt.config`, and are read off them.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import os
import re
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from memckpt.config import MemckptConfig, ResumeChoice, check_resume, parse_resume
from memckpt.errors import ConfigurationError

_RESUME_HELP = (
    "auto: continue if anything is held, else start; require: continue or fail; never: drop what is held and start; "
    "a number: continue at that step"
)
_PREFIX = "memckpt"
RUN_DIR = "MEMCKPT_RUN_DIR"
RESUME = "MEMCKPT_RESUME"
#: Read elsewhere: they say where a node's agent is found.
_ADDRESS = frozenset({"MEMCKPT_NODE", "MEMCKPT_RUNTIME_DIR"})
_WORDS = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}
_NONE = ("none", "null")
_log = logging.getLogger("memckpt")


@dataclass(frozen=True)
class Setting:
    """One field of the configuration tree.

    Attributes:
        path: its name from the root, dotted: ``agent.threads``.
        kind: bool, int, float or str; None for a part of the tree that may be switched off.
        choices: the values that it may have; empty if any of its kind.
        optional: whether it may be None.
        default: what it is where nothing is given.
        help: what its dataclass says about it.
    """

    path: str
    kind: type | None
    choices: tuple[str, ...]
    optional: bool
    default: Any
    help: str

    @property
    def option(self) -> str:
        """Its name on a command line."""
        return "--" + _PREFIX + "-" + self.path.replace(".", "-").replace("_", "-")

    @property
    def destination(self) -> str:
        """Its name in argparse's namespace."""
        return self.option.removeprefix("--").replace("-", "_")

    @property
    def variable(self) -> str:
        """Its name in the environment."""
        return self.destination.upper()

    @property
    def expected(self) -> str:
        """What it takes, in words."""
        if self.kind is None:
            return "on, off or none"
        parts = [repr(each) for each in self.choices] or [_WORDS[self.kind]]
        parts += ["'none'"] if self.optional else []
        return " or ".join(filter(None, [", ".join(parts[:-1]), parts[-1]]))

    def parse(self, text: str) -> Any:
        """Its value, as text gives it; ``"on"`` or ``"off"`` for a part of the tree.

        Raises:
            ConfigurationError: it takes no such value.
        """
        if self.optional and text.lower() in _NONE:
            return None if self.kind is not None else "off"
        if self.choices:
            if text in self.choices:
                return text
        elif self.kind in (int, float) or (self.kind is str and text):
            try:
                return self.kind(text)
            except ValueError:
                pass
        raise ConfigurationError(f"expected {self.expected}, found {text!r}")


class ProtectionArguments(NamedTuple):
    """What the user has asked for: the three arguments of ``memckpt.attach`` and of every adapter."""

    run_dir: str
    resume: ResumeChoice | int
    config: MemckptConfig


def describe_settings(kind: type = MemckptConfig, prefix: str = "") -> Iterator[Setting]:
    """Every setting below a dataclass of the tree, in its order; an optional part comes before what is in it."""
    hints = typing.get_type_hints(kind)
    texts = _help_of(kind)
    for each in dataclasses.fields(kind):
        path, hint = prefix + each.name, hints[each.name]
        inner, optional = _without_none(hint)
        default = each.default if each.default_factory is dataclasses.MISSING else each.default_factory()
        if dataclasses.is_dataclass(inner):
            if optional:
                yield Setting(path, None, ("on", "off"), True, "on", texts[each.name])
            yield from describe_settings(typing.cast(type, inner), path + ".")
        elif typing.get_origin(inner) is Literal:
            yield Setting(path, str, typing.get_args(inner), optional, default, texts[each.name])
        else:
            yield Setting(path, inner, (), optional, default, texts[each.name])


def _without_none(hint: Any) -> tuple[Any, bool]:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        inner = [each for each in typing.get_args(hint) if each is not types.NoneType]
        assert len(inner) == 1, f"a setting has one type, found {hint}"
        return inner[0], True
    return hint, False


def _help_of(kind: type) -> dict[str, str]:
    """The lines of a docstring's ``Args:``, by the name that they begin with."""
    _, _, listed = (kind.__doc__ or "").partition("Args:")
    texts: dict[str, str] = {}
    for line in listed.splitlines():
        begins = re.match(r" {8}(\w+): (.*)", line)
        if begins:
            name = begins[1]
            texts[name] = begins[2]
        elif line.strip():
            texts[name] += " " + line.strip()
    return {name: text.replace("``", "").replace("`", "") for name, text in texts.items()}


# argparse


def add_arguments(parser: argparse.ArgumentParser, *, run_dir: str | None = None) -> None:
    """Add ``--run-dir``, ``--resume`` and one ``--memckpt-...`` option for each setting; `from_args` reads them.

    Their defaults are the environment's.

    Args:
        run_dir: the default of ``--run-dir`` where MEMCKPT_RUN_DIR is not set; None makes the option required then.

    Raises:
        ConfigurationError: MEMCKPT_RUN_DIR or MEMCKPT_RESUME is set to what cannot be.
    """
    group = parser.add_argument_group("memckpt", "protection of every step; docs/configuration.md")
    directory = run_dir_from_environment() or run_dir
    fallback = "" if run_dir is None else f", or {run_dir}"
    resume = resume_from_environment()
    group.add_argument(
        "--run-dir",
        type=_argument(_not_empty),
        default=directory,
        required=directory is None,
        help=f"names the run; the same directory continues it (default: {RUN_DIR}{fallback})".replace("%", "%%"),
    )
    group.add_argument(
        "--resume",
        type=_argument(parse_resume),
        default="auto" if resume is None else resume,
        metavar="auto|require|never|STEP",
        help=f"{_RESUME_HELP} (default: {RESUME}, or auto)",
    )
    for setting in describe_settings():
        default = "none" if setting.default is None else setting.default
        group.add_argument(
            setting.option,
            dest=setting.destination,
            type=_argument(setting.parse),
            default=argparse.SUPPRESS,
            metavar="|".join(setting.choices) or (setting.kind.__name__.upper() if setting.kind else None),
            help=f"{setting.help} (default: {setting.variable}, or {default})".replace("%", "%%"),
        )


def from_args(args: argparse.Namespace) -> ProtectionArguments:
    """What the options of `add_arguments` say; where one was not given, what its environment variable says.

    Raises:
        ConfigurationError: a value is out of its range.
    """
    given = {
        setting: getattr(args, setting.destination)
        for setting in describe_settings()
        if hasattr(args, setting.destination)
    }
    variables = _from_variables(os.environ)
    if any(setting.path.startswith("storage.") for setting in given):
        # Whoever says on the command line how to store wants to, whatever the environment is for others.
        variables = {setting: value for setting, value in variables.items() if setting.path != "storage"}
    config = _assemble({**variables, **given}, lambda s: s.option if s in given else s.variable)
    return ProtectionArguments(args.run_dir, args.resume, config)


def _assemble(given: Mapping[Setting, Any], name: Callable[[Setting], str]) -> MemckptConfig:
    """The configuration with these settings, and defaults elsewhere. An error calls a setting by its `name`."""
    for setting, value in given.items():
        try:
            from_mapping(_nested({setting: value}))
        except ConfigurationError as error:
            raise ConfigurationError(f"{name(setting)}: {str(error).partition(': ')[2]}") from error
    config: MemckptConfig = from_mapping(_nested(given))
    return config


def _nested(given: Mapping[Setting, Any]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    off = []
    for setting, value in given.items():
        *parents, name = setting.path.split(".")
        place = values
        for parent in parents:
            place = place.setdefault(parent, {})
        if setting.kind is not None:
            place[name] = value
        elif value == "off":
            off.append((place, name))
    for place, name in off:
        place[name] = None
    return values


def _argument(read: Callable[[str], Any]) -> Callable[[str], Any]:
    """As argparse wants it: its own error class, whose message it shows with the option's name."""

    def convert(text: str) -> Any:
        try:
            return read(text)
        except ConfigurationError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return convert


def _not_empty(text: str) -> str:
    if not text:
        raise ConfigurationError("expected a directory, found ''")
    return text


# Environment variables


def run_dir_from_environment(environment: Mapping[str, str] = os.environ) -> str | None:
    """MEMCKPT_RUN_DIR; None where it is not set.

    Raises:
        ConfigurationError: it is empty.
    """
    found = environment.get(RUN_DIR)
    if found == "":
        raise ConfigurationError(f"{RUN_DIR}: expected a directory, found ''")
    return found


def resume_from_environment(environment: Mapping[str, str] = os.environ) -> ResumeChoice | int | None:
    """MEMCKPT_RESUME; None where it is not set.

    Raises:
        ConfigurationError: it is neither ``auto``, ``require``, ``never`` nor a step number.
    """
    found = environment.get(RESUME)
    return None if found is None else parse_resume(found, name=RESUME)


def config_from_environment(environment: Mapping[str, str] = os.environ) -> MemckptConfig:
    """The configuration that the variables describe; fields without one keep their defaults.

    A variable of our prefix that names no field is warned about.

    Raises:
        ConfigurationError: a value that its field does not take; the variable, what was expected and what was found.
    """
    return _assemble(_from_variables(environment), lambda setting: setting.variable)


def _from_variables(environment: Mapping[str, str]) -> dict[Setting, Any]:
    given: dict[Setting, Any] = {}
    known = {RUN_DIR, RESUME, *_ADDRESS}
    for setting in describe_settings():
        known.add(setting.variable)
        if setting.variable in environment:
            try:
                given[setting] = setting.parse(environment[setting.variable])
            except ConfigurationError as error:
                place = f"; a place is given by {setting.variable}_URL" if setting.path == "storage" else ""
                raise ConfigurationError(f"{setting.variable}: {error}{place}") from None
    for name in sorted(set(environment) - known):
        if name.startswith(f"{_PREFIX.upper()}_"):
            _log.warning("memckpt: the environment variable %s names no setting and is ignored", name)
    return given


def with_environment(
    run_dir: str | os.PathLike[str] | None, resume: ResumeChoice | int | None, config: MemckptConfig | None
) -> ProtectionArguments:
    """What was passed in Python; in the place of each None, what the environment says.

    Raises:
        ConfigurationError: there is no run directory, or a setting that cannot be.
    """
    directory = run_dir_from_environment() if run_dir is None else os.fspath(run_dir)
    if directory is None:
        raise ConfigurationError(f"run_dir: expected a directory as argument or in {RUN_DIR}, found neither")
    if directory == "":  # Path() would take it for the current one
        raise ConfigurationError("run_dir: expected a directory, found ''")
    if resume is None:
        resume = resume_from_environment()
    return ProtectionArguments(
        directory,
        check_resume("auto" if resume is None else resume),
        config_from_environment() if config is None else config,
    )


# Files


def from_mapping(values: Mapping[str, Any], kind: type = MemckptConfig, path: str = "") -> Any:
    """The dataclass that a nested mapping describes; what is not in it keeps its default.

    Raises:
        ConfigurationError: a key that there is not, with those that there are; a value of another type or out of range.
    """
    fields = {each.name: each for each in dataclasses.fields(kind)}
    hints = typing.get_type_hints(kind)
    arguments: dict[str, Any] = {}
    for name, value in values.items():
        if name not in fields:
            raise ConfigurationError(f"{path}{name}: expected one of {', '.join(fields)}, found {name!r}")
        inner, optional = _without_none(hints[name])
        if value is None and optional:
            arguments[name] = None
        elif dataclasses.is_dataclass(inner):
            if not isinstance(value, Mapping):
                raise ConfigurationError(f"{path}{name}: expected a mapping, found {value!r}")
            arguments[name] = from_mapping(value, typing.cast(type, inner), f"{path}{name}.")
        elif typing.get_origin(inner) is Literal:
            arguments[name] = value
        elif isinstance(value, bool) or not isinstance(value, (int, float) if inner is float else inner):
            none = "None or " if optional else ""
            raise ConfigurationError(f"{path}{name}: expected {none}{inner.__name__}, found {value!r}")
        else:
            arguments[name] = inner(value)
    return kind(**arguments)
