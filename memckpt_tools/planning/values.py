"""Values that a person writes, in files and options: read and checked; each error names its place.

A dataclass of values that are made in Python is a :class:`memckpt.config.checks.Checked`.
"""

from __future__ import annotations

import contextlib
import json
import re
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from memckpt.errors import ConfigurationError

T = TypeVar("T")
_EXPONENT = re.compile(r"[-+]?(?:[0-9]+[.]?[0-9]*|[.][0-9]+)[eE][-+]?[0-9]+$")


def _number(text: str) -> int | float:
    """A number with an exponent: whole where it is, as counts have to be."""
    value = float(text)
    return int(value) if value.is_integer() else value


def read_tree(path: Path, what: str) -> Any:
    """Plain values from a file: JSON if its name ends in .json, else YAML. `what` names it in ConfigurationErrors."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{what}: expected a readable text file, found {error}") from error
    if path.suffix == ".json":
        try:
            return json.loads(text)
        except json.JSONDecodeError as error:
            raise ConfigurationError(f"{what}: expected JSON, found {error}") from error
    try:
        import yaml
    except ImportError as error:
        raise ConfigurationError(
            f"{what}: expected PyYAML, which reads this file, found none: pip install pyyaml, or write JSON in a file "
            "whose name ends in .json"
        ) from error

    class Loader(yaml.SafeLoader):  # type: ignore[misc]  # PyYAML has no types
        """YAML 1.2's numbers: 1.1 takes 1e9 for a text."""

    Loader.add_implicit_resolver("!exponent", _EXPONENT, list("-+.0123456789"))
    Loader.add_constructor("!exponent", lambda loader, node: _number(loader.construct_scalar(node)))
    try:
        return yaml.load(text, Loader)
    except yaml.YAMLError as error:
        raise ConfigurationError(f"{what}: expected YAML, found {error}") from error


def converted(value: Any, kind: type[T], where: str, *, strict: bool = True) -> T:
    """Convert plain values; without `strict` numbers may be texts. A ConfigurationError names the place."""
    try:
        return msgspec.convert(value, kind, strict=strict)
    except msgspec.ValidationError as error:
        what, _, place = str(error).partition(" - at `$")
        place = place.rstrip("`")
        found = value
        for key in re.findall(r"\w+", place):
            found = found[int(key)] if key.isdigit() else found[key]
        shown = repr(found) if len(repr(found)) <= 60 else repr(found)[:57] + "..."
        raise ConfigurationError(f"{where}{place}: {what[0].lower()}{what[1:]}, found {shown}") from None


def option_of(name: str) -> str:
    """An option's name on the command line, from that of its parameter."""
    return "--" + name.replace("_", "-")


@contextlib.contextmanager
def fields_as_options(options: Mapping[str, str]) -> Iterator[None]:
    """Say of an option what is wrong with the field that it sets; `options` are by field."""
    try:
        yield
    except ConfigurationError as error:
        field, colon, rest = str(error).partition(":")
        if field not in options:
            raise
        # Names without an underscore are words, too.
        named = re.sub(r"\w+_\w+", lambda found: options.get(found[0], found[0]), rest)
        raise ConfigurationError(f"{options[field]}{colon}{named}") from error


def require_range(option: str, value: float, hint: Any, size: float, unit: str) -> None:
    """Refuse an option outside the range of the field that it sets, of which a unit of the option has `size` units."""
    (meta,) = (one for each in (hint, *typing.get_args(hint)) for one in getattr(each, "__metadata__", ()))
    low, high = meta.gt if meta.ge is None else meta.ge, meta.le
    if not low <= value * size <= high or value * size == meta.gt:
        raise ConfigurationError(f"{option}: expected {low / size:g} to {high / size:g} {unit}, found {value!r}")
