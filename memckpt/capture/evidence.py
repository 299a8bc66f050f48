"""Evidence: a sample of the state after a record, with which a restore compares what it has made.

Redo is a model of what training does. The sample is the truth: strided elements of every parameter, its optimizer
state, and every by-value and static tensor, taken at the end of the record. It travels in the rank state, so that each
tier has it. The first element moves with the record, and all elements come round.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from memckpt.capture.by_value import LiveTensor
from memckpt.capture.live_state import LiveState, state_of
from memckpt.state.spec import StateSpec, is_ours
from memckpt.state.tensors import Fixed, bits_of, local

#: Elements of all tensors together in a sample: up to 48 KiB of fp32, which a commit's packet takes.
ELEMENTS = 12_288
#: Fewest and most elements of one tensor.
FEWEST, MOST = 4, 512


Kind = Literal["parameter", "state", "buffer", "frozen"]


class _Sampler:
    """Samples of some tensors for as long as these keep their memory.

    Args:
        tensors: the tensors; a rank's local part of each is sampled.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        most = max(FEWEST, min(MOST, ELEMENTS // max(1, len(tensors))))
        #: By device and width: position, elements, whether these have a flat view, and the distance of two samples.
        self._groups: dict[tuple[torch.device, torch.dtype], list[tuple[int, torch.Tensor, bool, int]]] = {}
        for position, tensor in enumerate(tensors):
            here = local(tensor)
            if not here.numel():
                continue
            # What has no flat view is copied for each sample: few tensors are permuted.
            flat, dense = _flat_bits(here), here.is_contiguous()
            group = self._groups.setdefault((flat.device, flat.dtype), [])
            group.append((position, flat if dense else here, dense, -(-flat.numel() // most)))

    def take(self, record: int) -> list[torch.Tensor]:
        """Samples of a record, one flat tensor of bits for each group."""
        groups = self._groups.values()
        return [
            torch.cat([_strided(held, dense, record, stride) for _, held, dense, stride in group]) for group in groups
        ]

    def parts(self, record: int, taken: Sequence[torch.Tensor]) -> Iterator[tuple[int, torch.Tensor]]:
        """Positions of the tensors, and their parts of what :meth:`take` has returned."""
        for group, bits in zip(self._groups.values(), taken, strict=True):
            sizes = [len(_strided(held, dense, record, stride)) for _, held, dense, stride in group]
            yield from zip((position for position, *_ in group), bits.split_with_sizes(sizes), strict=True)


def _flat_bits(tensor: torch.Tensor) -> torch.Tensor:
    return bits_of(tensor.reshape(-1)).view(-1)


def _strided(held: torch.Tensor, dense: bool, record: int, stride: int) -> torch.Tensor:
    """Each `stride`-th element's bits, from one on that moves with the record."""
    return (held if dense else _flat_bits(held))[record % stride :: stride]


@dataclass(frozen=True)
class Pair:
    """Elements of one tensor, as they are now and as they were: flat, of one dtype, in host memory.

    Attributes:
        kind: ``"parameter"``, ``"state"``, ``"buffer"`` or ``"frozen"``.
        name: name of the tensor, for the user.
    """

    kind: Kind
    name: str
    now: torch.Tensor
    before: torch.Tensor


class Evidence:
    """The tensors of one layout, as they are sampled and compared.

    Args:
        spec: the layout.
        live: the live state.
    """

    def __init__(self, spec: StateSpec, live: LiveState) -> None:
        self._optimizers = live.optimizers
        tensors, holders = live.tensors(), live.holders()
        self._params = [
            (one.tensor.name, tensors[one.tensor.name], [owner.optimizer for owner in one.owners])
            for one in spec.params
        ]
        beside: list[tuple[Kind, str]] = [("buffer", one.name) for one in spec.by_value if not is_ours(one.name)]
        beside += [("frozen", one.name) for one in spec.static]
        self._beside = [(kind, name, LiveTensor(tensors[name], holders.get(name))) for kind, name in beside]
        self._sampler: _Sampler | None = None
        self._known: tuple[list[int], list[int]] = ([], [])

    def take(self, record: int) -> dict[str, Any]:
        """A sample of the state as it is now, at the end of `record`; a part of the rank state."""
        found, numbers = self._walk()
        bits = self._sample([tensor for *_, tensor in found]).take(record)
        return {"record": record, "tensors": len(found), "bits": bits, "numbers": numbers}

    def pairs(self, held: Mapping[str, Any]) -> list[Pair] | None:
        """The state as it is now beside a sample of another process, tensor by tensor; None if these do not fit."""
        found, numbers = self._walk()
        sampler = self._sample([tensor for *_, tensor in found])
        taken = [bits.cpu() for bits in sampler.take(held["record"])]
        sizes = [list(map(len, each)) for each in (taken, held["bits"])]
        if len(found) != held["tensors"] or sizes[0] != sizes[1] or len(numbers) != len(held["numbers"]):
            return None
        made = []
        if numbers:
            made.append(Pair("state", "numbers beside tensors", *map(torch.tensor, (numbers, held["numbers"]))))
        both = zip(sampler.parts(held["record"], taken), sampler.parts(held["record"], held["bits"]), strict=True)
        for (position, now), (_, before) in both:
            kind, name, key, tensor = found[position]
            real = tensor.dtype.to_real()
            made.append(Pair(kind, f"{name} ({key})" if kind == "state" else name, now.view(real), before.view(real)))
        return made

    def _sample(self, tensors: Sequence[torch.Tensor]) -> _Sampler:
        """The sampler of these tensors, made anew only where one has moved."""
        known = list(map(id, tensors)), Fixed(tensors).pointers()
        if self._sampler is None or known != self._known:
            self._sampler, self._known = _Sampler(tensors), known
        return self._sampler

    def _walk(self) -> tuple[list[_Found], list[float]]:
        """All tensors, in an order that does not depend on how they came; and numbers beside them."""
        found: list[_Found] = [("parameter", name, "", param) for name, param, _ in self._params]
        numbers: list[float] = []
        for name, param, owners in self._params:
            for number in owners:
                _flatten(state_of(self._optimizers[number], param), name, found, numbers)
        for kind, name, one in self._beside:
            now = one.now()
            if now is not None:
                found.append((kind, name, "", now))
        return found, numbers


#: Kind, name, key in an optimizer's state, and the tensor.
_Found = tuple[Kind, str, Any, torch.Tensor]


def _flatten(state: Any, name: str, found: list[_Found], numbers: list[float]) -> None:
    """Add the tensors and the numbers in a tree of optimizer state."""
    keys: Iterable[Any] = _ordered(tuple(state)) if isinstance(state, Mapping) else range(len(state))
    for key in keys:
        value = state[key]
        if isinstance(value, torch.Tensor):
            found.append(("state", name, key, value))
        elif isinstance(value, (bool, int, float)):
            numbers.append(float(value))
        elif isinstance(value, (Mapping, list, tuple)):
            _flatten(value, f"{name} ({key})", found, numbers)


@functools.lru_cache(maxsize=1024)
def _ordered(keys: tuple[Hashable, ...]) -> list[Hashable]:
    return sorted(keys, key=str)
