"""Log mode: records between checkpoints, in batches; a node dies, and training goes on behind the last batch."""

from __future__ import annotations

import time
from typing import Any

import pytest

from memckpt.agent.control import ask_status
from memckpt.config import StorageConfig
from memckpt.storage.chain import stored_points
from tests.engine_cases import PLAIN
from tests.engine_child import Action, Actions, Control, config, kill_both
from tests.engine_harness import Lab
from tests.test_storage_runs import catalog_of, until_ordered

REDO = pytest.mark.parametrize("redo", ["lazy", "eager"])
LIMIT_SECONDS = 60.0


def logged(redo: str, batch_steps: int = 3, **settings: Any) -> Any:
    """A configuration that logs every record, and makes a checkpoint when the log needs one."""
    storage = StorageConfig(mode="log", min_seconds=3600, batch_steps=batch_steps, **settings)
    return config(redo, storage=storage)


def until_taken(control: Control) -> None:
    """The trainer waits here until its record has been taken for the log: these steps are faster than any disk."""
    session = control.session
    assert session is not None
    address = session._link._address
    deadline = time.monotonic() + LIMIT_SECONDS
    record = session._recorder.record - 1
    while True:
        status = ask_status(address)
        assert status is not None
        assert status.storage is not None
        if status.storage.mode == "log" and (status.storage.logged or 0) >= record:
            return
        assert time.monotonic() < deadline, f"record {record} is not taken: {status.storage}"
        session._listen()


def until_based(control: Control) -> None:
    """The trainer waits here until storage has a checkpoint: its order is in, or came before."""
    session = control.session
    assert session is not None
    address = session._link._address
    deadline = time.monotonic() + LIMIT_SECONDS
    while (status := ask_status(address)) is None or status.storage is None or status.storage.step is None:
        assert time.monotonic() < deadline, "there is no checkpoint"
        session._listen()


def both(*actions: Action) -> Action:
    def act(control: Control) -> None:
        for action in actions:
            action(control)

    return act


def paced(first: int, last: int, based_at: int | None = None) -> Actions:
    """Every record from `first` on is waited for; at `based_at` also the checkpoint."""
    actions: dict[tuple[str, int], Action] = {("after commit", step): until_taken for step in range(first, last + 1)}
    if first == 2:
        actions["after commit", 3] = both(until_ordered, until_taken)
    if based_at is not None:
        actions["after commit", based_at] = both(until_taken, until_based)
    return actions


@REDO
def test_a_node_dies_and_training_goes_on_behind_the_last_batch(lab: Lab, redo: str) -> None:
    settings = logged(redo)
    first = lab.train(PLAIN, settings, actions={**paced(2, 11, based_at=4), ("backward", 12): kill_both})
    assert [(one.first, one.last) for one in catalog_of(lab).batches] == [(2, 4), (5, 7), (8, 10)]
    final = lab.train(PLAIN, settings, seed=2)
    assert final.restored_step == 10
    lab.check_same(PLAIN, first, final)
    catalog = catalog_of(lab)
    assert catalog.complete[0].step == PLAIN.steps
    assert stored_points(catalog)[0].step == PLAIN.steps
