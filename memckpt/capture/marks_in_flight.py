"""Marks of gradients whose copies are still on their way: they are set once the copies are known to be done."""

from __future__ import annotations

import threading
from collections import deque

from memckpt.capture.copier import Copier


class MarksInFlight:
    """Waiting marks of one record, for an asynchronous copier. Nothing here ever waits for a copy.

    Hooks of one backward may run in several threads, so that calls exclude each other.
    """

    def __init__(self, copier: Copier) -> None:
        self._copier = copier
        self._waiting: deque[tuple[int, memoryview, int, int]] = deque()  # ticket, words, index, value
        # What is to be set for a parameter; another value than the waiting mark's says that it was copied over since.
        self._newest: dict[int, int] = {}
        self._lock = threading.Lock()

    def add(self, words: memoryview, index: int, value: int) -> None:
        """A copy has begun: set the mark when it is done."""
        with self._lock:
            ticket = self._copier.ticket()
            # Asking the device costs a microsecond: once for each hand-over of copies, not for each gradient.
            if self._waiting and self._waiting[-1][0] != ticket:
                self._set()
            self._waiting.append((ticket, words, index, value))
            self._newest[index] = value

    def drop(self, index: int) -> None:
        """A parameter's gradient is about to be copied over: what waits for it is void."""
        with self._lock:
            self._newest.pop(index, None)

    def look(self) -> None:
        """Set the marks of all copies that are done by now."""
        with self._lock:
            self._set()

    def forget(self) -> None:
        """The record is over."""
        with self._lock:
            self._waiting.clear()
            self._newest.clear()
            self._copier.done()

    def _set(self) -> None:
        done = self._copier.done()
        while self._waiting and self._waiting[0][0] <= done:
            _, words, index, value = self._waiting.popleft()
            if self._newest.get(index) == value:
                words[index] = value
