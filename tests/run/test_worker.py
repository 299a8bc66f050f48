"""`memckpt worker`: attempts of a rank are what cold ones are, and end with their worker and the launcher."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from memckpt.errors import ConfigurationError
from memckpt.processes.handles import children_of, parent_of
from memckpt_run.commands import worker
from memckpt_run.worker import command_of_worker, work
from tests.support.trainings.engine_harness import Lab
from tests.support.trainings.supervised_runs import wait_for

LIMIT_SECONDS = 60.0
ROOT = Path(__file__).parents[2]
#: Tells what it is, then does what lines of a file tell the attempt of its number.
SCRIPT = f"""
import os, select, signal, sys
sys.path.append({str(ROOT)!r})
from tests.support.trainings.start_probe import main
main()
def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())
def end(number, frame):
    say("got SIGTERM")
    os._exit(9)
signal.signal(signal.SIGTERM, end)
count = os.environ["TORCHELASTIC_RESTART_COUNT"]
say("ready", count, os.getpid())
orders = open("orders")
while True:
    order = orders.readline().split()
    if order[:1] == [count]:
        exec(" ".join(order[1:]))
    select.select([], [], [], 0.01)
"""


class Launcher:
    """Starts workers of one local rank, one after the other, as torchrun does; a child of the lab."""

    def __init__(self, lab: Lab) -> None:
        self._directory = lab.directory
        (lab.directory / "script.py").write_text(SCRIPT)
        (lab.directory / "orders").touch()
        self.child = lab.fork(self._launch, "launcher")
        self._log = self.child.log

    def _launch(self) -> None:
        os.chdir(self._directory)
        for count in range(100):
            pid = os.fork()
            if pid == 0:
                os.setsid()
                os.environ.update(LOCAL_RANK="0", TORCHELASTIC_RESTART_COUNT=str(count))
                try:
                    worker(["script.py", "out"])
                except typer.Exit as ended:
                    os._exit(ended.exit_code)
            os.write(1, f"worker {count} {pid}\n".encode())
            os.write(1, f"ended {count} {os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])}\n".encode())

    def number(self, what: str, count: int) -> int:
        """Process id of the `count`-th worker or attempt, or how a worker has ended, when it is known."""
        wait_for(self._log, f"{what} {count} ")
        (found,) = re.findall(rf"^{what} {count} (-?\d+)$", self._log.read_text(), re.MULTILINE)
        return int(found)

    def order(self, count: int, code: str) -> None:
        with (self._directory / "orders").open("a") as file:
            file.write(f"{count} {code}\n")

    def kill(self, *others: int) -> None:
        """Kill the launcher, and see others end by themselves."""
        handles = [os.pidfd_open(each) for each in others]
        os.kill(self.child.pid, signal.SIGKILL)
        for handle in handles:
            wait_until_ended(handle)

    def said(self, count: int) -> dict[str, Any]:
        """What the attempt has told about itself."""
        self.number("ready", count)
        found: dict[str, Any] = json.loads((self._directory / "out").read_text())
        assert found["pid"] == self.number("ready", count)
        return found


def wait_until_ended(handle: int) -> None:
    assert select.select([handle], [], [], LIMIT_SECONDS)[0]
    os.close(handle)


def test_attempts_are_what_cold_ones_are_and_end_with_their_worker_and_the_launcher(lab: Lab) -> None:
    launcher = Launcher(lab)
    cold = launcher.said(0)
    assert launcher.number("ready", 0) == launcher.number("worker", 0)
    wait_for(launcher.child.log, "modules are imported ahead")
    launcher.order(0, "os._exit(3)")
    assert launcher.number("ended", 0) == 3

    warm = launcher.said(1)
    attempt = launcher.number("ready", 1)
    keeper = parent_of(attempt)
    assert keeper not in (launcher.number("worker", 1), launcher.child.pid)
    for found in (cold, warm):
        assert found["now"].pop("group and session") == [found["pid"]] * 2
        assert found["now"]["environment"]["MEMCKPT_LAUNCHER"] == str(launcher.child.pid)
    assert (cold["now"].pop("parent"), warm["now"].pop("parent")) == (launcher.child.pid, keeper)
    counts = [found["now"]["environment"].pop("TORCHELASTIC_RESTART_COUNT") for found in (cold, warm)]
    assert counts == ["0", "1"]
    for part in ("start", "now"):
        different = {name for name in cold[part] if cold[part][name] != warm[part][name]}
        assert not different, {name: (cold[part][name], warm[part][name]) for name in different}

    # A signal is passed on; another way round the end is.
    os.kill(launcher.number("worker", 1), signal.SIGTERM)
    assert launcher.number("ended", 1) == 9
    launcher.order(2, "os.kill(os.getpid(), signal.SIGSEGV)")
    assert launcher.number("ended", 2) == -signal.SIGSEGV

    # A worker that is killed takes its attempt with it, and what that has started.
    launcher.order(3, "say('child 3', os.fork() or signal.pause())")
    handles = [os.pidfd_open(launcher.number(what, 3)) for what in ("ready", "child")]
    os.kill(launcher.number("worker", 3), signal.SIGKILL)
    assert launcher.number("ended", 3) == -signal.SIGKILL
    for handle in handles:
        wait_until_ended(handle)

    # So does a keeper; the next worker makes another one, and begins cold.
    launcher.number("ready", 4)
    os.kill(keeper, signal.SIGKILL)
    assert launcher.number("ended", 4) == 1
    attempt = launcher.number("ready", 5)
    assert attempt == launcher.number("worker", 5)
    assert launcher.child.log.read_text().count("got SIGTERM") == 1
    launcher.kill(attempt)
    wait_for(launcher.child.log, "got SIGTERM", count=2)


def test_a_launcher_that_is_killed_ends_attempt_keeper_and_warm_process(lab: Lab) -> None:
    launcher = Launcher(lab)
    launcher.number("ready", 0)
    wait_for(launcher.child.log, "modules are imported ahead")
    launcher.order(0, "os._exit(3)")
    keeper = parent_of(launcher.number("ready", 1))
    children = children_of(keeper)
    assert len(children) == 2
    launcher.kill(keeper, launcher.number("worker", 1), *children)
    assert "got SIGTERM" in launcher.child.log.read_text()


def test_a_command_is_what_torchrun_would_run() -> None:
    python = [sys.executable, "-u"]
    assert command_of_worker(["train.py", "-x"]) == [*python, "train.py", "-x"]
    assert command_of_worker(["-m", "train", "-x"]) == [*python, "-m", "train", "-x"]
    assert command_of_worker([sys.executable, "-O", "train.py"]) == [sys.executable, "-O", "train.py"]


def test_without_a_launcher_it_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    with pytest.raises(ConfigurationError, match="torchrun --no-python"):
        work(["train.py"], [])
