"""Traces of an optimizer's steps beside the optimizer: class attributes, globals, defaults and closures of its code.

A step that is tried on copies shares these with the training, and must not change them.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import random
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from memckpt.state import rng
from memckpt.state.tensors import same_bits

#: Objects that are looked at, and elements of one of them: a script's globals may hold its data.
_MOST, _LONGEST = 4096, 4096
#: Bytes of a tensor whose values are kept.
_SMALL_BYTES = 1 << 20
_PLAIN = (int, float, complex, str, bytes, type(None))
_FOREIGN = {*sys.stdlib_module_names, "torch", "numpy", "memckpt"}
_ABSENT = object()
#: What a step is given by the optimizer, or has a state that is carried.
_OTHERS = (nn.Module, Optimizer, ModuleType)


class Traces:
    """What the code of an optimizer's class may change beside the optimizer, as it is now.

    It follows names that the code of the user's classes and functions refers to. Torch's own classes leave none.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        #: Name of each object, what reads its contents, these contents, and what puts them back (None: nothing can).
        self._kept: list[tuple[str, Callable[[], Any], Any, Callable[[Any], None] | None]] = []
        self._met: set[int] = set()
        self._due: list[tuple[str, Any]] = [
            (one.__qualname__, one) for one in type(optimizer).__mro__ if _is_users(one.__module__)
        ]
        self._due += [(name, one) for name, one in vars(optimizer).items() if isinstance(one, FunctionType)]
        while self._due and len(self._met) < _MOST:
            name, value = self._due.pop(0)
            if not isinstance(value, _PLAIN) and id(value) not in self._met:
                self._met.add(id(value))
                self._keep(name, value)

    def changed(self) -> list[str]:
        """Names of what has changed since."""
        return [name for name, read, before, _ in self._kept if not _same(read(), before)]

    def undo(self) -> None:
        """Put back what has changed since, as far as that is possible."""
        for _, read, before, write in self._kept:
            if write is not None and not _same(read(), before):
                write(before)

    def _add(self, name: str, read: Callable[[], Any], write: Callable[[Any], None] | None) -> None:
        self._kept.append((name, read, read(), write))

    def _keep(self, name: str, value: Any) -> None:
        """Keep the contents of one object, and go on to what these are."""
        if isinstance(value, type):
            if _is_users(value.__module__):
                self._keep_names(name, value, [key for key in vars(value) if not key.startswith("__")])
        elif isinstance(value, FunctionType):
            if _is_users(value.__module__) or value.__closure__:
                self._keep_function(name, value)
        elif isinstance(value, (staticmethod, classmethod, MethodType)):
            self._due.append((name, value.__func__))
        elif isinstance(value, property):
            self._due += [(name, one) for one in (value.fget, value.fset) if one is not None]
        elif isinstance(value, (dict, list, deque, set)):
            if len(value) <= _LONGEST:
                self._keep_elements(name, value)
        elif isinstance(value, tuple):
            self._due += [(f"{name}[{index}]", one) for index, one in enumerate(value[:_LONGEST])]
        elif isinstance(value, (torch.Tensor, np.ndarray)):
            self._keep_numbers(name, value)
        elif isinstance(value, rng.GENERATOR_TYPES) and not isinstance(value, random.SystemRandom):  # has no state
            self._add(name, lambda: repr(rng.capture_generator(value)), None)
        elif isinstance(value, itertools.count):
            self._add(name, lambda: repr(value), None)
        elif _is_users(type(value).__module__) and hasattr(value, "__dict__") and not isinstance(value, _OTHERS):
            self._keep_names(name, value, [*vars(value)])

    def _keep_elements(self, name: str, value: Any) -> None:
        keyed = isinstance(value, (dict, set))

        def write(before: Any) -> None:
            value.clear()
            (value.update if keyed else value.extend)(before)

        self._add(name, value.copy if keyed else lambda: [*value], write)
        if not isinstance(value, set):
            inner = value.items() if isinstance(value, dict) else enumerate(value)
            self._due += [(f"{name}[{key!r}]", one) for key, one in inner]

    def _keep_numbers(self, name: str, value: Any) -> None:
        tensor = torch.from_numpy(value) if isinstance(value, np.ndarray) and value.dtype.kind in "fiucb" else value
        if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided or tensor.is_meta:
            return
        if tensor.nbytes > _SMALL_BYTES:
            self._add(name, lambda: tensor._version, None)
            return
        here = tensor.detach()

        def write(before: torch.Tensor) -> None:
            here.copy_(before)

        self._add(name, here.clone, write)

    def _keep_function(self, name: str, function: Any) -> None:
        self._keep_names(name, function, ["__defaults__", "__kwdefaults__", *vars(function)])
        for cell in function.__closure__ or ():
            self._keep_cell(name, cell)
        names = _names_in(function.__code__)
        if _is_users(function.__module__):
            self._keep_globals(function.__globals__, names)
            for module in [one for one in map(function.__globals__.get, names) if isinstance(one, ModuleType)]:
                if _is_users(module.__name__):
                    self._keep_globals(vars(module), names)

    def _keep_cell(self, name: str, cell: CellType) -> None:
        def read() -> Any:
            try:
                return [cell.cell_contents]
            except ValueError:  # not bound yet
                return []

        def write(before: Any) -> None:
            (cell.cell_contents,) = before

        self._add(name, read, write if read() else None)
        self._due += [(name, inspect.unwrap(one) if callable(one) else one) for one in read()]

    def _keep_globals(self, held: dict[str, Any], names: set[str]) -> None:
        for each in names:

            def write(before: Any, key: str = each) -> None:
                if before is _ABSENT:
                    held.pop(key, None)
                else:
                    held[key] = before

            name = f"{held.get('__name__')}.{each}"
            self._add(name, lambda key=each: held.get(key, _ABSENT), write)  # type: ignore[misc]  # bound
            self._due += [(name, held[each])] if each in held else []

    def _keep_names(self, name: str, owner: Any, attributes: Iterable[str]) -> None:
        for each in attributes:

            def read(key: str = each) -> Any:
                return vars(owner)[key] if key in vars(owner) else getattr(owner, key, _ABSENT)

            def write(before: Any, key: str = each) -> None:
                setattr(owner, key, before)

            self._add(f"{name}.{each}", read, write)
            self._due.append((f"{name}.{each}", read()))
        known = {*vars(owner)}

        def drop_new(_: Any) -> None:
            for key in {*vars(owner)} - known:
                delattr(owner, key)

        self._add(f"the attributes of {name}", lambda: {*vars(owner)}, drop_new)


@contextlib.contextmanager
def leaving_no_trace(optimizer: Optimizer) -> Iterator[None]:
    """Put back what the steps of its siblings change beside the optimizer."""
    traces = Traces(optimizer)
    try:
        yield
    finally:
        traces.undo()


def _is_users(module: str | None) -> bool:
    return module is not None and module.partition(".")[0] not in _FOREIGN


def _names_in(code: CodeType) -> set[str]:
    """Names of globals and attributes that code refers to."""
    inner = (one for one in code.co_consts if isinstance(one, CodeType))
    return {*code.co_names}.union(*map(_names_in, inner))


def _same(now: Any, before: Any) -> bool:
    if now is before:
        return True
    if isinstance(now, torch.Tensor) and isinstance(before, torch.Tensor):
        return now.shape == before.shape and now.dtype == before.dtype and same_bits(now, before)
    if type(now) is not type(before):
        return False
    if isinstance(now, dict):
        return now.keys() == before.keys() and all(_equal(one, before[key]) for key, one in now.items())
    if isinstance(now, list):
        return len(now) == len(before) and all(map(_equal, now, before))
    return isinstance(now, (*_PLAIN, set)) and bool(now == before)


def _equal(one: Any, other: Any) -> bool:
    return one is other or (isinstance(one, _PLAIN) and type(one) is type(other) and one == other)
