"""Trainings under ``memckpt run``: started by forks, waited for, and read."""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import sys
import time
import traceback
from pathlib import Path

import typer

from memckpt_run.attempts import Attempt, Given
from memckpt_run.commands import run
from memckpt_run.notes import Notes
from memckpt_run.supervisor import Supervisor
from memckpt_run.warm import Warm
from tests.support.trainings import supervised_job
from tests.support.trainings.engine_harness import Child, Lab

LIMIT_SECONDS = 120.0


def supervise(lab: Lab, *command: str, restarts: int = 100, on_failure: str | None = None) -> Child:
    """`memckpt run --restarts N --on-failure ... -- COMMAND`, in a child of its own."""

    def body() -> None:
        os.chdir(lab.directory)
        try:
            run(list(command), restarts, on_failure=on_failure)
        except typer.Exit as ended:
            os._exit(ended.exit_code)

    return lab.fork(body, "run")


def wait_for(path: Path, text: str, count: int = 1) -> None:
    deadline = time.monotonic() + LIMIT_SECONDS * count
    while not path.exists() or path.read_text().count(text) < count:
        assert time.monotonic() < deadline, f"no {text!r} in {path}: {path.exists() and path.read_text()[-2000:]}"
        select.select([], [], [], 0.002)


class Forked:
    """Starts the job's attempts without the seconds of its imports: by a fork of the pytest process."""

    def __init__(self, *arguments: str) -> None:
        self._arguments = arguments

    @property
    def how(self) -> str:
        return "forked"

    def start(self, given: Given) -> Attempt:
        pid = os.fork()
        if pid == 0:
            signal.pthread_sigmask(signal.SIG_SETMASK, given.mask)
            os.environ.update(given.environment)
            sys.argv = [supervised_job.__file__, *self._arguments]
            try:
                supervised_job.main()
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        return Warm(pid)

    def prepare_next(self, attempt: Attempt) -> float | None:
        return None

    def close(self) -> None: ...


def forked_job(lab: Lab, run_dir: str, *arguments: str) -> Child:
    def body() -> None:
        os.chdir(lab.directory)
        with contextlib.closing(Supervisor(Forked(run_dir, *arguments), 100, Notes())) as supervisor:
            os._exit(supervisor.run() & 0xFF)

    return lab.fork(body, run_dir)


def weights(child: Child) -> str:
    (found,) = re.findall("^weights .*$", child.log.read_text(), re.MULTILINE)
    return str(found)


def resumed(child: Child) -> list[tuple[str, str]]:
    """Number of each attempt, and what it resumed."""
    return re.findall(r"^attempt (\d): (None|RestoreReport\(step=\d+)", child.log.read_text(), re.MULTILINE)
