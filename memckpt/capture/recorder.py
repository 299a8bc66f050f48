"""Collection of one record: staged gradients, the steps that optimizers really took, and the factors between them.

Taps call :meth:`Recorder.stage`; hooks of optimizers call :meth:`Recorder.optimizer_stepping` and
:meth:`Recorder.optimizer_stepped`; the session closes the record. A step is noted before it is taken, as it may change
what it uses. Nothing here raises into the user's training: an error is kept in `problem`, and the session responds with
a new generation.
"""

from __future__ import annotations

import logging
import signal
import traceback
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from memckpt.capture.beside.pending import PendingGradients
from memckpt.capture.beside.watch import ParameterWatch
from memckpt.capture.copier import Copier
from memckpt.capture.gradient_staging import GradientStaging, NotedOp, NotedSubStep, is_skipped, on_the_host
from memckpt.capture.live_state import LiveState
from memckpt.capture.phases import PhaseMarks, StallClock
from memckpt.capture.slot_writer import SlotWriter
from memckpt.capture.staging_check import StagingCheck, unknown_change
from memckpt.errors import UnsupportedError, UsageError
from memckpt.state import codec
from memckpt.state.ambient import ambient_of
from memckpt.state.optimizers import hyperparameters
from memckpt.state.records import SubStep

_log = logging.getLogger("memckpt")
_GRAPHED_STEP = (
    "an optimizer's step is being recorded into a CUDA graph, and its replays run no hooks: no record would hold them; "
    "step outside of the graph, or have the state copied (redo='snapshot')"
)


class Recorder:
    """Recorder of a session. Its attributes are for reading; what others may set has a method.

    Attributes:
        record: number of the record.
        writer: writer of its slot; None while nothing can be staged, as before the first generation.
        problem: why the record cannot be committed as it is staged, in words; None if it can.
        broken: text of an internal error in this record; empty if there was none.
        tap: name of the tap that calls :meth:`stage`.
        streams: whether gradients are taken as backward makes them, and not at the step.
        tap_mismatch: why this tap does not fit, in words; None if it does.
        compiled: class name of an optimizer whose step is compiled; empty if there is none, None before the first step.
    """

    def __init__(self, live: LiveState, copier: Copier, clock: StallClock) -> None:
        self._live = live
        self._copier = copier
        self.clock = clock
        self.writer: SlotWriter | None = None
        self.record = 0
        self.cuda_graphs = GraphNotes()
        self.tap = ""
        self.streams = True
        self.pending = PendingGradients(live.optimizers, self.fail)
        self.pending.first = live.left.compare_gradients
        live.strangers.stepped = self.pending.stepped_by_another
        self.gradients = GradientStaging(live, copier, self.fail)
        self.compiled: str | None = None
        self.problem: str | None = None
        self.broken = ""
        self._told: set[str] = set()
        self._usual_threads = torch.get_num_threads()
        self.tap_mismatch: str | None = None
        self.check = StagingCheck()
        self._needs_steps = True
        self._watch: ParameterWatch | None = None
        self._before_step: Callable[[int], None] | None = None
        self._marks: PhaseMarks | None = None
        self._compare_step: Callable[[int, Optimizer], None] | None = None
        self._compare_gradient: Callable[[torch.Tensor, torch.Tensor], None] | None = None
        #: Steps that have begun, by optimizer; None: nothing of it is recorded.
        self._begun: dict[int, NotedSubStep | None] = {}
        self._sub_steps: list[NotedSubStep] = []
        self._steps_taken: dict[int, int] = {}

    def begin_record(self, writer: SlotWriter | None, record: int) -> None:
        """Start collecting `record`."""
        self.writer = writer
        self.record = record
        self.problem = None
        self.broken = ""
        self._sub_steps = []
        self._steps_taken = {}
        self._begun = {}
        self.gradients.expect_gradients(writer, record)

    def fail(self, reason: str) -> None:
        """Void this record: the session begins a new generation at its end."""
        if self.problem is None:
            self.problem = reason

    @property
    def stepped(self) -> bool:
        """Whether an optimizer has stepped since the record began."""
        return bool(self._steps_taken)

    def broke(self, what: str, error: Exception) -> None:
        """Note an internal error inside the user's step, which must go on; raise it again if it is none of ours."""
        reason = f"{what} failed: {type(error).__name__}: {error}"
        if reason not in self._told:
            self._told.add(reason)
            _log.warning("memckpt: %s; training goes on, and the state is written anew", reason, exc_info=error)
        self.broken = reason
        self.fail(reason)
        if is_of_signal(error):
            raise error

    # Listeners and choices

    def use_tap(self, name: str, streams: bool) -> None:
        """Expect gradients of another tap. Called by the owner of the tap."""
        self.tap, self.streams, self.tap_mismatch = name, streams, None

    def record_steps(self, needed: bool) -> None:
        """Set whether records consist of steps; else the state is captured by value. Called as the mode changes."""
        self._needs_steps = needed

    def drop_writer(self) -> None:
        """Stage nothing any more of this record. Called by the owner of the writer, which closes it."""
        self.writer = None

    def watch_parameters(self, watch: ParameterWatch | None, before_step: Callable[[int], None] | None = None) -> None:
        """Have changes by anything but the optimizers looked for.

        Args:
            watch: told of each step; None: of none.
            before_step: called before each step, with the optimizer's number.
        """
        self._watch, self._before_step = watch, before_step

    def mark_phases(self, marks: PhaseMarks | None) -> None:
        """Mark the phases of each step for peers, whose traffic is held back during reductions; None: do not."""
        self._marks = marks

    def compare_steps(self, compare: Callable[[int, Optimizer], None] | None) -> None:
        """Call `compare` before each optimizer step: the resume check repeats a step. None: do not."""
        self._compare_step = compare

    def compare_gradients(self, compare: Callable[[torch.Tensor, torch.Tensor], None] | None) -> None:
        """Call `compare` with each gradient as backward has made it: the resume check has others. None: do not."""
        self._compare_gradient = compare

    def mark_step_end_for_peers(self, record: int) -> None:
        """Mark for peers that the step of a record is over."""
        if self._marks is not None:
            self._marks.step_ended(record)

    # From taps, and from functions of torch that change gradients

    def backward_runs(self) -> bool:
        """Note, from hooks that autograd runs, that gradients are being made and reduced.

        Returns:
            False if the backward is being recorded into a graph and not executed.
        """
        if self._copier.recording_graph():
            self.cuda_graphs.backward = True
            return False
        if self._marks is not None:
            self._marks.gradient_seen()
        return True

    def gradient_seen(self, param: torch.Tensor | None) -> None:
        """Note a new gradient: from now on the record cannot end before the parameter's optimizer has stepped.

        Args:
            param: the parameter; None for a flat one, whose shards the optimizers step.
        """
        self.pending.seen(param)

    def stage(self, param: torch.Tensor, gradient: torch.Tensor, parts: Sequence[torch.Tensor] | None = None) -> None:
        """Stage the gradient that backward has made for `param`; the last call before a step counts.

        Args:
            param: the parameter.
            gradient: its gradient.
            parts: the parts of its encoding, where it was averaged in compressed form.
        """
        try:
            # Runs for each tensor of each step: calls are kept to a minimum.
            self.pending.seen(param)
            if self._compare_gradient is not None:
                self._compare_gradient(param, gradient)
            if self.writer is not None and self.streams and self.problem is None:
                if parts is None:
                    self.gradients.stage(self.writer, param, gradient)
                else:
                    self.gradients.stage_encoded(self.writer, param, gradient, parts)
        except Exception as error:
            self.broke("staging a gradient", error)

    def gradients_change(self, kind: str, operand: Any, params: list[torch.Tensor]) -> None:
        """Gradients are about to be multiplied, divided or clamped in place."""
        with self.clock.in_hook():
            try:
                if self._copier.recording_graph():
                    return
                writer = self.writer
                self._copier.wait_before_changes()
                if writer is None:
                    return
                known = tuple(writer.index[id(param)] for param in params if id(param) in writer.index)
                self.gradients.note_change(kind, operand, known)
            except Exception as error:
                self.broke("noting a change of gradients", error)

    def gradients_changed(self, params: list[torch.Tensor]) -> None:
        """Gradients were changed in place."""
        with self.clock.in_hook():
            self.note_versions(params)

    def note_versions(self, params: Iterable[torch.Tensor] | None = None) -> None:
        """Note the version counters of these parameters' gradients (None: of all staged ones) after a known change."""
        try:
            if self.writer is not None:
                self.gradients.note_versions(self.writer, params)
        except Exception as error:
            self.broke("noting a change of gradients", error)

    # From optimizers

    def optimizer_stepping(self, number: int, optimizer: Optimizer) -> None:
        """Note a step that is about to be taken or skipped, and what it uses: with a closure, when this has returned.

        Raises:
            UnsupportedError: the step is being recorded into a graph, and records consist of steps.
        """
        if self._copier.recording_graph():
            if self._needs_steps:
                raise UnsupportedError(_GRAPHED_STEP)
            self.cuda_graphs.step = True
            return
        try:
            if number in self._begun:
                self._fail_step(optimizer, "has begun twice: it raised an exception, or evaluates its closure again")
            if self._before_step is not None:
                self._before_step(number)
            if self.writer is not None:
                self.gradients.mark_landed()
            self._begun[number] = self._guarded_note(number, optimizer)
            if self._compare_step is not None and not is_skipped(optimizer, wait=True):
                self._compare_step(number, optimizer)
            # The step changes parameters and state, whose anchors are being copied, and maybe gradients; zero_grad() or
            # the next backward change the gradients behind it.
            self._copier.wait_before_changes()
        except Exception as error:  # see `broke`, here and below
            self.broke("preparing for a step", error)

    def optimizer_stepped(self, number: int, optimizer: Optimizer) -> None:
        """Note that an optimizer has taken or skipped its step."""
        if self._copier.recording_graph():
            return
        self.cuda_graphs.stepped = True
        self.compiled = self.compiled or ""
        try:
            self.pending.stepped(number)
            if number not in self._begun:
                self._fail_step(optimizer, "has not evaluated its closure")
            elif (step := self._begun.pop(number)) is not None:
                self._sub_steps.append(step)
            if self._watch is not None and not self._watch.accept_changes(number):
                self.fail(f"the state of {type(optimizer).__qualname__} has got tensors that the layout lacks")
        except Exception as error:
            self.broke("noting a step", error)

    def compiled_step(self, number: int, optimizer: Optimizer) -> None:
        """As :meth:`optimizer_stepped`, for a compiled step: its kernels round differently from the class."""
        self.compiled = type(optimizer).__qualname__
        self._fail_step(optimizer, "is compiled")
        self.optimizer_stepped(number, optimizer)

    def end_steps(self) -> None:
        """End the record's steps: one that has begun and not ended may have changed anything."""
        for number in self._begun:
            self._fail_step(self._live.optimizers[number], "has not ended")

    def _fail_step(self, optimizer: Optimizer, what: str) -> None:
        if self.writer is not None:
            self.fail(f"the step of {type(optimizer).__qualname__} {what}")

    def _guarded_note(self, number: int, optimizer: Optimizer) -> NotedSubStep | None:
        try:
            if self.writer is not None and self.problem is None and not is_skipped(optimizer):
                return self._note_step(self.writer, number, optimizer)
        except Exception as error:
            self.broke("recording a step", error)
        return None

    def _note_step(self, writer: SlotWriter, number: int, optimizer: Optimizer) -> NotedSubStep | None:
        taken = self._steps_taken.get(number, 0)
        self._steps_taken[number] = taken + 1
        growth = self._live.growth.sub_steps
        if taken >= writer.layout.sub_step_room[number]:
            growth[number] = max(growth.get(number, 1), taken + 1)
            self.fail(f"optimizer {number} took more steps in one record than there was room for")
            return None
        frozen = writer.params_outside(number, optimizer)
        if frozen is None:
            self.fail(f"the parameter groups of optimizer {number} have changed")
            return None
        # Packed at this point: the step, and schedulers behind it, change groups, also tensors in place.
        groups = codec.Packed(hyperparameters(optimizer), self._copier.fetch, self._copier.token)
        step = NotedSubStep(number, taken, groups, ambient_of(writer.device, self._usual_threads).encode())
        found = getattr(optimizer, "found_inf", None)
        if isinstance(found, torch.Tensor):
            step.found_inf = on_the_host(found, self._copier)
        streamed = self.gradients.settle(writer, step)
        if streamed:
            mismatch = self.check.compare(writer, self.record, step, streamed)
            if mismatch is not None:
                self.tap_mismatch = mismatch
                self.fail(mismatch)
        scale = getattr(optimizer, "grad_scale", None)
        if isinstance(scale, torch.Tensor):
            # Fused kernels unscale by themselves, inside the step.
            step.ops.append(NotedOp("div", on_the_host(scale, self._copier), tuple(writer.members[number])))
        if any(param.grad is not None for param in frozen):
            self.fail("a parameter that was frozen has a gradient now")
        if self.gradients.changed is not None and self.streams:
            # The gradient was staged again and is right; but streaming is useless here.
            self.tap_mismatch = unknown_change(self.gradients.changed)
        return step

    # For the session

    def take_sub_steps(self) -> Callable[[], tuple[SubStep, ...]]:
        """A function that encodes the record's steps: it reads operands from the device, so the sender calls it."""
        steps, self._sub_steps = self._sub_steps, []
        return lambda: tuple(step.encode() for step in steps if step.had_effect)


class GraphNotes:
    """Graph recordings seen in this session: recorded work runs later, without the hooks that observe training.

    A forward in a graph is harmless: gradients are accumulated outside of it. A whole backward runs its hooks only
    while it is recorded; the gradients of its replays are taken after the step.

    Attributes:
        backward, step: whether a backward or a step has been recorded.
        stepped: whether an optimizer has stepped, outside of graphs, since the last commit.
    """

    def __init__(self) -> None:
        self.backward = False
        self.step = False
        self.stepped = False

    def refuse_hidden_backward(self, world_size: int, told: bool) -> None:
        """Refuse a commit if replays hide whether it is a restore point.

        Args:
            world_size: number of ranks.
            told: whether the caller has declared if gradients are pending.

        Raises:
            UnsupportedError: several ranks, whose reductions are hidden.
            UsageError: gradients may be waiting for a step.
        """
        stepped, self.stepped = self.stepped, False
        if not self.backward:
            return
        if world_size > 1:
            raise UnsupportedError(
                f"a backward was recorded into a CUDA graph, with {world_size} ranks: its replays run no hooks, so "
                "it is unknown when all ranks have reduced; record the forward alone, or use one rank"
            )
        if not (told or stepped or self.step):
            raise UsageError(
                "commit(): a backward was recorded into a CUDA graph, whose replays cannot be seen, and no optimizer "
                "has stepped: expected commit(gradients_pending=True) inside an accumulation, False otherwise"
            )


def is_of_signal(error: Exception) -> bool:
    """Whether a signal's handler raised it: torch's when a loader's worker dies, or the user's for a time limit."""
    handlers = {getattr(signal.getsignal(number), "__code__", None) for number in signal.valid_signals()}
    return any(frame.f_code in handlers for frame, _ in traceback.walk_tb(error.__traceback__))
