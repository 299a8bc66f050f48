"""Detection of changes to parameters, frozen ones too, and to state of optimizers, by anything but a step.

Such a change is in no gradient, so redo would not make it. Torch counts in-place changes of every tensor. Writes
through ``.data`` escape that count: values show them. Few bytes are compared whole, of many a sample, and a part in
turn. A tensor in which such a write was seen is compared whole from then on.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import chain
from operator import attrgetter

import torch
from torch.optim import Optimizer

from memckpt.capture.slot_writer import SlotWriter
from memckpt.state.tensors import UNCOUNTED, Fixed, bits_of, local, version

#: A sample is WINDOW elements out of every SPACING. Neighbours share a cache line: a strided sample of as many elements
#: takes several times as long.
WINDOW = 64
SPACING = 1 << 16
#: Number of checks that compare every element; there are two in each record.
FULL_CHECKS = 5
#: Bytes that every check compares whole: all tensors where they have no more, else a part that moves on in each step.
WHOLE_BYTES = 256 << 10


class _Sample:
    """Former values of host tensors, to detect changes that escape the counters. Reading an accelerator would block.

    Args:
        tensors: the tensors to compare; always the same ones.
        full_checks: number of checks that compare every element; all values are kept until they are over.
        whole: indices of tensors that are compared whole in every check.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], full_checks: int, whole: Collection[int] = ()) -> None:
        self._tensors = tensors
        self._sampled = [i for i, one in enumerate(tensors) if one.device.type == "cpu" and local(one).numel()]
        held = {index: local(tensors[index]) for index in self._sampled}
        few = sum(one.nbytes for one in held.values()) <= WHOLE_BYTES
        self._whole = set(held) if few else {*whole}
        #: Whether views of all elements can be kept; those of the others are copies, made in each check.
        self._dense = all(map(_is_dense, held.values()))
        #: Tensors in turn, first element of the part that is compared whole, and its values.
        self._turns = [index for index in self._sampled if index not in self._whole]
        self._turn_start = 0
        self._turn_values: torch.Tensor | None = None
        self._in_memory = Fixed([tensors[index] for index in self._sampled])
        self._pointers: list[int] = []
        #: By dtype and row width: the tensors' indices, and views of their windows as rows of that width.
        self._windows: dict[tuple[torch.dtype, int], list[tuple[int, torch.Tensor]]] = {}
        self._full_checks_left = full_checks
        self._values = self._copy_values()

    def _window(self, index: int) -> torch.Tensor:
        """The compared part of a tensor, as a view with rows of equal width."""
        flat = _flat(local(self._tensors[index]))
        if self._full_checks_left or index in self._whole:
            return flat.view(-1, 1)
        if flat.numel() < SPACING:
            return flat[:WINDOW].view(1, -1)
        rows = flat.numel() // SPACING
        return flat[: rows * SPACING].view(rows, SPACING)[:, :WINDOW]

    def _copy_values(self) -> dict[tuple[torch.dtype, int], torch.Tensor]:
        """Copies of the sampled values. The views are reused as long as the tensors keep their memory."""
        pointers = self._in_memory.pointers()
        if pointers != self._pointers or not self._dense:
            self._pointers, self._windows = pointers, {}
            for index in self._sampled:
                window = self._window(index)
                self._windows.setdefault((window.dtype, window.shape[1]), []).append((index, window))
        return {key: torch.cat([window for _, window in windows]) for key, windows in self._windows.items()}

    def renew(self) -> None:
        """Take the current values as the expected ones, and compare the next part whole from now on."""
        self._values = self._copy_values()
        if self._turns and not self._full_checks_left:
            self._turn_start += self._in_turn().numel()
            if not self._in_turn().numel():
                self._turns.append(self._turns.pop(0))
                self._turn_start = 0
            self._turn_values = self._in_turn().clone()

    def _in_turn(self) -> torch.Tensor:
        """The part that is compared whole, as a view if the tensor is dense; empty behind its end."""
        flat = _flat(local(self._tensors[self._turns[0]]))
        return flat[self._turn_start : self._turn_start + WHOLE_BYTES // flat.element_size()]

    def changed(self) -> list[int]:
        """Indices of tensors whose values differ from the expected ones."""
        found = []
        for key, now in self._copy_values().items():
            before = self._values.get(key)
            if before is None or before.shape != now.shape:  # another dtype, or another size
                found += [index for index, _ in self._windows[key]]
            elif not torch.equal(bits_of(now), bits_of(before)):
                found += self._find(key, now)
        if not found and self._turn_values is not None and not _same(self._in_turn(), self._turn_values):
            found.append(self._turns[0])
        if not found:
            self._end_full_check()
        return sorted(found)

    def _end_full_check(self) -> None:
        if self._full_checks_left:
            self._full_checks_left -= 1
            if not self._full_checks_left:
                self._pointers = []  # windows have to be made anew
                self.renew()

    def _find(self, key: tuple[torch.dtype, int], now: torch.Tensor) -> list[int]:
        differs = (bits_of(now) != bits_of(self._values[key])).flatten(1).any(dim=1)
        rows = differs.split_with_sizes([window.shape[0] for _, window in self._windows[key]])
        return [index for (index, _), its in zip(self._windows[key], rows, strict=True) if bool(its.any())]


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


class ParameterWatch:
    """Expected state of the stepped parameters and of their optimizers, as steps have left them.

    Args:
        writer: writer of the current generation.
        optimizers: the live optimizers.
        written: names of parameters in which a write was seen that torch has not counted; others are added.
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
        self._counted = [_count_changes(optimizer) for optimizer in optimizers]

    def accept_changes(self, number: int) -> bool:
        """Accept the changes that an optimizer has just made; returns False if its state has outgrown the layout."""
        for family in self._of[number]:
            family.renew()
        optimizer, before = self._optimizers[number], self._counted[number]
        self._counted[number] = now = _count_changes(optimizer)
        return now[1] == before[1] or self._writer.has_room(number, optimizer)

    def changed(self, number: int | None = None) -> str | None:
        """What has changed since the optimizer's last step, in words; None if nothing has.

        Args:
            number: the optimizer, which is about to step; None: look at the parameters of all of them. State is looked
                at before steps only, as counting its changes takes as long as all the rest.
        """
        for family in self._families.values() if number is None else self._of[number]:
            found = family.changed()
            if found is not None:
                return found
        if number is not None and self._counted[number] != _count_changes(self._optimizers[number]):
            return f"the state of {type(self._optimizers[number]).__qualname__}"
        return None


def _count_changes(optimizer: Optimizer) -> tuple[int, int, int]:
    """A value that differs once tensors of an optimizer's state have been changed in place, replaced, or removed."""
    state = optimizer.state
    try:
        values = [one for one in chain.from_iterable(map(dict.values, state.values())) if isinstance(one, torch.Tensor)]
        return id(state), len(values), sum(map(_version, values))
    except (TypeError, RuntimeError):  # state that is no dict; tensors made in inference mode
        return id(state), len(state), UNCOUNTED


_version = attrgetter("_version")


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """All elements in memory order; a view for any dense tensor, whatever its strides."""
    return tensor.as_strided((tensor.numel(),), (1,)) if _is_dense(tensor) else tensor.flatten()


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements lie one beside the other: also in channels_last, and in other permutations."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return last == tensor.numel() - 1 and 0 not in tensor.stride()


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and torch.equal(bits_of(one), bits_of(other))


class StaticWatch:
    """Watches tensors that are staged once per generation: if a counter has moved, the copy is compared.

    Writes that escape the counters (a momentum encoder updated through ``.data``) show in the values of host tensors:
    the first checks compare all values with the copy, later ones a sample with its former values.
    """

    def __init__(self, writer: SlotWriter) -> None:
        self._writer = writer
        self._seen = [self._identify(position) for position in range(len(writer.spec.static))]
        self._full_checks_left = FULL_CHECKS
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
            same = tensor is seen and now == noted
            if same and not (self._full_checks_left and tensor is not None and tensor.device.type == "cpu"):
                continue
            if tensor is None or not self._is_staged(position, tensor):
                changed.add(position)
            replaced = replaced or tensor is not seen
            self._seen[position] = (tensor, now)
        self._full_checks_left = max(0, self._full_checks_left - 1)
        if replaced:
            self._take_sample()
        changed.update(self._sampled[index] for index in self._sample.changed())
        return [self._writer.spec.static[position].name for position in sorted(changed)]

    def _is_staged(self, position: int, tensor: torch.Tensor) -> bool:
        staged, held = self._writer.static_copy(position), local(tensor)
        if held.shape != staged.shape or held.dtype != staged.dtype:
            return False
        return torch.equal(bits_of(held.to(staged.device)), bits_of(staged))
