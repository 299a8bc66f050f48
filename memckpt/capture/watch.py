"""Detection of changes to parameters, frozen ones too, by anything but their optimizer.

Such a change is in no gradient, so redo would not make it. Torch counts in-place changes of every tensor. Writes
through ``.data`` escape that count and are detected by a sample of the values.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from memckpt.capture.slot_writer import SlotWriter
from memckpt.state.tensors import Fixed, bits_of, local, version

#: A sample is WINDOW elements out of every SPACING. Neighbours share a cache line: a strided sample of as many elements
#: takes several times as long.
WINDOW = 64
SPACING = 1 << 16
#: Number of checks that compare every element.
FULL_CHECKS = 2


class _Sample:
    """Former values of host tensors, to detect changes that escape the counters. Reading an accelerator would block.

    Args:
        tensors: the tensors to compare; always the same ones.
        full_checks: number of checks that compare every element; all values are kept until they are over.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], full_checks: int) -> None:
        self._tensors = tensors
        self._sampled = [i for i, one in enumerate(tensors) if one.device.type == "cpu" and local(one).numel()]
        self._in_memory = Fixed([tensors[index] for index in self._sampled])
        self._pointers: list[int] = []
        #: By dtype and row width: the tensors' indices, and views of their windows as rows of that width.
        self._windows: dict[tuple[torch.dtype, int], list[tuple[int, torch.Tensor]]] = {}
        self._full_checks_left = full_checks
        self._values = self._take()

    def _window(self, tensor: torch.Tensor) -> torch.Tensor:
        """The compared part of a tensor, as a view with rows of equal width."""
        flat = _flat(tensor)
        if self._full_checks_left:
            return flat.view(-1, 1)
        if flat.numel() < SPACING:
            return flat[:WINDOW].view(1, -1)
        rows = flat.numel() // SPACING
        return flat[: rows * SPACING].view(rows, SPACING)[:, :WINDOW]

    def _take(self) -> dict[tuple[torch.dtype, int], torch.Tensor]:
        """Copies of the sampled values. The views are reused as long as the tensors keep their memory."""
        pointers = self._in_memory.pointers()
        if pointers != self._pointers:
            self._pointers, self._windows = pointers, {}
            for index in self._sampled:
                window = self._window(local(self._tensors[index]))
                self._windows.setdefault((window.dtype, window.shape[1]), []).append((index, window))
        return {key: torch.cat([window for _, window in windows]) for key, windows in self._windows.items()}

    def renew(self) -> None:
        """Take the current values as the expected ones."""
        self._values = self._take()

    def changed(self) -> list[int]:
        """Indices of tensors whose values differ from the expected ones."""
        found = []
        for key, now in self._take().items():
            if not torch.equal(bits_of(now), bits_of(self._values[key])):
                found += self._find(key, now)
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


class ParameterWatch:
    """Expected state of the stepped parameters, as their optimizers left them."""

    def __init__(self, writer: SlotWriter) -> None:
        self._writer = writer
        self._params = Fixed(writer.params)
        self._versions = self._params.versions()
        self._sample = _Sample(writer.params, FULL_CHECKS)

    def note(self, optimizer: int) -> None:
        """Accept the changes that an optimizer has just made to its parameters."""
        versions = self._params.versions()
        stepped = self._writer.layout.optimizer_params(optimizer)
        if len(stepped) == len(versions):
            self._versions = versions
        else:
            for index in stepped:
                self._versions[index] = versions[index]
        self._sample.renew()

    def counted_change(self) -> str | None:
        """Name of a parameter whose version counter moved since its optimizer's step; None if there is none."""
        versions = self._params.versions()
        if versions == self._versions:
            return None
        moved = next(i for i, (now, noted) in enumerate(zip(versions, self._versions, strict=True)) if now != noted)
        return self._writer.spec.params[moved].tensor.name

    def sampled_change(self) -> str | None:
        """As :meth:`counted_change`, by the sample of the values."""
        changed = self._sample.changed()
        return self._writer.spec.params[changed[0]].tensor.name if changed else None


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """All elements in memory order; a view for any dense tensor, whatever its strides."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    dense = last == tensor.numel() - 1  # channels_last and other permutations
    return tensor.as_strided((tensor.numel(),), (1,)) if dense else tensor.flatten()


class StaticWatch:
    """Watches tensors that are staged once per generation: if a counter has moved, the copy is compared.

    Writes that escape the counters (a momentum encoder updated through ``.data``) show in the values of host tensors:
    the first checks compare all values with the copy, later ones a sample with its former values.
    """

    def __init__(self, writer: SlotWriter) -> None:
        self._writer = writer
        self._seen = [self._look(position) for position in range(len(writer.spec.static))]
        self._full_checks_left = FULL_CHECKS
        self._take_sample()

    def _take_sample(self) -> None:
        there = [(position, tensor) for position, (tensor, _) in enumerate(self._seen) if tensor is not None]
        self._sampled = [position for position, _ in there]
        self._sample = _Sample([tensor for _, tensor in there], 0)

    def _look(self, position: int) -> tuple[torch.Tensor | None, int]:
        tensor = self._writer.static_tensor(position)
        return tensor, -1 if tensor is None else version(tensor)

    def changed(self) -> list[str]:
        """Names of static tensors whose values differ from the staged ones."""
        replaced, changed = False, set()
        for position, (seen, noted) in enumerate(self._seen):
            tensor, now = self._look(position)
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
