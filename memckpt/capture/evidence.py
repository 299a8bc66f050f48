"""Evidence: a sample of the state after a record, with which a restore compares what it has made.

Redo is a model of what training does. The sample is the truth: strided elements of every parameter, its optimizer
state, and every by-value and static tensor, taken at the end of the record. It travels in the rank state, so that each
tier has it. The first element moves with the record, and all elements come round.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from operator import attrgetter
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import torch

from memckpt.capture.by_value import LiveTensor
from memckpt.capture.live_state import LiveState, state_of, values_of
from memckpt.state.spec import StateSpec, is_ours
from memckpt.state.tensors import Fixed, bits_of, local, why_not_held

#: Elements of all tensors together in a sample, 16 KiB of fp32: each is a cache line to be read.
ELEMENTS = 4_096
#: Fewest elements of one tensor, and most of one that is not sampled in full.
FEWEST, MOST = 4, 256


_nbytes = attrgetter("nbytes")
_PLAIN = {torch.Tensor, torch.nn.Parameter}
Kind = Literal["parameter", "state", "buffer", "frozen"]


#: Device and width.
_Key: TypeAlias = "tuple[torch.device, torch.dtype]"
#: Types of devices of which torch gathers elements where they lie, and takes their addresses as they are.
_BY_ADDRESS = {"cpu", "cuda"}


class _InMemory:
    """Elements of tensors of one device, as integers of one width, gathered by one call from where they lie.

    Slicing each tensor takes a thousand times as long as the copy of its elements, and 10 us where it is a GPU's.
    ``Tensor.numpy()`` would keep the user from resizing the storage.

    Args:
        places: of each tensor: its address, a multiple of the width; its number of elements; the distance of samples.
        device: the device.
        dtype: the integers.
    """

    def __init__(self, places: Sequence[tuple[int, int, int]], device: torch.device, dtype: torch.dtype) -> None:
        addresses, self._numels, self._strides = np.array(places).T
        low = int(addresses.min())
        self._firsts = (addresses - low) // dtype.itemsize
        # All of the address space between the tensors: only elements of theirs are read.
        span = int((self._firsts + self._numels).max())
        if device.type == "cpu":
            integers = np.dtype(str(dtype).removeprefix("torch."))
            there = (ctypes.c_char * (span * dtype.itemsize)).from_address(low)
            self._memory: Any = np.frombuffer(memoryview(there), dtype=integers)
        else:
            storage = torch._C._construct_storage_from_data_pointer(low, device, span * dtype.itemsize)
            self._memory = torch.empty(0, dtype=dtype, device=device).set_(storage, 0, (span,), (1,))

    def sample(self, record: int) -> torch.Tensor:
        """Elements of all tensors, one behind the other."""
        starts = record % self._strides
        counts = (self._numels - starts + self._strides - 1) // self._strides
        ends = counts.cumsum()
        firsts = self._firsts + starts - (ends - counts) * self._strides
        places = firsts.repeat(counts) + np.arange(ends[-1]) * self._strides.repeat(counts)
        if isinstance(self._memory, np.ndarray):
            return torch.from_numpy(self._memory.take(places))
        there = torch.from_numpy(places).pin_memory().to(self._memory.device, non_blocking=True)
        taken: torch.Tensor = self._memory.take(there)
        return taken


class _Sampler:
    """Samples of some tensors for as long as these keep their memory, which is read by address where it can be.

    The caller makes a new one where a tensor has moved.

    Args:
        tensors: the tensors; a rank's local part of each is sampled.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        most = _most_of_each([local(tensor).numel() for tensor in tensors])
        #: By device and width: positions, and distances of samples.
        self._groups: dict[_Key, list[tuple[int, int]]] = {}
        #: By position: all elements of a device's tensor, which take 10 us to view.
        self._flat: dict[int, torch.Tensor] = {}
        places: dict[_Key, list[tuple[int, int, int]]] = {}
        for position, tensor in enumerate(tensors):
            here = local(tensor)
            if here.numel() and not why_not_held(here):  # else its memory is given up
                flat = _flat_bits(here)
                key, address, numel = (flat.device, flat.dtype), flat.data_ptr(), flat.numel()
                stride = _apart(numel, here.shape, most if numel <= most else min(MOST, most))
                self._groups.setdefault(key, []).append((position, stride))
                if address != here.data_ptr():
                    continue  # a copy, of what is permuted or conjugated: it lies elsewhere each time
                if not address % flat.element_size():
                    places.setdefault(key, []).append((address, numel, stride))
                if not flat.is_cpu:
                    self._flat[position] = flat
        self._in_memory = {
            key: _InMemory(there, *key)
            for key, there in places.items()
            if key[0].type in _BY_ADDRESS and len(there) == len(self._groups[key])
        }

    def sample_tensors(self, record: int, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Samples of a record, one flat tensor of bits for each group."""
        taken = []
        for key, group in self._groups.items():
            in_memory = self._in_memory.get(key)
            if in_memory is not None:
                taken.append(in_memory.sample(record))
                continue
            known = [self._flat.get(position) for position, _ in group]
            flats = [
                _flat_bits(local(tensors[position])) if flat is None else flat
                for flat, (position, _) in zip(known, group, strict=True)
            ]
            strided = [flat[record % stride :: stride] for flat, (_, stride) in zip(flats, group, strict=True)]
            taken.append(torch.cat(strided))
        return taken

    def parts(
        self, record: int, taken: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """Positions of the tensors, and their parts of what :meth:`take` has returned."""
        for group, bits in zip(self._groups.values(), taken, strict=True):
            numels = [_flat_bits(local(tensors[position])).numel() for position, _ in group]
            sizes = [
                len(range(record % stride, numel, stride)) for numel, (_, stride) in zip(numels, group, strict=True)
            ]
            yield from zip((position for position, _ in group), bits.split_with_sizes(sizes), strict=True)


def _most_of_each(sizes: Sequence[int]) -> int:
    """The most elements of one tensor, so that what small tensors leave of all elements goes to larger ones."""
    room, left = ELEMENTS, len(sizes)
    for size in sorted(sizes):
        if size * left >= room:
            break
        room, left = room - size, left - 1
    return max(FEWEST, room // left if left else max(sizes, default=0))


def _apart(numel: int, shape: torch.Size, most: int) -> int:
    """The distance of sampled elements: no multiple of a row's parts, or a changed column would stay between them."""
    apart, columns = -(-numel // most), shape[-1] if shape else 1
    while math.gcd(apart, 2 * columns) > 1:
        apart += 1
    return apart


def _flat_bits(tensor: torch.Tensor) -> torch.Tensor:
    """All elements' bits in row-major order; a copy of what is permuted."""
    return bits_of(tensor.reshape(-1)).view(-1)


class Pair(NamedTuple):
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
        self._live = live
        self._optimizers = live.optimizers
        tensors = live.tensors()
        self._params = [
            (one.tensor.name, tensors[one.tensor.name], [owner.optimizer for owner in one.owners])
            for one in spec.params
        ]
        buffers = [one.name for one in spec.by_value if not is_ours(one.name)]
        kinds: dict[str, Kind] = {**dict.fromkeys(buffers, "buffer"), **{one.name: "frozen" for one in spec.static}}
        self._beside = [(kind, name, LiveTensor(tensors[name], None)) for name, kind in kinds.items()]
        self._bind(tensors)
        self._sampler: _Sampler | None = None
        #: Identities of all values, and addresses and sizes of the tensors among them, when the sampler was made.
        self._known: tuple[list[int], list[int]] = ([], [])
        #: Positions of the tensors among all values; None where they have to be looked for again each time.
        self._order: list[int] | None = None

    def _bind(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Find what holds the tensors that no optimizer steps: modules may have been replaced."""
        self._changes, holders = self._live.changes, self._live.holders()
        self._beside = [
            (kind, name, LiveTensor(tensors[name], holders.get(name)) if name in tensors else one)
            for kind, name, one in self._beside
        ]

    def _values_beside(self) -> Iterator[tuple[Kind, str, torch.Tensor]]:
        if self._changes != self._live.changes:
            self._bind(self._live.tensors())
        for kind, name, one in self._beside:
            now = one.now()
            if now is not None:
                yield kind, name, now

    def sample_state(self, record: int) -> dict[str, Any]:
        """A sample of the state as it is now, at the end of `record`; a part of the rank state."""
        tensors, numbers = self._tensors()
        bits = self._sample(tensors).sample_tensors(record, tensors)
        return {"record": record, "tensors": len(tensors), "bits": bits, "numbers": numbers}

    @torch.no_grad()
    def pairs(self, held: Mapping[str, Any]) -> list[Pair] | None:
        """The state as it is now beside a sample of another process, tensor by tensor; None if these do not fit."""
        record, found, numbers = held["record"], *self._walk()
        tensors = [tensor for *_, tensor in found]
        sampler = _Sampler(tensors)
        taken = [bits.cpu() for bits in sampler.sample_tensors(record, tensors)]
        sizes = [list(map(len, each)) for each in (taken, held["bits"])]
        if len(found) != held["tensors"] or sizes[0] != sizes[1] or len(numbers) != len(held["numbers"]):
            return None
        made = []
        if numbers:
            made.append(Pair("state", "numbers beside tensors", *map(torch.tensor, (numbers, held["numbers"]))))
        both = zip(sampler.parts(record, taken, tensors), sampler.parts(record, held["bits"], tensors), strict=True)
        for (position, now), (_, before) in both:
            kind, name, key, tensor = found[position]
            real = tensor.dtype.to_real()
            made.append(Pair(kind, f"{name} ({key})" if kind == "state" else name, now.view(real), before.view(real)))
        return made

    def _tensors(self) -> tuple[list[torch.Tensor], list[float]]:
        """The tensors of :meth:`_walk` and its numbers; found at once where the values are those of the last call."""
        values: list[Any] = [param for _, param, _ in self._params]
        for optimizer in self._optimizers:
            values += optimizer.state
            values += values_of(optimizer)
        values += [now for *_, now in self._values_beside()]
        identities = list(map(id, values))
        if self._order is not None and identities == self._known[0]:
            return [values[position] for position in self._order], []
        found, numbers = self._walk()
        places = {identity: position for position, identity in enumerate(identities)}
        tensors = [tensor for *_, tensor in found]
        plain = not numbers and all(id(tensor) in places for tensor in tensors)
        self._order = [places[id(tensor)] for tensor in tensors] if plain else None
        self._known = identities, []
        return tensors, numbers

    def _sample(self, tensors: Sequence[torch.Tensor]) -> _Sampler:
        """The sampler of these tensors, made anew only where one has moved."""
        # Only DTensors have parts elsewhere; looking at each tensor would take longer than the sample.
        plain = set(map(type, tensors)) <= _PLAIN
        addresses = map(torch.Tensor.data_ptr, tensors) if plain else Fixed(tensors).pointers()
        # By turns: many tensors have left the processor's cache by the end of a walk.
        places = list(chain.from_iterable(zip(addresses, map(_nbytes, tensors), strict=True)))
        if self._sampler is None or places != self._known[1]:
            self._sampler = _Sampler(tensors)
            self._known = self._known[0], places
            self._live.look_at_memory()
        return self._sampler

    def _walk(self) -> tuple[list[_Found], list[float]]:
        """All tensors, in an order that does not depend on how they came; and numbers beside them."""
        found: list[_Found] = [("parameter", name, "", param) for name, param, _ in self._params]
        numbers: list[float] = []
        for name, param, owners in self._params:
            for number in owners:
                _flatten(state_of(self._optimizers[number], param), name, found, numbers)
        found += [(kind, name, "", now) for kind, name, now in self._values_beside()]
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
