"""When a process that has died is started again."""

from __future__ import annotations

import time
from collections.abc import Callable

#: So often in a row one takes its place at once.
_AT_ONCE = 2
_FIRST_SECONDS = 1.0
_MOST_SECONDS = 60.0
#: One that has lived so long did not die of how it was started.
_STEADY_SECONDS = 60.0


class Backoff:
    """How long to wait after each death: not at all at first, then twice as long each time, a minute at most.

    It never gives up: training that waits for what the process does would stand still for ever.

    Args:
        clock: in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
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
        if self._clock() - self._started >= _STEADY_SECONDS:
            self._deaths = 0
        self._deaths += 1
        if self._deaths <= _AT_ONCE:
            return 0.0
        return min(_MOST_SECONDS, _FIRST_SECONDS * 2.0 ** min(self._deaths - _AT_ONCE - 1, 10))
