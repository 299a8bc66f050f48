"""An agent that is told to end saves what it holds, and whoever starts meanwhile finds that."""

from __future__ import annotations

import os
import select
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from memckpt.agent.saving.saver import Saver
from memckpt.processes.address import AgentAddress
from memckpt.processes.control import ask_status
from memckpt.protocol.trainer import Inventory
from memckpt.session.connection import AgentConnection
from memckpt.session.link import AgentLink
from memckpt.state.spec import StateSpec
from tests.support.cluster.sharded_cases import Setup, job_of
from tests.support.cluster.waiting import LIMIT_SECONDS, until
from tests.support.storage.stored_runs import goes_on, newest, stored
from tests.support.trainings import killed_ranks
from tests.support.trainings.engine_cases import PLAIN
from tests.support.trainings.engine_child import Control, kill_both, kill_self
from tests.support.trainings.engine_harness import Lab


def agent_of(control: Control) -> int:
    """Process id of the agent that protects this trainer."""
    pid = control.session.agent_pid
    assert pid is not None
    return pid


@pytest.mark.promise(
    "the state that a dead trainer leaves is written to storage, and so are the final step and the state at a SIGTERM"
)
@pytest.mark.promise("SIGTERM to the agent (a preemption)")
def test_an_agent_that_is_told_to_end_saves_first_and_training_goes_on(lab: Lab) -> None:
    settings = stored("lazy", every_steps=None)

    def preempt(control: Control) -> None:
        pid = agent_of(control)
        handle = os.pidfd_open(pid)
        os.kill(pid, signal.SIGTERM)
        assert select.select([handle], [], [], LIMIT_SECONDS)[0]
        os.close(handle)

    died = lab.train(PLAIN, settings, actions={("after commit", 8): preempt, ("backward", 10): kill_both})
    assert "training goes on without protection" in died.log
    assert newest(lab) == 8
    goes_on(lab, settings, died, 8)


@pytest.mark.promise(
    "the state that a dead trainer leaves is written to storage, and so are the final step and the state at a SIGTERM"
)
@pytest.mark.promise("SIGTERM to the agent (a preemption)")
def test_a_start_waits_for_an_agent_that_still_writes_what_it_holds(lab: Lab) -> None:
    """The agent is told to end, and its trainer dies: another one starts at once, and finds all."""
    settings = stored("lazy", every_steps=None)

    def preempt(control: Control) -> None:
        os.kill(agent_of(control), signal.SIGTERM)
        kill_self(control)

    def prepare(control: Control) -> None:
        """Wait until the old agent answers no more, as for a trainer that is started a little later."""
        serving = AgentAddress.of(lab.run_dir).serving()
        if serving is not None:
            while (answered := AgentAddress.of(lab.run_dir).connect()) is not None:
                answered.close()
                serving.ends(within=0.01)

    died = lab.train(PLAIN, settings, actions={("backward", 9): preempt})
    final = lab.train(PLAIN, settings, seed=2, prepare=prepare)
    assert final.restored_step == 8
    assert "still writes to storage what it holds" in final.log
    lab.check_same(PLAIN, died, final)


@pytest.mark.promise(
    "the state that a dead trainer leaves is written to storage, and so are the final step and the state at a SIGTERM"
)
def test_a_stopped_agent_that_is_told_to_end_saves_what_it_had_not_read_yet(lab: Lab) -> None:
    settings = stored("lazy", every_steps=None)

    def stop(control: Control) -> None:
        os.kill(agent_of(control), signal.SIGSTOP)

    died = lab.train(PLAIN, settings, actions={("after commit", 5): stop, ("backward", 9): kill_self})
    serving = AgentAddress.of(lab.run_dir).serving()
    assert serving is not None
    for number in (signal.SIGTERM, signal.SIGCONT):
        os.kill(serving.pid, number)
    goes_on(lab, settings, died, 8)


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_a_start_whose_agent_ends_while_it_connects_goes_on_with_another_one(lab: Lab, how: signal.Signals) -> None:
    settings = stored("lazy", every_steps=None)
    address = AgentAddress.of(lab.run_dir)

    def prepare(control: Control) -> None:
        original = AgentConnection.request

        def request(connection: AgentConnection, hello: Any, expected: Any) -> Any:
            AgentConnection.request = original  # type: ignore[method-assign]
            os.kill(connection.agent_pid, how)
            until(lambda: (serving := address.serving()) is None or serving.ends(within=0.0))
            return original(connection, hello, expected)

        AgentConnection.request = request  # type: ignore[method-assign]  # in a forked child

    died = lab.train(PLAIN, settings, actions={("backward", 9): kill_self})
    final = lab.train(PLAIN, settings, seed=2, prepare=prepare)
    if how == signal.SIGTERM:
        assert final.restored_step == 8
        lab.check_same(PLAIN, died, final)


def test_an_agent_that_is_told_to_end_says_so_before_it_saves(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A replica may have to go forward before it is saved, and whoever takes over does not wait for that."""
    go, original = tmp_path / "go", Saver.save_held

    def save_held(saver: Saver, *arguments: Any) -> None:
        until(go.exists)
        original(saver, *arguments)

    monkeypatch.setattr(Saver, "save_held", save_held)
    lab.start_agent()
    monkeypatch.undo()

    def preempt(control: Control) -> None:
        os.kill(agent_of(control), signal.SIGTERM)
        until(lambda: AgentAddress.of(lab.run_dir).serving() is None)
        go.touch()
        kill_self(control)

    settings = stored("lazy", every_steps=None)
    died = lab.train(PLAIN, settings, actions={("backward", 9): preempt})
    goes_on(lab, settings, died, 8)


@pytest.mark.promise(
    "the state that a dead trainer leaves is written to storage, and so are the final step and the state at a SIGTERM"
)
def test_ranks_that_come_before_and_after_their_agent_was_told_to_end_go_to_one(lab: Lab) -> None:
    job = job_of(lab, Setup(world_size=2), stored("lazy", every_steps=None))
    expected = killed_ranks.reference(lab, job)
    killed_ranks.start_agents(lab, job)
    died = replace(job, deaths=[killed_ranks.Death("all", 6, "backward")])
    assert killed_ranks.run(lab, died) == [-signal.SIGKILL] * 2

    def prepare(rank: int) -> None:
        original = AgentLink.connect

        def connect(link: AgentLink, spec: StateSpec) -> Inventory:
            AgentLink.connect = original  # type: ignore[method-assign]
            serving = link._address.serving()
            until(lambda: (status := ask_status(link._address)) is not None and len(status.trainers) == 1)
            os.kill(serving.pid, signal.SIGTERM)
            until(lambda: link._address.serving() != serving)
            return original(link, spec)

        if rank == 1:
            AgentLink.connect = connect  # type: ignore[method-assign]  # in a forked child

    last = replace(job, directory=killed_ranks.fresh_directory(lab), number=1, prepare=prepare)
    assert killed_ranks.run(lab, last) == [0, 0], killed_ranks.logs(lab)[-6000:]
    killed_ranks.check_same(killed_ranks.results(last), expected)
    assert {each["resumed"] for each in killed_ranks.results(last)} == {6}
    assert killed_ranks.logs(lab).count("they go to the next one") == 2


@pytest.mark.promise(
    "the state that a dead trainer leaves is written to storage, and so are the final step and the state at a SIGTERM"
)
def test_an_agent_that_cannot_save_tries_again_until_its_grace_period_ends(lab: Lab, tmp_path: Path) -> None:
    place = tmp_path / "mount"
    place.write_text("not a directory")
    settings = stored("lazy", every_steps=None, url=str(place / "inside"), grace_seconds=LIMIT_SECONDS)

    def preempt(control: Control) -> None:
        """And the disk is back once the agent has failed to save."""
        os.kill(agent_of(control), signal.SIGTERM)
        until(lambda: "step 8 is not in storage" in AgentAddress.of(lab.run_dir).log_path.read_text())
        place.unlink()
        kill_self(control)

    died = lab.train(PLAIN, settings, actions={("backward", 9): preempt})
    goes_on(lab, settings, died, 8)
