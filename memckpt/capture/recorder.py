"""Collection of one record: staged gradients, the steps that optimizers really took, and the factors between them.

Taps call :meth:`Recorder.stage`; optimizer post-hooks call :meth:`Recorder.optimizer_stepped`; the session closes the
record. Nothing here raises into the user's training: an error is kept in `problem`, and the session responds with a new
generation.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim import Optimizer

from memckpt.capture import graphs
from memckpt.capture.copier import Copier
from memckpt.capture.graphs import GraphNotes
from memckpt.capture.live_state import LiveState
from memckpt.capture.marks_in_flight import MarksInFlight
from memckpt.capture.pending import PendingGradients
from memckpt.capture.phases import PhaseMarks
from memckpt.capture.slot_writer import SlotWriter
from memckpt.capture.staging_check import StagingCheck
from memckpt.capture.watch import ParameterWatch
from memckpt.errors import UnsupportedError
from memckpt.memory.landings import FIRING_BITS
from memckpt.state import codec
from memckpt.state.optimizers import dtype_name, hyperparameters
from memckpt.state.records import GradientOp, SparseGradient, SubStep
from memckpt.state.tensors import is_dtensor, local, version

_log = logging.getLogger("memckpt")


@dataclass
class _PendingOp:
    kind: str
    operand: Any
    params: tuple[int, ...]


@dataclass
class _PendingSubStep:
    optimizer: int
    index: int
    groups: codec.Packed
    stepped: bool
    absent: list[int] = field(default_factory=list)
    #: Flag in host memory, once its copy has arrived: a fused step under a gradient scaler had no effect.
    found_inf: torch.Tensor | None = None
    sparse: list[SparseGradient] = field(default_factory=list)
    ops: list[_PendingOp] = field(default_factory=list)


@dataclass
class StallClock:
    """Seconds that the training thread spent in our code, by cause.

    `hooks` covers hooks of autograd, of optimizers, and of torch's functions that change gradients. Each hook measures
    itself as a whole; functions that it calls do not.
    """

    hooks: float = 0.0
    anchors: float = 0.0
    commit: float = 0.0
    slot_wait: float = 0.0
    snapshot: float = 0.0

    @property
    def total(self) -> float:
        return self.hooks + self.anchors + self.commit + self.slot_wait + self.snapshot

    @contextlib.contextmanager
    def in_hook(self) -> Iterator[None]:
        """Measure a hook. Hooks that run per parameter skip this: it would cost more than they do."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.hooks += time.perf_counter() - started


class Recorder:
    """Recorder of a session. `writer` is None while nothing can be staged, as before the first generation."""

    def __init__(self, live: LiveState, copier: Copier, clock: StallClock) -> None:
        self._live = live
        self._copier = copier
        self.clock = clock
        self.writer: SlotWriter | None = None
        self.record = 0
        self.graphs = GraphNotes()
        #: Whether records consist of steps; else the state is captured by value.
        self.needs_steps = True
        self.streams = True
        self.pending = PendingGradients(live.optimizers, self.fail)
        #: Whether a backward has run since the last step of any optimizer, or the last commit.
        self.backward_ran = False
        #: Class name of an optimizer whose step is compiled; empty if there is none, None before the first step.
        self.compiled: str | None = None
        self.problem: str | None = None
        #: Text of an internal error in this record; empty if there was none.
        self.broken = ""
        self._told: set[str] = set()
        self.tap_mismatch: str | None = None
        self.check = StagingCheck()
        self.watch: ParameterWatch | None = None
        self.on_backward: Callable[[], None] | None = None
        self.marks: PhaseMarks | None = None
        #: Whether a later backward adds to the gradients of this one before a step: then they are not copied.
        self.accumulates: Callable[[], bool] | None = None
        self._asked_in = -1
        self._put_off = False
        #: Called at each optimizer step while the last step of a dead attempt is repeated.
        self.repeated: Callable[[int, Optimizer], None] | None = None
        #: Called with each gradient as backward has made it, while those of a dead attempt are there for comparison.
        self.witness: Callable[[torch.Tensor, torch.Tensor], None] | None = None
        #: Name of the tap that calls :meth:`stage`.
        self.tap = ""
        self._noted_before: set[int] = set()
        self._ops: list[_PendingOp] = []
        self._sub_steps: list[_PendingSubStep] = []
        self._steps_taken: dict[int, int] = {}
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
        self._in_flight = MarksInFlight(copier) if copier.asynchronous else None
        # For each parameter, gradients made by backward in this record; and over all of them, gradients staged.
        self._firings: list[int] = []
        self._landed = 0
        self._changed: str | None = None

    def begin(self, writer: SlotWriter | None, record: int) -> None:
        """Start collecting `record`."""
        self.writer = writer
        self.record = record
        self.problem = None
        self.broken = ""
        self._ops.clear()
        self._sub_steps = []
        self._steps_taken = {}
        params = len(writer.params) if writer is not None else 0
        self._staged_after, self._held, self._counts = [0] * params, [None] * params, [0] * params
        self._rows = [] if writer is None else [writer.gradient_row(record, n, 0) for n in range(len(writer.members))]
        marks = None if writer is None or writer.landings is None else writer.landings.words(record)
        self._landings = [marks] * len(self._rows)
        self._firings, self._landed = [0] * params, 0
        if self._in_flight is not None:
            self._in_flight.forget()

    def fail(self, reason: str) -> None:
        """Void this record: the session begins a new generation at its end."""
        if self.problem is None:
            self.problem = reason

    @property
    def stepped(self) -> bool:
        """Whether an optimizer has stepped since the record began."""
        return bool(self._steps_taken)

    def broke(self, what: str, error: Exception) -> None:
        """Note an internal error inside the user's step, which must go on."""
        reason = f"{what} failed: {type(error).__name__}: {error}"
        if reason not in self._told:
            self._told.add(reason)
            _log.warning("memckpt: %s; training goes on, and the state is written anew", reason, exc_info=error)
        self.broken = reason
        self.fail(reason)

    # From taps

    def backward_runs(self) -> bool:
        """Note, from hooks that autograd runs, that gradients are being made and reduced.

        Returns:
            False if the backward is being recorded into a graph and not executed.
        """
        if self._copier.recording_graph():
            self.graphs.backward = True
            return False
        if self.marks is not None:
            self.marks.gradient_seen()
        return True

    def gradient_seen(self, param: torch.Tensor | None, look: bool = True) -> None:
        """Note a new gradient: from now on the record cannot end before the parameter's optimizer has stepped.

        Args:
            param: the parameter; None for a flat one, whose shards the optimizers step.
            look: whether parameters are in place, so that changes by hand can be looked for.
        """
        self.pending.seen(param)
        if not self.backward_ran:
            self._backward_begins(look)

    def _backward_begins(self, look: bool = True) -> None:
        self.backward_ran = True
        if look:
            self.look_before_backward()

    def look_before_backward(self) -> None:
        """Look for changes of parameters since their optimizer's step; called when a backward begins or is about to."""
        try:
            if self.on_backward is not None:
                self.on_backward()
        except Exception as error:  # see `broke`, here and below
            self.broke("looking for changes of parameters", error)

    def stage(self, param: torch.Tensor, gradient: torch.Tensor) -> None:
        """Stage the gradient that backward has made for `param`; the last call before a step counts."""
        try:
            # Runs for each tensor of each step: calls are kept to a minimum.
            self.pending.seen(param)
            if not self.backward_ran:
                self._backward_begins()
            if self.witness is not None:
                self.witness(param, gradient)
            writer = self.writer
            if writer is None or not self.streams or self.problem is not None:
                return
            index = writer.index.get(id(param))
            if index is None:
                return  # settled at the optimizer's step
            self._firings[index] = firing = self._firings[index] + 1
            if gradient.is_sparse:
                return  # settled at the optimizer's step
            if self.accumulates is not None and self._is_put_off(self.accumulates):
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
            self._note_version(index, param.grad)
        except Exception as error:
            self.broke("staging a gradient", error)

    def _take_off(self, landings: memoryview, index: int) -> None:
        """Clear a landing mark, set or in flight, before its gradient is overwritten."""
        if self._in_flight is not None:
            self._in_flight.drop(index)
        landings[index] = 0

    def _is_put_off(self, accumulates: Callable[[], bool]) -> bool:
        """Whether gradients of the running backward need not be copied; asks once per backward.

        A wrong answer costs only a copy: gradients that a step uses and that are not staged are taken after the step.
        """
        running: int = torch._C._current_graph_task_id()
        if running == -1 or running != self._asked_in:
            self._asked_in, self._put_off = running, accumulates()
        return self._put_off

    def _note_version(self, index: int, gradient: torch.Tensor | None) -> None:
        self._held[index] = gradient
        if gradient is not None:
            self._counts[index] = gradient._version if type(gradient) is torch.Tensor else version(gradient)

    def gradients_change(self, kind: str, operand: Any, params: list[torch.Tensor]) -> None:
        """Gradients are about to be multiplied, divided or clamped in place."""
        try:
            if self._copier.recording_graph():
                return
            writer = self.writer
            self._copier.wait_before_changes()
            if writer is None:
                return
            indices = tuple(writer.index[id(param)] for param in params if id(param) in writer.index)
            if indices:
                operand = self._kept(operand) if isinstance(operand, torch.Tensor) else operand
                self._ops.append(_PendingOp(kind, operand, indices))
        except Exception as error:
            self.broke("noting a change of gradients", error)

    def _kept(self, tensor: torch.Tensor) -> torch.Tensor:
        """A small tensor's value at this point, in host memory; a copy from a device may still be in flight."""
        tensor = local(tensor)
        return tensor.clone() if codec.on_host(tensor) else self._copier.fetch(tensor)

    def note_versions(self, params: Iterable[torch.Tensor] | None = None) -> None:
        """Note the version counters of these parameters' gradients (None: of all staged ones) after a known change."""
        try:
            writer = self.writer
            if writer is None:
                return
            indices = range(len(writer.params)) if params is None else [writer.index.get(id(one)) for one in params]
            for index in indices:
                if index is not None and self._staged_after[index]:
                    self._note_version(index, writer.params[index].grad)
        except Exception as error:
            self.broke("noting a change of gradients", error)

    def _as_staged(self, number: int, index: int, gradient: torch.Tensor, stepped: bool) -> bool:
        """Whether a staged gradient underwent known changes only, as far as version counters tell."""
        held = self._held[index]
        if held is None:
            return True  # unknown; the check of values remains
        # Version counters miss what a fused step does to DTensors.
        moves = self._live.version_moves[number] if stepped and not is_dtensor(gradient) else 0
        return held is gradient and version(gradient) == self._counts[index] + moves

    # From optimizers

    def optimizer_stepping(self, number: int, optimizer: Optimizer, with_closure: bool) -> None:
        """Note, before its step, an optimizer that changes its gradients, while they are intact.

        With a closure they do not exist yet (Lightning computes them inside it): then only streaming captures them.

        Raises:
            UnsupportedError: the step is being recorded into a graph, and records consist of steps.
        """
        if self._copier.recording_graph():
            if self.needs_steps:
                raise UnsupportedError(graphs.STEP)
            self.graphs.step = True
            return
        try:
            if number in self._live.changing_optimizers and not with_closure:
                self._guarded_note(number, optimizer, whole=True, stepped=False)
                self._noted_before.add(number)
            # The step changes parameters and state, whose anchors are being copied, and maybe gradients.
            self._copier.wait_before_changes()
        except Exception as error:
            self.broke("preparing for a step", error)

    def optimizer_stepped(self, number: int, optimizer: Optimizer) -> None:
        """Note what an optimizer used in the step that it has just taken or skipped."""
        if self._copier.recording_graph():
            return
        self.graphs.stepped = True
        self.backward_ran = False
        self.compiled = self.compiled or ""
        try:
            if self._in_flight is not None and self.writer is not None:
                self._in_flight.look()
            self.pending.stepped(number)
            if number in self._noted_before:
                self._noted_before.discard(number)
            else:
                self._guarded_note(number, optimizer, number not in self._live.changing_optimizers, stepped=True)
                # Gradients copied just now may be zeroed in place, or accumulated into by the next backward.
                self._copier.wait_before_changes()
            if self.watch is not None:
                self.watch.note(number)
            if self.repeated is not None and not _skipped(optimizer, wait=True):
                self.repeated(number, optimizer)
        except Exception as error:
            self.broke("noting a step", error)

    def compiled_step(self, number: int, optimizer: Optimizer) -> None:
        """As :meth:`optimizer_stepped`, for a compiled step: its kernels round differently from the class."""
        self.compiled = type(optimizer).__qualname__
        if self.writer is not None:
            self.fail(f"the step of {self.compiled} is compiled")
        self.optimizer_stepped(number, optimizer)

    def _guarded_note(self, number: int, optimizer: Optimizer, whole: bool, stepped: bool) -> None:
        """Note a step, before or after it is taken; `whole`: the gradients are those that it uses."""
        try:
            if self.writer is not None and self.problem is None and not _skipped(optimizer):
                self._note_step(self.writer, number, optimizer, whole, stepped)
        except Exception as error:
            self.broke("recording a step", error)

    def _note_step(self, writer: SlotWriter, number: int, optimizer: Optimizer, whole: bool, stepped: bool) -> None:
        taken = self._steps_taken.get(number, 0)
        self._steps_taken[number] = taken + 1
        growth = self._live.growth.sub_steps
        if taken >= writer.sub_step_room[number]:
            growth[number] = max(growth.get(number, 1), taken + 1)
            self.fail(f"optimizer {number} took more steps in one record than there was room for")
            return
        spec = writer.spec.optimizers[number]
        if spec.group_sizes != tuple(len(group["params"]) for group in optimizer.param_groups):
            self.fail(f"the parameter groups of optimizer {number} have changed")
            return
        step = _PendingSubStep(number, taken, self._packed(hyperparameters(optimizer)), stepped)
        found = getattr(optimizer, "found_inf", None)
        if isinstance(found, torch.Tensor):
            step.found_inf = self._kept(found)
        scale = getattr(optimizer, "grad_scale", None)
        if isinstance(scale, torch.Tensor):
            # Fused kernels unscale by themselves, inside the step.
            self._ops.append(_PendingOp("div", self._kept(scale), tuple(writer.layout.optimizer_params(number))))
        streamed = self._settle_all(writer, step, whole)
        step.ops = self._ops_for(writer, step, streamed)
        self._rows[number] = writer.gradient_row(self.record, number, taken + 1)
        self._landings[number] = None
        if streamed and whole:
            mismatch = self.check.compare(writer, self.record, step.optimizer, step.index, streamed, step.ops)
            if mismatch is not None:
                self.tap_mismatch = mismatch
                self.fail(mismatch)
        if any(param.grad is not None for param in writer.not_stepped(number, optimizer)):
            self.fail("a parameter that was frozen has a gradient now")
        self._sub_steps.append(step)
        if self._changed is not None and self.streams:
            # The gradient was staged again and is right; but streaming is useless here.
            self.tap_mismatch = (
                f"the gradient of {self._changed} was changed between backward and the optimizer's step in a way that "
                "streaming does not know"
            )

    def _settle_all(self, writer: SlotWriter, step: _PendingSubStep, whole: bool) -> list[int]:
        """Make sure that all gradients are in the slot; returns parameters whose streamed gradients are unchanged."""
        streamed: list[int] = []
        params, staged_after, held, counts = writer.params, self._staged_after, self._held, self._counts
        moves = self._live.version_moves[step.optimizer] if step.stepped else 0
        for index in writer.members[step.optimizer]:
            # The common case, without a call: staged, and the same gradient ever since.
            gradient = held[index]
            if (
                staged_after[index]
                and type(gradient) is torch.Tensor
                and params[index].grad is gradient
                and (not whole or gradient._version == counts[index] + moves)
            ):
                streamed.append(index)
            else:
                self._settle(writer, step, index, streamed, whole)
        return streamed

    def _settle(self, writer: SlotWriter, step: _PendingSubStep, index: int, streamed: list[int], whole: bool) -> None:
        """Make sure that the gradient of one parameter is in the slot, or that its absence is noted."""
        gradient = writer.params[index].grad
        staged = self._staged_after[index]
        if gradient is None:
            step.absent.append(index)
        elif not staged and not whole:
            self.fail("a gradient that was not streamed has been changed by the step itself")
        elif gradient.dtype is not writer.grad_dtypes[index]:
            name = writer.spec.params[index].tensor.name
            self._live.growth.grad_dtypes[name] = dtype_name(gradient.dtype)
            self.fail(f"the gradient of {name} is of dtype {gradient.dtype}, not {writer.grad_dtypes[index]} as before")
        elif gradient.is_sparse:
            sparse = writer.stage_sparse(self.record, step.optimizer, step.index, index, gradient)
            if sparse is None:
                self.fail("a sparse gradient needs more room")
            else:
                step.sparse.append(sparse)
        elif staged and (not whole or self._as_staged(step.optimizer, index, gradient, step.stepped)):
            streamed.append(index)
            return
        elif writer.mine[index]:
            spec = writer.spec.params[index]
            if staged:
                self._changed = spec.tensor.name
            if spec.grad_bytes < spec.dense_grad_bytes:
                self._live.growth.sparse_bytes[spec.tensor.name] = spec.dense_grad_bytes
                self.fail("a gradient that was sparse is dense and needs more room")
            else:
                landings = self._landings[step.optimizer]
                if landings is not None and writer.owners[index][0] == step.optimizer:
                    self._take_off(landings, index)  # no longer the gradient as backward made it
                view = writer.gradient_view(self.record, step.optimizer, step.index, index)
                self._copier.copy(view, local(gradient))
        # Staged after all the changes: none of them applies.
        self._staged_after[index] = 1 + len(self._ops)

    def _ops_for(self, writer: SlotWriter, step: _PendingSubStep, streamed: list[int]) -> list[_PendingOp]:
        """The changes made to streamed gradients after staging; resets the staging state."""
        ops = []
        for position, op in enumerate(self._ops):
            covered = set(op.params)
            late = tuple(i for i in streamed if i in covered and self._staged_after[i] <= position + 1)
            if late:
                ops.append(_PendingOp(op.kind, op.operand, late))
        for index in writer.members[step.optimizer]:
            self._staged_after[index] = 0
            self._held[index] = None  # a reference would keep the gradient alive beyond zero_grad()
        return ops

    # For the session

    def take_sub_steps(self) -> Callable[[], tuple[SubStep, ...]]:
        """A function that encodes the record's steps: it reads operands from the device, so the sender calls it."""
        steps, self._sub_steps = self._sub_steps, []
        return lambda: tuple(_encode(step) for step in steps if step.found_inf is None or not step.found_inf.any())

    def _packed(self, groups: list[dict[str, Any]]) -> codec.Packed:
        """Hyperparameters at this point: schedulers change tensors in place after the step."""
        return codec.Packed(groups, self._copier.fetch, self._copier.token)


def _encode(step: _PendingSubStep) -> SubStep:
    return SubStep(
        optimizer=step.optimizer,
        index=step.index,
        groups=step.groups.encode(),
        absent=tuple(step.absent),
        sparse=tuple(step.sparse),
        ops=tuple(GradientOp(op.kind, codec.encode(op.operand), op.params) for op in step.ops),
    )


def _skipped(optimizer: Optimizer, wait: bool = False) -> bool:
    """Whether a gradient scaler makes this step void: fused optimizers run it nevertheless.

    If only the device knows, `wait` waits for it; else the step is noted, and dropped when it is encoded.
    """
    found = getattr(optimizer, "found_inf", None)
    return isinstance(found, torch.Tensor) and (wait or codec.on_host(found)) and bool(found.item())
