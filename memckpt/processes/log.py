"""A log that never blocks: lines wait in a bounded queue for a thread that writes them.

The log is a file in the run directory, which may be on a network disk that hangs, or a pipe that nobody reads. A loop
blocked on it would stop training.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import sys
import threading
from collections.abc import Iterator

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
    """Log INFO and above to standard error inside the block, without blocking the caller.

    Args:
        who: name in each line, for a process that shares its log with others.
    """
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
