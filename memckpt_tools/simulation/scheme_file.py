"""Schemes of protection from options and files: what the user calls them, with errors that name the place."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from memckpt.errors import ConfigurationError
from memckpt_tools.planning.mapping_file import read_tree
from memckpt_tools.planning.scheme import Scheme, Tier

_Kind = TypeVar("_Kind", Scheme, Tier)
_NAMES = {str: "a text", bool: "true or false", int: "a whole number", float: "a number"}


def read_schemes(path: Path) -> list[Scheme]:
    """Schemes in a file of JSON (``.json``) or YAML: a list, or a mapping with the list as ``schemes``.

    Each has the fields of :class:`Scheme`, and its tiers those of :class:`Tier`.

    Raises:
        ConfigurationError: it cannot be read; a field is unknown, missing or of another type; PyYAML is missing.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"schemes: expected a readable text file, found {path}: {error}") from error
    found = read_tree(path, text, str(path))
    if isinstance(found, Mapping) and set(found) == {"schemes"}:
        found = found["schemes"]
    if not isinstance(found, list) or not found:
        raise ConfigurationError(f"{path}: expected a list of schemes, found {_shown(found)}")
    return [_scheme_of(values, f"{path}: schemes[{at}]") for at, values in enumerate(found)]


def parse_tier(text: str) -> Tier:
    """A tier from ``name=disk,every_steps=100,...``, with the fields of :class:`Tier`.

    Raises:
        ConfigurationError: a field is unknown, missing or of another type.
    """
    values: dict[str, Any] = {}
    hints = typing.get_type_hints(Tier)
    for part in text.split(","):
        name, equals, value = (each.strip() for each in part.partition("="))
        if not equals or name in values:
            raise ConfigurationError(f"--tier {text}: expected FIELD=VALUE, each field once, found {part.strip()!r}")
        values[name] = _from_text(value, hints.get(name, str))
    return _build(Tier, values, f"--tier {text}")


def _scheme_of(values: Any, where: str) -> Scheme:
    if isinstance(values, Mapping) and "tiers" in values:
        tiers = values["tiers"]
        if not isinstance(tiers, list):
            raise ConfigurationError(f"{where}.tiers: expected a list of tiers, found {_shown(tiers)}")
        built = tuple(_build(Tier, tier, f"{where}.tiers[{at}]") for at, tier in enumerate(tiers))
        values = {**values, "tiers": built}
    return _build(Scheme, values, where)


def _build(kind: type[_Kind], values: Any, where: str) -> _Kind:
    if not isinstance(values, Mapping):
        raise ConfigurationError(f"{where}: expected a mapping, found {_shown(values)}")
    fields = {each.name: each for each in dataclasses.fields(kind)}
    hints = typing.get_type_hints(kind)
    arguments: dict[str, Any] = {}
    for name, value in values.items():
        if name not in fields:
            raise ConfigurationError(f"{where}: expected fields of {', '.join(fields)}, found {name!r}")
        expected = hints[name]
        if expected in _NAMES:
            number = isinstance(value, int) and not isinstance(value, bool) and expected is float
            if not number and type(value) is not expected:
                raise ConfigurationError(f"{where}.{name}: expected {_NAMES[expected]}, found {_shown(value)}")
        arguments[name] = value
    if missing := [
        name for name, each in fields.items() if name not in arguments and each.default is dataclasses.MISSING
    ]:
        raise ConfigurationError(
            f"{where}: expected {', '.join(missing)}, found only {', '.join(arguments) or 'nothing'}"
        )
    return kind(**arguments)


def _from_text(text: str, kind: type) -> Any:
    if kind is bool:
        return {"true": True, "false": False}.get(text, text)
    if kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            return text
    return text


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
