"""Log mode: records between checkpoints, in batches; a node dies, and training goes on behind the last batch."""

from __future__ import annotations

import time
from typing import Any

import pytest

from memckpt.agent.saving import record_log
from memckpt.config import MemckptConfig, StorageConfig
from memckpt.processes.control import ask_status
from memckpt.storage.catalog import read_catalog
from memckpt.storage.chain import stored_points
from memckpt.storage.urls import open_store
from tests.conftest import Bucket
from tests.support.cluster.processes import kill_and_wait
from tests.support.cluster.waiting import until
from tests.support.storage.stored_runs import catalog_of, goes_on, until_ordered
from tests.support.trainings.engine_cases import PLAIN, SHAPE_CASES
from tests.support.trainings.engine_child import Action, Actions, Control, config, kill_both, kill_self
from tests.support.trainings.engine_harness import Ended, Lab
from tests.support.trainings.engine_steps import OTHER_GRADIENT_CASES
from tests.support.trainings.engine_training import Case

REDO = pytest.mark.parametrize("redo", ["lazy", pytest.param("eager", marks=pytest.mark.slow)])
LIMIT_SECONDS = 60.0
#: The one that a training child wrote to when it was last asked; children are forked with an empty list.
_generations: list[int] = []


def logged(redo: str, batch_steps: int = 3, **settings: Any) -> Any:
    """A configuration that logs every record, and makes a checkpoint when the log needs one."""
    storage = StorageConfig(mode="log", min_seconds=3600, batch_steps=batch_steps, **settings)
    return config(redo, storage=storage)


def until_taken(control: Control) -> None:
    """The trainer waits here until its record has been taken for the log: these steps are faster than any disk."""
    session = control.session
    address = session._link._address
    deadline = time.monotonic() + LIMIT_SECONDS
    record = session._recorder.record - 1
    writer = session._staging.writer
    before, _generations[:] = list(_generations), [writer.generation]
    if before not in ([], _generations):
        return  # a generation has begun with this record, which is not in its log
    while True:
        status = ask_status(address)
        if status.storage.mode == "log" and (status.storage.logged or 0) >= record:
            return
        assert time.monotonic() < deadline, f"record {record} is not taken: {status.storage}"
        session._protection.listen()


def until_based(control: Control, step: int = 0) -> None:
    """The trainer waits here until storage can produce this step or a later one: the checkpoint's order has come."""
    session = control.session
    address = session._link._address
    deadline = time.monotonic() + LIMIT_SECONDS
    while (status := ask_status(address)) is None or status.storage is None or (status.storage.step or -1) < step:
        assert time.monotonic() < deadline, "there is no checkpoint"
        session._protection.listen()


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


def based(settings: MemckptConfig, step: int = 4) -> int:
    """The step at which the first checkpoint can be waited for: an eager replica gets to it one step later."""
    return step + (settings.redo == "eager")


@pytest.fixture
def full_batches(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """No batch is written because it is old, however slow the machine is; the agent of the test is started."""
    with monkeypatch.context() as patch:
        patch.setattr(record_log, "_BATCH_SECONDS", 3600.0)
        lab.start_agent()


def says_equal(ended: Ended, step: int) -> None:
    """Storage has the state before the newest record, too: the step was repeated."""
    verdict, line = ended.verdict
    assert verdict == "equal", f"{line}\n{ended.log[-3000:]}"
    assert line.startswith(f"step {step} was repeated: "), line
    assert "parameter" in line
    assert "generators" in line


@pytest.mark.promise(
    "log mode: after the death of a node training goes on after the last batch, across attempts, and also from the "
    "middle of a batch"
)
@pytest.mark.promise('`"log"`')
@pytest.mark.usefixtures("full_batches")
@REDO
def test_a_node_dies_and_training_goes_on_behind_the_last_batch(lab: Lab, redo: str) -> None:
    settings = logged(redo)
    first = lab.train(PLAIN, settings, actions={**paced(2, 11, based_at=based(settings)), ("backward", 12): kill_both})
    # The first commit that is logged, of record 2, has the checkpoint ordered; the trainer waits for the order.
    assert [one.step for one in catalog_of(lab).complete] == [4]
    batches = [(one.first, one.last) for one in catalog_of(lab).batches]
    newest = batches[-1][1]  # one later if a slow start begins the log a record later
    assert newest in (10, 11)
    assert batches[-2:] == [(newest - 5, newest - 3), (newest - 2, newest)]
    final = lab.train(PLAIN, settings, seed=2)
    assert final.restored_step == newest
    says_equal(final, newest)
    lab.check_same(PLAIN, first, final)
    catalog = catalog_of(lab)
    assert catalog.complete[0].step == PLAIN.steps
    assert stored_points(catalog)[0].step == PLAIN.steps


@pytest.mark.promise(
    "log mode: after the death of a node training goes on after the last batch, across attempts, and also from the "
    "middle of a batch"
)
@pytest.mark.slow
@pytest.mark.parametrize("redo", ["lazy", pytest.param("eager", marks=pytest.mark.slow)])
def test_attempts_go_on_with_the_log_and_what_a_dead_trainer_left_is_written(lab: Lab, redo: str) -> None:
    """Killed, resumed from memory, killed again: the part batch is flushed, and the chain crosses both attempts."""
    settings = logged(redo, batch_steps=4)
    first = lab.train(
        PLAIN, settings, actions={**paced(2, 10, based_at=based(settings, 5)), ("backward", 11): kill_self}
    )
    actions: Actions = {**paced(11, 16), ("backward", 17): kill_self}
    second = lab.train(PLAIN, settings, seed=2, actions=actions)
    assert second.restored_step == 10
    until(lambda: stored_points(catalog_of(lab))[0].step == 16)
    assert [one.step for one in catalog_of(lab).complete] == [4]
    kill_and_wait(lab.status().pid)
    final = lab.train(PLAIN, settings, seed=3)
    assert final.restored_step == 16
    says_equal(second, 10)
    says_equal(final, 16)
    lab.check_same(PLAIN, first, second, final)


@pytest.mark.promise(
    "a damaged batch is named, and the step before it is used; a missed record is followed by a checkpoint"
)
@pytest.mark.promise('`"log"`')
@pytest.mark.slow
@pytest.mark.usefixtures("full_batches")
def test_a_damaged_batch_is_named_and_the_step_before_it_is_used(lab: Lab) -> None:
    settings = logged("lazy")
    first = lab.train(PLAIN, settings, actions={**paced(2, 11, based_at=based(settings)), ("backward", 12): kill_both})
    damaged = catalog_of(lab).batches[-1].log_path
    data = bytearray((lab.run_dir / "storage" / damaged).read_bytes())
    data[len(data) // 2] ^= 1
    (lab.run_dir / "storage" / damaged).write_bytes(data)
    final = lab.train(PLAIN, settings, seed=2)
    assert f"passed over: step 10: {damaged}: expected checksum" in final.log
    assert final.restored_step == 7
    says_equal(final, 7)
    lab.check_same(PLAIN, first, final)


@pytest.mark.promise(
    "log mode: after the death of a node training goes on after the last batch, across attempts, and also from the "
    "middle of a batch"
)
@pytest.mark.usefixtures("full_batches")
@pytest.mark.slow
def test_a_step_inside_a_batch_can_be_resumed(lab: Lab) -> None:
    settings = logged("lazy")
    first = lab.train(PLAIN, settings, actions={**paced(2, 11, based_at=based(settings)), ("backward", 12): kill_both})
    final = lab.train(PLAIN, settings, seed=2, resume=9)
    assert final.restored_step == 9
    assert final.verdict[0] == "equal"
    assert final.verdict[1].endswith("no step was compared: resume=9")
    lab.check_same(PLAIN, first, final)


# What a redo from files could get wrong: several optimizers, absent, sparse and half-precision gradients, factors.
NAMES = "scaler-fused-clip bf16-adamw groups tensor-rate tied unused sparse channels-last buffers alternating"
NAMES += " fp32-gradients"
CASES = [case for case in [*SHAPE_CASES, *OTHER_GRADIENT_CASES] if case.name in NAMES.split()]


@pytest.mark.promise(
    "log mode: after the death of a node training goes on after the last batch, across attempts, and also from the "
    "middle of a batch"
)
@pytest.mark.slow
@REDO
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_whatever_is_trained_is_redone_from_the_log(lab: Lab, redo: str, case: Case) -> None:
    # Behind a hole a checkpoint is due as soon as its share of the time allows it: here, within the next steps.
    settings = logged(redo, batch_steps=2, overhead=1.0 if case.name == "buffers" else 0.01)
    last = case.steps - 2
    actions = {**paced(2, last, based_at=based(settings))}
    if case.name == "buffers":  # which begins a generation at step 10: a hole, and a checkpoint behind it
        actions["after commit", 11] = both(until_taken, until_ordered)
        actions["after commit", 16] = both(until_taken, lambda control: until_based(control, 12))
    first = lab.train(case, settings, actions={**actions, ("after commit", last + 1): kill_both})
    final = lab.train(case, settings, seed=2)
    assert final.restored_step is not None
    assert final.restored_step >= last - 1
    says_equal(final, final.restored_step)
    lab.check_same(case, first, final)


@pytest.mark.slow
@REDO
def test_the_same_with_an_object_store(bucket: Bucket, request: pytest.FixtureRequest, lab: Lab, redo: str) -> None:
    request.getfixturevalue("full_batches")  # the agent is started once the environment names the bucket
    settings = logged(redo, url=bucket.url)
    first = lab.train(PLAIN, settings, actions={**paced(2, 11, based_at=based(settings)), ("backward", 12): kill_both})
    newest = read_catalog(open_store(bucket.url)).batches[-1].last
    assert newest in (10, 11)  # one later if a slow start begins the log a record later
    goes_on(lab, settings, first, newest)
    catalog = read_catalog(open_store(bucket.url))
    assert catalog.complete[0].step == PLAIN.steps


@pytest.mark.promise(
    "a damaged batch is named, and the step before it is used; a missed record is followed by a checkpoint"
)
@pytest.mark.slow
def test_a_hole_is_followed_by_a_checkpoint_and_training_never_waits(lab: Lab) -> None:
    """These steps take a millisecond, and nobody waits: records are missed while the processes start."""
    done = lab.train(PLAIN, logged("eager"))
    lab.check_same(PLAIN, done)
    assert stored_points(catalog_of(lab))[0].step == PLAIN.steps
