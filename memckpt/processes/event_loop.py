"""The event loop of a process: descriptors, deadlines by a clock, and calls from other threads.

Deadlines are asked for in each turn: nothing has to be cancelled when they change. asyncio has no single turns for
tests, no work at a turn's end, and no seqpacket sockets with descriptors.
"""

from __future__ import annotations

import collections
import contextlib
import math
import os
import select
import time
from collections.abc import Callable
from typing import Any, Protocol

from memckpt.memory.pages import LifePage
from memckpt.protocol.descriptors import HasDescriptor


class Poller(Protocol):
    """Waits for descriptors: :func:`select.poll`, or zmq.Poller, which takes sockets of ZeroMQ as well."""

    def register(self, source: int, flags: int, /) -> Any:
        """Wait for this one, too; one that is registered gets these flags."""

    def unregister(self, source: int, /) -> None:
        """The reverse."""

    def poll(self, milliseconds: int | None, /) -> list[tuple[Any, int]]:
        """Wait; returns what is ready (a descriptor, or a socket of ZeroMQ), with flags."""


class EventLoop:
    """Belongs to one thread, :meth:`post` to all. Owns a pipe that wakes it; :meth:`close` it.

    What a callback raises leaves :meth:`turn`. The caller owns `life`, the page in which it shows that it lives, every
    `beat_seconds` at the latest.
    """

    def __init__(
        self, life: LifePage | None = None, clock: Callable[[], float] = time.monotonic, poller: Poller | None = None
    ) -> None:
        self.life, self.clock = life, clock
        self.beat_seconds: float | None = None
        self._poller: Poller = select.poll() if poller is None else poller
        self._callbacks: dict[int, Callable[[], None]] = {}
        self._work: list[tuple[Callable[[], None], Callable[[], float | None]]] = []
        self._posted: collections.deque[Callable[[], None]] = collections.deque()
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._attend(self._wake_read, self._take_posted, select.POLLIN)

    # What it waits for

    def attend(self, source: HasDescriptor, callback: Callable[[], None], to_write: bool = False) -> None:
        """Call a function, in place of an earlier one, when there is something to read; with `to_write` also room."""
        self._attend(source.fileno(), callback, select.POLLIN | (select.POLLOUT if to_write else 0))

    def _attend(self, fd: int, callback: Callable[[], None], flags: int) -> None:
        self._poller.register(fd, flags)
        self._callbacks[fd] = callback

    def unregister(self, source: HasDescriptor) -> None:
        """Call its function no more, not even if it is ready by now. Idempotent."""
        fd = source.fileno()
        if self._callbacks.pop(fd, None) is not None:
            self._poller.unregister(fd)

    def each_turn(self, work: Callable[[], None], deadline: Callable[[], float | None]) -> None:
        """Call `work` at the end of each turn. A turn ends when something happens, by `deadline()` at the latest."""
        self._work.append((work, deadline))

    def post(self, call: Callable[[], None]) -> None:
        """Have the loop call a function after earlier ones, unless it is closed. For any thread and signal handler."""
        self._posted.append(call)
        if self._wake_write >= 0:
            with contextlib.suppress(BlockingIOError):  # the pipe is full: the loop is awake
                os.write(self._wake_write, b"x")

    def _take_posted(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while os.read(self._wake_read, 4096):
                pass
        while self._posted:
            self._posted.popleft()()

    # Turns

    def deadline(self) -> float | None:
        """The earliest deadline, by the clock; None: there is none."""
        return min((at for _, deadline in self._work if (at := deadline()) is not None), default=None)

    def turn(self) -> None:
        """Wait until something happens or is due, and do it."""
        if self.life is not None:
            self.life.beat()
        wait, due = self.beat_seconds, self.deadline()
        if due is not None:
            left = max(0.0, due - self.clock())
            wait = left if wait is None else min(wait, left)
        found = self._poller.poll(None if wait is None else math.ceil(wait * 1000))
        # A function may forget another one, whose descriptor may be a new source's before its turn comes.
        for source, callback in [(source, self._callbacks.get(source)) for source, _ in found]:
            if callback is not None and self._callbacks.get(source) is callback:
                callback()
        for work, _ in self._work:
            work()

    def close(self) -> None:
        """Close the pipe. Sources and page are their owners'."""
        self._poller.unregister(self._wake_read)
        read, write, self._wake_write = self._wake_read, self._wake_write, -1
        os.close(read)
        os.close(write)
