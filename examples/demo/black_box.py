"""The training's position in a page of memory that outlives the process, as a flight recorder outlives a crash."""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass
from pathlib import Path

#: Phases of a step. "commit" lasts from the end of the optimizer's step to the start of the next forward.
PHASES = ("start-up", "forward", "backward", "optimizer", "commit")


@dataclass(frozen=True)
class Position:
    """A moment of a training.

    Attributes:
        step: number of the step in progress, from 1; 0 before the first.
        phase: one of :data:`PHASES`.
        finished: the last step that the optimizer has taken.
        closed: the last step whose batch has ended, including all callbacks.
    """

    step: int
    phase: str
    finished: int
    closed: int


class BlackBox:
    """Four words in a mapped file. One process writes them, another reads them; each word is atomic."""

    BYTES = 32

    def __init__(self, path: Path) -> None:
        fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.ftruncate(fd, self.BYTES)
            self._words = memoryview(mmap.mmap(fd, self.BYTES)).cast("q")
        finally:
            os.close(fd)

    def write(self, *, step: int, phase: str, finished: int, closed: int) -> None:
        self._words[0], self._words[1] = step, PHASES.index(phase)
        self._words[2], self._words[3] = finished, closed

    def read(self) -> Position:
        step, phase, finished, closed = self._words
        return Position(step, PHASES[phase], finished, closed)
