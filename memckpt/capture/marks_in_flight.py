"""Landing marks of gradients whose copies are in flight: set once the copies are known to be done."""

from __future__ import annotations

import threading
from collections import deque

from memckpt.capture.copier import Copier


class MarksInFlight:
    """Marks of one record that wait for an asynchronous copier. Never blocks on a copy.

    Thread-safe: hooks of one backward may run in several threads.
    """

    def __init__(self, copier: Copier) -> None:
        self._copier = copier
        self._waiting: deque[tuple[int, memoryview, int, int]] = deque()  # ticket, words, index, value
        # The newest mark of each parameter; a waiting mark with another value has been superseded by a later copy.
        self._newest: dict[int, int] = {}
        self._lock = threading.Lock()

    def add(self, words: memoryview, index: int, value: int) -> None:
        """Set the mark once the copy that has just begun is done."""
        with self._lock:
            ticket = self._copier.ticket()
            # Asking the device takes about a microsecond: once per launch of copies, not per gradient.
            if self._waiting and self._waiting[-1][0] != ticket:
                self._set()
            self._waiting.append((ticket, words, index, value))
            self._newest[index] = value

    def drop(self, index: int) -> None:
        """Void the waiting marks of a parameter whose gradient is about to be overwritten."""
        with self._lock:
            self._newest.pop(index, None)

    def look(self) -> None:
        """Set the marks of all copies that are done."""
        with self._lock:
            self._set()

    def forget(self) -> None:
        """Drop all marks: the record is over."""
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
