"""Staging of one record's gradients and steps: which are in the slot, and what has been done to them since.

A gradient is copied as soon as backward has made it. Changes made in place afterwards are noted. At its optimizer's
step each gradient is settled: as staged, staged again, sparse, or absent.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim import Optimizer

from memckpt.capture.copier import Copier
from memckpt.capture.live_state import LiveState
from memckpt.capture.slot_writer import SlotWriter
from memckpt.memory.slots import FIRING_BITS
from memckpt.state import codec
from memckpt.state.optimizers import dtype_name
from memckpt.state.records import GradientOp, SparseGradient, SubStep
from memckpt.state.tensors import local, version


@dataclass
class NotedOp:
    """An in-place change of gradients: as GradientOp, with an operand that may still be on its way to the host."""

    kind: str
    operand: Any
    params: tuple[int, ...]


@dataclass
class NotedSubStep:
    """A step that an optimizer is about to take."""

    optimizer: int
    index: int
    groups: codec.Packed
    ambient: bytes = b""
    absent: list[int] = field(default_factory=list)
    #: Flag in host memory, once its copy has arrived: a fused step under a gradient scaler had no effect.
    found_inf: torch.Tensor | None = None
    sparse: list[SparseGradient] = field(default_factory=list)
    ops: list[NotedOp] = field(default_factory=list)

    @property
    def had_effect(self) -> bool:
        """Whether the step had an effect; waits for no copy."""
        return self.found_inf is None or not self.found_inf.any()

    def encode(self) -> SubStep:
        """The sub-step for the record; call once the copies have arrived."""
        return SubStep(
            optimizer=self.optimizer,
            index=self.index,
            groups=self.groups.encode(),
            absent=tuple(self.absent),
            sparse=tuple(self.sparse),
            ops=tuple(GradientOp(op.kind, codec.encode(op.operand), op.params) for op in self.ops),
            ambient=self.ambient,
        )


def on_the_host(tensor: torch.Tensor, copier: Copier) -> torch.Tensor:
    """A small tensor's value at this point, in host memory; a copy from a device may still be in flight."""
    tensor = local(tensor)
    return tensor.clone() if codec.on_host(tensor) else copier.fetch(tensor)


def is_skipped(optimizer: Optimizer, wait: bool = False) -> bool:
    """Whether a gradient scaler makes this step void: fused optimizers run it nevertheless.

    If only the device knows, `wait` waits for it; else the step is noted, and dropped when it is encoded.
    """
    found = getattr(optimizer, "found_inf", None)
    return isinstance(found, torch.Tensor) and (wait or codec.on_host(found)) and bool(found.item())


class GradientStaging:
    """The gradients of the record that is being collected.

    Args:
        live: the live tensors; their growth is noted.
        copier: copies into slots.
        failed: called with the reason when the record cannot hold a gradient.

    Attributes:
        changed: name of a parameter whose gradient was changed in an unknown way after it was staged; None so far.
    """

    def __init__(self, live: LiveState, copier: Copier, failed: Callable[[str], None]) -> None:
        self._live = live
        self._copier = copier
        self._failed = failed
        self._accumulates: Callable[[], bool] | None = None
        #: Whether some gradients are not copied as they are made: accumulation is announced, or learned.
        self._puts_off = False
        self._learned = LearnedFirings() if copier.asynchronous else None
        self._asked_in = -1
        self._put_off = False
        self.changed: str | None = None
        self._record = 0
        self._ops: list[NotedOp] = []
        # For each parameter: 0 until its gradient is staged for the coming step, then 1 + the number of in-place
        # changes made before it was staged.
        self._staged_after: list[int] = []
        # The staged gradient of each parameter (None: unknown), and its version counter after the last known change.
        self._held: list[torch.Tensor | None] = []
        self._counts: list[int] = []
        # By optimizer: destinations of the gradients of its next step; None if there is no room for another one.
        self._rows: list[list[torch.Tensor | None] | None] = []
        # By optimizer: landing marks of its gradients; None once the optimizer has stepped.
        self._landings: list[memoryview | None] = []
        # By optimizer: number of its steps so far.
        self._steps: list[int] = []
        self._in_flight = MarksInFlight(copier) if copier.asynchronous else None
        # For each parameter, gradients made by backward in this record; and over all of them, gradients staged.
        self._firings: list[int] = []
        self._landed = 0

    def announce_accumulation(self, accumulates: Callable[[], bool]) -> None:
        """Call `accumulates()` in each backward: whether a later one adds to its gradients before a step."""
        self._accumulates, self._puts_off, self._learned = accumulates, True, None

    def expect_gradients(self, writer: SlotWriter | None, record: int) -> None:
        """Start with `record`, of which nothing is staged."""
        self._record = record
        if self._learned is not None:
            self._puts_off = writer is not None and self._learned.start_counts(writer)
        self._ops.clear()
        params = len(writer.params) if writer is not None else 0
        self._staged_after, self._held, self._counts = [0] * params, [None] * params, [0] * params
        self._rows, marks = [], None
        if writer is not None:
            self._rows = [writer.gradient_places.row(record, number, 0) for number in range(len(writer.members))]
            marks = None if writer.landings is None else writer.landings.words(record)
        self._landings = [marks] * len(self._rows)
        self._steps = [0] * len(self._rows)
        self._firings, self._landed = [0] * params, 0
        if self._in_flight is not None:
            self._in_flight.drop_marks()

    # While backward runs

    def stage(self, writer: SlotWriter, param: torch.Tensor, gradient: torch.Tensor) -> None:
        """Stage the gradient that backward has made for `param`; the last call before a step counts."""
        # Runs for each tensor of each step: calls are kept to a minimum.
        index = writer.index.get(id(param))
        if index is None:
            return  # settled at the optimizer's step
        self._firings[index] = firing = self._firings[index] + 1
        if gradient.is_sparse:
            return  # settled at the optimizer's step
        if self._puts_off and self._is_put_off(index, firing):
            self._staged_after[index], self._held[index] = 0, None
            return
        if type(gradient) is not torch.Tensor or gradient.requires_grad:
            gradient = local(gradient)
        if gradient.dtype is not writer.grad_dtypes[index]:
            return  # a copy would round: settled at the optimizer's step
        owners = writer.owners[index]
        landings = self._landings[owners[0]]
        if landings is not None and firing > 1:
            self._take_off(landings, index)
        for optimizer in owners:
            row = self._rows[optimizer]
            if row is None:
                return  # no room: settled at the optimizer's step
            view = row[index]
            if view is not None:
                self._copier.copy(view, gradient)
            elif writer.mine[index]:
                return  # it was sparse: settled at the optimizer's step
        self._landed = landed = self._landed + 1  # other ranks count these, too, and merge orders
        if landings is not None and view is not None:
            if self._in_flight is None:
                landings[index] = landed << FIRING_BITS | firing
            else:
                self._in_flight.add(landings, index, landed << FIRING_BITS | firing)
        self._staged_after[index] = 1 + len(self._ops)
        # As `_note_version` does, without the call.
        self._held[index] = held = param.grad
        if held is not None:
            self._counts[index] = held._version if type(held) is torch.Tensor else version(held)

    def stage_encoded(
        self, writer: SlotWriter, param: torch.Tensor, gradient: torch.Tensor, parts: Sequence[torch.Tensor]
    ) -> None:
        """Stage the parts of a gradient that was averaged in compressed form.

        Args:
            writer: writer of the slot.
            param: the parameter.
            gradient: the gradient that follows from the parts; staged where the layout has room for it as it is.
            parts: its parts.
        """
        index = writer.index.get(id(param))
        if index is None or writer.spec.encoding(index) is None:
            self.stage(writer, param, gradient)
            return
        self._firings[index] = firing = self._firings[index] + 1
        landings = self._landings[writer.owners[index][0]]
        if landings is not None and firing > 1:
            self._take_off(landings, index)
        for optimizer in writer.owners[index]:
            places = writer.gradient_places.encoded(self._record, optimizer, self._steps[optimizer], index)
            if places is None:
                return  # no room: settled at the optimizer's step
            if writer.mine[index]:
                for place, part in zip(places, parts, strict=True):
                    self._copier.copy(place, part)
        self._landed += 1
        if landings is not None and writer.mine[index]:
            if self._in_flight is None:
                landings[index] = self._landed << FIRING_BITS | firing
            else:
                self._in_flight.add(landings, index, self._landed << FIRING_BITS | firing)
        self._staged_after[index] = 1 + len(self._ops)
        self._note_version(index, param.grad)

    def _take_off(self, landings: memoryview, index: int) -> None:
        """Clear a landing mark, set or in flight, before its gradient is overwritten."""
        if self._in_flight is not None:
            self._in_flight.drop(index)
        landings[index] = 0

    def _is_put_off(self, index: int, firing: int) -> bool:
        """Whether a gradient of the running backward need not be copied; asks once per backward.

        A wrong answer costs only a copy: gradients that a step uses and that are not staged are taken at the step.
        """
        if self._accumulates is None:
            return self._learned is not None and firing < self._learned.expected[index]
        running: int = torch._C._current_graph_task_id()
        if running == -1 or running != self._asked_in:
            self._asked_in, self._put_off = running, self._accumulates()
        return self._put_off

    def mark_landed(self) -> None:
        """Set the landing marks of copies that have arrived meanwhile."""
        if self._in_flight is not None:
            self._in_flight.set_done_marks()

    # Changes in place

    def note_change(self, kind: str, operand: Any, params: tuple[int, ...]) -> None:
        """Note a change of these parameters' gradients that is about to be made; as GradientOp describes it."""
        if params:
            operand = on_the_host(operand, self._copier) if isinstance(operand, torch.Tensor) else operand
            self._ops.append(NotedOp(kind, operand, params))

    def note_versions(self, writer: SlotWriter, params: Iterable[torch.Tensor] | None) -> None:
        """Note the version counters of these parameters' gradients (None: of all staged ones) after a known change."""
        indices = range(len(writer.params)) if params is None else [writer.index.get(id(one)) for one in params]
        for index in indices:
            if index is not None and self._staged_after[index]:
                self._note_version(index, writer.params[index].grad)

    def _note_version(self, index: int, gradient: torch.Tensor | None) -> None:
        self._held[index] = gradient
        if gradient is not None:
            self._counts[index] = gradient._version if type(gradient) is torch.Tensor else version(gradient)

    # At an optimizer's step

    def settle(self, writer: SlotWriter, step: NotedSubStep) -> list[int]:
        """Make sure that all gradients of a coming step are in the slot, and note what was done to them since.

        Args:
            writer: writer of the slot.
            step: the step; what is absent or sparse, and changes of gradients, are added to it.

        Returns:
            Parameters whose streamed gradients underwent known changes only.
        """
        number = step.optimizer
        streamed: list[int] = []
        if self._learned is not None and step.index == 0:
            self._learned.note_step(number, writer.members[number], self._firings)
        params, staged_after, held, counts = writer.params, self._staged_after, self._held, self._counts
        for index in writer.members[number]:
            # The common case, without a call: staged, and the same gradient ever since.
            gradient = held[index]
            if (
                staged_after[index]
                and type(gradient) is torch.Tensor
                and params[index].grad is gradient
                and gradient._version == counts[index]
            ):
                streamed.append(index)
            else:
                self._settle(writer, step, index, streamed)
        step.ops = self._ops_since(streamed)
        for index in writer.members[number]:
            staged_after[index] = 0
            held[index] = None  # a reference would keep the gradient alive beyond zero_grad()
        self._rows[number] = writer.gradient_places.row(self._record, number, step.index + 1)
        self._landings[number] = None
        self._steps[number] = step.index + 1
        return streamed

    def _settle(self, writer: SlotWriter, step: NotedSubStep, index: int, streamed: list[int]) -> None:
        """Make sure that the gradient of one parameter is in the slot, or that its absence is noted."""
        gradient = writer.params[index].grad
        staged = self._staged_after[index]
        if gradient is None:
            step.absent.append(index)
        elif gradient.dtype is not writer.grad_dtypes[index]:
            name = writer.spec.params[index].tensor.name
            self._live.growth.grad_dtypes[name] = dtype_name(gradient.dtype)
            expected = writer.grad_dtypes[index]
            self._failed(f"the gradient of {name} is of dtype {gradient.dtype}, not {expected} as before")
        elif gradient.is_sparse:
            sparse = self._stage_sparse(writer, step, index, gradient)
            if sparse is None:
                self._failed("a sparse gradient needs more room")
            else:
                step.sparse.append(sparse)
        elif staged and self._as_staged(index, gradient):
            streamed.append(index)
            return
        elif writer.spec.encoding(index) is not None:
            # On each rank, whichever stages the parameter: all of them need the same layout.
            self.changed = name = writer.spec.params[index].tensor.name
            self._failed(f"the gradient of {name} is not the compressed average")
        elif writer.mine[index]:
            spec = writer.spec.params[index]
            if staged:
                self.changed = spec.tensor.name
            if not writer.spec.has_dense_room(index):
                self._live.growth.sparse_bytes[spec.tensor.name] = spec.dense_grad_bytes
                self._failed("a gradient that was sparse is dense and needs more room")
            else:
                landings = self._landings[step.optimizer]
                if landings is not None and writer.owners[index][0] == step.optimizer:
                    self._take_off(landings, index)  # no longer the gradient as backward made it
                view = writer.gradient_places.view(self._record, step.optimizer, step.index, index)
                self._copier.copy(view, local(gradient))
        # Staged after all the changes: none of them applies.
        self._staged_after[index] = 1 + len(self._ops)

    def _stage_sparse(
        self, writer: SlotWriter, step: NotedSubStep, param: int, gradient: torch.Tensor
    ) -> SparseGradient | None:
        """Stage a sparse gradient, coalesced or not; None, and the need is noted, if its room is too small."""
        indices, values = gradient._indices(), gradient._values()
        spec = writer.spec.params[param]
        needed = indices.nbytes + values.nbytes
        if needed > spec.sparse_bytes and not spec.tensor.elsewhere:
            # Twice the bytes seen: the number of rows differs from batch to batch.
            self._live.growth.sparse_bytes[spec.tensor.name] = 2 * needed
            return None
        if writer.mine[param]:
            places = writer.gradient_places.sparse(self._record, step.optimizer, step.index, param, gradient)
            for place, source in zip(places, (indices, values), strict=True):
                self._copier.copy(place, source)
        return SparseGradient(param, gradient.sparse_dim(), indices.shape[1], gradient.is_coalesced())

    def _as_staged(self, index: int, gradient: torch.Tensor) -> bool:
        """Whether a staged gradient underwent known changes only, as far as version counters tell."""
        held = self._held[index]
        if held is None:
            return True  # unknown; the check of values remains
        return held is gradient and version(gradient) == self._counts[index]

    def _ops_since(self, streamed: list[int]) -> list[NotedOp]:
        """The changes made to streamed gradients after they were staged."""
        ops = []
        for position, op in enumerate(self._ops):
            covered = set(op.params)
            late = tuple(i for i in streamed if i in covered and self._staged_after[i] <= position + 1)
            if late:
                ops.append(NotedOp(op.kind, op.operand, late))
        return ops


class LearnedFirings:
    """How often backward makes each gradient before its optimizer's first step, learned from two records alike.

    With accumulation that nothing announces, copies of all but the last would be needless.

    Attributes:
        expected: number by parameter; 1 while it is not known.
    """

    def __init__(self) -> None:
        self.expected: list[int] = []
        self._writer: SlotWriter | None = None
        #: By optimizer: numbers of all parameters at its last step, and whether they are expected again.
        self._last: dict[int, list[int]] = {}
        self._known: set[int] = set()

    def start_counts(self, writer: SlotWriter) -> bool:
        """Start with a record; returns whether some gradients are made several times before a step."""
        if writer is not self._writer:
            self._writer, self.expected = writer, [1] * len(writer.params)
            self._last, self._known = {}, set()
        return bool(self._known)

    def note_step(self, optimizer: int, members: Sequence[int], firings: Sequence[int]) -> None:
        """Note the first step of an optimizer in a record: how often the gradients were made by then."""
        before, now = self._last.get(optimizer), list(firings)
        self._last[optimizer] = now
        is_known = now == before and max(now, default=0) > 1
        if is_known is not (optimizer in self._known):
            for index in members:
                self.expected[index] = now[index] if is_known else 1
            self._known ^= {optimizer}


class MarksInFlight:
    """Marks of one record that wait for an asynchronous copier. Never blocks on a copy.

    Thread-safe: hooks of one backward may run in several threads.
    """

    def __init__(self, copier: Copier) -> None:
        self._copier = copier
        self._waiting: deque[tuple[int, memoryview, int, int]] = deque()  # ticket, words, index, value
        # The newest mark of each parameter; a waiting mark with another value has been superseded by a later copy.
        self._newest: dict[int, int] = {}
        self._lock = threading.Lock()

    def add(self, words: memoryview, index: int, value: int) -> None:
        """Set the mark once the copy that has just begun is done."""
        with self._lock:
            ticket = self._copier.ticket()
            # Asking the device takes about a microsecond: once per launch of copies, not per gradient.
            if self._waiting and self._waiting[-1][0] != ticket:
                self._set()
            self._waiting.append((ticket, words, index, value))
            self._newest[index] = value

    def drop(self, index: int) -> None:
        """Void the waiting marks of a parameter whose gradient is about to be overwritten."""
        with self._lock:
            self._newest.pop(index, None)

    def set_done_marks(self) -> None:
        """Set the marks of all copies that are done."""
        with self._lock:
            self._set()

    def drop_marks(self) -> None:
        """Drop all marks: the record is over."""
        with self._lock:
            self._waiting.clear()
            self._newest.clear()
            self._copier.done()

    def _set(self) -> None:
        done = self._copier.done()
        while self._waiting and self._waiting[0][0] <= done:
            _, words, index, value = self._waiting.popleft()
            if self._newest.get(index) == value:
                words[index] = value
