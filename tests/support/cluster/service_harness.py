"""Shipped systemd units, run by this process as a service manager would, or by a user manager of their own.

This process knows the features that the shipped units use: commands, environment, readiness, restarts.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import secrets
import select
import shlex
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.trainings.engine_harness import Ended

ROOT = Path(__file__).resolve().parents[3]
SYSTEMD = ROOT / "deploy" / "systemd"
LIMIT_SECONDS = 60.0
#: Ends by these signals are no failures: systemd.service(5), Restart=.
_CLEAN_SIGNALS = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGPIPE)
_PLACES = ("/usr/lib/systemd/systemd", "/lib/systemd/systemd")
_START_SECONDS = 20.0
_COMMAND_SECONDS = 90.0


@dataclass(frozen=True)
class Unit:
    """A unit file."""

    path: Path
    settings: tuple[tuple[str, str, str], ...]  # section, name and value of each line, in the file's order

    @classmethod
    def read(cls, path: Path) -> Unit:
        found, section = [], ""
        for line in path.read_text().replace("\\\n", " ").splitlines():
            line = line.strip()
            if not line or line[0] in "#;":
                continue
            if line[0] == "[":
                assert line[-1] == "]", f"{path.name}: {line!r}"
                section = line[1:-1]
                continue
            name, equals, value = line.partition("=")
            assert section, f"{path.name}: {line!r} is in no section"
            assert equals, f"{path.name}: {line!r} is no setting"
            found.append((section, name.strip(), value.strip()))
        return cls(path, tuple(found))

    def values(self, name: str) -> list[str]:
        return [value for _, key, value in self.settings if key == name]

    def value(self, name: str) -> str:
        found = self.values(name)
        assert len(found) == 1, f"{self.path.name}: expected {name}= once, found {found}"
        return found[0]

    def seconds(self, name: str) -> float:
        value = self.value(name)
        units = {"": 1, "s": 1, "min": 60, "h": 3600}
        number, unit = re.fullmatch(r"(\d+)(\w*)", value).groups()  # type: ignore[union-attr]
        return float(number) * units[unit]

    def command(self, specifiers: Mapping[str, str]) -> list[str]:
        return shlex.split(expand(self.value("ExecStart"), specifiers))

    def environment(self, specifiers: Mapping[str, str]) -> dict[str, str]:
        words = [word for value in self.values("Environment") for word in shlex.split(expand(value, specifiers))]
        return dict(word.split("=", 1) for word in words)

    def restarts_after(self, code: int) -> bool:
        """Whether the manager restarts it; a signal is a negative exit code."""
        assert self.value("Restart") == "on-failure"
        prevented = " ".join(self.values("RestartPreventExitStatus")).split()
        if str(code) in prevented:
            return False
        return code != 0 and -code not in _CLEAN_SIGNALS


def expand(text: str, specifiers: Mapping[str, str]) -> str:
    """Replace ``%h`` and other specifiers; an unknown one is an error."""
    return re.sub(r"%(.)", lambda found: {"%": "%", **specifiers}[found[1]], text)


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
        report = self.path / "project" / f"report-{number}"
        result = report / "outcome"
        outcome = pickle.loads(result.read_bytes()) if result.exists() else None
        events = [json.loads(line) for line in (report / "journal").read_text().splitlines()]
        return Ended(code, events, log, outcome)


def _popen(command: list[str], env: dict[str, str], log: Path, cwd: str | None = None) -> subprocess.Popen[bytes]:
    with log.open("ab") as out:
        return subprocess.Popen(
            command, env=env, cwd=cwd, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
        )


class Service:
    """A shipped unit, run by this process; the manager's socket may be `abstract`. Its owner closes it."""

    def __init__(self, unit: str, home: Home, *, abstract: bool = False) -> None:
        self.unit, self._home, self._abstract = Unit.read(SYSTEMD / unit), home, abstract
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
        directory = [expand(each, specifiers) for each in unit.values("WorkingDirectory")] or ["/"]
        self._process = _popen(unit.command(specifiers), environment, self.log, directory[0])

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


class UserManager:
    """Runs the shipped units. Its owner closes it, which stops them.

    Skips the test if systemd is missing, does not run this machine, or may not make control groups here.
    """

    def __init__(self, home: Home) -> None:
        program = next((place for place in _PLACES if os.access(place, os.X_OK)), None)
        if program is None or shutil.which("systemctl") is None or not Path("/run/systemd/system").is_dir():
            pytest.skip("this machine was not started by systemd")
        self.log = home.path / "log"
        self._home = home
        self._environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(home.path),
            "XDG_RUNTIME_DIR": str(home.runtime),
            "SYSTEMD_LOG_TARGET": "console",
        }
        units = home.path / ".config" / "systemd" / "user"
        units.mkdir(parents=True)
        (units / "idle.target").write_text("[Unit]\nDescription=Nothing yet\n")
        for path in SYSTEMD.glob("*.service"):
            shutil.copy(path, units)
            (units / f"{path.name}.d").mkdir()
            # The tested code need not be the installed one.
            drop_in = ["[Service]", f"Environment=PYTHONPATH={ROOT}"]
            drop_in += [f"Standard{stream}=append:{self.log}" for stream in ("Output", "Error")]
            (units / f"{path.name}.d" / "test.conf").write_text("\n".join(drop_in))
        log = home.path / "manager.log"
        self._process = _popen([program, "--user", "--unit=idle.target"], self._environment, log)
        deadline = time.monotonic() + _START_SECONDS
        while self.call("is-system-running").stdout.strip() != "running":
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.close()
                pytest.skip(f"no manager can be started here: {log.read_text()[-500:]}")
            select.select([], [], [], 0.05)

    def call(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run ``systemctl --user``, whatever its outcome."""
        command = ["systemctl", "--user", *arguments]
        settings: Any = {"env": self._environment, "timeout": _COMMAND_SECONDS}
        return subprocess.run(command, capture_output=True, text=True, **settings)

    def do(self, *arguments: str) -> None:
        """Run ``systemctl --user``, which must succeed."""
        done = self.call(*arguments)
        assert done.returncode == 0, f"{arguments}: {done.stderr}\n{self.log.read_text()[-3000:]}"

    def show(self, unit: str, name: str) -> str:
        return self.call("show", "--value", f"--property={name}", unit).stdout.strip()

    def close(self) -> None:
        """Stop the units, then the manager."""
        if self._process.poll() is None:
            self.call("exit")
            try:
                self._process.wait(_COMMAND_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
        self._process.wait()
        for path in self._home.runtime.iterdir():
            if path.name != "memckpt":  # the agents remove that themselves
                shutil.rmtree(path) if path.is_dir() else path.unlink()
