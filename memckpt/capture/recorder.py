"""Collects one record: staged gradients, the steps that optimizers really took, and the factors between them.

Taps call :meth:`Recorder.stage`; optimizer post-hooks call :meth:`Recorder.optimizer_stepped`; the session closes the
record. Nothing here raises into the user's training: what goes wrong is kept in `problem`, and the session answers it
with a new generation.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim import Optimizer

from memckpt.capture.copier import Copier
from memckpt.capture.live_state import LiveState
from memckpt.capture.phases import PhaseMarks
from memckpt.capture.slot_writer import SlotWriter
from memckpt.capture.staging_check import StagingCheck
from memckpt.capture.watch import ParameterWatch
from memckpt.state import codec
from memckpt.state.optimizers import hyperparameters
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
    groups: list[dict[str, Any]]
    stepped: bool
    absent: list[int] = field(default_factory=list)
    sparse: list[SparseGradient] = field(default_factory=list)
    ops: list[_PendingOp] = field(default_factory=list)


@dataclass
class StallClock:
    """Seconds that the training thread spent in us, by cause."""

    hooks: float = 0.0
    anchors: float = 0.0
    commit: float = 0.0
    slot_wait: float = 0.0
    snapshot: float = 0.0

    @property
    def total(self) -> float:
        return self.hooks + self.anchors + self.commit + self.slot_wait + self.snapshot


class Recorder:
    """One per session. `writer` is None while nothing can be staged (no generation yet, or none any more)."""

    def __init__(self, live: LiveState, copier: Copier, clock: StallClock) -> None:
        self._live = live
        self._copier = copier
        self._clock = clock
        self.writer: SlotWriter | None = None
        self.record = 0
        self.streams = True
        self.gradients_pending = False
        self.problem: str | None = None
        self.tap_mismatch: str | None = None
        self.check = StagingCheck()
        self.watch: ParameterWatch | None = None
        self.on_backward: Callable[[], None] | None = None
        self.marks: PhaseMarks | None = None
        self._noted_before: set[int] = set()
        self._ops: list[_PendingOp] = []
        self._sub_steps: list[_PendingSubStep] = []
        self._steps_taken: dict[int, int] = {}
        # For each parameter: 0 while its gradient is not staged for the coming step, else 1 + the number of
        # in-place changes that had been made when it was.
        self._staged_after: list[int] = []
        # The gradient that was staged and its version counter after the last known change; None where unknown.
        self._versions: list[tuple[torch.Tensor, int] | None] = []
        self._changed: str | None = None

    def begin(self, writer: SlotWriter | None, record: int) -> None:
        """Start to collect `record`."""
        self.writer = writer
        self.record = record
        self.problem = None
        self._ops.clear()
        self._sub_steps = []
        self._steps_taken = {}
        self._staged_after = [0] * len(writer.params) if writer is not None else []
        self._versions = [None] * len(self._staged_after)

    def fail(self, reason: str) -> None:
        """This record cannot be whole: the session begins a new generation at its end."""
        if self.problem is None:
            self.problem = reason

    # From taps

    def backward_runs(self) -> None:
        """From hooks that autograd runs, as soon as they do: gradients are being made and reduced."""
        if self.marks is not None:
            self.marks.gradient_seen()

    def gradient_seen(self, look: bool = True) -> None:
        """Some parameter has a new gradient: from now on the record cannot end before an optimizer has stepped.

        Args:
            look: whether parameters stand in their places, so that changes by hand can be looked for.
        """
        if not self.gradients_pending:
            self.gradients_pending = True
            if look:
                self.look_before_backward()

    def look_before_backward(self) -> None:
        """A backward is about to run, or begins: were parameters changed since their optimizer's step?"""
        if self.on_backward is not None:
            self.on_backward()

    def stage(self, param: torch.Tensor, gradient: torch.Tensor) -> None:
        """Stage the gradient that backward has produced for `param`; the last call before a step counts."""
        self.gradient_seen()
        writer = self.writer
        if writer is None or not self.streams or self.problem is not None:
            return
        started = time.perf_counter()
        try:
            index = writer.index.get(id(param))
            if index is None or gradient.is_sparse:
                return  # settled at the optimizer's step
            if writer.mine[index]:
                for optimizer in writer.owners[index]:
                    taken = self._steps_taken.get(optimizer, 0)
                    if taken >= writer.sub_step_room[optimizer]:
                        return  # no room: settled at the optimizer's step
                    self._copier.copy(writer.gradient_view(self.record, optimizer, taken, index), gradient)
            self._staged_after[index] = 1 + len(self._ops)
            held = param.grad
            self._versions[index] = None if held is None else (held, version(held))
        except Exception as error:  # a tap must never end the user's training
            _log.exception("memckpt: staging failed")
            self.fail(f"staging a gradient failed: {type(error).__name__}: {error}")
        finally:
            self._clock.hooks += time.perf_counter() - started

    def gradients_change(self, kind: str, operand: Any, params: list[torch.Tensor]) -> None:
        """Gradients are about to be multiplied, divided or clamped in place."""
        writer = self.writer
        self._copier.wait_before_changes()
        if writer is None:
            return
        indices = tuple(writer.index[id(param)] for param in params if id(param) in writer.index)
        if indices:
            operand = operand.detach().clone() if isinstance(operand, torch.Tensor) else operand
            self._ops.append(_PendingOp(kind, operand, indices))

    def note_versions(self, params: Iterable[torch.Tensor] | None = None) -> None:
        """The gradients of these parameters (None: of all staged ones) are as known changes have left them."""
        writer = self.writer
        if writer is None:
            return
        indices = range(len(writer.params)) if params is None else [writer.index.get(id(param)) for param in params]
        for index in indices:
            if index is not None and self._staged_after[index]:
                gradient = writer.params[index].grad
                self._versions[index] = None if gradient is None else (gradient, version(gradient))

    def _as_staged(self, number: int, index: int, gradient: torch.Tensor, stepped: bool) -> bool:
        """Whether a staged gradient went through known changes only, as far as version counters tell."""
        noted = self._versions[index]
        if noted is None:
            return True  # not known; the check of the values is left
        # What a fused step does to DTensors is not counted.
        moves = self._live.version_moves[number] if stepped and not is_dtensor(gradient) else 0
        return noted[0] is gradient and version(gradient) == noted[1] + moves

    # From optimizers

    def optimizer_stepping(self, number: int, optimizer: Optimizer, with_closure: bool) -> None:
        """An optimizer is about to step. Only one that changes its gradients is noted here, while they are whole.

        With a closure they do not exist yet (Lightning computes them inside it): then only streaming has them.
        """
        if number in self._live.changing_optimizers and not with_closure:
            self._guarded_note(number, optimizer, whole=True, stepped=False)
            self._noted_before.add(number)

    def optimizer_stepped(self, number: int, optimizer: Optimizer) -> None:
        """An optimizer has just taken a step (or decided to skip it): note what it used."""
        started = time.perf_counter()
        self.gradients_pending = False
        if number in self._noted_before:
            self._noted_before.discard(number)
        else:
            self._guarded_note(number, optimizer, number not in self._live.changing_optimizers, stepped=True)
        if self.watch is not None:
            self.watch.note(number)
        self._clock.hooks += time.perf_counter() - started

    def _guarded_note(self, number: int, optimizer: Optimizer, whole: bool, stepped: bool) -> None:
        """Note a step, before or after it was made; `whole` says that the gradients are what it uses."""
        try:
            if self.writer is not None and self.problem is None and not _skipped(optimizer):
                self._note_step(self.writer, number, optimizer, whole, stepped)
        except Exception as error:  # the user's training must go on
            _log.exception("memckpt: recording a step failed")
            self.fail(f"recording a step failed: {type(error).__name__}: {error}")

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
        step = _PendingSubStep(number, taken, _snapshot(hyperparameters(optimizer)), stepped)
        scale = getattr(optimizer, "grad_scale", None)
        if isinstance(scale, torch.Tensor):
            # Fused kernels unscale by themselves, inside the step.
            self._ops.append(_PendingOp("div", scale.detach().clone(), tuple(writer.layout.optimizer_params(number))))
        streamed: list[int] = []
        for index in writer.layout.optimizer_params(number):
            self._settle(writer, step, index, streamed, whole)
        step.ops = self._ops_for(step, writer.layout.optimizer_params(number), streamed)
        if streamed and whole:
            mismatch = self.check.compare(writer, self.record, step.optimizer, step.index, streamed, step.ops)
            if mismatch is not None:
                self.tap_mismatch = mismatch
                self.fail(mismatch)
        for group in optimizer.param_groups:
            for param in group["params"]:
                if param.grad is not None and id(param) not in writer.index:
                    self.fail("a parameter that was frozen has a gradient now")
        self._sub_steps.append(step)
        if self._changed is not None and self.streams:
            # It was staged again and is right; but streaming is of no use where that happens.
            self.tap_mismatch = (
                f"the gradient of {self._changed} was changed between backward and the optimizer's step in a way that "
                "streaming does not know"
            )

    def _settle(self, writer: SlotWriter, step: _PendingSubStep, index: int, streamed: list[int], whole: bool) -> None:
        """Make sure that the gradient of one parameter is in the slot, or that its absence is noted."""
        gradient = writer.params[index].grad
        staged = self._staged_after[index]
        if gradient is None:
            step.absent.append(index)
        elif not staged and not whole:
            self.fail("a gradient that was not streamed has been changed by the step itself")
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
            if staged:
                self._changed = writer.spec.params[index].tensor.name
            view = writer.gradient_view(self.record, step.optimizer, step.index, index)
            self._copier.copy(view, local(gradient))
        # Staged after all the changes: none of them applies.
        self._staged_after[index] = 1 + len(self._ops)

    def _ops_for(self, step: _PendingSubStep, params: list[int], streamed: list[int]) -> list[_PendingOp]:
        """The changes made to streamed gradients after they were staged; forgets the staging."""
        ops = []
        for position, op in enumerate(self._ops):
            covered = set(op.params)
            late = tuple(i for i in streamed if i in covered and self._staged_after[i] <= position + 1)
            if late:
                ops.append(_PendingOp(op.kind, op.operand, late))
        for index in params:
            self._staged_after[index] = 0
            self._versions[index] = None  # it would keep the gradient's memory beyond zero_grad()
        return ops

    # For the session

    def take_sub_steps(self) -> Callable[[], tuple[SubStep, ...]]:
        """The record's steps. Encoding reads operands back from the device, so it is left to whoever sends them."""
        steps, self._sub_steps = self._sub_steps, []
        return lambda: tuple(_encode(step) for step in steps)


def _snapshot(value: Any) -> Any:
    """Hyperparameters as they are now: schedulers change tensors in place after the step."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: _snapshot(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_snapshot(item) for item in value)
    return value


def _encode(step: _PendingSubStep) -> SubStep:
    return SubStep(
        optimizer=step.optimizer,
        index=step.index,
        groups=codec.encode(step.groups),
        absent=tuple(step.absent),
        sparse=tuple(step.sparse),
        ops=tuple(GradientOp(op.kind, codec.encode(op.operand), op.params) for op in step.ops),
    )


def _skipped(optimizer: Optimizer) -> bool:
    """Fused optimizers run their step under a scaler even when it must have no effect."""
    found = getattr(optimizer, "found_inf", None)
    return isinstance(found, torch.Tensor) and bool(found.item())
