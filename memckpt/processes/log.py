"""A log that never blocks, even if its disk does: lines wait in a bounded queue for a thread that writes them."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator

#: Most lines that wait to be written; later ones are dropped and counted.
_MOST_WAITING = 10_000
#: Longest wait, in seconds, for queued lines at the end of the process.
_END_SECONDS = 2.0


class QueuedLines(logging.Handler):
    """Formats records in the caller, and writes them in a thread. :meth:`stop` ends the thread."""

    def __init__(self, fd: int, most_waiting: int = _MOST_WAITING) -> None:
        super().__init__()
        self._fd = fd
        self._lines: queue.Queue[bytes | None] = queue.Queue(most_waiting)
        self._ended = threading.Event()
        #: Lines dropped since the last one that was queued.
        self.dropped = 0
        # A daemon: nothing can interrupt a write to a disk that hangs.
        self._thread = threading.Thread(target=self._write, name="memckpt-log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        """Queue a record. Never blocks: called by loops that trainers wait for."""
        try:
            line = self.format(record)
            if self.dropped:
                line = f"(the log was blocked: {self.dropped} lines were dropped here)\n{line}"
            self._lines.put_nowait(f"{line}\n".encode(errors="backslashreplace"))
        except queue.Full:
            self.dropped += 1
        except Exception:  # formatting failed: handled as in the standard library
            self.handleError(record)
        else:
            self.dropped = 0

    def _write(self) -> None:
        while (line := self._lines.get()) is not None:
            # A full disk, or a pipe without a reader: there is nowhere to report it, and the next line may succeed.
            with contextlib.suppress(OSError):
                while line:
                    line = line[os.write(self._fd, line) :]
        self._ended.set()

    def stop(self) -> None:
        """End the thread, and wait briefly until queued lines are written."""
        with contextlib.suppress(queue.Full):
            self._lines.put_nowait(None)
            self._ended.wait(_END_SECONDS)


@contextlib.contextmanager
def logging_to_stderr(who: str = "") -> Iterator[None]:
    """Log INFO and above to standard error in the block, without blocking; `who`: name in each line of a shared log."""
    handler = QueuedLines(sys.stderr.fileno())
    handler.setFormatter(logging.Formatter(f"%(asctime)s {who}{' ' if who else ''}%(levelname)s %(message)s"))
    root = logging.getLogger()
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    try:
        yield
    finally:
        root.removeHandler(handler)
        handler.stop()


class Seldom:
    """Tells when to speak: the `first` times, then at most once in so many seconds."""

    def __init__(self, first: int = 10, seconds: float = 60.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._first, self._seconds, self._clock = first, seconds, clock
        self._not_before = float("-inf")
        #: Number of times that were not told since the last one that was.
        self._untold = 0

    def count(self) -> str | None:
        """Count one more time; returns a text to add to what is told, on what was left out; None: tell nothing."""
        now = self._clock()
        if self._first > 0:
            self._first -= 1
        elif now < self._not_before:
            self._untold += 1
            return None
        self._not_before = now + self._seconds
        untold, self._untold = self._untold, 0
        return f" ({untold} more since the last line)" if untold else ""
