"""A log that is full."""

from __future__ import annotations

import fcntl
import os


def fill(fd: int) -> None:
    """Until a pipe takes nothing more."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_NONBLOCK)
    try:
        while True:
            os.write(fd, b"x" * 4096)
    except BlockingIOError:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags)
