"""How long a start waits for storage that cannot be read for a moment."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

_log = logging.getLogger("memckpt")


class Patience:
    """Backoff of one start: ever longer pauses, until its time is over.

    Args:
        seconds: how long, counted from the first failure.
        clock, pause: tell the time and let it pass, in seconds.
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
        """Wait, and say so; False if the time is over.

        Args:
            problem: what could not be read, and why.
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
