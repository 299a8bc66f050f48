"""Changes that the optimizer did not make: detected, logged, and answered with a new generation."""

from __future__ import annotations

import logging

from memckpt.capture.recorder import Recorder
from memckpt.capture.slot_writer import SlotWriter
from memckpt.capture.watch import ParameterWatch, StaticWatch

_log = logging.getLogger("memckpt")
#: Number of changes that are logged; later ones are not.
_TELL = 3


class Changes:
    """Watches the tensors of the current generation.

    Attributes:
        problem: why the whole state has to be written again, in words; None if it need not be.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._static: StaticWatch | None = None
        self._hidden = False
        self._told = 0
        self.problem: str | None = None
        recorder.on_backward = self.look_before_backward

    def watch(self, writer: SlotWriter) -> None:
        """Take the current values of a generation's tensors as unchanged."""
        self._recorder.watch = ParameterWatch(writer)
        self._static = StaticWatch(writer)

    def forget(self) -> None:
        self._recorder.watch = self._static = None

    def look_before_backward(self) -> None:
        """Check, as a backward begins, whether parameters have changed since their optimizer's step."""
        watch = self._recorder.watch
        if watch is not None and self.problem is None:
            counted = watch.counted_change()
            changed = counted or watch.sampled_change()
            self._hidden = self._hidden or (changed is not None and counted is None)
            self._note(changed)

    def look_at_commit(self) -> None:
        """Check the same at the end of a record."""
        watch = self._recorder.watch
        if watch is not None:
            changed = watch.counted_change()
            if changed is None and self._hidden:
                # Values that changed once without a version counter may do so after every step.
                changed = watch.sampled_change()
            self._note(changed)

    def static_changes(self) -> list[str]:
        """Names of static tensors that have changed."""
        return self._static.changed() if self._static is not None else []

    def _note(self, changed: str | None) -> None:
        if changed is None or self.problem is not None:
            return
        self._told += 1
        if self._told <= _TELL:
            again = (
                "; this happens again and again and costs a copy of the whole state each time: redo='capture' copies "
                "it every capture_every_steps steps only. An optimizer that memckpt was not given does this, too, and "
                "its state is not restored"
            )
            _log.warning(
                "memckpt: %s was changed outside the optimizer; redo cannot know of that, so the state is written "
                "anew%s",
                changed,
                again if self._told == _TELL else "",
            )
        self.problem = f"{changed} was changed outside the optimizer"
