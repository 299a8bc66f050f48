"""What changed outside the optimizer: found, told, and answered with a new generation."""

from __future__ import annotations

import logging

from memckpt.capture.recorder import Recorder
from memckpt.capture.slot_writer import SlotWriter
from memckpt.capture.watch import ParameterWatch, StaticWatch

_log = logging.getLogger("memckpt")
#: So often a change is told.
_TELL = 3


class Changes:
    """Watches the tensors of the generation that is being written."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._static: StaticWatch | None = None
        self._hidden = False
        self._told = 0
        #: Why the state must be written anew; None if it need not.
        self.problem: str | None = None
        recorder.on_backward = self.look_before_backward

    def watch(self, writer: SlotWriter) -> None:
        """Remember the tensors of a generation as they are now."""
        self._recorder.watch = ParameterWatch(writer)
        self._static = StaticWatch(writer)

    def forget(self) -> None:
        self._recorder.watch = self._static = None

    def look_before_backward(self) -> None:
        """As a backward begins: were parameters changed since their optimizer's step?"""
        watch = self._recorder.watch
        if watch is not None and self.problem is None:
            counted = watch.counted_change()
            changed = counted or watch.sampled_change()
            self._hidden = self._hidden or (changed is not None and counted is None)
            self._note(changed)

    def look_at_commit(self) -> None:
        """The same, at the end of a record."""
        watch = self._recorder.watch
        if watch is not None:
            changed = watch.counted_change()
            if changed is None and self._hidden:
                # Whoever has once changed values behind the counters' back may do it after every step.
                changed = watch.sampled_change()
            self._note(changed)

    def static_changes(self) -> list[str]:
        """The names of tensors that were taken for constant and have changed."""
        return self._static.changed() if self._static is not None else []

    def _note(self, changed: str | None) -> None:
        if changed is None or self.problem is not None:
            return
        self._told += 1
        if self._told <= _TELL:
            again = "; this happens again and again and costs a copy of the whole state each time"
            _log.warning(
                "memckpt: %s was changed outside the optimizer; redo cannot know of that, so the state is written "
                "anew%s",
                changed,
                again if self._told == _TELL else "",
            )
        self.problem = f"{changed} was changed outside the optimizer"
