"""What a repeated step has made, compared with what is held before that overwrites it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from memckpt.state import codec
from memckpt.state.bits import Distance
from memckpt.state.tensors import local

#: Kinds of what is compared, in the order in which one causes the other.
Kind = Literal[
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
#: Tensors that are named in a verdict's findings, at most, for each kind.
_NAMED = 8


@dataclass(frozen=True)
class Difference:
    """One thing that differs.

    Attributes:
        kind: what it is.
        name: its name, in the words of the user's own objects.
        text: how it differs.
        relative: the largest difference as a share of the largest held value; infinite for what is no rounding.
        ulp: the largest difference in units in the last place.
        dtype: the tensor's, empty for anything else.
    """

    kind: Kind
    name: str
    text: str
    relative: float = float("inf")
    ulp: float = 0.0
    dtype: str = ""


@dataclass
class Findings:
    """One rank's result: how much was compared, and what differs. Small, and travels between ranks.

    Attributes:
        compared: how many things of each kind were compared.
        differing: how many of them differ.
        differences: the first few of each kind.
        problem: why not all could be compared, in words; empty if it was.
    """

    problem: str = ""
    compared: dict[str, int] = field(default_factory=dict)
    differing: dict[str, int] = field(default_factory=dict)
    differences: list[Difference] = field(default_factory=list)

    def count(self, kind: Kind, difference: Difference | None = None) -> None:
        """One more thing has been compared."""
        self.compared[kind] = self.compared.get(kind, 0) + 1
        if difference is not None:
            self.differing[kind] = self.differing.get(kind, 0) + 1
            if self.differing[kind] <= _NAMED:
                self.differences.append(difference)


class Comparison:
    """Collects what differs between the repeated state and the held one; the restorer feeds it.

    Tensors may come in pieces, under one name; they are counted when :meth:`findings` is called.
    """

    def __init__(self) -> None:
        #: Why not all can be compared, in words.
        self.problem = ""
        self._findings = Findings()
        self._tensors: dict[tuple[Kind, str], tuple[Distance, str]] = {}

    def tensor(self, kind: Kind, name: str, found: torch.Tensor, held: torch.Tensor) -> None:
        """Compare a tensor, or one more piece of it."""
        distance, _ = self._tensors.setdefault((kind, name), (Distance(), str(held.dtype).removeprefix("torch.")))
        distance.add(found, held)

    def value(self, kind: Kind, name: str, found: Any, held: Any) -> None:
        """Compare anything that the codec takes, by its encoding; names the first path at which it differs."""
        if codec.encode(found) == codec.encode(held):
            self._findings.count(kind)
            return
        path, now, before = _first_difference(name, found, held)
        text = f"{_shown(now)} in place of {_shown(before)}"
        if kind == "logged values":
            # What is logged follows from what was computed: where that is rounded, so is this.
            far = _distance(found, held)
            self._findings.count(kind, Difference(kind, path, text, far.relative, far.ulp))
        elif isinstance(now, torch.Tensor) and isinstance(before, torch.Tensor) and now.shape == before.shape:
            far = _distance(now, before)
            dtype = str(before.dtype).removeprefix("torch.")
            self._findings.count(kind, Difference(kind, path, far.text, far.relative, far.ulp, dtype))
        else:
            self._findings.count(kind, Difference(kind, path, text))

    def absence(self, name: str, found: str, held: str) -> None:
        """Something is there on one side only."""
        self._findings.count("absences", Difference("absences", name, f"{found} in place of {held}"))

    def states(self, name: str, found: Mapping[str, Any], held: Mapping[str, Any], apart: Iterable[str]) -> None:
        """Compare an optimizer's state of one parameter, but for those keys that are compared piece by piece."""
        for key in sorted({*found, *held}):
            label = f"{name} ({key})"
            if key not in found or key not in held:
                self.absence(label, _presence(found, key), _presence(held, key))
            elif isinstance(found[key], torch.Tensor) != isinstance(held[key], torch.Tensor):
                self.absence(label, type(found[key]).__name__, type(held[key]).__name__)
            elif not isinstance(held[key], torch.Tensor):
                if not codec.unencodable_paths([found[key], held[key]]):
                    self.value("state", label, found[key], held[key])
            elif key not in apart:
                self.tensor("state", label, local(found[key]), local(held[key]))

    def findings(self, order: Iterable[str] = ()) -> Findings:
        """The result; call it once everything has been compared.

        Args:
            order: names of the model's tensors, in the model's order; what differs is named in it.
        """
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


def _presence(state: Mapping[str, Any], key: str) -> str:
    return "present" if key in state else "absent"


def _first_difference(path: str, found: Any, held: Any) -> tuple[str, Any, Any]:
    """Where two trees of plain values differ first, and the values there."""
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
    """How far the numbers of two trees lie apart; infinitely, where anything else differs."""
    distance = Distance()
    for one, other in _leaves(found, held):
        if isinstance(one, float) and isinstance(other, float):
            one, other = (torch.tensor(each, dtype=torch.float64) for each in (one, other))
        if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
            own = Distance()  # each by itself: a large value must not excuse a small one
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
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."
