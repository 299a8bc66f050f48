"""The trainer's phase marks, by which peers' traffic keeps out of the way of reductions.

The end of a step is marked by the session, a backward by the taps, which see its first gradient: under DDP before the
first reduction. No hook is put on modules: a hook in a compiled module would change what is compiled. What the taps do
not see is taken as part of the phase before: sharded parameters are seen from their first reduced gradient on.
"""

from __future__ import annotations

import logging

import torch

from memckpt.memory.phases import PhaseWriter
from memckpt.state.phases import Phase

_log = logging.getLogger("memckpt")


class PhaseMarks:
    """Marks the phases of one rank. Its methods never raise: what goes wrong is said once, and nothing marked any more.

    Args:
        writer: to the shared page, which belongs to the caller: :meth:`remove` this before it is closed.
        record: number of the first record to be made.
    """

    def __init__(self, writer: PhaseWriter, record: int) -> None:
        self._writer: PhaseWriter | None = writer
        self._step = record
        self._in_backward = False
        self._mark(Phase.FORWARD)

    def gradient_seen(self) -> None:
        """From a hook that autograd runs: a backward is running. Its first call marks that, the others cost nothing."""
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
        """A record is complete, and the next one begins."""
        self._step = record + 1
        self._in_backward = False  # a backward that raised has not come to its end
        self._mark(Phase.FORWARD)

    def remove(self) -> None:
        """Mark nothing any more. Idempotent."""
        self._writer = None

    def _mark(self, phase: Phase) -> None:
        if self._writer is not None:
            try:
                self._writer.mark(self._step, phase)
            except Exception as error:  # the user's training must go on
                self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        _log.warning("memckpt: phases are not marked any more, so that peers send at any time: %s", error)
        self.remove()
