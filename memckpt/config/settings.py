"""The configuration tree as a list of settings, and its conversion from and to the nested mapping of a file.

Names, types, defaults and help texts are read from the dataclasses in :mod:`memckpt.config`. In a part of
the tree that is off by default the key ``kind`` of a mapping names its dataclass: ``{kind: erasure, data: 4}``.
"""

from __future__ import annotations

import dataclasses
import re
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from memckpt.config import MemckptConfig
from memckpt.errors import ConfigurationError

#: Key of a mapping that names its variant.
KIND = "kind"
PREFIX = "memckpt"
_WORDS = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}
_NONE = ("none", "null")
#: What to write in place of a variant that there was.
_FORMER = {"mirror": "; for copies write {kind: erasure, data: 1, tolerate: 1}"}
TRUTH = {"true": True, "false": False, "1": True, "0": False}


@dataclass(frozen=True)
class Setting:
    """One field of the configuration tree.

    Attributes:
        path: dotted name from the root: ``agent.threads``.
        kind: bool, int, float or str; None: a part of the tree that may be switched off, or has variants.
        choices: allowed values; empty: any value of its kind.
        optional: whether it may be None.
        default: default value.
        help: description in its dataclass's docstring.
        variants: variants of its part that have it; empty: the part is not named by ``kind``.
    """

    path: str
    kind: type | None
    choices: tuple[str, ...]
    optional: bool
    default: Any
    help: str
    variants: tuple[str, ...] = ()

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
        """Description of the allowed values."""
        if self.kind is None:
            return f"{', '.join(self.choices)} or none"
        parts = [repr(each) for each in self.choices] or [_WORDS[self.kind]]
        parts += ["'none'"] if self.optional else []
        return " or ".join(filter(None, [", ".join(parts[:-1]), parts[-1]]))

    def parse(self, text: str) -> Any:
        """Its value from a text; ``"on"``, ``"off"`` or the name of a variant for a part of the tree.

        Raises:
            ConfigurationError: the value is not allowed.
        """
        if self.kind is None and text == "off":
            return "off"
        if self.optional and text.lower() in _NONE:
            return None if self.kind is not None else "off"
        if self.choices:
            if text in self.choices:
                return text
        elif self.kind is bool:
            if text.lower() in TRUTH:
                return TRUTH[text.lower()]
        elif self.kind in (int, float) or (self.kind is str and text):
            try:
                return self.kind(text)
            except ValueError:
                pass
        raise ConfigurationError(f"expected {self.expected}, found {text!r}")


def describe_settings(kind: type = MemckptConfig, prefix: str = "") -> Iterator[Setting]:
    """All settings below a dataclass of the tree, in order; an optional part comes before its settings."""
    hints = typing.get_type_hints(kind)
    texts = _help_of(kind)
    for each in dataclasses.fields(kind):
        path, text = prefix + each.name, texts[each.name]
        (inner, *_), optional = alternatives(hints[each.name])
        default = each.default if each.default_factory is dataclasses.MISSING else each.default_factory()
        if variants := variants_of(each, hints[each.name]):
            chosen = None if default is None else variant_name(type(default))
            yield Setting(path, None, tuple(variants), optional, chosen, text)
            yield from _of_variants(variants, path + ".")
        elif dataclasses.is_dataclass(inner):
            if optional:
                yield Setting(path, None, ("on", "off"), True, "on", text)
            yield from describe_settings(typing.cast(type, inner), path + ".")
        elif typing.get_origin(inner) is Literal:
            yield Setting(path, str, typing.get_args(inner), optional, default, text)
        else:
            yield Setting(path, inner, (), optional, default, text)


def _of_variants(variants: Mapping[str, type], prefix: str) -> Iterator[Setting]:
    """The settings of all variants; those shared by several variants come once."""
    found: dict[Setting, tuple[str, ...]] = {}
    for name, kind in variants.items():
        for setting in describe_settings(kind, prefix):
            found[setting] = (*found.get(setting, ()), name)
    assert len({setting.path for setting in found}) == len(found), "variants with one name for different settings"
    for setting, names in found.items():
        yield dataclasses.replace(setting, variants=names)


def alternatives(hint: Any) -> tuple[list[Any], bool]:
    """The types that a field may hold, and whether it may be None. Several types are dataclasses: variants."""
    if typing.get_origin(hint) not in (typing.Union, types.UnionType):
        return [hint], False
    kinds = [each for each in typing.get_args(hint) if each is not types.NoneType]
    assert len(kinds) == 1 or all(map(dataclasses.is_dataclass, kinds)), f"a setting has one type, found {hint}"
    return kinds, len(kinds) < len(typing.get_args(hint))


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
            texts.update(_described(one.__doc__ or ""))
    return {name: text.replace("``", "").replace("`", "") for name, text in texts.items()}


def _described(docstring: str) -> dict[str, str]:
    _, _, listed = docstring.partition("Args:")
    texts: dict[str, str] = {}
    names: list[str] = []
    for line in listed.splitlines():
        begins = re.match(r" {8}(\w+(?:, \w+)*): (.*)", line)
        if begins:
            names = begins[1].split(", ")
            texts.update(dict.fromkeys(names, begins[2]))
        elif line.strip():
            texts.update({name: f"{texts[name]} {line.strip()}" for name in names})
    return texts


# Files


def from_mapping(values: Mapping[str, Any], kind: type = MemckptConfig, path: str = "") -> Any:
    """The dataclass that a nested mapping describes; absent fields keep their defaults.

    Raises:
        ConfigurationError: an unknown key, or a value of another type or out of range.
    """
    fields = {each.name: each for each in dataclasses.fields(kind)}
    hints = typing.get_type_hints(kind)
    arguments: dict[str, Any] = {}
    for name, value in values.items():
        if name not in fields:
            raise ConfigurationError(f"{path}{name}: expected one of {', '.join(fields)}, found {name!r}")
        kinds, optional = alternatives(hints[name])
        inner, variants = kinds[0], variants_of(fields[name], hints[name])
        if value is None and optional:
            arguments[name] = None
        elif dataclasses.is_dataclass(inner):
            if not isinstance(value, Mapping):
                remedy = f"; write {{{KIND}: {value}}}" if value in variants else ""
                raise ConfigurationError(f"{path}{name}: expected a mapping, found {value!r}{remedy}")
            if variants:
                inner, value = _variant(variants, value, f"{path}{name}")
            arguments[name] = from_mapping(value, typing.cast(type, inner), f"{path}{name}.")
        elif typing.get_origin(inner) is Literal:
            arguments[name] = value
        elif isinstance(value, bool) != (inner is bool) or not isinstance(
            value, (int, float) if inner is float else inner
        ):
            none = "None or " if optional else ""
            raise ConfigurationError(f"{path}{name}: expected {none}{inner.__name__}, found {value!r}")
        else:
            arguments[name] = inner(value)
    return kind(**arguments)


def _variant(variants: Mapping[str, Any], value: Mapping[str, Any], path: str) -> tuple[type, Mapping[str, Any]]:
    """The dataclass selected by a mapping's ``kind``, and the mapping's other entries."""
    found = value.get(KIND)
    if not isinstance(found, str) or found not in variants:
        names, shown = " or ".join(map(repr, variants)), "none" if found is None else repr(found)
        raise ConfigurationError(f"{path}.{KIND}: expected {names}, found {shown}{_FORMER.get(str(found), '')}")
    return variants[found], {name: one for name, one in value.items() if name != KIND}


def to_mapping(config: Any) -> dict[str, Any]:
    """The inverse of :func:`from_mapping`."""
    hints = typing.get_type_hints(type(config))
    values: dict[str, Any] = {}
    for each in dataclasses.fields(config):
        value = getattr(config, each.name)
        if dataclasses.is_dataclass(value):
            tag = {KIND: variant_name(type(value))} if variants_of(each, hints[each.name]) else {}
            value = {**tag, **to_mapping(value)}
        values[each.name] = value
    return values
