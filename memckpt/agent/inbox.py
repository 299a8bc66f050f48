"""Messages to an event loop from other threads and from signal handlers."""

from __future__ import annotations

import collections
import contextlib
import os
import selectors
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Inbox(Generic[T]):
    """Owns a pipe that wakes the loop; :meth:`close` it once nobody puts anything in any more.

    Args:
        selector: of the loop; its data are functions without arguments.
        take: called on the loop with each message, in the order in which they came.
    """

    def __init__(self, selector: selectors.BaseSelector, take: Callable[[T], None]) -> None:
        self._selector = selector
        self._take = take
        self._messages: collections.deque[T] = collections.deque()
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def open(self) -> None:
        """Have the loop look into it from now on."""
        self._selector.register(self._wake_read, selectors.EVENT_READ, self._drain)

    def put(self, message: T) -> None:
        """Hand a message to the loop, from any thread."""
        self._messages.append(message)
        with contextlib.suppress(BlockingIOError):  # the pipe is full: the loop is awake
            os.write(self._wake_write, b"x")

    def _drain(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while os.read(self._wake_read, 4096):
                pass
        while self._messages:
            self._take(self._messages.popleft())

    def close(self) -> None:
        os.close(self._wake_read)
        os.close(self._wake_write)
