"""Processes of memckpt, seen from outside: their output, end and CPU time."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
from pathlib import Path

#: Seconds until a process that does not answer is given up.
PATIENCE_SECONDS = 300.0
_TICKS = os.sysconf("SC_CLK_TCK")


class Lines:
    """The lines that a process writes to its standard output, as they come.

    Args:
        process: started with a pipe for its standard output, in binary mode.
    """

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        self._pipe = process.stdout
        self._buffer = b""

    def next(self) -> bytes:
        """The next line.

        Raises:
            RuntimeError: the process has ended, or has said nothing for minutes.
        """
        while b"\n" not in self._buffer:
            ready, _, _ = select.select([self._pipe], [], [], PATIENCE_SECONDS)
            chunk = os.read(self._pipe.fileno(), 1 << 16) if ready else b""
            if not chunk:
                raise RuntimeError("the trainee has ended" if ready else "the trainee says nothing")
            self._buffer += chunk
        line, self._buffer = self._buffer.split(b"\n", 1)
        return line

    @property
    def ready(self) -> bool:
        """Whether something has come that is not taken yet."""
        return b"\n" in self._buffer or bool(select.select([self._pipe], [], [], 0)[0])

    def close(self) -> None:
        """Close the pipe."""
        self._pipe.close()


def end_agent(pid: int) -> None:
    """End an agent, and wait until its memory is free for the next case."""
    with contextlib.suppress(ProcessLookupError):
        agent = os.pidfd_open(pid)
        signal.pidfd_send_signal(agent, signal.SIGTERM)
        select.select([agent], [], [], PATIENCE_SECONDS)
        os.close(agent)


def children(pid: int) -> list[int]:
    """Pids of a process's children."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def cpu_seconds(pid: int) -> float:
    """CPU seconds of all threads of a process."""
    stat = Path(f"/proc/{pid}/stat").read_text()
    user, system = stat[stat.rindex(")") + 2 :].split()[11:13]
    return (int(user) + int(system)) / _TICKS
