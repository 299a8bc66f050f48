"""Checks that what was staged, times the noted factors, is what the optimizer used.

User code may change gradients in ways that streaming does not know: its own clipping, noise, centralization. The first
records are compared in full, later ones in a window of every tensor that moves on from record to record, which sees any
change of a whole tensor at once and costs next to nothing. (Elements far apart would cost a cache miss each.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from memckpt.capture.slot_writer import SlotWriter
from memckpt.state.redo import change_values
from memckpt.state.tensors import local

#: Elements of each tensor that are compared.
WINDOW = 256
FULL_RECORDS = 2
_BITS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


class Op(Protocol):
    """An in-place change of gradients, as noted by the recorder."""

    kind: str
    operand: Any
    params: tuple[int, ...]


class StagingCheck:
    """Compares staged with used gradients. Host tensors only: reading them on an accelerator would stall it, and there
    the version counters of gradients are what finds unknown changes."""

    def __init__(self) -> None:
        self._checked = 0

    def restart(self) -> None:
        """Compare the next records in full again."""
        self._checked = 0

    def compare(
        self, writer: SlotWriter, record: int, optimizer: int, sub_step: int, params: Sequence[int], ops: Sequence[Op]
    ) -> str | None:
        """What differs, in words; None if nothing does."""
        full = self._checked < FULL_RECORDS
        self._checked += 1
        mine = [index for index in params if writer.mine[index] and writer.params[index].device.type == "cpu"]
        for batch in self._alike(mine, ops, writer):
            staged, used = [], []
            for index in batch:
                gradient = writer.params[index].grad
                assert gradient is not None
                view = writer.gradient_view(record, optimizer, sub_step, index)
                size = view.numel() if full else min(WINDOW, view.numel())
                start = record * WINDOW % (view.numel() - size + 1)
                staged.append(_window(view, start, size))
                used.append(_window(local(gradient), start, size))
            with torch.no_grad():
                expected = torch.cat(staged)
                for op in ops:
                    if batch[0] in op.params:
                        expected = change_values(op.kind, op.operand, expected)
                found = torch.cat(used)
                bits = _BITS[found.element_size()]
                if expected.dtype != found.dtype or not torch.equal(expected.view(bits), found.view(bits)):
                    return self._name_difference(writer, batch, staged, used, ops)
        return None

    def _alike(self, params: Sequence[int], ops: Sequence[Op], writer: SlotWriter) -> list[list[int]]:
        """Parameters of one dtype to which the same changes apply, together."""
        covered = [set(op.params) for op in ops]
        batches: dict[Any, list[int]] = {}
        for index in params:
            key = (writer.params[index].dtype, tuple(index in one for one in covered))
            batches.setdefault(key, []).append(index)
        return list(batches.values())

    def _name_difference(
        self,
        writer: SlotWriter,
        batch: Sequence[int],
        staged: Sequence[torch.Tensor],
        used: Sequence[torch.Tensor],
        ops: Sequence[Op],
    ) -> str:
        for index, ours, theirs in zip(batch, staged, used, strict=True):
            for op in ops:
                if index in op.params:
                    ours = change_values(op.kind, op.operand, ours)
            if not torch.equal(ours, theirs):
                return (
                    f"the gradient of {writer.spec.params[index].tensor.name} was changed between backward and the "
                    "optimizer's step in a way that streaming does not know"
                )
        return "gradients were changed between backward and the optimizer's step"


def _window(tensor: torch.Tensor, start: int, size: int) -> torch.Tensor:
    """Elements in row-major order: one operation where that is how they lie."""
    if tensor.is_contiguous():
        return tensor.as_strided((size,), (1,), tensor.storage_offset() + start)
    return tensor.reshape(-1)[start : start + size]
