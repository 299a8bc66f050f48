"""Shipped units run as a service manager would: commands, environment, readiness, restarts."""

from __future__ import annotations

import json
import os
import pickle
import secrets
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.support.cluster.unit_files import SYSTEMD, Unit, expand
from tests.support.trainings.engine_harness import Ended

ROOT = Path(__file__).resolve().parents[3]
LIMIT_SECONDS = 60.0


class NotifySocket:
    """The socket that a manager binds for a service of Type=notify. Its owner closes it."""

    def __init__(self, directory: Path, abstract: bool = False) -> None:
        name = f"notify-{secrets.token_hex(4)}"
        #: Value of NOTIFY_SOCKET.
        self.address = f"@{name}" if abstract else str(directory / name)
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._sock.bind(f"\0{name}" if abstract else self.address)

    def fileno(self) -> int:
        return self._sock.fileno()

    def receive(self) -> tuple[str, int]:
        """A pending datagram, and the pid of its sender."""
        text, ancillary, _, _ = self._sock.recvmsg(4096, socket.CMSG_SPACE(12), socket.MSG_DONTWAIT)
        (pid, _, _) = struct.unpack("3i", ancillary[0][2])
        return text.decode(), pid

    def close(self) -> None:
        self._sock.close()
        if self.address[0] != "@":
            Path(self.address).unlink()


@dataclass(frozen=True)
class Home:
    """Home and runtime directories of the services' user, with the files that the shipped units expect there."""

    path: Path
    runtime: Path
    run: str = "my-run"

    @classmethod
    def make(cls, path: Path, runtime: Path) -> Home:
        (path / "project").mkdir(parents=True)
        (path / "project" / "train.py").write_text("from tests.support.cluster.service_job import main\n\nmain()\n")
        (path / "venv").symlink_to(sys.prefix)
        return cls(path, runtime)

    @property
    def specifiers(self) -> dict[str, str]:
        return {"h": str(self.path), "t": str(self.runtime), "i": self.run}

    @property
    def run_dir(self) -> Path:
        return self.path / "runs" / self.run

    def plan(self, *attempts: Sequence[tuple[str, str, int]]) -> None:
        """Set the actions of each attempt of the training, by point and step: see ``service_job``."""
        (self.path / "project" / "plan.json").write_text(json.dumps(attempts))

    def go(self, number: int) -> None:
        """Let a waiting attempt continue."""
        (self.path / "project" / f"go-{number}").touch()

    def waits(self, number: int) -> bool:
        """Whether an attempt has reached its action."""
        journal = self.path / "project" / f"report-{number}" / "journal"
        return journal.exists() and '"event": "action"' in journal.read_text()

    def ended(self, number: int) -> bool:
        """Whether an attempt has reached the end of the training."""
        return (self.path / "project" / f"report-{number}" / "outcome").exists()

    def attempt(self, number: int, code: int, log: str) -> Ended:
        """Results of an attempt."""
        report = self.path / "project" / f"report-{number}"
        result = report / "outcome"
        outcome = pickle.loads(result.read_bytes()) if result.exists() else None
        events = [json.loads(line) for line in (report / "journal").read_text().splitlines()]
        return Ended(code, events, log, outcome)


class Service:
    """A shipped unit, run by this process. Its owner closes it.

    Args:
        unit: name of the unit, as shipped.
        home: home of its user.
        abstract: whether the manager's socket is in the abstract namespace.
        extra: variables that the manager adds.
    """

    def __init__(self, unit: str, home: Home, *, abstract: bool = False) -> None:
        self.unit = Unit.read(SYSTEMD / unit)
        self._home = home
        self._abstract = abstract
        self._socket: NotifySocket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self.log = home.path / f"{unit}.log"
        self.said: list[str] = []

    @property
    def process(self) -> subprocess.Popen[bytes]:
        assert self._process is not None
        return self._process

    def start(self) -> None:
        """Start its process as the manager would, without this process's environment."""
        assert self._process is None or self._process.poll() is not None
        unit, specifiers = self.unit, self._home.specifiers
        environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(self._home.path),
            "PYTHONPATH": str(ROOT),  # the tested code need not be the installed one
            **unit.environment(specifiers),
        }
        self.said = []
        self._close_socket()
        if unit.values("Type") == ["notify"]:
            self._socket = NotifySocket(self._home.runtime, self._abstract)
            environment["NOTIFY_SOCKET"] = self._socket.address
        directory = unit.values("WorkingDirectory")
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                unit.command(specifiers),
                env=environment,
                cwd=expand(directory[0], specifiers) if directory else "/",
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def until_said(self, state: str) -> None:
        """Wait until its main process, and no other, has sent this state."""
        pidfd = os.pidfd_open(self.process.pid)
        deadline = time.monotonic() + LIMIT_SECONDS
        try:
            while state not in self.said:
                ready = select.select([self._socket, pidfd], [], [], max(0.0, deadline - time.monotonic()))[0]
                assert ready, f"it has not said {state}:\n{self.log.read_text()[-3000:]}"
                if self._socket not in ready:
                    raise AssertionError(f"it has ended without {state}:\n{self.log.read_text()[-3000:]}")
                text, pid = self._socket.receive()
                assert pid == self.process.pid
                self.said += text.split("\n")
        finally:
            os.close(pidfd)

    def wait(self) -> int:
        """Wait for its end; returns the exit code, negative for a signal."""
        try:
            return self.process.wait(LIMIT_SECONDS)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"pid {self.process.pid} lives on:\n{self.log.read_text()[-3000:]}") from None

    def stop(self) -> int:
        """``systemctl stop``: SIGTERM, and a wait as long as the unit permits. Returns the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(self.unit.seconds("TimeoutStopSec"))

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(LIMIT_SECONDS)

    def _close_socket(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def close(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self.kill()
        self._close_socket()
