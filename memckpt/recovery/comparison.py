"""Comparison of a repeated step's result with the state that is put back over it."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch.optim import Optimizer

from memckpt.recovery.restore import is_restored
from memckpt.state import codec
from memckpt.state.spec import StateSpec
from memckpt.state.tensors import Distance, local

#: Kinds of compared values, in causal order.
ComparedKind = Literal[
    "data position",
    "generators",
    "hyperparameters",
    "absences",
    "registered",
    "logged values",
    "gradient",
    "buffer",
    "frozen",
    "parameter",
    "state",
]
#: Tensors of each kind that a verdict names, at most.
_NAMED = 8


@dataclass(frozen=True)
class Difference:
    """One value that differs, by its name in the user's own objects."""

    kind: ComparedKind
    name: str
    text: str
    relative: float = float("inf")  #: largest difference, of the largest held value; infinite: it cannot be rounding
    ulp: float = 0.0
    dtype: str = ""  #: empty for what is no tensor


@dataclass
class Findings:
    """One rank's result: counts of compared values, and differences. Small: it is sent between ranks."""

    problem: str = ""
    elements: int = 0  #: of tensors, that were compared
    compared: dict[str, int] = field(default_factory=dict)
    differing: dict[str, int] = field(default_factory=dict)
    differences: list[Difference] = field(default_factory=list)

    def count(self, kind: ComparedKind, difference: Difference | None = None) -> None:
        """Count one more compared value, and its difference if it has one."""
        self.compared[kind] = self.compared.get(kind, 0) + 1
        if difference is not None:
            self.differing[kind] = self.differing.get(kind, 0) + 1
            if self.differing[kind] <= _NAMED:
                self.differences.append(difference)


class Comparison:
    """Collects differences between a repeated state and the held one. Tensors are counted in :meth:`findings`."""

    def __init__(self) -> None:
        #: Reason why some values cannot be compared.
        self.problem = ""
        self._findings = Findings()
        self._tensors: dict[tuple[ComparedKind, str], tuple[Distance, str]] = {}

    def tensor(self, kind: ComparedKind, name: str, found: torch.Tensor, held: torch.Tensor) -> None:
        """Compare a tensor."""
        distance, _ = self._tensors.setdefault((kind, name), (Distance(), str(held.dtype).removeprefix("torch.")))
        distance.add(found, held)
        self._findings.elements += held.numel()

    def value(self, kind: ComparedKind, name: str, found: Any, held: Any) -> None:
        """Compare any value that the codec takes, by its encoding; names the first path at which it differs."""
        if codec.encode(found) == codec.encode(held):
            self._findings.count(kind)
            return
        path, now, before = _first_difference(name, found, held)
        text = f"{_shown(now)} in place of {_shown(before)}"
        if kind == "logged values":
            # Logged values follow from computed ones, and are rounded if these are.
            far = _distance(found, held)
            self._findings.count(kind, Difference(kind, path, text, far.relative, far.ulp))
        elif isinstance(now, torch.Tensor) and isinstance(before, torch.Tensor) and now.shape == before.shape:
            far = _distance(now, before)
            dtype = str(before.dtype).removeprefix("torch.")
            self._findings.count(kind, Difference(kind, path, far.text, far.relative, far.ulp, dtype))
        else:
            self._findings.count(kind, Difference(kind, path, text))

    def absence(self, name: str, found: str, held: str) -> None:
        """Count a value that exists on one side only."""
        self._findings.count("absences", Difference("absences", name, f"{found} in place of {held}"))

    def states(self, name: str, found: Mapping[str, Any], held: Mapping[str, Any]) -> None:
        """Compare an optimizer's state of one parameter."""
        for key in sorted({*found, *held}):
            label = f"{name} ({key})"
            if key not in found or key not in held:
                self.absence(label, _presence(found, key), _presence(held, key))
            elif isinstance(found[key], torch.Tensor) != isinstance(held[key], torch.Tensor):
                self.absence(label, type(found[key]).__name__, type(held[key]).__name__)
            elif not isinstance(held[key], torch.Tensor):
                if not codec.unencodable_paths([found[key], held[key]]):
                    self.value("state", label, found[key], held[key])
            else:
                self.tensor("state", label, local(found[key]), local(held[key]))

    def sample(self, pairs: Iterable[tuple[ComparedKind, str, torch.Tensor, torch.Tensor]] | None) -> None:
        """Compare a sample of a state with that of a record, tensor by tensor; None: it has other tensors."""
        if pairs is None:
            self.absence("the state", "other tensors", "those of the record")
        for kind, name, found, held in pairs or ():
            self.tensor(kind, name, found, held)

    def findings(self, order: Iterable[str] = ()) -> Findings:
        """The result; call once everything has been compared."""
        places = {name: place for place, name in enumerate(order)}
        tensors = sorted(self._tensors.items(), key=lambda item: places.get(item[0][1].partition(" (")[0], len(places)))
        for (kind, name), (distance, dtype) in tensors:
            difference = None
            if distance.differing:
                difference = Difference(kind, name, distance.text, distance.relative, distance.ulp, dtype)
            self._findings.count(kind, difference)
        self._tensors.clear()
        self._findings.problem = self.problem
        return self._findings


class LiveCopies:
    """Copies in host memory of the live tensors and the optimizers' state, before a held state overwrites them.

    `state` describes parameters, static tensors and optimizer state, `own` the rank's by-value tensors.
    """

    def __init__(
        self,
        state: StateSpec,
        own: StateSpec,
        tensors: Mapping[str, torch.Tensor],
        optimizers: Sequence[Optimizer],
    ) -> None:
        self._tensors = tensors
        self._optimizers = optimizers
        params = [param for param in state.params if not param.tensor.elsewhere]
        kinds: dict[str, ComparedKind] = {param.tensor.name: "parameter" for param in params}
        kinds |= dict.fromkeys((spec.name for spec in state.static if not spec.elsewhere), "frozen")
        kinds |= dict.fromkeys((spec.name for spec in own.by_value if is_restored(spec, tensors)), "buffer")
        self._kinds = kinds
        self._copies = {name: _copy(tensors[name]) for name in kinds}
        #: By name of the parameter and index of the optimizer.
        self._states = {
            (param.tensor.name, owner.optimizer): {
                key: _copy(value) if isinstance(value, torch.Tensor) else value
                for key, value in optimizers[owner.optimizer].state.get(tensors[param.tensor.name], {}).items()
            }
            for param in params
            for owner in param.owners
        }

    @torch.no_grad()
    def compare(self, comparison: Comparison) -> None:
        """Compare the copies with the live tensors; each copy is freed after its comparison."""
        for name, kind in self._kinds.items():
            comparison.tensor(kind, name, self._copies.pop(name), local(self._tensors[name]))
        for (name, index), copies in self._states.items():
            held: dict[str, Any] = self._optimizers[index].state.get(self._tensors[name], {})
            comparison.states(name, copies, held)
        self._states.clear()


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return local(tensor).to("cpu", copy=True)


def copied_bytes(state: StateSpec, own: StateSpec | None = None) -> int:
    """Upper bound of the copies' host memory, in bytes. `own`: as for :class:`LiveCopies`; None: the same spec."""
    params = sum(
        param.tensor.nbytes + sum(one.nbytes for owner in param.owners for one in owner.state) for param in state.params
    )
    return params + sum(spec.nbytes for spec in (*state.static, *(own or state).by_value))


def _presence(state: Mapping[str, Any], key: str) -> str:
    return "present" if key in state else "absent"


def _first_difference(path: str, found: Any, held: Any) -> tuple[str, Any, Any]:
    """The first path at which two trees of plain values differ, and the values there."""
    if isinstance(found, Mapping) and isinstance(held, Mapping):
        for key in [*held, *(key for key in found if key not in held)]:
            if key not in found or key not in held:
                return f"{path}.{key}", found.get(key, "nothing"), held.get(key, "nothing")
            if codec.encode(found[key]) != codec.encode(held[key]):
                return _first_difference(f"{path}.{key}", found[key], held[key])
        return f"{path} (its order)", list(found), list(held)
    if isinstance(found, (list, tuple)) and isinstance(held, (list, tuple)) and len(found) == len(held):
        for index, (one, other) in enumerate(zip(found, held, strict=True)):
            if codec.encode(one) != codec.encode(other):
                return _first_difference(f"{path}.{index}", one, other)
    return path, found, held


def _distance(found: Any, held: Any) -> Distance:
    """The distance between the numbers of two trees; infinite if anything else differs."""
    distance = Distance()
    for one, other in _leaves(found, held):
        if isinstance(one, float) and isinstance(other, float):
            one, other = (torch.tensor(each, dtype=torch.float64) for each in (one, other))
        if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
            own = Distance()  # one by one: a large value must not hide a small one's difference
            own.add(one, other)
            if own.relative >= distance.relative:
                distance = own
        elif codec.encode(one) != codec.encode(other):
            return Distance(differing=1, largest=float("inf"), scale=1.0, ulp=float("inf"))
    return distance


def _leaves(found: Any, held: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(found, Mapping) and isinstance(held, Mapping) and list(found) == list(held):
        for key in held:
            yield from _leaves(found[key], held[key])
    elif isinstance(found, (list, tuple)) and isinstance(held, (list, tuple)) and len(found) == len(held):
        for one, other in zip(found, held, strict=True):
            yield from _leaves(one, other)
    else:
        yield found, held


def _shown(value: Any, limit: int = 40) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of {value.numel()} elements" if value.numel() > 1 else f"tensor({value.item()!r})"
    if isinstance(value, bytes):
        return f"{len(value)} bytes ({zlib.crc32(value):08x})"
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."
