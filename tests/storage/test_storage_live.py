"""A run that trains while somebody wants its state, is killed at any instant, or has nowhere to write."""

from __future__ import annotations

import os
import random
import select
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import memckpt
from memckpt.agent.saving import saver
from memckpt.config import StorageConfig
from memckpt.processes.address import AgentAddress
from memckpt.processes.control import ask_status
from memckpt.protocol.channel import Channel
from memckpt.protocol.status import Status, StatusRequest
from memckpt.protocol.storing import Saved, SaveTo
from memckpt.storage.catalog import read_catalog
from memckpt.storage.export import read_state
from memckpt.storage.local_store import LocalStore
from tests.support.cluster.processes import kill_and_wait
from tests.support.cluster.waiting import until
from tests.support.faults.frozen import differences, outcome
from tests.support.storage.stored_runs import catalog_of, goes_on, until_ordered
from tests.support.trainings.cli_harness import invoke
from tests.support.trainings.engine_cases import PLAIN
from tests.support.trainings.engine_child import Actions, config, kill_self
from tests.support.trainings.engine_harness import Lab, collect

REDO = pytest.mark.parametrize("redo", ["lazy", "eager"])
LONG = replace(PLAIN, name="long", steps=3000)


#: Why a resume repeats no step, where the node dies before a log has a record behind its checkpoint.
_AT_A_CHECKPOINT = "storage does not have the state from which step"


class Asker:
    """Asks an agent for a checkpoint, and gets its answer later."""

    def __init__(self, place: Path) -> None:
        self._place = place
        self._channel: Channel | None = None

    def ask(self, address: AgentAddress) -> None:
        sock = address.connect()
        assert sock is not None
        self._channel = Channel(sock)
        self._channel.send(SaveTo(str(self._place)))
        # The agent reads what comes in order: once it has answered this, it knows of the other.
        self._channel.send(StatusRequest())
        assert isinstance(self._channel.receive(10)[0], Status)

    def take(self) -> int:
        """The step that the answer names."""
        answer = self._channel.receive(60)[0]
        assert isinstance(answer, Saved), answer
        self._channel.close()
        return answer.step


@pytest.mark.promise("the state of a training run can be exported while it goes on")
@pytest.mark.parametrize("redo", ["lazy", pytest.param("eager", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "storage",
    [None, pytest.param(StorageConfig(every_steps=1000), marks=pytest.mark.slow)],
    ids=["memory-only", "with-storage"],
)
def test_a_training_run_gives_its_state_away_and_goes_on(
    lab: Lab, tmp_path: Path, redo: str, storage: StorageConfig | None
) -> None:
    asker = Asker(tmp_path / "beside")
    actions: Actions = {
        ("after commit", 8): lambda control: asker.ask(control.session._link._address),
        ("after commit", 9): until_ordered,
        ("after commit", 12): lambda control: control.journal.note("saved", step=asker.take()),
    }
    done = lab.train(PLAIN, config(redo, storage=storage), actions=actions)
    lab.check_same(PLAIN, done)
    step = done.of("saved")[0]["step"]
    beside = LocalStore(tmp_path / "beside")
    (checkpoint,) = read_catalog(beside).checkpoints
    assert checkpoint.step == step
    until_then = lab.train(PLAIN, None, last_step=step)
    training = PLAIN.build()
    state = read_state(beside, checkpoint)
    training.model.load_state_dict(state.model)
    assert differences(until_then.outcome["parameters"], outcome(training)["parameters"]) == []


def test_whoever_asked_a_trainer_that_dies_gets_what_it_left(lab: Lab, tmp_path: Path) -> None:
    child, _ = lab.begin(PLAIN, config("lazy"), actions={("forward", 9): lambda control: signal.pause()})
    address = AgentAddress.of(lab.run_dir)
    until(lambda: (status := ask_status(address)) is not None and status.step == 8)
    asker = Asker(tmp_path / "beside")
    asker.ask(address)
    kill_and_wait(child.pid)
    assert asker.take() == 8
    assert [one.step for one in read_catalog(LocalStore(tmp_path / "beside")).complete] == [8]
    lab.stop()


def test_what_a_dead_trainer_left_is_exported_from_memory(lab: Lab, tmp_path: Path) -> None:
    lab.train(PLAIN, config("lazy"), actions={("backward", 9): kill_self})
    invoke("export", lab.run_dir, "--from", "memory", "--to", tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    assert state["step"] == 8
    loaded = memckpt.load(lab.run_dir, source="memory")
    assert loaded.step == 8
    assert all(torch.equal(tensor, loaded.model[name]) for name, tensor in state["model"].items())
    assert not [path for path in lab.run_dir.iterdir() if "load" in path.name]
    assert sorted(path.name for path in tmp_path.iterdir() if "state.pt" in path.name) == ["state.pt"]
    final = lab.train(PLAIN, config("lazy"), seed=2)
    assert final.restored_step == 8
    lab.check_same(PLAIN, final)


@pytest.fixture(params=["disk", "bucket"])
def url(request: pytest.FixtureRequest) -> str | None:
    """Where a run's storage is. Asked for before the lab, which would take the server for something left behind."""
    return request.getfixturevalue("bucket").url if request.param == "bucket" else None


@pytest.mark.promise("no more is lost than `memckpt status` said, whenever the node dies")
@pytest.mark.promise('`"log"`')
@pytest.mark.slow
@pytest.mark.parametrize("mode", ["replica", "log"])
@REDO
def test_killed_at_random_no_more_is_lost_than_status_said(url: str | None, lab: Lab, redo: str, mode: str) -> None:
    """The node dies again and again, at any instant; the last attempt ends with the reference's bits."""
    chance = random.Random(f"{redo} {mode} {url is None}")
    storage = StorageConfig(every_steps=40, mode=mode, url=url)  # type: ignore[arg-type]
    settings = config(redo, storage=storage)
    attempts = []
    for number in range(4):
        lab.start_agent()
        child, report = lab.begin(LONG, settings, seed=number + 1)  # the first one's is the reference's
        address, delay, due = AgentAddress.of(lab.run_dir), chance.uniform(0.0, 1.0), None
        while (status := ask_status(address)) is not None:
            storage_status = status.storage
            if storage_status is not None and storage_status.loses_at_most is not None and status.step is not None:
                due = due or time.monotonic() + delay
                if time.monotonic() >= due:
                    break
            select.select([], [], [], 0.02)
        if status is None:
            break  # training was faster, and has ended
        pids = chance.sample([status.pid, child.pid], 2)
        for pid in pids:  # at once: a trainer that outlives its agent starts another one
            os.kill(pid, signal.SIGKILL)
        for pid in pids:
            kill_and_wait(pid)
        ended = collect(child, report)
        attempts.append(ended)
        assert status.storage.loses_at_most is not None
        assert status.step is not None
        lab.start_agent()
        look = lab.train(LONG, settings, seed=9, last_step=1, unchecked=None)  # it ends in the repeated step
        assert look.restored_step is not None
        assert status.step - look.restored_step <= status.storage.loses_at_most, status.storage
        kill_and_wait(lab.status().pid)
    assert attempts
    if child.alive():
        child.wait()
    lab.start_agent()
    final = lab.train(LONG, settings, seed=5, unchecked=[_AT_A_CHECKPOINT])
    lab.check_same(LONG, *attempts, final)


@pytest.fixture
def blocked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """In place of a directory, until it is unlinked; the agent tries again soon."""
    monkeypatch.setattr(saver, "_RETRY_SECONDS", 0.3)
    path = tmp_path / "blocked"
    path.write_text("no directory")
    return path


@pytest.mark.slow
def test_what_is_held_is_tried_again_until_there_is_a_place_for_it(blocked: Path, lab: Lab) -> None:
    settings = config("lazy", storage=StorageConfig(url=str(blocked / "store"), every_steps=1000))
    agent = lab.start_agent()
    died = lab.train(PLAIN, settings, actions={("backward", 9): kill_self})
    until(lambda: agent.log.read_text().count("step 8 is not in storage") >= 2)
    blocked.unlink()
    until(lambda: bool(read_catalog(LocalStore(blocked / "store")).complete))
    kill_and_wait(agent.pid)
    goes_on(lab, settings, died, 8)


def test_a_final_step_that_has_no_place_is_held_until_there_is_one(blocked: Path, lab: Lab) -> None:
    settings = config("lazy", storage=StorageConfig(url=str(blocked / "store"), every_steps=1000))
    agent = lab.start_agent()
    ended = lab.train(PLAIN, settings)
    assert f"the agent (pid {agent.pid}) keeps it in memory for 60 s, and tries again" in ended.log
    status = lab.status()
    assert status.step == PLAIN.steps
    assert "NotADirectoryError" in status.storage.alarm
    blocked.unlink()
    assert agent.wait() == 0
    assert "leaving: training finished" in agent.log.read_text()
    (held,) = read_catalog(LocalStore(blocked / "store")).complete
    assert held.step == PLAIN.steps


def test_a_node_without_an_agent_has_nothing_to_export(lab: Lab, tmp_path: Path) -> None:
    from memckpt.errors import AgentNotFoundError

    with pytest.raises(AgentNotFoundError, match="nothing is held in memory"):
        invoke("export", lab.run_dir, "--from", "memory", "--to", tmp_path / "state.pt")
    assert not (tmp_path / "state.pt").exists()
    assert catalog_of(lab).checkpoints == ()
