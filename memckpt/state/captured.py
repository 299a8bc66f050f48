"""Capture of the state that an optimizer object keeps beside the tensors in slots, as trees that the codec takes.

That is: instance attributes of any kind, including generators; attributes of its parameters; state that has no room in
a slot; the order of the state's keys. A reference to a live tensor (a list of parameters, a buffer that is also state)
is captured as a reference. Restoring fills containers and tensors in place, so that other holders see the values.

A tree is ``[kind, ...]``. ``"live"`` stands for values that cannot change (functions) or cannot be encoded: they stay.
An object of a class of Python's is carried as its ``__dict__``.
"""

from __future__ import annotations

import enum
import functools
import logging
import sys
import types
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from memckpt.state import codec, rng
from memckpt.state.optimizers import fits_room, own_attributes, own_modules
from memckpt.state.spec import StateSpec, StateTensorSpec
from memckpt.state.tensors import has_usual_strides, is_dtensor, local, with_strides

Tree = list[Any]
#: Room in slots, by (optimizer, parameter, key).
Rooms = dict[tuple[int, str, Any], StateTensorSpec]
#: (parameter, key, value) of an optimizer's state -> whether it is carried elsewhere.
Travels = Callable[[str, Any, Any], bool]
_CODE = (
    type,
    types.FunctionType,
    types.MethodType,
    types.BuiltinFunctionType,
    functools.partial,
    types.ModuleType,
    logging.Logger,
    enum.Enum,
)
_LIVE: Tree = ["live"]


class OptimizerCapture:
    """Captures and restores the optimizers of one model, without the tensors of `modules`, the user's.

    `left_out`: state that could not be captured, as text; never shrinks.
    """

    def __init__(
        self, optimizers: list[Optimizer], tensors: Mapping[str, torch.Tensor], modules: list[nn.Module]
    ) -> None:
        self._optimizers = optimizers
        self._tensors = dict(tensors)
        self._names = {id(tensor): name for name, tensor in tensors.items()}
        self._modules = {id(one) for module in modules for one in module.modules()}
        self._references: dict[int, Tree] = {}
        #: By `id`, the number of a tensor that was captured by value; by number, what it was restored to.
        self._numbers: dict[int, int] = {}
        self._made: dict[int, Any] = {}
        self._open: set[int] = set()
        self._restored: list[Any] = []
        self._resharded = False
        self.left_out: list[str] = []

    # Capture

    def capture(self, spec: StateSpec) -> list[Any]:
        """One tree per optimizer of its current state, without what has room in the slots of that layout."""
        rooms: Rooms = {
            (owner.optimizer, param.tensor.name, state.key): state
            for param in spec.params
            for owner in param.owners
            for state in owner.state
        }
        self._references, self._numbers = {}, {}
        for index, optimizer in enumerate(self._optimizers):
            for name, state in self._named_state(optimizer):
                for key, value in state.items():
                    if isinstance(value, torch.Tensor) and isinstance(key, str):
                        # Several parameters may share a tensor: it belongs to the first one.
                        self._references.setdefault(id(value), ["state", index, name, key])
        found = [
            self._capture_one(
                optimizer, type(optimizer).__qualname__, functools.partial(self._travels, rooms, index), index
            )
            for index, optimizer in enumerate(self._optimizers)
        ]
        self._references = {}
        return found

    def _travels(self, rooms: Rooms, index: int, name: str, key: Any, value: Any) -> bool:
        """Whether a state's value is carried in a slot or encoded with the record."""
        if isinstance(value, torch.Tensor):
            room = rooms.get((index, name, key))
            return room is not None and fits_room(value, self._tensors[name], room)
        return not codec.unencodable_paths(value)

    def _named_state(self, optimizer: Optimizer) -> list[tuple[str, dict[Any, Any]]]:
        return [
            (self._names[id(param)], state)
            for param, state in optimizer.state.items()
            if id(param) in self._names and isinstance(state, dict)
        ]

    def _capture_one(self, optimizer: Optimizer, path: str, travels: Travels, index: int = -1) -> dict[str, Any]:
        named = {id(state) for _, state in self._named_state(optimizer)}
        # In the order in which they are restored: what comes later may refer to what came before.
        return {
            "state": [
                [name, self._state(name, state, path, travels, index)] for name, state in self._named_state(optimizer)
            ],
            "others": [
                [self._out(key, f"{path}.state"), self._out(value, f"{path}.state[{key!r}]")]
                for key, value in optimizer.state.items()
                if id(value) not in named
            ],
            "on_parameters": [
                [self._names[id(param)], [[key, self._out(value, f"{path}: {key}")] for key, value in kept]]
                for group in optimizer.param_groups
                for param in group["params"]
                if id(param) in self._names and (kept := _own(param))
            ],
            "attributes": {
                name: self._out(value, f"{path}.{name}")
                for name, value in {**own_attributes(optimizer), **own_modules(optimizer)}.items()
            },
        }

    def _state(self, name: str, state: dict[Any, Any], path: str, travels: Travels, index: int) -> list[Any]:
        """The keys in order, each with its value, or None if that is carried elsewhere."""
        found = []
        for key, value in state.items():
            own = self._references.get(id(value)) in (None, ["state", index, name, key])
            if not (own and travels(name, key, value)):
                found.append([key, self._out(value, f"{path}.state[{name}].{key}", own)])
            elif (
                isinstance(value, torch.Tensor)
                and not is_dtensor(value)
                and not has_usual_strides(value, self._tensors[name])
            ):
                found.append([key, ["strided", list(value.stride())]])
            else:
                found.append([key, None])
        return found

    def _out(self, value: Any, path: str, own: bool = False) -> Tree:
        if id(value) in self._names:
            return ["tensor", self._names[id(value)]]
        if not own and id(value) in self._references:
            return self._references[id(value)]
        if type(value) is int and value in self._names:
            return ["id", self._names[value]]  # of a parameter: another one in another process
        if isinstance(value, _CODE) or id(value) in self._modules:
            return _LIVE
        if isinstance(value, rng.GENERATOR_TYPES):
            try:
                return ["generator", rng.capture_generator(value)]
            except ValueError as error:
                return self._leave_out(path, str(error))
        if isinstance(value, torch.Tensor) and is_dtensor(value):
            return self._dtensor(value, path)
        if isinstance(value, (Optimizer, dict, list, tuple, deque)):
            if id(value) in self._open:
                return self._leave_out(path, "it contains itself")
            self._open.add(id(value))
            try:
                found = self._container(value, path)
            finally:
                self._open.discard(id(value))
            if found is not None:
                return found
        refused = codec.unencodable_paths(value)
        if refused and _is_plain_object(value) and id(value) not in self._open:
            self._open.add(id(value))
            try:
                items = [[key, self._out(item, f"{path}.{key}")] for key, item in vars(value).items()]
            finally:
                self._open.discard(id(value))
            return ["object", type(value).__module__, type(value).__qualname__, items]
        if refused:
            return self._leave_out(path, refused[0])
        if isinstance(value, torch.Tensor):
            if id(value) in self._numbers:
                return ["again", self._numbers[id(value)]]
            self._numbers[id(value)] = len(self._numbers)
            return ["value", value, self._numbers[id(value)]]
        return ["value", value]

    def _container(self, value: Any, path: str) -> Tree | None:
        if isinstance(value, Optimizer):
            # An optimizer inside another (SAM, Lookahead). Its groups are often the outer one's own list.
            inner = self._capture_one(value, path, lambda name, key, value: False)
            groups = [
                [[key, self._out(item, f"{path}.{key}")] for key, item in group.items() if key != "params"]
                for group in value.param_groups
            ]
            return ["optimizer", inner, groups]
        if isinstance(value, dict):
            items = [[self._out(key, path), self._out(item, f"{path}[{key!r}]")] for key, item in value.items()]
            return ["dict", items]
        for kind in (list, tuple, deque):
            if type(value) is kind:
                return [kind.__name__, [self._out(item, f"{path}[{index}]") for index, item in enumerate(value)]]
        return None

    def _dtensor(self, value: Any, path: str) -> Tree:
        for name, tensor in self._tensors.items():
            if is_dtensor(tensor) and tensor.device_mesh == value.device_mesh:
                if any(placement.is_partial() for placement in value.placements):
                    break
                placements = [one.dim if one.is_shard() else None for one in value.placements]
                return ["dtensor", name, local(value), placements, list(value.shape), list(value.stride())]
        return self._leave_out(path, "a DTensor on a mesh of its own, or a partial sum")

    def _leave_out(self, path: str, why: str) -> Tree:
        text = f"{path} cannot be captured: {why}"
        if text not in self.left_out:
            self.left_out.append(text)
        return _LIVE

    # Restore

    @torch.no_grad()
    def restore(self, captured: list[Any], resharded: bool = False) -> None:
        """Restore what :meth:`capture` returned; call after the tensors in slots are restored.

        `resharded`: ranks hold other shards now. Tensors without room in the layout then have no known meaning: live
        ones stay.
        """
        self._resharded = resharded
        self._restored = []
        for optimizer, found in zip(self._optimizers, captured, strict=True):
            self._restore_one(optimizer, found)

    def _restore_one(self, optimizer: Optimizer, found: dict[str, Any]) -> None:
        # One around another often has that one's state for its own.
        if not any(optimizer.state is each for each in self._restored):
            self._restored.append(optimizer.state)
            self._restore_state(optimizer, found)
        for name, items in found["on_parameters"]:
            param = self._tensors[name]
            for key, tree in items:
                if tree != _LIVE or key in vars(param):
                    setattr(param, key, self._back(tree, vars(param).get(key)))
        for name, tree in found["attributes"].items():
            setattr(optimizer, name, self._back(tree, getattr(optimizer, name, None)))

    def _restore_state(self, optimizer: Optimizer, found: dict[str, Any]) -> None:
        if not self._resharded:
            # State that some optimizers make as they are made, of parameters that had none any more.
            kept = {id(self._tensors[name]) for name, _ in found["state"]}
            for param in [one for one, state in optimizer.state.items() if isinstance(state, dict)]:
                if id(param) in self._names and id(param) not in kept:
                    del optimizer.state[param]
        for name, items in found["state"]:
            param = self._tensors[name]
            there = optimizer.state.pop(param, {})
            optimizer.state[param] = state = {}
            for key, tree in items:
                if tree == _LIVE and key not in there:
                    continue  # as in a process that has not taken a step
                if tree is not None and not (self._resharded and _is_piece(tree[0], tree[1:])):
                    state[key] = self._back(tree, there.get(key))
                elif key in there:
                    state[key] = there[key]
            state.update({key: there[key] for key in there if key not in state})
        # Under their old keys, after the state that they may refer to.
        for key, value in found["others"]:
            key = self._back(key, None)
            optimizer.state[key] = self._back(value, optimizer.state.get(key))

    def _back(self, tree: Tree, live: Any) -> Any:
        kind, *rest = tree
        if kind == "live" or (self._resharded and _is_piece(kind, rest)):
            return live
        if kind == "value":
            if len(rest) == 1:
                return rest[0]
            self._made[rest[1]] = made = filled(rest[0], live)
            return made
        if kind == "strided":
            return with_strides(live, rest[0])
        if kind == "again":
            return self._made[rest[0]]
        if kind == "id":
            return id(self._tensors[rest[0]])
        if kind == "object":
            return self._object_back(rest[0], rest[1], rest[2], live)
        if kind == "tensor":
            return self._tensors[rest[0]]
        if kind == "state":
            index, name, key = rest
            return self._optimizers[index].state[self._tensors[name]][key]
        if kind == "generator":
            if isinstance(live, rng.GENERATOR_TYPES):
                rng.restore_generator(live, rest[0])
            return live
        if kind == "dtensor":
            return self._dtensor_back(*rest)
        if kind == "optimizer":
            self._restore_one(live, rest[0])
            for group, items in zip(live.param_groups, rest[1], strict=True):
                group.update({key: self._back(item, group.get(key)) for key, item in items})
            return live
        if kind == "dict":
            return self._dict_back(rest[0], live)
        return self._sequence_back(kind, rest[0], live)

    def _dict_back(self, items: list[Any], live: Any) -> dict[Any, Any]:
        target = live if isinstance(live, dict) else {}
        keys = [self._back(key, None) for key, _ in items]
        values = [self._back(item, target.get(key)) for key, (_, item) in zip(keys, items, strict=True)]
        target.clear()
        target.update(zip(keys, values, strict=True))
        return target

    def _object_back(self, module: str, qualname: str, items: list[Any], live: Any) -> Any:
        target = live
        if type(live).__qualname__ != qualname:
            kind = functools.reduce(getattr, qualname.split("."), sys.modules[module])
            target = object.__new__(kind)  # type: ignore[arg-type]  # a class, by its name
        for key, tree in items:
            vars(target)[key] = self._back(tree, vars(target).get(key))
        return target

    def _sequence_back(self, kind: str, items: list[Any], live: Any) -> Any:
        there = list(live) if isinstance(live, (list, tuple, deque)) else []
        there += [None] * (len(items) - len(there))
        values = [self._back(item, old) for item, old in zip(items, there, strict=False)]
        if kind == "tuple":
            return tuple(values)
        target = live if type(live).__name__ == kind else deque() if kind == "deque" else []
        target.clear()
        target.extend(values)
        return target

    def _dtensor_back(
        self, name: str, piece: torch.Tensor, placements: list[int | None], shape: list[int], stride: list[int]
    ) -> torch.Tensor:
        from torch.distributed.tensor import DTensor, Replicate, Shard

        like: Any = self._tensors[name]
        return DTensor.from_local(
            piece.to(local(like).device),
            like.device_mesh,
            [Replicate() if dim is None else Shard(dim) for dim in placements],
            run_check=False,
            shape=torch.Size(shape),
            stride=tuple(stride),
        )


def _own(param: torch.Tensor) -> list[tuple[str, Any]]:
    """Attributes that were put on a parameter, where some optimizers keep their state."""
    return [(key, value) for key, value in vars(param).items() if not key.startswith("_")]


def _is_piece(kind: str, rest: list[Any]) -> bool:
    """Whether a tree is a tensor that may be a shard."""
    return kind == "dtensor" or (kind == "value" and isinstance(rest[0], torch.Tensor) and rest[0].numel() > 1)


def _is_plain_object(value: Any) -> bool:
    """Whether an object consists of its ``__dict__``, and its class can be found by name in another process."""
    kind = type(value)
    if not hasattr(value, "__dict__") or "<locals>" in kind.__qualname__ or isinstance(value, type):
        return False
    if any(one is not object and (not one.__flags__ & _HEAP or getattr(one, "__slots__", ())) for one in kind.__mro__):
        return False
    found: Any = sys.modules.get(kind.__module__)
    return functools.reduce(lambda held, name: getattr(held, name, None), kind.__qualname__.split("."), found) is kind


#: Flag of a class that is made by Python code.
_HEAP = 1 << 9


def filled(value: Any, live: Any) -> Any:
    """`live`, filled with the tensor `value` if it fits, since others may hold it too; else `value`."""
    if not isinstance(value, torch.Tensor) or not isinstance(live, torch.Tensor) or is_dtensor(live):
        return value
    if value.shape != live.shape or value.dtype != live.dtype or value.stride() != live.stride():
        return value
    live.detach().copy_(value)
    return live
