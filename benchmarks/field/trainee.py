"""A run of the training, as the benchmark sees it: started, let through its steps, killed and started again.

Its processes carry a mark in their environment, by which helpers that leave their parent are found, too.
"""

from __future__ import annotations

import itertools
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from benchmarks.field.gate import ALL_STEPS

_ROOT = Path(__file__).resolve().parents[2]
#: Seconds until a run that reports nothing is given up.
PATIENCE_SECONDS = 120.0
#: The variable with a run's mark.
MARK = "FIELD_RUN"
_TICKS = os.sysconf("SC_CLK_TCK")
#: A background that takes no more than this of a core is idle: it polls.
_IDLE_SHARE = 0.1
_WATCHED_SECONDS = 0.1
#: A background that is never idle is waited for no longer than this.
_SETTLE_SECONDS = 4.0


class RunFailed(RuntimeError):
    """A run ended by itself, or stood still."""


@dataclass(frozen=True)
class Block:
    """Steps taken without a pause.

    Attributes:
        seconds: of each.
        cpu_seconds: of all its processes, per step, with what they did behind the last one.
    """

    seconds: list[float]
    cpu_seconds: float


@dataclass
class Record:
    """Reports of a run.

    Attributes:
        losses, data: of each step, the last time that it was taken.
        digests: of the final state; empty before the end.
    """

    losses: dict[int, str] = field(default_factory=dict)
    data: dict[int, int] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)


class Trainee:
    """A run of the training. Owns its processes; leaving the block ends what is left of them.

    Args:
        launcher: a command in front of the training's; it starts the training again when that dies.
        arguments: of ``benchmarks.field.train``.
        directory: its own, empty.
    """

    def __init__(self, launcher: Sequence[str], arguments: Sequence[str], directory: Path) -> None:
        directory.mkdir()
        self.directory = directory
        self.record = Record()
        self._supervised = bool(launcher)
        self._mark = uuid.uuid4().hex
        gate = directory / "gate"
        training = ["-m", "benchmarks.field.train", "--gate", str(gate), "--directory", str(directory), *arguments]
        self._command = [*launcher, *training] if launcher else [sys.executable, *training]
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(gate))
        self._listener.listen()
        self._log = (directory / "log").open("ab")
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None
        self._buffer = b""
        self._pid = 0

    def __enter__(self) -> Trainee:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end(self._marked())
        if self._process is not None:
            self._process.wait()
        for left in Path("/dev/shm").glob(f"*{self._mark}*"):
            left.unlink()
        self._disconnect()
        self._listener.close()
        self._log.close()

    def start(self) -> None:
        """Start it and wait for its report.

        Raises:
            RunFailed: it ended before that.
        """
        path = os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH", "")]))
        environment = {**os.environ, "PYTHONPATH": path, MARK: self._mark}
        # Sessions are what the kernel divides a busy machine's cores among: each run has one, as some launchers make.
        self._process = subprocess.Popen(
            self._command, cwd=self.directory, env=environment, stdin=subprocess.DEVNULL,
            stdout=self._log, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        self._accept()

    def wait_for(self, event: str, step: int = 0) -> dict[str, Any]:
        """Read reports up to `event` of `step` or a later one.

        Raises:
            RunFailed: the run ended by itself, or stood still.
        """
        while True:
            said = self._next()
            if said["event"] == event and said.get("step", step) >= step:
                return said

    def let_through(self, steps: int = ALL_STEPS) -> None:
        """Permit so many steps more."""
        assert self._connection is not None
        self._connection.sendall(f"{steps}\n".encode())

    def take_block(self, steps: int, settle: bool) -> Block:
        """Let it take a step that is not timed and `steps` that are; it stands at its gate before and behind.

        `settle`: wait for what it does in the background, and count that, too.
        """
        before = self._cpu_seconds()
        self.let_through(steps + 1)
        moments: list[float] = []
        while len(moments) < steps + 1:
            moments.append(float(self.wait_for("begin")["at"]))
        if settle:
            self._settle()
        spent = self._cpu_seconds() - before
        seconds = [after - earlier for earlier, after in itertools.pairwise(moments)]
        return Block(seconds, spent / (steps + 1))

    def kill(self) -> float:
        """Send SIGKILL to the training's process, and start it again unless its launcher does; the signal's time.

        Raises:
            RunFailed: it does not start again.
        """
        sent_at = time.monotonic()
        os.kill(self._pid, signal.SIGKILL)
        self._disconnect()
        if self._supervised:
            self._accept()
        else:
            assert self._process is not None
            self._process.wait()
            self.start()
        return sent_at

    def wait_until_ended(self) -> None:
        """Wait for the end of a run that has reported its final state.

        Raises:
            RunFailed: it does not end, or fails at its end.
        """
        assert self._process is not None
        try:
            status = self._process.wait(PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            raise RunFailed("does not end") from None
        if status != 0:
            raise RunFailed(f"ended with status {status}: {self._last_words()}")

    def memory_bytes(self) -> int:
        """Memory of its processes; what several share is divided among them."""
        found = 0
        for pid in self._marked():
            try:
                lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
            except (FileNotFoundError, ProcessLookupError):
                continue  # it has ended
            found += sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))
        return found

    def disk_bytes(self) -> int:
        """Bytes of the files that it has written."""
        files = [path for path in self.directory.rglob("*") if path.is_file() and not path.is_symlink()]
        return sum(path.stat().st_size for path in files)

    def _accept(self) -> None:
        assert self._process is not None
        ended = os.pidfd_open(self._process.pid)
        try:
            ready, _, _ = select.select([self._listener.fileno(), ended], [], [], PATIENCE_SECONDS)
        finally:
            os.close(ended)
        if self._listener.fileno() not in ready:
            raise RunFailed(self._last_words() if ready else "does not start")
        self._connection, _ = self._listener.accept()
        self._buffer = b""
        self._pid = int(self._next()["pid"])

    def _next(self) -> dict[str, Any]:
        assert self._connection is not None
        while b"\n" not in self._buffer:
            ready, _, _ = select.select([self._connection], [], [], PATIENCE_SECONDS)
            if not ready:
                raise RunFailed("stands still")
            chunk = self._read(self._connection)
            if not chunk:
                raise RunFailed(self._last_words())
            self._buffer += chunk
        line, self._buffer = self._buffer.split(b"\n", 1)
        said: dict[str, Any] = json.loads(line)
        if said["event"] == "failed":
            raise RunFailed(said["why"].replace(str(self.directory), "RUN"))
        if said["event"] == "end":
            self.record.losses[said["step"]] = said["loss"]
            self.record.data[said["step"]] = said["data"]
        if said["event"] == "finished":
            self.record.digests = said["digests"]
        return said

    @staticmethod
    def _read(connection: socket.socket) -> bytes:
        try:
            return connection.recv(1 << 16)
        except ConnectionResetError:
            return b""

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _last_words(self) -> str:
        """The last line that it wrote, mostly the error that ended it."""
        text = (self.directory / "log").read_text(errors="replace").replace(str(self.directory), "RUN")
        lines = text.strip().splitlines()
        return lines[-1].strip() if lines else "ended without a word"

    def _settle(self) -> None:
        """Wait until its processes are idle: a background that polls has no event to wait for."""
        deadline = time.monotonic() + _SETTLE_SECONDS
        while time.monotonic() < deadline:
            before = self._cpu_seconds()
            time.sleep(_WATCHED_SECONDS)  # the span over which processor time is counted
            if self._cpu_seconds() - before <= _IDLE_SHARE * _WATCHED_SECONDS + 1 / _TICKS:
                return

    def _marked(self) -> list[int]:
        """Pids of its processes."""
        wanted = f"{MARK}={self._mark}".encode()
        found = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdecimal():
                continue
            try:
                variables = (entry / "environ").read_bytes().split(b"\0")
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue  # ended, or another user's
            if wanted in variables:
                found.append(int(entry.name))
        return found

    def _cpu_seconds(self) -> float:
        """CPU seconds of its processes, and of their children that have ended."""
        ticks = 0
        for pid in self._marked():
            try:
                stat = Path(f"/proc/{pid}/stat").read_text()
            except (FileNotFoundError, ProcessLookupError):
                continue  # it has ended
            ticks += sum(map(int, stat[stat.rindex(")") + 2 :].split()[11:15]))
        return ticks / _TICKS

    @staticmethod
    def _end(pids: Sequence[int]) -> None:
        for pid in pids:
            try:
                process = os.pidfd_open(pid)
            except ProcessLookupError:
                continue
            try:
                signal.pidfd_send_signal(process, signal.SIGKILL)
                select.select([process], [], [], PATIENCE_SECONDS)
            except ProcessLookupError:
                continue  # it ended by itself
            finally:
                os.close(process)
