"""Settings from outside Python: options of argparse, and nested mappings from files.

Names, types, defaults and help texts are those of the dataclasses in :mod:`memckpt.config`, and are read off them.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from memckpt.config import MemckptConfig, ResumeChoice, parse_resume
from memckpt.errors import ConfigurationError

_RESUME_HELP = (
    "auto: continue if anything is held, else start; require: continue or fail; never: drop what is held and start; "
    "a number: continue at that step"
)
_PREFIX = "memckpt"


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

    Args:
        run_dir: the default of ``--run-dir``; None makes the option required.
    """
    group = parser.add_argument_group("memckpt", "protection of every step; docs/configuration.md")
    group.add_argument(
        "--run-dir", default=run_dir, required=run_dir is None, help="names the run; the same directory continues it"
    )
    group.add_argument(
        "--resume", type=_argument(parse_resume), default="auto", metavar="auto|require|never|STEP", help=_RESUME_HELP
    )
    for setting in describe_settings():
        default = "none" if setting.default is None else setting.default
        group.add_argument(
            setting.option,
            dest=setting.destination,
            type=_argument(_reader(setting)),
            default=setting.default,
            metavar="|".join(setting.choices) or (setting.kind.__name__.upper() if setting.kind else None),
            help=f"{setting.help} (default: {default})".replace("%", "%%"),
        )


def from_args(args: argparse.Namespace) -> ProtectionArguments:
    """What the options of `add_arguments` say.

    Raises:
        ConfigurationError: a value is out of its range.
    """
    values: dict[str, Any] = {}
    off = []
    for setting in describe_settings():
        *parents, name = setting.path.split(".")
        place = values
        for parent in parents:
            place = place.setdefault(parent, {})
        found = getattr(args, setting.destination)
        if setting.kind is not None:
            place[name] = found
        elif found == "off":
            off.append((place, name))
    for place, name in off:
        place[name] = None
    return ProtectionArguments(args.run_dir, args.resume, from_mapping(values))


def _reader(setting: Setting) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        if setting.optional and setting.kind is not None and text.lower() in ("none", "null"):
            return None
        if setting.choices:
            if text not in setting.choices:
                raise ConfigurationError(f"expected {' or '.join(setting.choices)}, found {text!r}")
            return text
        assert setting.kind is not None
        try:
            return setting.kind(text)
        except ValueError:
            none = "none or " if setting.optional else ""
            raise ConfigurationError(f"expected {none}{setting.kind.__name__}, found {text!r}") from None

    return read


def _argument(read: Callable[[str], Any]) -> Callable[[str], Any]:
    """As argparse wants it: its own error class, whose message it shows with the option's name."""

    def convert(text: str) -> Any:
        try:
            return read(text)
        except ConfigurationError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return convert


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
