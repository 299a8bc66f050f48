"""Plain attributes of the user's objects, by dotted name: read at each commit, written back on a resume.

State that hooks keep in attributes (a curriculum's level, a moving threshold) is in no state_dict().
"""

from __future__ import annotations

import array
import copy
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from typing import Any

import numpy as np
import torch

from memckpt.errors import ConfigurationError, UnsupportedStateError
from memckpt.state import codec

_MISSING = object()
_PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes, bytearray})
_ARRAYS = frozenset({torch.Tensor, torch.Size, torch.dtype, torch.device, np.ndarray, array.array})

#: Root objects of dotted names, looked up on each call: a framework creates some of them late.
Roots = Callable[[], Mapping[str, object]]


class Attributes:
    """The attributes that a user has named.

    Args:
        names: ``"module.level"``, ``"callbacks.Curriculum.level"``: a root, then attributes or keys of dicts.
        roots: the root objects by name; a root's own name may contain dots.

    Raises:
        ConfigurationError: a name is malformed or given twice.
    """

    def __init__(self, names: Iterable[str], roots: Roots) -> None:
        self.names = checked_names(names)
        self._roots = roots
        #: Values that a commit could not carry, as text, in the order of discovery.
        self.left_out: dict[str, None] = {}

    def check(self) -> None:
        """Check, as training starts, that every attribute can be carried.

        Raises:
            ConfigurationError: an attribute does not exist.
            UnsupportedStateError: a value would not survive encoding; names the attribute and its type.
        """
        for name in self.names:
            value = self._value(name)
            if value is _MISSING:
                raise ConfigurationError(
                    f"attributes: expected {name!r} to exist when training starts, found no such attribute; "
                    f"names begin with one of {sorted(self._roots())}. Set it in __init__() or setup(), or take it out "
                    "of `attributes`"
                )
            if (found := _unstorable(value, "")) is not None:
                raise UnsupportedStateError(f"attribute {name}{found[0]}", found[1])

    def capture(self) -> dict[str, Any]:
        """The current values; they may share memory with live ones until they are encoded.

        A value that can no longer be encoded is left out and listed in :attr:`left_out`; training goes on.
        """
        values = {}
        for name in self.names:
            value = self._value(name)
            found = ("", "nothing") if value is _MISSING else _unstorable(value, "")
            if found is None:
                values[name] = value
            else:
                self.left_out.setdefault(f"attribute {name}{found[0]} ({found[1]})")
        return values

    def restore(self, values: Mapping[str, Any]) -> None:
        """Write copies of the values that :meth:`capture` returned to the objects that exist."""
        for name in self.names:
            holder, last = self._find(name)
            if name in values and holder is not _MISSING:
                value = copy.deepcopy(values[name])
                if isinstance(holder, dict):
                    holder[last] = value
                else:
                    setattr(holder, last, value)

    def _value(self, name: str) -> Any:
        holder, last = self._find(name)
        return _MISSING if holder is _MISSING else _step(holder, last)

    def _find(self, name: str) -> tuple[Any, str]:
        """The object that holds the attribute (`_MISSING` if there is none), and the attribute's own name."""
        roots = self._roots()
        # The longest root wins: `callbacks.A.B` may itself be a root.
        root = max((each for each in roots if name.startswith(f"{each}.")), key=len, default=None)
        if root is None:
            return _MISSING, ""
        held: Any = roots[root]
        *parts, last = name[len(root) + 1 :].split(".")
        for part in parts:
            held = _step(held, part)
            if held is _MISSING:
                break
        return held, last


class AttributesOf:
    """Some plain attributes of one object, as an object with a state_dict().

    Args:
        name: name of the object, for messages.
        obj: the object.
        names: names of its attributes; dotted for attributes of its attributes.

    Raises:
        ConfigurationError, UnsupportedStateError: as :meth:`Attributes.check`.
    """

    def __init__(self, name: str, obj: object, names: Iterable[str]) -> None:
        if isinstance(names, str):
            raise ConfigurationError(f"attributes: expected a list of names, found the str {names!r}")
        self._attributes = Attributes((f"{name}.{each}" for each in names), lambda: {name: obj})
        self._attributes.check()

    def state_dict(self) -> dict[str, Any]:
        """The values. Raises as the constructor does."""
        self._attributes.check()
        return self._attributes.capture()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Write the values back."""
        self._attributes.restore(state)


def checked_names(names: Iterable[str]) -> tuple[str, ...]:
    """The names that a user has given, validated.

    Raises:
        ConfigurationError: a name is not dotted, or is given twice.
    """
    if isinstance(names, str):
        raise ConfigurationError(f"attributes: expected a list of names, found the str {names!r}")
    found = tuple(names)
    for name in found:
        if not isinstance(name, str) or not all(name.split(".")) or "." not in name:
            raise ConfigurationError(f"attributes: expected dotted names as 'module.level', found {name!r}")
    if twice := sorted({name for name in found if found.count(name) > 1}):
        raise ConfigurationError(f"attributes: expected each name once, found {twice[0]!r} again")
    return found


def _step(held: Any, part: str) -> Any:
    if isinstance(held, dict):
        return held.get(part, _MISSING)
    return getattr(held, part, _MISSING)


def _unstorable(value: Any, path: str) -> tuple[str, str] | None:
    """Path and type of the first value that would not survive encoding; None if all do.

    Stricter than the codec, which decodes subclasses as their base.
    """
    kind = type(value)
    if kind in _PLAIN:
        return None
    parts: Iterable[tuple[object, Any]]
    if kind in (dict, OrderedDict):
        parts = chain(((f"key {key!r}", key) for key in value), value.items())
    elif kind in (list, tuple, set, frozenset, deque):
        parts = enumerate(value)
    elif kind in _ARRAYS or isinstance(value, np.generic):
        return None if not codec.unencodable_paths(value) else (path, _name(kind))
    else:
        return path, _name(kind)
    found = (_unstorable(one, f"{path}.{part}") for part, one in parts)
    return next((each for each in found if each is not None), None)


def _name(kind: type[Any]) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
