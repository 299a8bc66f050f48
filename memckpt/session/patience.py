"""Retries of a start while storage cannot be read."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

_log = logging.getLogger("memckpt")


class Patience:
    """Exponential backoff of one start, up to a time limit.

    Args:
        seconds: time limit, counted from the first failure.
        clock: returns the current time, in seconds.
        pause: sleeps for a number of seconds.
    """

    def __init__(
        self,
        seconds: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self.seconds = seconds
        self._clock = clock
        self._pause = pause
        self._next = 1.0
        self._until: float | None = None

    def again(self, problem: str) -> bool:
        """Log the problem and wait. Returns False, without waiting, once the time limit is over.

        Args:
            problem: file or place that could not be read, and the reason.
        """
        if self._until is None:
            self._until = self._clock() + self.seconds
        left = self._until - self._clock()
        if left <= 0:
            return False
        seconds = min(self._next, left)
        _log.warning("memckpt: %s; tried again in %.0f s, for %.0f s at most", problem, seconds, left)
        self._pause(seconds)
        self._next *= 2
        return True
