"""Checks of settings: msgspec holds a value against the annotation of its field."""

from __future__ import annotations

import dataclasses
import types
import typing
from functools import cache
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from memckpt.errors import ConfigurationError

Text = Annotated[str, Meta(min_length=1)]
Count = Annotated[int, Meta(ge=1)]
NotNegative = Annotated[float, Meta(ge=0)]
Positive = Annotated[float, Meta(gt=0)]
Share = Annotated[float, Meta(gt=0, le=1)]
Port = Annotated[int, Meta(ge=0, le=65535)]
Names = tuple[Text, ...]

_NONE = ("none", "null")
_WORDS = {int: "a whole number", float: "a number", str: "a text", bool: "True or False"}


class Checked:
    """A frozen dataclass of settings. Making it holds each value against its annotation, and converts int to float.

    `part`: path of its fields in the tree, with a dot at the end.
    """

    part: ClassVar[str] = ""

    def __post_init__(self) -> None:
        for name, hint in hints_of(typing.cast(type, type(self))).items():
            object.__setattr__(self, name, _converted(f"{self.part}{name}", hint, getattr(self, name)))


def require(condition: bool, name: str, expected: str, found: object) -> None:
    """Refuse a setting that does not go with another one."""
    if not condition:
        raise ConfigurationError(f"{name}: expected {expected}, found {found!r}")


@cache
def hints_of(kind: type) -> dict[str, Any]:
    """The annotations of a dataclass's fields, with their constraints."""
    hints = typing.get_type_hints(kind, include_extras=True)
    return {each.name: hints[each.name] for each in dataclasses.fields(kind)}


def alternatives(hint: Any) -> tuple[list[Any], bool]:
    """The types that a field may hold, and whether it may be None. Several types are dataclasses: variants."""
    if typing.get_origin(hint) not in (typing.Union, types.UnionType):
        return [hint], False
    kinds = [each for each in typing.get_args(hint) if each is not types.NoneType]
    assert len(kinds) == 1 or all(map(dataclasses.is_dataclass, kinds)), f"a setting has one type, found {hint}"
    return kinds, len(kinds) < len(typing.get_args(hint))


def _converted(name: str, hint: Any, value: Any) -> Any:
    kinds, optional = alternatives(hint)
    if dataclasses.is_dataclass(kinds[0]):
        require(isinstance(value, tuple(kinds)) or (optional and value is None), name, expected_of(hint), value)
        return value
    try:
        # NumPy's float64 is a float, too; msgspec takes none but Python's own.
        return msgspec.convert(float(value) if isinstance(value, float) else value, hint)
    except msgspec.ValidationError:
        raise ConfigurationError(f"{name}: expected {expected_of(hint)}, found {value!r}") from None


def parse_text(hint: Any, text: str) -> Any:
    """The value of a setting from a text; ``none`` is None where it may be None. Raises ConfigurationError."""
    (kind,), optional = alternatives(hint)
    several, none = typing.get_origin(kind) is tuple, text.lower() in _NONE
    if none and (optional or several):
        return () if several else None
    try:
        return msgspec.convert(text.split(",") if several else text, kind, strict=False)
    except msgspec.ValidationError:
        raise ConfigurationError(f"expected {expected_of(hint, text=True)}, found {text!r}") from None


def expected_of(hint: Any, *, text: bool = False) -> str:
    """The values that a setting takes, in words; `text`: as on a command line and in the environment."""
    kinds, optional = alternatives(hint)
    words = _words(kinds[0])
    if typing.get_origin(kinds[0]) is tuple:
        words = "names, separated by commas" if text else "a tuple of names"
    if not words:
        words = one_of([each.__name__ for each in kinds])
        words = f"{'an' if words[0] in 'AEIOU' else 'a'} {words}"
        words += f" such as {kinds[0].__name__}()" if len(kinds) > 1 else ""
    if text:
        words = words.lower() if words == _WORDS[bool] else words
    none = "'none'" if text else "None"
    return f"{words}, or {none}" if optional and "," in words else f"{words} or {none}" if optional else words


def one_of(words: list[str]) -> str:
    """The words, as a list that ends with "or"."""
    return " or ".join(filter(None, [", ".join(words[:-1]), words[-1]]))


def _words(kind: Any) -> str:
    if typing.get_origin(kind) is Literal:
        return one_of([repr(each) for each in typing.get_args(kind)])
    if typing.get_origin(kind) is not Annotated:
        return _WORDS.get(kind, "")
    base, *metas = typing.get_args(kind)
    found = [_limits(meta) for meta in metas]
    return ", ".join([_WORDS[base], *filter(None, found)])


def _limits(meta: Meta) -> str:
    if meta.min_length:
        return "not empty"
    ge, gt, le, lt = (f"{one:g}" if isinstance(one, float) else one for one in (meta.ge, meta.gt, meta.le, meta.lt))
    if ge is not None and le is not None:
        return f"{ge} to {le}"
    words = [f"more than {gt}"] if gt is not None else [f"{ge} or more"] if ge is not None else []
    words += [f"at most {le}"] if le is not None else []
    words += [f"less than {lt}"] if lt is not None else []
    return ", ".join(words)
