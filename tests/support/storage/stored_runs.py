"""Trainings with a storage tier: their settings, what they wait for, and what is stored."""

from __future__ import annotations

import select
import time
from pathlib import Path
from typing import Any

from memckpt.config import StorageConfig
from memckpt.processes.address import AgentAddress
from memckpt.processes.control import ask_status, stop_agent
from memckpt.storage.catalog import Catalog, Checkpoint, read_catalog
from memckpt.storage.local_store import LocalStore
from tests.support.cluster.waiting import LIMIT_SECONDS
from tests.support.trainings.engine_cases import PLAIN
from tests.support.trainings.engine_child import Action, Actions, Control, config
from tests.support.trainings.engine_harness import Ended, Lab


def stored(redo: str, every_steps: int | None = 5, **settings: Any) -> Any:
    """A configuration with a storage tier; None: nothing is stored while training runs."""
    storage = StorageConfig(every_steps=every_steps, min_seconds=3600, **settings)
    return config(redo, storage=storage)


def leave_only_storage(run_dir: Path) -> Checkpoint:
    """Wait until what the agent holds is in storage, and end the agent; the checkpoint."""
    address, store = AgentAddress.of(run_dir), LocalStore(run_dir / "storage")
    held = ask_status(address)
    deadline = time.monotonic() + LIMIT_SECONDS
    while not (complete := read_catalog(store).complete) or complete[0].step != held.step:
        assert time.monotonic() < deadline, f"step {held.step} is not in storage"
        select.select([], [], [], 0.05)
    assert stop_agent(address) is not None
    return complete[0]


def until_stored(step: int) -> Action:
    """The trainer waits here until its agent has told it that a step, or a later one, is in storage."""

    def wait(control: Control) -> None:
        session = control.session
        deadline = time.monotonic() + LIMIT_SECONDS
        while (session.stored_step or 0) < step:
            left = deadline - time.monotonic()
            if not select.select([session._link.connection.channel], [], [], max(0.0, left))[0]:
                raise TimeoutError(f"step {step} is not in storage, only {session.stored_step}")
            session._protection.listen()

    return wait


def until_ordered(control: Control) -> None:
    """The trainer waits here until its agent has ordered a copy; one that is late is ordered for a later step.

    With eager redo nothing is ordered: the trainer cannot be far ahead of the replica.
    """
    session = control.session
    while session.mode != "eager" and session._link.connection.order is None:
        assert select.select([session._link.connection.channel], [], [], LIMIT_SECONDS)[0]
        session._protection.listen()


#: Waits of a run that stores every five steps: no order comes too late for step 5, nor for step 10 after that.
BEFORE_5: Actions = {("after commit", 3): until_ordered}
BEFORE_10: Actions = {("after commit", 8): until_ordered}


def until_not_stored(control: Control) -> None:
    """The trainer waits here until it has been told that a step could not be stored."""
    session = control.session
    assert session is not None
    while "did not get to storage" not in Path("/proc/self/fd/2").read_text():
        assert select.select([session._link.connection.channel], [], [], LIMIT_SECONDS)[0]
        session._protection.listen()


def goes_on(lab: Lab, settings: Any, died: Ended, step: int) -> None:
    """Another attempt of PLAIN resumes behind `step`, and both are the training without interruption."""
    final = lab.train(PLAIN, settings, seed=2)
    assert final.restored_step == step
    lab.check_same(PLAIN, died, final)


def catalog_of(lab: Lab) -> Catalog:
    return read_catalog(LocalStore(lab.run_dir / "storage"))


def newest(lab: Lab) -> int | None:
    complete = catalog_of(lab).complete
    return complete[0].step if complete else None
