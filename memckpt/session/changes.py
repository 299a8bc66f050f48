"""Changes that the optimizer did not make: detected, logged, and answered with a new generation."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from torch.optim import Optimizer

from memckpt.capture.recorder import Recorder
from memckpt.capture.slot_writer import SlotWriter
from memckpt.capture.watch import ParameterWatch, StaticWatch

_log = logging.getLogger("memckpt")
#: Number of changes that are logged; later ones are not.
_TELL = 3
#: Number of records in a row with a change after which state is captured.
_MANY = 5


class Changes:
    """Watches the tensors of the current generation.

    Attributes:
        problem: why the whole state has to be written again, in words; None if it need not be.
    """

    def __init__(self, recorder: Recorder, optimizers: Sequence[Optimizer]) -> None:
        self._recorder = recorder
        self._optimizers = optimizers
        self._watch: ParameterWatch | None = None
        self._static: StaticWatch | None = None
        self._told = 0
        self._in_a_row = 0
        self._found = ""
        self.problem: str | None = None

    @property
    def persistent(self) -> str:
        """What changes at every step, in words; empty if nothing does."""
        return f"{self._found} in {self._in_a_row} steps in a row" if self._in_a_row >= _MANY else ""

    def watch(self, writer: SlotWriter) -> None:
        """Take the current values of a generation's tensors as unchanged."""
        # State that is captured need not be watched: it is copied whatever has changed it.
        self._watch = None if writer.snapshots else ParameterWatch(writer, self._optimizers)
        self._recorder.watch_parameters(self._watch, self.look_before_step)
        self._static = StaticWatch(writer)

    def forget(self) -> None:
        self._watch = self._static = None
        self._recorder.watch_parameters(None)

    def look_before_step(self, number: int) -> None:
        """Look for changes, which no optimizer has made, of what this one is about to step."""
        self._look(number)

    def _look(self, number: int | None) -> None:
        if self._watch is not None and self.problem is None:
            self._note(self._watch.changed(number))

    def look_at_commit(self) -> None:
        """Look at everything at the end of a record, behind which all of it has to be as redo makes it."""
        self._recorder.end_steps()
        self._look(None)
        self._in_a_row = self._in_a_row + 1 if self.problem is not None else 0

    def static_changes(self) -> list[str]:
        """Names of static tensors that have changed."""
        return self._static.changed() if self._static is not None else []

    def _note(self, changed: str | None) -> None:
        if changed is None:
            return
        self._told += 1
        if self._told <= _TELL:
            again = (
                "; this happens again and again and costs a copy of the whole state each time: redo='snapshot' copies "
                "it every snapshot_every_steps steps only. An optimizer that memckpt was not given does this, too, and "
                "its state is not restored"
            )
            _log.warning(
                "memckpt: %s was changed outside the optimizer; redo cannot know of that, so the state is written "
                "anew%s",
                changed,
                again if self._told == _TELL else "",
            )
        self.problem = self._found = f"{changed} was changed outside the optimizer"
