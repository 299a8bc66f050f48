"""The configuration tree as a list of settings, and its conversion from and to the nested mapping of a file.

Names, types, defaults and help texts are read from the dataclasses in :mod:`memckpt.config`. In a part of
the tree that is off by default the key ``kind`` of a mapping names its dataclass: ``{kind: erasure, data: 4}``.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from memckpt.config import MemckptConfig
from memckpt.config.checks import alternatives, expected_of, hints_of, parse_text
from memckpt.errors import ConfigurationError

#: Key of a mapping that names its variant.
KIND = "kind"
PREFIX = "memckpt"


@dataclass(frozen=True)
class Setting:
    """One field of the configuration tree, or a part of it that may be switched off or has variants."""

    path: str  #: dotted name from the root: ``agent.threads``
    hint: Any  #: annotation, with its constraints; None: a part of the tree
    choices: tuple[str, ...]  #: allowed values of a part, or of a field; empty: any value that the annotation allows
    default: Any
    help: str
    variants: tuple[str, ...] = ()  #: variants of its part that have it; empty: the part is not named by ``kind``

    @property
    def is_part(self) -> bool:
        """Whether it is a part of the tree."""
        return self.hint is None

    @property
    def kind(self) -> type | None:
        """bool, int, float or str (also for names); None: a part of the tree."""
        if self.is_part:
            return None
        inner = alternatives(self.hint)[0][0]
        if self.choices or typing.get_origin(inner) is tuple:
            return str
        kind: type = typing.get_args(inner)[0] if typing.get_args(inner) else inner
        return kind

    @property
    def part(self) -> str:
        """Path of the part of the tree that contains it."""
        return self.path.rpartition(".")[0]

    @property
    def option(self) -> str:
        """Its name on a command line."""
        return "--" + PREFIX + "-" + self.path.replace(".", "-").replace("_", "-")

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
        """Description of the allowed values, as texts."""
        return f"{', '.join(self.choices)} or none" if self.is_part else expected_of(self.hint, text=True)

    def parse(self, text: str) -> Any:
        """Its value from a text; a part's: ``"on"``, ``"off"`` or a variant's name. Raises ConfigurationError."""
        if not self.is_part:
            return parse_text(self.hint, text)
        if text in self.choices:
            return text
        if text.lower() in ("off", "none", "null"):
            return "off"
        raise ConfigurationError(f"expected {self.expected}, found {text!r}")


def describe_settings(kind: type = MemckptConfig, prefix: str = "") -> Iterator[Setting]:
    """All settings below a dataclass of the tree, in order; an optional part comes before its settings."""
    texts = _help_of(kind)
    fields = {each.name: each for each in dataclasses.fields(kind)}
    for name, hint in hints_of(kind).items():
        path, text, each = prefix + name, texts[name], fields[name]
        (inner, *_), optional = alternatives(hint)
        default = each.default if each.default_factory is dataclasses.MISSING else each.default_factory()
        if variants := variants_of(each, hint):
            chosen = None if default is None else variant_name(type(default))
            yield Setting(path, None, tuple(variants), chosen, text)
            yield from _of_variants(variants, path + ".")
        elif dataclasses.is_dataclass(inner):
            if optional:
                yield Setting(path, None, ("on", "off"), "on", text)
            yield from describe_settings(typing.cast(type, inner), path + ".")
        else:
            choices = typing.get_args(inner) if typing.get_origin(inner) is Literal else ()
            yield Setting(path, hint, choices, default, text)


def _of_variants(variants: Mapping[str, type], prefix: str) -> Iterator[Setting]:
    """The settings of all variants; those shared by several variants come once."""
    found: dict[str, Setting] = {}
    for name, kind in variants.items():
        for setting in describe_settings(kind, prefix):
            known = found.get(setting.path, setting)
            assert dataclasses.replace(known, variants=()) == setting, "variants with one name for different settings"
            found[setting.path] = dataclasses.replace(setting, variants=(*known.variants, name))
    yield from found.values()


def variants_of(field: dataclasses.Field[Any], hint: Any) -> dict[str, Any]:
    """The dataclasses of a part that is off by default, by the names that switch it on; empty for other fields."""
    kinds, _ = alternatives(hint)
    named = field.default is None and dataclasses.is_dataclass(kinds[0])
    return {variant_name(kind): kind for kind in kinds} if named else {}


def variant_name(kind: type) -> str:
    """The name of a dataclass as a variant: ``erasure`` for ErasureConfig."""
    return kind.__name__.removesuffix("Config").lower()


def _help_of(kind: type) -> dict[str, str]:
    """The entries of a docstring's ``Args:`` by name, including those of inherited fields."""
    texts: dict[str, str] = {}
    for one in reversed(kind.__mro__):
        if dataclasses.is_dataclass(one):
            texts.update(_described(inspect.cleandoc(one.__doc__ or "")))  # Python 3.13 takes the indentation off
    return {name: text.replace("``", "").replace("`", "") for name, text in texts.items()}


def _described(docstring: str) -> dict[str, str]:
    _, _, listed = docstring.partition("Args:")
    texts: dict[str, str] = {}
    names: list[str] = []
    for line in listed.splitlines():
        begins = re.match(r" {4}(\w+(?:, \w+)*): (.*)", line)
        if begins:
            names = begins[1].split(", ")
            texts.update(dict.fromkeys(names, begins[2]))
        elif line.strip():
            texts.update({name: f"{texts[name]} {line.strip()}" for name in names})
    return texts


# Files


def from_mapping(values: Mapping[str, Any], kind: type = MemckptConfig, path: str = "") -> Any:
    """The dataclass that a nested mapping describes; absent fields keep their defaults. Raises ConfigurationError."""
    hints = hints_of(kind)
    fields = {each.name: each for each in dataclasses.fields(kind)}
    arguments: dict[str, Any] = {}
    for name, value in values.items():
        if name not in hints:
            raise ConfigurationError(f"{path}{name}: expected one of {', '.join(hints)}, found {name!r}")
        kinds, optional = alternatives(hints[name])
        inner, variants = kinds[0], variants_of(fields[name], hints[name])
        if dataclasses.is_dataclass(inner) and not (value is None and optional):
            if not isinstance(value, Mapping):
                remedy = f"; write {{{KIND}: {value}}}" if isinstance(value, str) and value in variants else ""
                raise ConfigurationError(f"{path}{name}: expected a mapping, found {value!r}{remedy}")
            if variants:
                inner, value = _variant(variants, value, f"{path}{name}")
            value = from_mapping(value, typing.cast(type, inner), f"{path}{name}.")
        arguments[name] = value
    return kind(**arguments)


def _variant(variants: Mapping[str, Any], value: Mapping[str, Any], path: str) -> tuple[type, Mapping[str, Any]]:
    """The dataclass selected by a mapping's ``kind``, and the mapping's other entries."""
    found = value.get(KIND)
    if not isinstance(found, str) or found not in variants:
        names, shown = " or ".join(map(repr, variants)), "none" if found is None else repr(found)
        raise ConfigurationError(f"{path}.{KIND}: expected {names}, found {shown}")
    return variants[found], {name: one for name, one in value.items() if name != KIND}


def to_mapping(config: Any) -> dict[str, Any]:
    """The inverse of :func:`from_mapping`."""
    hints = hints_of(typing.cast(type, type(config)))
    values: dict[str, Any] = {}
    for each in dataclasses.fields(config):
        value = getattr(config, each.name)
        if dataclasses.is_dataclass(value):
            tag = {KIND: variant_name(type(value))} if variants_of(each, hints[each.name]) else {}
            value = {**tag, **to_mapping(value)}
        values[each.name] = value
    return values
