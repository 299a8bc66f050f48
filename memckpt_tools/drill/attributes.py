"""Plain values of the user's objects: what a resume does not put back, unless it is part of some state.

Looked at are attributes of the model's modules, of other objects whose classes are the user's own (callbacks,
datasets), and variables of the user's functions that are running, and of the script. The user's own is what is neither
installed nor Python's.
"""

from __future__ import annotations

import functools
import gc
import random
import sys
import sysconfig
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
import xxhash
from torch import nn
from torch.optim import Optimizer

from memckpt.errors import UnsupportedStateError
from memckpt.state import codec
from memckpt.state.optimizers import own_attributes

#: Kinds of the values found here.
ATTRIBUTE, VARIABLE = "attribute", "variable"
#: In the name of an attribute of an optimizer, between its own and that of the class.
OF_OPTIMIZER = " of optimizer "
#: Length up to which a value's text stands for it, and which text begins with this character.
_TEXT_CHARACTERS, TEXT = 40, "="
#: Largest containers, in elements, and tensors, in bytes, that are looked at.
_ELEMENTS, _TENSOR_BYTES = 1_000, 1 << 20
_OWN = ("memckpt", "memckpt_tools", "lightning_memckpt", "accelerate_plugin", "transformers_memckpt", "memckpt_hydra")
_NOT_PLAIN = frozenset({"_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"})


class Attributes:
    """The plain values of a training's objects, by name.

    Args:
        modules: by path; the model's is empty.
    """

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self._modules = dict(modules)
        self._others: list[weakref.ref[Any]] | None = None

    def values(self, frame: FrameType | None) -> Iterator[tuple[str, str, str]]:
        """Kind, name, and text or digest of each value.

        Args:
            frame: innermost frame whose variables may be the user's.
        """
        if self._others is None:
            self._others = list(_find_others({id(module) for module in self._modules.values()}))
        for path, module in self._modules.items():
            yield from _attributes_of(module, f" ({path})" if path else "")
        for reference in self._others:
            if (found := reference()) is not None:
                yield from _attributes_of(found, "")
        seen: set[str] = set()
        while frame is not None:
            if _is_users_file(frame.f_code.co_filename) and frame.f_code.co_name not in seen:
                function = frame.f_code.co_name
                seen.add(function)
                where = "the script" if function == "<module>" else f"{function}()"
                for name, value in list(frame.f_locals.items()):
                    if not name.startswith("__") and (text := text_of(value)) is not None:
                        yield VARIABLE, f"{name} of {where}", text
            frame = frame.f_back


def _attributes_of(found: Any, where: str) -> Iterator[tuple[str, str, str]]:
    kind = OF_OPTIMIZER if isinstance(found, Optimizer) else " of "
    attributes = own_attributes(found) if isinstance(found, Optimizer) else vars(found)
    for name, value in list(attributes.items()):
        if name not in _NOT_PLAIN and not name.endswith("_hooks") and (text := text_of(value)) is not None:
            yield ATTRIBUTE, f"{name}{kind}{type(found).__qualname__}{where}", text


def _find_others(known: set[int]) -> Iterator[weakref.ref[Any]]:
    """Objects of the user's classes that are alive: those that are alone of their class, since names need be unique."""
    by_class: dict[type, list[Any]] = {}
    for found in gc.get_objects():
        kind = type(found)
        if kind.__module__ in sys.modules and id(found) not in known and _is_users_class(kind):
            by_class.setdefault(kind, []).append(found)
    for found, *others in by_class.values():
        if not others and hasattr(found, "__dict__") and not isinstance(found, type):
            try:
                yield weakref.ref(found)
            except TypeError:  # its class has no room for one
                continue


def _is_users_class(kind: type) -> bool:
    module = sys.modules.get(kind.__module__)
    path = getattr(module, "__file__", None)
    return isinstance(path, str) and kind.__module__.partition(".")[0] not in _OWN and _is_users_file(path)


@functools.cache
def _is_users_file(path: str) -> bool:
    if path.startswith("<"):
        return False
    found = Path(path).absolute()
    if {"site-packages", "dist-packages"} & set(found.parts):
        return False
    own = Path(__file__).absolute().parents[2]
    if found.is_relative_to(own) and found.relative_to(own).parts[0] in _OWN:
        return False
    return not any(found.is_relative_to(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib"))


def text_of(value: Any) -> str | None:
    """A short value's text, behind ``=``; a longer one's digest; None for what is no plain value."""
    value = _plain(value)
    if value is None or getattr(value, "nbytes", 0) > _TENSOR_BYTES:
        return None
    if isinstance(value, (list, tuple, set, dict)) and len(value) > _ELEMENTS:
        return None
    if isinstance(value, (bool, int, float, complex, str)) and len(repr(value)) <= _TEXT_CHARACTERS:
        return TEXT + repr(value)
    try:
        return xxhash.xxh3_128_hexdigest(codec.encode(_in_order(value)))
    except UnsupportedStateError:
        return None


def _in_order(value: Any) -> Any:
    """The same with all mappings in the order of their keys: load_state_dict() and others change it."""
    if type(value) is dict:
        return {key: _in_order(value[key]) for key in sorted(value, key=repr)}
    if type(value) in (list, tuple):
        return type(value)(_in_order(one) for one in value)
    return value


def _has_parameters(value: Any) -> bool:
    """Whether it is a parameter, or lists some: these are compared by themselves."""
    if isinstance(value, dict):
        return any(map(_has_parameters, value.values()))
    if isinstance(value, (list, tuple, set)):
        return any(map(_has_parameters, value))
    return isinstance(value, nn.Parameter)


def _plain(value: Any) -> Any:
    """The state of a generator, a detached tensor, or the value itself if it may be plain; None if it is not."""
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, torch.Generator):
        return value.get_state()
    if isinstance(value, np.random.Generator):
        return dict(value.bit_generator.state)
    if isinstance(value, np.random.RandomState):
        return value.get_state(legacy=False)
    if callable(value) or _has_parameters(value):
        return None
    if isinstance(value, torch.Tensor):  # one with a gradient was computed: it is an effect
        return (
            value if type(value) is torch.Tensor and value.layout is torch.strided and not value.requires_grad else None
        )
    plain = (bool, int, float, complex, str, bytes, list, tuple, set, dict, np.ndarray, np.generic)
    return value if isinstance(value, plain) else None
