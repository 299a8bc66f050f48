"""Telling of what may recur at every step, without filling a log."""

from __future__ import annotations

import time
from collections.abc import Callable


class Seldom:
    """Tells when to speak: the first times, then once in a while.

    Args:
        first: number of times that are all told.
        seconds: least time between later ones that are told, in seconds.
        clock: monotonic, in seconds.
    """

    def __init__(self, first: int = 10, seconds: float = 60.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._first = first
        self._seconds = seconds
        self._clock = clock
        self._not_before = float("-inf")
        #: Number of times that were not told since the last one that was.
        self._untold = 0

    def tell(self) -> str | None:
        """Note that it has happened again.

        Returns:
            Text to add to what is told, which names what was left out; None: nothing is to be told.
        """
        now = self._clock()
        if self._first > 0:
            self._first -= 1
        elif now < self._not_before:
            self._untold += 1
            return None
        self._not_before = now + self._seconds
        untold, self._untold = self._untold, 0
        return f" ({untold} more since the last line)" if untold else ""
