"""When memory is gone, training resumes from storage: trainers and agents are killed, results compared."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from memckpt.agent.saving import jobs
from memckpt.config import StorageConfig
from memckpt.errors import MemoryBudgetError, UsageError
from memckpt.journal.events import AttemptBegan
from memckpt.journal.journal import latest_attempt, read_journal
from memckpt.processes.address import AgentAddress
from memckpt.storage.catalog import read_catalog
from memckpt.storage.export import export
from memckpt.storage.local_store import LocalStore
from memckpt.storage.store import verify_files
from memckpt.storage.urls import open_store
from tests.conftest import Bucket
from tests.support.cluster.processes import kill_and_wait
from tests.support.cluster.waiting import until
from tests.support.faults.frozen import differences, outcome
from tests.support.storage.stored_runs import (
    BEFORE_5,
    BEFORE_10,
    catalog_of,
    goes_on,
    newest,
    stored,
    until_not_stored,
    until_ordered,
    until_stored,
)
from tests.support.trainings.engine_cases import PLAIN, SHAPE_CASES
from tests.support.trainings.engine_child import Action, Actions, Control, config, kill_agent, kill_both, kill_self
from tests.support.trainings.engine_harness import Lab, collect
from tests.support.trainings.engine_training import Case

REDO = pytest.mark.parametrize("redo", ["lazy", pytest.param("eager", marks=pytest.mark.slow)])
#: The steps 5 and 10 are in storage when agent and trainer die.
DIES_AFTER_10: Actions = {
    **BEFORE_5,
    ("after commit", 7): until_stored(5),
    **BEFORE_10,
    ("after commit", 12): until_stored(10),
    ("backward", 14): kill_both,
}


@pytest.mark.promise("after the death of agent and trainer a run resumes from a disk, and from an object store")
@pytest.mark.promise("after the death of agent and trainer a resume from storage is exact")
@pytest.mark.promise("agent and trainer of one node together, without peers")
@pytest.mark.promise('`"replica"` (default)')
@pytest.mark.thinned(2)
@REDO
def test_agent_and_trainer_die_together_and_training_resumes_from_storage(lab: Lab, redo: str) -> None:
    settings = stored(redo)
    actions: Actions = {("after commit", 7): until_stored(5), ("backward", 9): kill_both}
    first = lab.train(PLAIN, settings, actions={**BEFORE_5, **actions})
    actions = {("after commit", 12): until_stored(10), ("in commit", 14): kill_both}
    second = lab.train(PLAIN, settings, seed=2, actions={**BEFORE_10, **actions})
    assert second.restored_step == 5
    final = lab.train(PLAIN, settings, seed=3)
    assert final.restored_step == 10
    lab.check_same(PLAIN, first, second, final)
    assert newest(lab) == PLAIN.steps
    # The journal knows of attempts of which nothing else is left.
    began = [one.envelope.attempt for one in read_journal(lab.run_dir) if isinstance(one.event, AttemptBegan)]
    assert began == [1, 2, 3]


@pytest.mark.parametrize("damaged", [False, True])
def test_a_checkpoint_that_is_ahead_of_the_captured_state_in_memory_serves(lab: Lab, damaged: bool) -> None:
    """Where it is damaged, the older state of memory serves."""
    storage = StorageConfig(every_steps=5, min_seconds=3600)
    settings = config("snapshot", snapshot_every_steps=8, storage=storage)
    actions: Actions = {**DIES_AFTER_10, ("backward", 14): kill_self}
    first = lab.train(PLAIN, settings, actions=actions)
    checkpoint = next(one for one in catalog_of(lab).complete if one.step == 10)
    if damaged:
        file = next(file for part in checkpoint.parts.values() for file in part.files)
        os.truncate(lab.run_dir / "storage" / file.path, file.nbytes - 1)
    final = lab.train(PLAIN, settings, seed=2, unchecked=None)
    assert final.restored_step == (8 if damaged else 10), final.log[-3000:]
    lab.check_same(PLAIN, first, final)


def test_attempts_are_numbered_on_though_nothing_is_left_of_them(lab: Lab) -> None:
    settings = stored("lazy", every_steps=None)
    for number in (1, 2):
        lab.train(PLAIN, settings, actions={("forward", 2): kill_both})
        assert latest_attempt(lab.run_dir, AgentAddress.of(lab.run_dir).node) == number
    (lab.run_dir / f"events-{AgentAddress.of(lab.run_dir).node}.jsonl").write_bytes(b"torn")
    lab.train(PLAIN, settings, actions={("forward", 2): kill_both})
    assert latest_attempt(lab.run_dir, AgentAddress.of(lab.run_dir).node) == 1
    assert latest_attempt(lab.run_dir, "another") == 0


def average_swapped_in(control: Control) -> None:
    """As averaging does at the end of a training: in the sight of torch's counters."""
    with torch.no_grad():
        for param in control.session._staging.writer.params:
            param.add_(1.0)


def average_put_through_data(control: Control) -> None:
    """Past the counters."""
    for param in control.session._staging.writer.params:
        param.data.copy_(param.data + 1.0)


def optimizer_state_dropped(control: Control) -> None:
    """Whoever wants the memory back."""
    for optimizer in control.training.optimizers:
        optimizer.state.clear()


@pytest.mark.thinned(3)
@pytest.mark.parametrize("change", [average_swapped_in, average_put_through_data, optimizer_state_dropped])
def test_what_is_changed_after_the_last_step_is_not_in_storage(lab: Lab, change: Action) -> None:
    settings = stored("lazy", every_steps=None)
    lab.train(PLAIN, settings, actions={("after commit", PLAIN.steps): change})
    again = lab.train(PLAIN, settings, seed=2)
    assert again.restored_step == PLAIN.steps
    lab.check_same(PLAIN, again)


@pytest.mark.slow
def test_an_order_that_died_with_its_trainer_is_given_again(lab: Lab) -> None:
    settings = stored("lazy")
    first = lab.train(PLAIN, settings, actions={**BEFORE_5, ("forward", 4): kill_self})
    actions: Actions = {**BEFORE_10, ("after commit", 12): until_stored(10), ("forward", 14): kill_self}
    second = lab.train(PLAIN, settings, seed=2, actions=actions)
    assert second.restored_step == 3
    final = lab.train(PLAIN, settings, seed=3)
    lab.check_same(PLAIN, first, second, final)


@pytest.mark.promise("after the death of agent and trainer a run resumes from a disk, and from an object store")
@pytest.mark.slow
@REDO
def test_the_same_with_an_object_store(bucket: Bucket, lab: Lab, redo: str) -> None:
    settings = stored(redo, url=bucket.url)
    first = lab.train(PLAIN, settings, actions=DIES_AFTER_10)
    final = lab.train(PLAIN, settings, seed=2)
    assert final.restored_step == 10
    assert "resuming from storage" in final.log
    lab.check_same(PLAIN, first, final)
    store = open_store(bucket.url)
    checkpoints = read_catalog(store).complete
    assert checkpoints[0].step == PLAIN.steps
    assert len(checkpoints) == 2
    assert [verify_files(store, one.part_files) for one in checkpoints] == [[], []]


@pytest.mark.promise(
    "the state that a dead trainer leaves is written to storage, and so are the final step and the state at a SIGTERM"
)
@pytest.mark.promise("no trainer comes back within `linger_seconds` (default 30 minutes)")
@REDO
def test_what_a_dead_trainer_left_in_memory_goes_to_storage(lab: Lab, redo: str) -> None:
    settings = stored(redo, every_steps=None)
    died = lab.train(PLAIN, settings, actions={("backward", 9): kill_self})
    until(lambda: newest(lab) == 8)
    kill_and_wait(lab.status().pid)
    final = lab.train(PLAIN, settings, seed=2)
    assert final.restored_step == 8
    assert "resuming from storage at step 8: nothing is held in local memory" in final.log
    lab.check_same(PLAIN, died, final)


@pytest.mark.promise("what goes to storage before a restart leaves memory able to repeat the step")
@REDO
def test_what_goes_to_storage_meanwhile_stays_before_the_step_that_is_repeated(lab: Lab, redo: str) -> None:
    settings = stored(redo, every_steps=None)
    died = lab.train(PLAIN, settings, actions={("backward", 9): kill_self})
    until(lambda: newest(lab) == 8)
    final = lab.train(PLAIN, settings, seed=2)
    assert "resuming from local memory at step 8" in final.log
    assert final.verdict[0] == "equal"
    lab.check_same(PLAIN, died, final)


@pytest.mark.promise("what goes to storage before a restart leaves memory able to repeat the step")
def test_without_room_for_a_copy_storage_comes_first(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """The replica itself is taken on to what goes to storage, and nothing is before it."""

    def refuse(nbytes: int, held: int, budget: int | None, detail: str) -> None:
        if detail == "a copy of the state on its way to storage":
            raise MemoryBudgetError("there is no room")

    with monkeypatch.context() as patch:
        patch.setattr(jobs, "check_budget", refuse)
        lab.start_agent()
    settings = stored("eager", every_steps=None)
    died = lab.train(PLAIN, settings, actions={("backward", 9): kill_self})
    until(lambda: newest(lab) == 8)
    reason = (
        "the replica has gone past record 7: an attempt since repeated no step, or what is held has gone to storage"
    )
    final = lab.train(PLAIN, settings, seed=2, unchecked=[reason])
    assert (final.restored_step, final.verdict[0]) == (8, "equal")
    lab.check_same(PLAIN, died, final)


@pytest.mark.promise(
    "the state that a dead trainer leaves is written to storage, and so are the final step and the state at a SIGTERM"
)
@REDO
def test_a_clean_end_leaves_the_final_step_in_storage(lab: Lab, redo: str) -> None:
    settings = stored(redo, every_steps=None)
    done = lab.train(PLAIN, settings)
    assert done.log.count("the final step is being brought to storage") == 1
    assert newest(lab) == PLAIN.steps
    assert not lab.agent_answers()
    longer = replace(PLAIN, name="plain-longer", steps=PLAIN.steps + 4)
    final = lab.train(longer, settings, seed=2, resume="require")
    assert final.restored_step == PLAIN.steps
    lab.check_same(longer, done, final)


def test_a_newcomer_that_comes_at_once_is_served_from_memory(lab: Lab) -> None:
    """What was to be written is not needed any more, and nothing is lost by giving it up."""
    settings = stored("eager", every_steps=None)
    lab.survives(PLAIN, settings, [("backward", 6), ("after commit", 9), ("in commit", 11)])


@pytest.mark.promise("a power cut or a flipped bit never leads to a step that loads wrongly")
@pytest.mark.promise("agent and trainer of one node together, without peers")
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(lab: Lab) -> None:
    settings = stored("lazy")
    died = lab.train(PLAIN, settings, actions=DIES_AFTER_10)
    checkpoint = catalog_of(lab).complete[0]
    assert checkpoint.step == 10
    damaged = next(file for file in checkpoint.part_serving(0).files if file.path.endswith(".distcp"))
    path = lab.run_dir / "storage" / damaged.path
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    refused = lab.begin(PLAIN, settings, resume=10)
    ended = collect(*refused)
    assert ended.code == 3
    assert f"no checkpoint in storage is whole: step 10: {damaged.path}: expected checksum" in ended.log
    lab.stop()
    final = lab.train(PLAIN, settings, seed=2)
    assert f"passed over: step 10: {damaged.path}: expected checksum" in final.log
    assert final.restored_step == 5
    lab.check_same(PLAIN, died, final)


@pytest.mark.promise(
    "the state that a dead trainer leaves is written to storage, and so are the final step and the state at a SIGTERM"
)
def test_sigterm_to_the_trainer_brings_the_newest_step_to_storage_while_training_goes_on(lab: Lab) -> None:
    """Whoever had the signal before still gets it: here a handler that lets training go on."""
    settings = stored("lazy", every_steps=None)
    received: list[int] = []

    def prepare(control: Control) -> None:
        signal.signal(signal.SIGTERM, lambda number, _: received.append(number))

    def preempt(control: Control) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        assert received == [signal.SIGTERM]

    actions: Actions = {
        # The first checkpoint, which is taken without being asked for, is out of the way.
        ("after commit", 2): until_ordered,
        ("after commit", 6): until_stored(1),
        ("backward", 7): preempt,
        ("after commit", 7): until_ordered,
        ("after commit", 12): until_stored(7),
        ("backward", 14): kill_both,
    }
    died = lab.train(PLAIN, settings, prepare=prepare, actions=actions)
    kept = newest(lab)
    assert kept in range(7, 13)
    goes_on(lab, settings, died, kept)


@pytest.mark.slow
def test_sigterm_that_ends_the_trainer_leaves_its_last_step_in_storage(lab: Lab) -> None:
    settings = stored("eager", every_steps=None)

    def end(control: Control) -> None:
        control.journal.note("killed", who="nobody", step=control.step)
        os.kill(os.getpid(), signal.SIGTERM)

    ended = collect(*lab.begin(PLAIN, settings, actions={("forward", 9): end}))
    assert ended.code == -signal.SIGTERM
    until(lambda: newest(lab) == 8)
    lab.stop()
    goes_on(lab, settings, ended, 8)


@pytest.mark.promise("failing storage never stops training")
def test_storage_that_cannot_be_written_never_stops_training_and_is_used_again_when_it_can(
    lab: Lab, tmp_path: Path
) -> None:
    place = tmp_path / "mount"
    place.write_text("not a directory")
    settings = stored("lazy", url=str(place / "inside"))

    def repair(control: Control) -> None:
        place.unlink()

    actions: Actions = {
        **BEFORE_5,
        ("after commit", 7): until_not_stored,
        ("after commit", 8): repair,
        ("after commit", 9): until_ordered,
        ("after commit", 12): until_stored(10),
        ("backward", 13): kill_both,
    }
    died = lab.train(PLAIN, settings, actions=actions)
    assert "step 5 did not get to storage" in died.log
    goes_on(lab, settings, died, 10)


@pytest.mark.slow
def test_an_agent_that_dies_alone_is_followed_by_one_that_saves(lab: Lab) -> None:
    settings = stored("lazy", every_steps=10)
    actions: Actions = {
        ("forward", 3): kill_agent,
        ("after commit", 6): until_ordered,
        ("after commit", 12): until_stored(10),
        ("backward", 14): kill_both,
    }
    died = lab.train(PLAIN, settings, actions=actions)
    goes_on(lab, settings, died, 10)


@pytest.mark.slow
def test_storage_of_another_model_is_refused(lab: Lab) -> None:
    settings = stored("lazy", every_steps=None)
    lab.train(PLAIN, settings)
    other = next(case for case in SHAPE_CASES if case.name == "buffers")
    ended = collect(*lab.begin(other, settings))
    assert ended.code == 3
    assert "belongs to another model or optimizer. First difference: held:" in ended.log
    lab.stop()
    assert newest(lab) == PLAIN.steps


@pytest.mark.slow
def test_only_so_many_checkpoints_are_kept(lab: Lab) -> None:
    settings = stored("lazy", every_steps=2, keep_last=2, keep_every_steps=5)
    # The order comes two records ahead, and one checkpoint is written at a time.
    actions: dict[tuple[str, int], Action] = {("after commit", step): until_ordered for step in (2, 8, 14)}
    actions |= {("after commit", step): until_stored(step - 2) for step in (6, 12, 18)}
    lab.train(PLAIN, settings, actions=actions)
    steps = sorted(one.step for one in catalog_of(lab).complete)
    assert 10 in steps
    assert steps[-1] == PLAIN.steps
    assert 4 not in steps
    assert len(steps) == 3


# What a checkpoint could get wrong: state that is missing, not a tensor, not cut, not fp32, in buffers or elsewhere.
NAMES = (
    "scaler-fused-clip bf16-adamw groups tensor-rate tied unused channels-last odd buffers moving-average alternating"
)
SHAPES = [case for case in SHAPE_CASES if case.name in NAMES.split()]


@pytest.mark.promise("after the death of agent and trainer a resume from storage is exact")
@pytest.mark.slow
@REDO
@pytest.mark.parametrize("case", SHAPES, ids=lambda case: case.name)
def test_whatever_is_trained_resumes_from_storage(lab: Lab, redo: str, case: Case) -> None:
    """Once from a copy made by trainers, once from what a dead trainer left."""
    settings = stored(redo, every_steps=4)
    actions: Actions = {
        ("after commit", 2): until_ordered,
        ("after commit", 7): until_stored(4),
        ("after commit", 8): kill_both,
    }
    first = lab.train(case, settings, actions=actions)
    second = lab.train(case, settings, seed=2, actions={("after commit", case.steps - 1): kill_self})
    assert second.restored_step in (4, 8)
    until(lambda: newest(lab) == case.steps - 1)
    kill_and_wait(lab.status().pid)
    final = lab.train(case, settings, seed=3)
    assert final.restored_step == case.steps - 1
    lab.check_same(case, first, second, final)


@pytest.mark.parametrize(
    "name", ["groups", *(pytest.param(name, marks=pytest.mark.slow) for name in ("tied", "buffers"))]
)
def test_an_export_holds_what_was_trained(lab: Lab, name: str, tmp_path: Path) -> None:
    """Loaded with torch alone into a new model and optimizer, it is the state at the end of the training."""
    case = next(one for one in SHAPE_CASES if one.name == name)
    done = lab.train(case, stored("lazy", every_steps=None))
    assert done.outcome is not None
    store = LocalStore(lab.run_dir / "storage")
    checkpoint = catalog_of(lab).complete[0]
    export(store, checkpoint, tmp_path / "state.pt", "torch")
    export(store, checkpoint, tmp_path / "model.safetensors", "safetensors")
    with pytest.raises(UsageError, match="exists"):
        export(store, checkpoint, tmp_path / "state.pt", "torch")
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    training = case.build()
    training.model.load_state_dict(state["model"])
    for optimizer, saved in zip(training.optimizers, state["optimizers"], strict=True):
        optimizer.load_state_dict(saved)
    found = outcome(training)
    assert differences(done.outcome["parameters"], found["parameters"]) == []
    assert differences(done.outcome["optimizers"], found["optimizers"]) == []
    tensors = load_file(tmp_path / "model.safetensors")
    assert tensors.keys() == state["model"].keys()
    assert all(torch.equal(tensors[name], value) for name, value in state["model"].items())
