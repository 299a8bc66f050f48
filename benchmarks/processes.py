"""Running `trainee_process`, and reading its output."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parents[1]
_PATIENCE_SECONDS = 300.0


class TraineeProcess:
    """A running trainee. :meth:`kill` ends it as a crash would."""

    def __init__(self, *arguments: str) -> None:
        self.started_at = time.monotonic()
        self.moments: dict[str, float] = {}
        self.agent_pid: int | None = None
        self.numel = 0
        command = [sys.executable, "-m", "benchmarks.trainee_process", *arguments]
        self._process = subprocess.Popen(command, cwd=_ROOT, stdout=subprocess.PIPE)
        self.pid = self._process.pid
        self._buffer = b""

    def wait_for(self, event: str, count: int = 1) -> dict[str, Any]:
        """Wait until it reports `event` for the `count`-th time from now on. The time of the first one is kept.

        Raises:
            RuntimeError: it ended, or reported nothing for minutes.
        """
        while True:
            said: dict[str, Any] = json.loads(self._line())
            self.moments.setdefault(said["event"], said["at"])
            self.agent_pid = said.get("pid", self.agent_pid)
            self.numel = said.get("numel", self.numel)
            if said["event"] == event:
                count -= 1
                if count == 0:
                    return said

    def _line(self) -> bytes:
        assert self._process.stdout is not None
        while b"\n" not in self._buffer:
            ready, _, _ = select.select([self._process.stdout], [], [], _PATIENCE_SECONDS)
            chunk = os.read(self._process.stdout.fileno(), 1 << 16) if ready else b""
            if not chunk:
                raise RuntimeError("the trainee has ended" if ready else "the trainee says nothing")
            self._buffer += chunk
        line, self._buffer = self._buffer.split(b"\n", 1)
        return line

    def kill(self) -> tuple[float, float]:
        """Send SIGKILL; returns the times of the signal and of the process's end, in seconds."""
        sent_at = time.monotonic()
        self._process.kill()
        self._process.wait()
        return sent_at, time.monotonic()

    def close(self) -> None:
        """End it, and its agent."""
        if self._process.poll() is None:
            self.kill()
        assert self._process.stdout is not None
        self._process.stdout.close()
        if self.agent_pid is not None:
            end_agent(self.agent_pid)


def end_agent(pid: int) -> None:
    """End an agent, and wait until its memory is free for the next case."""
    with contextlib.suppress(ProcessLookupError):
        agent = os.pidfd_open(pid)
        signal.pidfd_send_signal(agent, signal.SIGTERM)
        select.select([agent], [], [], _PATIENCE_SECONDS)
        os.close(agent)


@contextlib.contextmanager
def trainee_process(*arguments: str) -> Iterator[TraineeProcess]:
    """A trainee that ends with the block, together with its agent."""
    process = TraineeProcess(*arguments)
    try:
        yield process
    finally:
        process.close()


def proportional_bytes(pid: int) -> int:
    """Proportional set size (PSS) of a process in bytes.

    File-backed pages are left out: they are libraries, shared by every process that uses torch.
    """
    fields = {}
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]:
        name, kibibytes, _ = line.split()
        fields[name] = int(kibibytes) * 1024
    return fields["Pss_Anon:"] + fields["Pss_Shmem:"]
