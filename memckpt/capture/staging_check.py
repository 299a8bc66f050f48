"""Check that staged gradients times the noted factors equal what the optimizer used.

User code may change gradients in ways that streaming does not know: its own clipping, noise, centralization. The first
records are compared in full, later ones in a contiguous window of every tensor, which moves on with each record, and in
a few entries of encoded ones. The window catches any change of a whole tensor at once, at negligible cost. (Strided
elements would cost a cache miss each.) If windows differ, tensors are compared one by one, to name the one.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import torch
from torch._utils import _flatten_dense_tensors

from memckpt.capture.gradient_staging import NotedOp, NotedSubStep
from memckpt.capture.slot_writer import SlotWriter
from memckpt.state.optimizers import dtype_of
from memckpt.state.redo import change_values
from memckpt.state.spec import ITEM_BYTES
from memckpt.state.tensors import bits_of, local

#: Elements of each tensor that are compared per record.
WINDOW = 256
FULL_RECORDS = 2
#: Encoded gradients of which a few elements are compared per record.
_SAMPLED = 128
#: Stretches of small gradients that are compared where they are: no more, as a view takes a microsecond.
_FEW_STRETCHES = 8


def unknown_change(name: str) -> str:
    """The text for a gradient that was changed in an unknown way; `name`: the parameter."""
    return (
        f"the gradient of {name} was changed between backward and the optimizer's step in a way that streaming does "
        "not know"
    )


class StagingCheck:
    """Compares staged with used gradients, in host memory only.

    Reading an accelerator would stall it; there version counters find unknown changes.
    """

    def __init__(self) -> None:
        self._checked = 0
        #: By optimizer: the parameters compared last, and their windows.
        self._last: dict[int, tuple[list[int], _Sample | None]] = {}

    def restart(self) -> None:
        """Compare the next records in full again; their layout may be a new one."""
        self._checked = 0
        self._last.clear()

    def compare(self, writer: SlotWriter, record: int, step: NotedSubStep, params: Sequence[int]) -> str | None:
        """A text naming the difference between these gradients of a step; None if there is none."""
        full = self._checked < FULL_RECORDS
        self._checked += 1
        if writer.spec.encodings:
            encoded = [index for index in params if writer.spec.encoding(index) is not None]
            params = [index for index in params if writer.spec.encoding(index) is None]
            # In turns, where there are many: each takes some 30 us.
            turn = self._checked * _SAMPLED % max(1, len(encoded))
            due = encoded if full else (encoded[turn:] + encoded[:turn])[:_SAMPLED]
            mismatch = self._compare_encoded(writer, record, step, due, full)
            if mismatch is not None or not params:
                return mismatch
        # A factor rounds values without dimensions otherwise: they are not compared with others.
        flat = [index for index in params if index not in writer.scalars] if writer.scalars else params
        if not full and self._sample_is_equal(writer, record, step, flat):
            params = [index for index in params if index in writer.scalars] if writer.scalars else []
        mine = [index for index in params if writer.mine[index] and writer.params[index].device.type == "cpu"]
        for batch in self._alike(mine, step.ops, writer):
            staged, used = [], []
            for index in batch:
                gradient = writer.params[index].grad
                assert gradient is not None
                view = writer.gradient_places.view(record, step.optimizer, step.index, index)
                size = view.numel() if full else min(WINDOW, view.numel())
                start = record * WINDOW % (view.numel() - size + 1)
                staged.append(_window(view, start, size))
                used.append(_window(local(gradient), start, size))
            with torch.no_grad():
                expected = torch.cat(staged) if len(batch) > 1 else staged[0]
                for op in step.ops:
                    if batch[0] in op.params:
                        expected = change_values(op.kind, op.operand, expected)
                found = torch.cat(used) if len(batch) > 1 else used[0]
                if expected.dtype != found.dtype or not torch.equal(bits_of(expected), bits_of(found)):
                    return self._name_difference(writer, batch, staged, used, step.ops)
        return None

    def _compare_encoded(
        self, writer: SlotWriter, record: int, step: NotedSubStep, params: Sequence[int], full: bool
    ) -> str | None:
        """The difference between encoded gradients and those of the step, in all elements or in a few of each."""
        places = writer.gradient_places
        for index in params:
            param = writer.params[index]
            if not writer.mine[index] or param.device.type != "cpu":
                continue
            assert param.grad is not None
            with torch.no_grad():
                used = local(param.grad)
                if full:
                    expected = places.staged(record, step.optimizer, step.index, index)
                else:
                    positions, expected = places.sample(record, step.optimizer, step.index, index)
                    used = used.reshape(-1)[positions]
                for op in step.ops:
                    if index in op.params:
                        expected = change_values(op.kind, op.operand, expected)
                if expected.dtype != used.dtype or not torch.equal(bits_of(expected), bits_of(used)):
                    return unknown_change(writer.spec.params[index].tensor.name)
        return None

    def _sample_is_equal(self, writer: SlotWriter, record: int, step: NotedSubStep, params: Sequence[int]) -> bool:
        """Whether the windows of all gradients are equal, by a few operations on all of them together.

        Also False if that cannot be done: dtypes or changes differ between gradients, or the parameters differ from the
        last comparison.
        """
        last, sample = self._last.get(step.optimizer, ([], None))
        if params != last:
            self._last[step.optimizer] = list(params), None
            return False
        if sample is None or sample.generation != writer.generation:
            sample = _Sample(writer, step.optimizer, params)
            self._last[step.optimizer] = last, sample
        return sample.fits(step.ops) and sample.is_equal(writer, record, step.index, step.ops)

    def _alike(self, params: Sequence[int], ops: Sequence[NotedOp], writer: SlotWriter) -> list[list[int]]:
        """Batches of parameters with one dtype and the same changes."""
        covered = [set(op.params) for op in ops]
        batches: dict[Any, list[int]] = {}
        for index in params:
            spec = writer.spec.params[index]
            alone = None if spec.tensor.shape else index
            key = (spec.grad_dtype, tuple(index in one for one in covered), alone)
            batches.setdefault(key, []).append(index)
        return list(batches.values())

    def _name_difference(
        self,
        writer: SlotWriter,
        batch: Sequence[int],
        staged: Sequence[torch.Tensor],
        used: Sequence[torch.Tensor],
        ops: Sequence[NotedOp],
    ) -> str:
        for index, ours, theirs in zip(batch, staged, used, strict=True):
            for op in ops:
                if index in op.params:
                    ours = change_values(op.kind, op.operand, ours)
            if not torch.equal(ours, theirs):
                return unknown_change(writer.spec.params[index].tensor.name)
        return "gradients were changed between backward and the optimizer's step"


class _Sample:
    """The windows of one optimizer's gradients, concatenated.

    With a thousand tensors of a few elements each, two views of each would dominate the cost. Here staged values are
    gathered by one index, and whole small gradients are copied by one call.
    """

    def __init__(self, writer: SlotWriter, optimizer: int, params: Sequence[int]) -> None:
        self.generation = writer.generation
        self._optimizer = optimizer
        self._covered = frozenset(params)
        specs = writer.spec.params
        host = [index for index in params if writer.mine[index] and writer.params[index].device.type == "cpu"]
        host = [index for index in host if specs[index].tensor.numel]
        small = [index for index in host if specs[index].tensor.numel <= WINDOW]
        large = [index for index in host if specs[index].tensor.numel > WINDOW]
        dtypes = {specs[index].grad_dtype for index in host}
        self._dtype = dtypes.pop() if len(dtypes) == 1 else ""
        if not self._dtype:
            return
        self._small, self._large = ([writer.params[index] for index in part] for part in (small, large))
        item = ITEM_BYTES[self._dtype]
        area, _ = writer.layout.gradient_area(optimizer, 0)
        starts = {index: (writer.layout.gradient_offset(optimizer, 0, index) - area) // item for index in host}
        #: Stretches of a sub-step's area, in elements, that small gradients fill one beside the other.
        self._stretches: list[tuple[int, int]] = []
        for start, stop in ((starts[index], starts[index] + specs[index].tensor.numel) for index in small):
            if self._stretches and self._stretches[-1][1] == start:
                start, _ = self._stretches.pop()
            self._stretches.append((start, stop))
        #: Indices of their elements, where the stretches are many.
        self._of_small = None
        if len(self._stretches) > _FEW_STRETCHES:
            self._of_small = torch.cat([torch.arange(*stretch) for stretch in self._stretches])
        #: Start of each large gradient in the area, in elements, and its number of window positions.
        self._of_large = torch.tensor([starts[index] for index in large], dtype=torch.int64)
        self._places = torch.tensor([specs[index].tensor.numel - WINDOW + 1 for index in large], dtype=torch.int64)
        self._within = torch.arange(WINDOW)

    def fits(self, ops: Sequence[NotedOp]) -> bool:
        """Whether all gradients have one dtype and every change applies to all of them."""
        return bool(self._dtype) and all(self._covered.issubset(op.params) for op in ops)

    def is_equal(self, writer: SlotWriter, record: int, sub_step: int, ops: Sequence[NotedOp]) -> bool:
        """Whether the staged values, with the changes applied, equal what the optimizer used, bit for bit."""
        with torch.no_grad():
            used = _gradients(self._small)
            area = writer.gradient_places.area(record, self._optimizer, sub_step, self._dtype)
            if self._of_small is None:
                staged = [area[start:stop] for start, stop in self._stretches]
            else:
                staged = [area.index_select(0, self._of_small)]
            if self._large:
                begin = (record * WINDOW) % self._places
                large = _gradients(self._large)
                used += [_window(one, start, WINDOW) for one, start in zip(large, begin.tolist(), strict=True)]
                staged.append(area.index_select(0, ((self._of_large + begin)[:, None] + self._within).view(-1)))
            if set(map(_dtype, used)) != {dtype_of(self._dtype)}:
                return False  # joined they would be rounded
            found = _flatten_dense_tensors(used)
            expected = staged[0] if len(staged) == 1 else torch.cat(staged)
            for op in ops:
                expected = change_values(op.kind, op.operand, expected)
            return expected.dtype == found.dtype and torch.equal(bits_of(expected), bits_of(found))


_dtype, _grad = attrgetter("dtype"), attrgetter("grad")


def _gradients(params: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Gradients of parameters; of a DTensor's the part that this rank holds."""
    found = list(map(_grad, params))
    return found if set(map(type, found)) <= {torch.Tensor} else list(map(local, found))


def _window(tensor: torch.Tensor, start: int, size: int) -> torch.Tensor:
    """`size` elements in row-major order from `start`; one operation if the tensor is contiguous."""
    if not tensor.ndim:
        return tensor
    if tensor.is_contiguous():
        return tensor.as_strided((size,), (1,), tensor.storage_offset() + start)
    return tensor.reshape(-1)[start : start + size]
