"""When a process that has died is started again."""

from __future__ import annotations

import time
from collections.abc import Callable


class Backoff:
    """How long to wait after each death: not at all at first, then twice as long each time, up to a limit.

    It never gives up: training that waits for what the process does would stand still for ever.

    Args:
        clock: in seconds.
        at_once: so often in a row one takes the place of the last at once.
        first: the shortest pause, in seconds.
        longest: the longest.
        steady: one that has lived so long did not die of how it was started.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        *,
        at_once: int = 2,
        first: float = 1.0,
        longest: float = 60.0,
        steady: float = 60.0,
    ) -> None:
        self._clock = clock
        self._at_once = at_once
        self._first = first
        self._longest = longest
        self._steady = steady
        self._started = clock()
        self._deaths = 0

    def reset(self) -> None:
        """What comes now has nothing to do with what was before."""
        self._deaths = 0

    def started(self) -> None:
        """One has been started, or is about to be."""
        self._started = self._clock()

    def died(self) -> float:
        """The seconds until another one is to be started: 0 for at once."""
        if self._clock() - self._started >= self._steady:
            self._deaths = 0
        self._deaths += 1
        if self._deaths <= self._at_once:
            return 0.0
        return min(self._longest, self._first * 2.0 ** min(self._deaths - self._at_once - 1, 10))
