"""A log that never blocks: what a process has to say waits in a bounded queue for a thread that writes it.

The log is a file in the run directory, which may be on a network disk that hangs, or a pipe that nobody reads. A loop
that waited for it would stop training with it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import sys
import threading
from collections.abc import Iterator

#: Lines that wait to be written; later ones are dropped and counted.
_MOST_WAITING = 10_000
#: How long the end of the process waits for what is still to be written.
_END_SECONDS = 2.0


class QueuedLines(logging.Handler):
    """Formats records where they are made, and has a thread of its own write them. :meth:`stop` ends the thread."""

    def __init__(self, fd: int, most_waiting: int = _MOST_WAITING) -> None:
        super().__init__()
        self._fd = fd
        self._lines: queue.Queue[bytes | None] = queue.Queue(most_waiting)
        self._ended = threading.Event()
        #: Lines that found no room, since the last that did.
        self.dropped = 0
        # A daemon, as nothing can interrupt a write to a disk that hangs.
        self._thread = threading.Thread(target=self._write, name="memckpt-log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        """Never blocks: called by loops that trainers wait for."""
        try:
            line = self.format(record)
            if self.dropped:
                line = f"(the log takes nothing: {self.dropped} lines were dropped here)\n{line}"
            self._lines.put_nowait(f"{line}\n".encode(errors="backslashreplace"))
        except queue.Full:
            self.dropped += 1
        except Exception:  # what cannot be formatted: as the handlers of the standard library do
            self.handleError(record)
        else:
            self.dropped = 0

    def _write(self) -> None:
        while (line := self._lines.get()) is not None:
            # A full disk, a pipe that nobody reads any more: there is nowhere to say it, and the next line may pass.
            with contextlib.suppress(OSError):
                while line:
                    line = line[os.write(self._fd, line) :]
        self._ended.set()

    def stop(self) -> None:
        """Have what waits written, if that takes no longer than a moment, and end."""
        with contextlib.suppress(queue.Full):
            self._lines.put_nowait(None)
            self._ended.wait(_END_SECONDS)


@contextlib.contextmanager
def logging_to_stderr(who: str = "") -> Iterator[None]:
    """In here, what is logged at INFO and above goes to standard error, and nothing that logs waits for it.

    Args:
        who: in each line, for a process that shares its log with others.
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
