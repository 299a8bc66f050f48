"""A systemd user manager for one test, with its own home and runtime directory."""

from __future__ import annotations

import os
import select
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from tests.support.cluster.service_harness import ROOT, Home
from tests.support.cluster.unit_files import SYSTEMD

_PLACES = ("/usr/lib/systemd/systemd", "/lib/systemd/systemd")
_START_SECONDS = 20.0
_COMMAND_SECONDS = 90.0


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
        with (home.path / "manager.log").open("wb") as log:
            self._process = subprocess.Popen(
                [program, "--user", "--unit=idle.target"],
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        deadline = time.monotonic() + _START_SECONDS
        while self.call("is-system-running").stdout.strip() != "running":
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.close()
                pytest.skip(f"no manager can be started here: {(home.path / 'manager.log').read_text()[-500:]}")
            select.select([], [], [], 0.05)

    def call(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run ``systemctl --user``, whatever its outcome."""
        return subprocess.run(
            ["systemctl", "--user", *arguments],
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=_COMMAND_SECONDS,
        )

    def do(self, *arguments: str) -> None:
        """Run ``systemctl --user``, which must succeed."""
        done = self.call(*arguments)
        assert done.returncode == 0, f"{arguments}: {done.stderr}\n{self.log.read_text()[-3000:]}"

    def show(self, unit: str, name: str) -> str:
        """A property of a unit."""
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
