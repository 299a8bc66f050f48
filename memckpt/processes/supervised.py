"""Notes of a trainer to the ``memckpt run`` that supervises it: files in a private directory.

The environment names the directory. Notes are written at the start of protection, so that a training step pays nothing
for them.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import msgspec

from memckpt.config.arguments import RESTART_COUNT, SUPERVISOR
from memckpt.processes.address import AgentAddress

_log = logging.getLogger("memckpt")


class _Run(msgspec.Struct, frozen=True):
    """Where the agent is that protects the training."""

    run_dir: str
    node: str


class Notes:
    """The supervisor's end. Owns the directory; :meth:`close` removes it."""

    def __init__(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="memckpt-run-"))

    def environment(self, restarts: int) -> dict[str, str]:
        """Variables of the attempt with this number of restarts before it."""
        return {SUPERVISOR: str(self.directory), RESTART_COUNT: str(restarts)}

    def run(self) -> AgentAddress | None:
        """The address of the agent that protects the training; None as long as no session has begun."""
        try:
            found = msgspec.json.decode((self.directory / "run.json").read_bytes(), type=_Run)
        except FileNotFoundError:
            return None
        return AgentAddress.of(found.run_dir, found.node)

    def of_attempt(self, name: str, pid: int) -> bytes | None:
        """The note of this name that a process has left; None if it has not."""
        try:
            return self.place(name, pid).read_bytes()
        except FileNotFoundError:
            return None

    def place(self, name: str, pid: int) -> Path:
        """Where a process leaves its note of this name."""
        return self.directory / f"{name}-{pid}.json"

    def close(self) -> None:
        shutil.rmtree(self.directory, ignore_errors=True)


def tell_supervisor(address: AgentAddress) -> None:
    """Tell a supervisor, if there is one, which agent protects this training."""
    leave_note("run.json", lambda: msgspec.json.encode(_Run(str(address.run_dir), address.node)))


def own_note(name: str) -> str:
    """File name of a note that only this process leaves."""
    return f"{name}-{os.getpid()}.json"


def leave_note(name: str, content: Callable[[], bytes]) -> None:
    """Write a file for the supervisor if there is one, whole or not at all; several ranks may write the same."""
    place = os.environ.get(SUPERVISOR)
    if place is None:
        return
    own = Path(place) / f"{name}.{os.getpid()}"
    try:
        own.write_bytes(content())
        own.replace(Path(place) / name)
    except OSError as error:  # the supervisor is gone, or its disk is full: training goes on without it
        _log.debug("memckpt: no note for the supervisor: %s", error)
        with contextlib.suppress(OSError):
            own.unlink(missing_ok=True)
