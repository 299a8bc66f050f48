"""The clock of what protection costs a step, and marks of its phases, by which peers' traffic yields to reductions.

The session marks the end of a step. The taps mark a backward at its first gradient, under DDP before the first
reduction. Modules get no hooks, which would change what is compiled. Work that the taps do not see counts as part of
the previous phase: sharded parameters are seen from their first reduced gradient on.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from memckpt.memory.pages import Phase, PhaseWriter


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
    state_copy: float = 0.0

    @property
    def total(self) -> float:
        return self.hooks + self.anchors + self.commit + self.slot_wait + self.state_copy

    @contextlib.contextmanager
    def in_hook(self) -> Iterator[None]:
        """Measure a hook. Hooks that run per parameter skip this: it would cost more than they do."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.hooks += time.perf_counter() - started

    @contextlib.contextmanager
    def in_commit(self) -> Iterator[None]:
        """Measure a commit, without what it spends on other causes."""
        started, others = time.perf_counter(), self.total - self.commit
        try:
            yield
        finally:
            others = self.total - self.commit - others
            self.commit += time.perf_counter() - started - others


_log = logging.getLogger("memckpt")


class PhaseMarks:
    """Phase marks of one rank. Methods never raise: the first error is logged once and ends marking.

    Args:
        writer: writer to the shared page. The caller owns it, and calls :meth:`remove` before it closes it.
        record: number of the first record to be made.
    """

    def __init__(self, writer: PhaseWriter, record: int) -> None:
        self._writer: PhaseWriter | None = writer
        self._step = record
        self._in_backward = False
        self._mark(Phase.FORWARD)

    def gradient_seen(self) -> None:
        """Mark a backward, from a hook that autograd runs. Only the first call of a backward does anything."""
        if self._in_backward or self._writer is None:
            return
        self._in_backward = True
        try:
            torch.autograd.Variable._execution_engine.queue_callback(self._backward_ending)
        except Exception as error:  # the user's backward must go on
            self._give_up(error)
        else:
            self._mark(Phase.BACKWARD)

    def _backward_ending(self) -> None:
        try:
            # DDP waits for its reductions in a callback of its own; one queued from inside a callback runs after it.
            torch.autograd.Variable._execution_engine.queue_callback(self._backward_ended)
        except Exception as error:  # the user's backward must go on
            self._give_up(error)

    def _backward_ended(self) -> None:
        self._in_backward = False
        self._mark(Phase.STEP)

    def step_ended(self, record: int) -> None:
        """Mark the end of `record` and the start of the next one."""
        self._step = record + 1
        self._in_backward = False  # a backward that raised runs no callback
        self._mark(Phase.FORWARD)

    def remove(self) -> None:
        """Stop marking. Idempotent."""
        self._writer = None

    def _mark(self, phase: Phase) -> None:
        if self._writer is not None:
            try:
                self._writer.write_mark(self._step, phase)
            except Exception as error:  # the user's training must go on
                self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        _log.warning("memckpt: phases are no longer marked, so peers send at any time: %s", error)
        self.remove()
