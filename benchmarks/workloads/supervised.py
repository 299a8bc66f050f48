"""A trainee under ``memckpt run``, for benchmarks that kill it and see it started again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from benchmarks.harness.processes import Lines, end_agent

_ROOT = Path(__file__).resolve().parents[2]


class Supervised:
    """A trainee and its supervisor; leaving the block ends both, and the agent.

    Args:
        arguments: of the trainee.
        cold: whether restarts import everything again.
    """

    def __init__(self, arguments: Sequence[str], cold: bool) -> None:
        supervisor = [sys.executable, "-m", "memckpt", "run", *(["--cold"] if cold else []), "--"]
        command = [*supervisor, sys.executable, "-m", "benchmarks.workloads.trainee_process", *arguments]
        # One pipe: what the supervisor says stands among the trainee's events.
        self._process = subprocess.Popen(command, cwd=_ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        self._lines = Lines(self._process)
        self._agent: int | None = None
        self._trainee = 0
        self._killed = 0
        self._warm = False

    def __enter__(self) -> Supervised:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.terminate()
        self._process.wait()
        self._lines.close()
        if self._agent is not None:
            end_agent(self._agent)

    def wait_for(self, event: str, count: int = 1) -> dict[str, Any]:
        """Wait for the `count`-th such event from now on."""
        while True:
            said = self._next()
            if said.get("event") == event:
                count -= 1
                if count == 0:
                    return said

    def wait_for_next_start(self, event: str) -> dict[str, Any]:
        """Wait for an event of the attempt that follows the killed one."""
        while self._trainee == self._killed:
            self._next()
        return self.wait_for(event)

    def wait_until_warm(self) -> None:
        """Wait until the supervisor has said that the next start is warm."""
        while not self._warm:
            self._next()

    def skip(self) -> None:
        """Drop what has been said so far."""
        while self._lines.ready:
            self._next()

    def kill(self) -> None:
        """Kill the trainee."""
        self._killed = self._trainee
        os.kill(self._trainee, signal.SIGKILL)

    def _next(self) -> dict[str, Any]:
        line = self._lines.next()
        if not line.startswith(b"{"):
            if b"restarts will be cold" in line or b"start is cold" in line:
                raise RuntimeError(line.decode())
            self._warm = self._warm or b"imported ahead" in line
            return {}
        said: dict[str, Any] = json.loads(line)
        self._agent = said.get("pid", self._agent)
        self._trainee = said.get("trainee", self._trainee)
        return said
