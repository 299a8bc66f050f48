"""Pauses before what failed is tried again: a process that died, a connection, a full disk, a store."""

from __future__ import annotations

import time
from collections.abc import Callable


class Backoff:
    """Pauses: none after `at_once` deaths in a row, then `first` seconds, doubled each time, up to `longest`.

    A life of `steady` seconds is no failure. Pauses never end by themselves: who gives up has a deadline.
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
        self._clock, self._at_once, self._first = clock, at_once, first
        self._longest, self._steady = longest, steady
        self._started = clock()
        self._deaths = 0

    def reset(self) -> None:
        """Drop earlier deaths: the next process has nothing to do with them."""
        self._deaths = 0

    def started(self) -> None:
        """Note that a process has been started, or is about to be."""
        self._started = self._clock()

    @property
    def steady(self) -> bool:
        """Whether the process has lived so long that its death is no failed start."""
        return self._clock() - self._started >= self._steady

    def died(self) -> float:
        """Note a death; returns the seconds until the next start, 0 for at once."""
        if self.steady:
            self._deaths = 0
        self._deaths += 1
        if self._deaths <= self._at_once:
            return 0.0
        return min(self._longest, self._first * 2.0 ** min(self._deaths - self._at_once - 1, 10))
