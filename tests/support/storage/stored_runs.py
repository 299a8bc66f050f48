"""Trainings with a storage tier: their settings, what they wait for, and what is stored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from memckpt.config import StorageConfig
from memckpt.processes.address import AgentAddress
from memckpt.processes.control import ask_status, stop_agent
from memckpt.storage.catalog import Catalog, Checkpoint, read_catalog
from memckpt.storage.local_store import LocalStore
from tests.support.cluster.waiting import until
from tests.support.trainings.engine_cases import PLAIN
from tests.support.trainings.engine_child import Action, Actions, Control, config, listen_until
from tests.support.trainings.engine_harness import Ended, Lab


def stored(redo: str, every_steps: int | None = 5, **settings: Any) -> Any:
    """A configuration with a storage tier; None: nothing is stored while training runs."""
    storage = StorageConfig(every_steps=every_steps, min_seconds=3600, **settings)
    return config(redo, storage=storage)


def leave_only_storage(run_dir: Path) -> Checkpoint:
    """Wait until what the agent holds is in storage, and end the agent; the checkpoint."""
    address, store = AgentAddress.of(run_dir), LocalStore(run_dir / "storage")
    step = ask_status(address).step
    [newest] = until(
        lambda: [one for one in read_catalog(store).complete[:1] if one.step == step], f"step {step} in storage"
    )
    assert stop_agent(address) is not None
    return newest


def until_stored(step: int) -> Action:
    """The trainer waits here until its agent has told it that a step, or a later one, is in storage."""

    def wait(control: Control) -> None:
        listen_until(control.session, lambda: (control.session.stored_step or 0) >= step, f"step {step} not in storage")

    return wait


def until_ordered(control: Control) -> None:
    """The trainer waits here until its agent has ordered a copy; one that is late is ordered for a later step.

    With eager redo nothing is ordered: the trainer cannot be far ahead of the replica.
    """
    session = control.session
    listen_until(session, lambda: session.mode == "eager" or session._link.connection.order is not None)


#: Waits of a run that stores every five steps: no order comes too late for step 5, nor for step 10 after that.
BEFORE_5: Actions = {("after commit", 3): until_ordered}
BEFORE_10: Actions = {("after commit", 8): until_ordered}


def until_not_stored(control: Control) -> None:
    """The trainer waits here until it has been told that a step could not be stored."""
    listen_until(control.session, lambda: "did not get to storage" in Path("/proc/self/fd/2").read_text())


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
