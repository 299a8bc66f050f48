"""Detection of changes to parameters, frozen ones too, and to state of optimizers, by anything but a step.

Such a change is in no gradient, so redo would not make it. Torch counts in-place changes of every tensor. Writes
through ``.data`` escape that count: values show them. Few bytes are compared whole, of many a sample, and a part in
turn. A tensor in which such a write was seen is compared whole from then on.
"""

from __future__ import annotations

import ctypes
from collections.abc import Collection, Iterator, Mapping, Sequence
from operator import attrgetter, is_
from typing import Any

import torch
from torch.optim import Optimizer

from memckpt.capture.live_state import values_of
from memckpt.capture.slot_writer import SlotWriter
from memckpt.state.tensors import UNCOUNTED, Fixed, bits_of, is_dense, local, version, why_not_held

#: A sample is WINDOW elements out of every SPACING. Neighbours share a cache line: a strided sample of as many elements
#: takes several times as long.
WINDOW = 64
SPACING = 1 << 16
#: Number of checks that compare every element; there are two in each record.
FULL_CHECKS = 5
#: Bytes that every check compares whole: all tensors where they have no more, else a part that moves on in each step.
WHOLE_BYTES = 256 << 10
#: Tensors of an optimizer's state above which they are only compared in turn: each read costs a cache miss.
MOST_SAMPLED = 512


class _Sample:
    """Former bytes of host tensors, to detect changes that escape the counters. Reading an accelerator would block.

    Memory is read by address: one join of its parts takes a fraction of what operations on tensors do.

    Args:
        tensors: the tensors to compare; always the same ones.
        full_checks: number of checks that compare every element; all values are kept until they are over.
        whole: indices of tensors that are compared whole in every check.
        windows: whether others are sampled, too, or compared whole where they are few, and not only in turn.
    """

    def __init__(
        self, tensors: Sequence[torch.Tensor], full_checks: int, whole: Collection[int] = (), windows: bool = True
    ) -> None:
        self._tensors = tensors
        held = {i: local(one) for i, one in enumerate(tensors) if one.device.type == "cpu" and not why_not_held(one)}
        few = sum(one.nbytes for one in held.values()) <= WHOLE_BYTES
        self._whole = set(held) if few and windows else {*whole}
        #: Whether all can be read where they are; copies of the others are made in each check.
        self._dense = all(map(is_dense, held.values()))
        #: Tensors in turn, and the first byte of the part that is compared whole.
        self._turns = [index for index in held if index not in self._whole]
        self._turn_start = 0
        self._sampled = [index for index in held if windows or index in self._whole]
        self._memory = Fixed([tensors[index] for index in self._sampled])
        self._pointers: list[int] = []
        #: What is compared, with the tensor that it is of; at last the part in turn.
        self._parts: list[tuple[int, memoryview]] = []
        self._views: list[memoryview] = []
        self._full_checks_left = full_checks
        self._keep()

    def _read(self) -> bytes:
        """The compared bytes. The parts are those of before as long as the tensors keep their memory."""
        pointers = [*self._memory.pointers(), self._turn_pointer()]
        if pointers != self._pointers or not self._dense:
            self._pointers = pointers
            self._parts = [(index, part) for index in self._sampled for part in self._parts_of(index)]
            self._parts.append(self._part_in_turn())
            self._views = [part for _, part in self._parts]
        return b"".join(self._views)

    def _parts_of(self, index: int) -> list[memoryview]:
        there, size = _memory_of(self._tensors[index]), self._tensors[index].element_size()
        if self._full_checks_left or index in self._whole:
            return [there]
        apart, window = SPACING * size, WINDOW * size
        return [there[start : start + window] for start in range(0, max(1, len(there) - apart + 1), apart)]

    def _turn_pointer(self) -> int:
        return local(self._tensors[self._turns[0]]).data_ptr() if self._turns else 0

    def _part_in_turn(self) -> tuple[int, memoryview]:
        if self._full_checks_left or not self._turns:
            return -1, memoryview(b"")
        return self._turns[0], _memory_of(self._tensors[self._turns[0]])[self._turn_start :][:WHOLE_BYTES]

    def renew(self) -> None:
        """Take the current values as the expected ones, and compare the next part whole from now on."""
        if self._turns and not self._full_checks_left:
            self._turn_start += WHOLE_BYTES
            if self._turn_start >= local(self._tensors[self._turns[0]]).nbytes:
                self._turns.append(self._turns.pop(0))
                self._turn_start = 0
            self._parts[-1] = self._part_in_turn()
            self._views[-1] = self._parts[-1][1]
            self._pointers[-1] = self._turn_pointer()
        self._keep()

    def _keep(self) -> None:
        self._kept = self._read()
        self._kept_parts = self._parts

    def changed(self) -> list[int]:
        """Indices of tensors whose values differ from the expected ones."""
        now = self._read()
        if now != self._kept:
            before, after = _by_tensor(self._kept_parts, self._kept), _by_tensor(self._parts, now)
            return sorted(index for index in before.keys() | after.keys() if before.get(index) != after.get(index))
        if self._full_checks_left:
            self._full_checks_left -= 1
            if not self._full_checks_left:
                self._pointers = []  # the parts are smaller from now on
                self._keep()
        return []


def _by_tensor(parts: Sequence[tuple[int, memoryview]], joined: bytes) -> dict[int, bytes]:
    """The bytes of each tensor."""
    found: dict[int, bytes] = {}
    start = 0
    for index, part in parts:
        found[index] = found.get(index, b"") + joined[start : start + len(part)]
        start += len(part)
    return found


class _Family:
    """The parameters that the same optimizers step, as these left them.

    Args:
        written: names of those in which a write was seen that torch has not counted; others are added.
    """

    def __init__(self, writer: SlotWriter, indices: Sequence[int], written: set[str]) -> None:
        self._names = [writer.spec.params[index].tensor.name for index in indices]
        params = [writer.params[index] for index in indices]
        self._params = Fixed(params)
        self._versions = self._params.versions()
        self._written = written
        self._sample = _Sample(params, FULL_CHECKS, [at for at, name in enumerate(self._names) if name in written])

    def renew(self) -> None:
        self._versions = self._params.versions()
        self._sample.renew()

    def changed(self) -> str | None:
        """Name of a parameter that has changed; None if none has, as far as counters and the sample show."""
        versions = self._params.versions()
        if versions != self._versions:
            pairs = zip(versions, self._versions, self._names, strict=True)
            return next(name for now, noted, name in pairs if now != noted)
        changed = [self._names[index] for index in self._sample.changed()]
        self._written.update(changed)
        return changed[0] if changed else None


class _State:
    """The state of one optimizer, as its last step left it.

    Args:
        names: names of parameters by `id`.
        written: as for :class:`_Family`; a tensor of state is named by its parameter and its key.
    """

    def __init__(self, optimizer: Optimizer, names: Mapping[int, str], written: set[str]) -> None:
        self._optimizer = optimizer
        self._names = names
        self._written = written
        self._accept(values_of(optimizer))

    def _accept(self, values: list[Any]) -> None:
        """Take these values, of which some are new objects, as the expected ones."""
        self._values = values
        self._tensors = [one for one in values if isinstance(one, torch.Tensor)]
        self._changes = _sum_of_versions(self._tensors)
        names = self._names_of_tensors() if self._written else ()
        written = [at for at, name in enumerate(names) if name in self._written]
        # Steps that replace tensors have it made anew each time: no check of every element.
        self._sample = _Sample(self._tensors, 0, written, windows=len(self._tensors) <= MOST_SAMPLED)

    def _names_of_tensors(self) -> Iterator[str]:
        for param, state in self._optimizer.state.items():
            for key, value in state.items() if isinstance(state, dict) else ():
                if isinstance(value, torch.Tensor):
                    yield f"{self._names.get(id(param), 'a parameter')} ({key})"

    def renew(self) -> bool:
        """Take the current values as the expected ones; returns whether there are as many tensors as before."""
        values, before = values_of(self._optimizer), len(self._tensors)
        if self._are_kept(values):
            self._changes = _sum_of_versions(self._tensors)
            self._sample.renew()
        else:
            self._accept(values)
        return len(self._tensors) == before

    def _are_kept(self, values: list[Any]) -> bool:
        return len(values) == len(self._values) and all(map(is_, values, self._values))

    def changed(self) -> bool:
        """Whether anything has changed, as far as identities, counters and the sample show."""
        if not self._are_kept(values_of(self._optimizer)) or self._changes != _sum_of_versions(self._tensors):
            return True
        found = set(self._sample.changed())
        if found:
            self._written |= {name for at, name in enumerate(self._names_of_tensors()) if at in found}
        return bool(found)


class ParameterWatch:
    """Expected state of the stepped parameters and of their optimizers, as steps have left them.

    Args:
        writer: writer of the current generation.
        optimizers: the live optimizers.
        written: names of tensors in which a write was seen that torch has not counted; others are added.
    """

    def __init__(self, writer: SlotWriter, optimizers: Sequence[Optimizer], written: set[str]) -> None:
        self._writer = writer
        self._optimizers = optimizers
        members: dict[tuple[int, ...], list[int]] = {}
        for index, owners in enumerate(writer.owners):
            members.setdefault(tuple(owners), []).append(index)
        self._families = {owners: _Family(writer, indices, written) for owners, indices in members.items()}
        self._of = [
            [family for owners, family in self._families.items() if number in owners]
            for number in range(len(optimizers))
        ]
        names = {id(param): writer.spec.params[index].tensor.name for index, param in enumerate(writer.params)}
        self._states = [_State(optimizer, names, written) for optimizer in optimizers]

    def accept_changes(self, number: int) -> bool:
        """Accept the changes that an optimizer has just made; returns False if its state has outgrown the layout."""
        for family in self._of[number]:
            family.renew()
        return self._states[number].renew() or self._writer.has_room(number, self._optimizers[number])

    def changed(self, number: int | None = None) -> str | None:
        """What has changed since the optimizer's last step, in words; None if nothing has.

        Args:
            number: the optimizer, which is about to step; None: look at all of them.
        """
        for family in self._families.values() if number is None else self._of[number]:
            found = family.changed()
            if found is not None:
                return found
        for each in range(len(self._states)) if number is None else (number,):
            if self._states[each].changed():
                return f"the state of {type(self._optimizers[each]).__qualname__}"
        return None


def _sum_of_versions(tensors: Sequence[torch.Tensor]) -> int:
    try:
        return sum(map(_version, tensors))
    except RuntimeError:  # tensors made in inference mode
        return UNCOUNTED


_version = attrgetter("_version")


def _memory_of(tensor: torch.Tensor) -> memoryview:
    """All bytes of a tensor in memory order: those in its memory if it is dense, else a copy of them.

    ``Tensor.numpy()`` would keep the user from resizing the storage.
    """
    held = local(tensor).detach()
    if not held.numel() or why_not_held(held):  # no elements, or their memory is given up, as wrappers do meanwhile
        return memoryview(b"")
    if not is_dense(held):
        copied = bits_of(held.clone(memory_format=torch.contiguous_format))
        return memoryview(copied.numpy().tobytes())
    return memoryview((ctypes.c_char * held.nbytes).from_address(held.data_ptr()))


class StaticWatch:
    """Watches tensors that are staged once per generation: if a counter has moved, the copy is compared.

    Writes that escape the counters (a momentum encoder updated through ``.data``) show in the values of host tensors.
    The first checks compare all values with the copy, later ones a sample with its former values, and a part in turn
    with the copy.
    """

    def __init__(self, writer: SlotWriter) -> None:
        self._writer = writer
        self._seen = [self._identify(position) for position in range(len(writer.spec.static))]
        self._full_checks_left = FULL_CHECKS
        #: What is compared with its copy next: a tensor, and the first of its rows.
        self._turn, self._row = 0, 0
        self._take_sample()

    def _take_sample(self) -> None:
        there = [(position, tensor) for position, (tensor, _) in enumerate(self._seen) if tensor is not None]
        self._sampled = [position for position, _ in there]
        self._sample = _Sample([tensor for _, tensor in there], 0)

    def _identify(self, position: int) -> tuple[torch.Tensor | None, int]:
        tensor = self._writer.static_tensor(position)
        return tensor, -1 if tensor is None else version(tensor)

    def changed(self) -> list[str]:
        """Names of static tensors whose values differ from the staged ones."""
        replaced, changed = False, set()
        for position, (seen, noted) in enumerate(self._seen):
            tensor, now = self._identify(position)
            same, elsewhere = tensor is seen and now == noted, self._writer.spec.static[position].elsewhere
            if same and not (self._full_checks_left and tensor is not None and tensor.device.type == "cpu"):
                continue
            if tensor is None or not (same if elsewhere else self._is_staged(position, tensor)):
                changed.add(position)
            replaced = replaced or tensor is not seen
            self._seen[position] = (tensor, now)
        self._full_checks_left = max(0, self._full_checks_left - 1)
        if replaced:
            self._take_sample()
        changed.update(self._sampled[index] for index in self._sample.changed())
        if self._sampled and not self._full_checks_left and not self._is_part_staged():
            changed.add(self._sampled[self._turn])
        return [self._writer.spec.static[position].name for position in sorted(changed)]

    def _is_part_staged(self) -> bool:
        """Whether the next part of a host tensor has the values of its copy: a write that is missed shows in turn."""
        if self._row == 0 or self._turn >= len(self._sampled):  # some may have gone
            self._turn, self._row = (self._turn + 1) % len(self._sampled), 0
        position = self._sampled[self._turn]
        tensor, staged = self._seen[position][0], self._writer.static_copy(position)
        if self._writer.spec.static[position].elsewhere:
            return True
        if tensor is None or tensor.device.type != "cpu" or why_not_held(tensor) or not tensor.numel():
            return True
        held = local(tensor).detach()
        if held.shape != staged.shape or held.dtype != staged.dtype or not held.data_ptr():  # or: given up meanwhile
            return True
        if held.dim() == 0:
            return torch.equal(bits_of(held), bits_of(staged))
        rows = slice(self._row, self._row + max(1, WHOLE_BYTES * len(held) // held.nbytes))
        self._row = rows.stop if rows.stop < len(held) else 0
        return torch.equal(bits_of(held[rows]), bits_of(staged[rows]))

    def _is_staged(self, position: int, tensor: torch.Tensor) -> bool:
        staged, held = self._writer.static_copy(position), local(tensor)
        if why_not_held(tensor):
            return True  # a commit leaves it out, unless wrappers give up its memory meanwhile
        if held.shape != staged.shape or held.dtype != staged.dtype:
            return False
        return torch.equal(bits_of(held.to(staged.device)), bits_of(staged))
