"""The agent as a service: readiness, restarts, stops. What is run is what the shipped units say."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from memckpt.cli.main import READY, ServiceManager
from memckpt.errors import AgentGoneError
from memckpt.processes.address import NODE_VARIABLE, AgentAddress
from memckpt.processes.control import ask_status
from memckpt.storage.catalog import read_catalog
from memckpt.storage.local_store import LocalStore
from tests.support.cluster.service_harness import Home, Service, UserManager
from tests.support.cluster.service_job import SETTINGS
from tests.support.cluster.waiting import until
from tests.support.trainings.engine_cases import PLAIN
from tests.support.trainings.engine_child import Control, config, kill_self
from tests.support.trainings.engine_harness import Lab, collect

AGENT, TRAIN = "memckpt-agent@.service", "train@.service"


@pytest.fixture
def runtime() -> Iterator[Path]:
    """A user's runtime directory, whose path is short enough for a manager's socket."""
    with tempfile.TemporaryDirectory(prefix="mk-") as directory:
        yield Path(directory)


@pytest.fixture
def home(lab: Lab, runtime: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    """A user's home, whose runs this process finds, too."""
    home = Home.make(lab.directory / "home", runtime)
    monkeypatch.delenv(NODE_VARIABLE)
    lab.run_dir = home.run_dir
    return home


@pytest.fixture
def agent(home: Home) -> Iterator[Service]:
    service = Service(AGENT, home)
    yield service
    service.close()


def stored_step(run_dir: Path) -> int | None:
    complete = read_catalog(LocalStore(run_dir / "storage")).complete
    return complete[0].step if complete else None


# Readiness


@pytest.mark.parametrize("abstract", [False, True], ids=["path", "abstract"])
def test_the_agent_says_when_it_answers_and_when_it_leaves(lab: Lab, home: Home, abstract: bool) -> None:
    agent = Service(AGENT, home, abstract=abstract)
    try:
        agent.start()
        agent.until_said("READY=1")
        assert lab.agent_answers()
        assert agent.said == ["READY=1"]
        agent.process.send_signal(signal.SIGTERM)
        agent.until_said("STOPPING=1")
        assert agent.wait() == 0
        assert agent.said == ["READY=1", "STOPPING=1"]
    finally:
        agent.close()


def test_a_manager_that_does_not_listen_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "nobody"))
    manager = ServiceManager()
    assert "NOTIFY_SOCKET" not in os.environ, "what the agent starts is not the service"
    manager.notify(READY)
    assert caplog.messages[0].startswith(f"READY=1 cannot be sent to NOTIFY_SOCKET={tmp_path / 'nobody'}: [Errno 2]")
    ServiceManager().notify(READY)
    assert len(caplog.messages) == 1


# Restarts


@pytest.mark.promise("an agent beside the job replaces one that would die with the trainers, and no other")
def test_a_second_agent_ends_with_status_7_and_is_not_started_again(lab: Lab, home: Home, agent: Service) -> None:
    """Of an agent that nobody trains with it is not known what it is kept for: it is left alone."""
    first = lab.start_agent()
    agent.start()
    code = agent.wait()
    assert code == 7, agent.log.read_text()
    assert "STOPPING=1" not in agent.said
    assert f"an agent already serves {home.run_dir}" in agent.log.read_text()
    assert first.alive()
    assert [agent.unit.restarts_after(code) for code in (7, 0, -signal.SIGTERM)] == [False] * 3
    assert [agent.unit.restarts_after(code) for code in (1, 9, -signal.SIGKILL)] == [True] * 3
    lab.stop()


@pytest.mark.promise(
    "under the shipped systemd units a killed trainer resumes from memory, a stopped machine from storage"
)
@pytest.mark.promise("the machine, the container with both, the cgroup with both, without peers")
def test_a_run_under_the_shipped_unit_goes_on_from_memory_then_from_storage(
    lab: Lab, home: Home, agent: Service
) -> None:
    agent.start()
    agent.until_said("READY=1")
    pid = agent.process.pid
    died = lab.train(PLAIN, SETTINGS, actions={("backward", 9): kill_self})
    assert lab.status().pid == pid, "the trainer has started an agent of its own"
    again = lab.train(PLAIN, SETTINGS, seed=2, actions={("after commit", 14): kill_self})
    assert again.restored_step == 8
    assert lab.status().pid == pid
    # The machine goes down: the unit is stopped, and what it holds is in storage.
    assert stored_step(home.run_dir) != 14
    assert agent.stop() == 0
    assert stored_step(home.run_dir) == 14
    # It is up again.
    agent.start()
    agent.until_said("READY=1")
    final = lab.train(PLAIN, SETTINGS, seed=3)
    assert final.restored_step == 14
    assert "resuming from storage" in final.log
    agent.until_said("STOPPING=1")
    assert agent.wait() == 0, "training has finished"
    lab.check_same(PLAIN, died, again, final)


@pytest.mark.promise("an agent beside the job replaces one that would die with the trainers, and no other")
def test_an_agent_beside_the_job_takes_over_from_one_that_would_die_with_it(
    lab: Lab, home: Home, agent: Service
) -> None:
    """As after the death of a unit's agent, when a trainer was faster than its restart."""

    address = AgentAddress.of(home.run_dir)
    first = lab.start_agent()

    def taken_over() -> bool:
        try:
            status = ask_status(address)
        except AgentGoneError:  # the first one leaves as it is asked
            return False
        return status is not None and status.by_operator

    def until_taken_over(control: Control) -> None:
        until(taken_over)

    actions = {("after commit", 6): until_taken_over, ("backward", 10): kill_self}
    memory_only = config("lazy")  # that an agent which is told to go saves first is tested elsewhere
    child, report = lab.begin(PLAIN, memory_only, actions=actions)
    until(lambda: (report / "journal").exists() and "after commit" in (report / "journal").read_text())
    agent.start()
    agent.until_said("READY=1")
    died = collect(child, report)
    assert died.code == -signal.SIGKILL
    assert first.wait() == 0
    final = lab.train(PLAIN, memory_only, seed=2)
    assert final.restored_step == 9
    lab.check_same(PLAIN, died, final)
    assert agent.wait() == 0
    assert f"taking over from agent pid {first.pid}" in agent.log.read_text()


# Both units


@pytest.mark.promise(
    "under the shipped systemd units a killed trainer resumes from memory, a stopped machine from storage"
)
@pytest.mark.slow
def test_both_shipped_units(lab: Lab, home: Home, agent: Service) -> None:
    """New processes all along, as under a manager."""
    train = Service(TRAIN, home)
    home.plan([("kill", "backward", 9)], [("kill", "after commit", 14)], [("kill", "in commit", 17)], [])
    agent.start()
    agent.until_said("READY=1")
    attempts = []
    try:
        for number in range(4):
            train.start()
            code = train.wait()
            attempts.append(home.attempt(number, code, train.log.read_text()))
            if number == 1:
                assert agent.stop() == 0
                agent.start()
                agent.until_said("READY=1")
            if not train.unit.restarts_after(code):
                break
        assert [one.code for one in attempts] == [-signal.SIGKILL] * 3 + [0], train.log.read_text()[-3000:]
        assert [one.restored_step for one in attempts] == [None, 8, 14, 16], agent.log.read_text()
        assert train.log.read_text().count("resuming from storage") == 1
        assert agent.wait() == 0, "training has finished"
        assert not agent.unit.restarts_after(0)
        lab.check_same(PLAIN, *attempts)
    finally:
        train.close()


@pytest.mark.promise(
    "under the shipped systemd units a killed trainer resumes from memory, a stopped machine from storage"
)
@pytest.mark.slow
def test_both_shipped_units_under_systemd_itself(lab: Lab, home: Home) -> None:
    """Its control groups, its restarts, its order of starts."""
    manager = UserManager(home)
    agent, train = "memckpt-agent@my-run.service", "train@my-run.service"
    try:
        home.plan(
            [("kill", "backward", 9)],
            [("wait", "after commit", 14)],
            [("wait", "after commit", 17), ("kill", "backward", 21)],
            [("wait", "after commit", 22)],
            [],
        )
        manager.do("start", train)
        # The first attempt's end is the unit's end, and everything in its control group dies.
        until(lambda: home.waits(1))
        assert manager.show(train, "NRestarts") == "1"
        pid = lab.status().pid
        assert str(pid) == manager.show(agent, "MainPID"), "the trainer has started an agent of its own"
        # An operator stops the training: it stays in memory.
        manager.do("stop", train)
        assert manager.show(train, "ActiveState") == "inactive"
        assert lab.status().pid == pid
        # And then the agent: it is in storage. To start the training starts the agent first.
        manager.do("stop", agent)
        assert not lab.agent_answers()
        assert stored_step(home.run_dir) == 14
        manager.do("start", train)
        until(lambda: home.waits(2))
        assert str(lab.status().pid) == manager.show(agent, "MainPID")
        # The agent dies, and is started again; whoever is faster, in the end the unit's agent serves.
        manager.do("kill", "--signal=KILL", "--kill-whom=main", agent)
        until(lambda: manager.show(agent, "NRestarts") == "1" and manager.show(agent, "SubState") == "running")
        home.go(2)
        until(lambda: home.waits(3))
        # The agent has left when the training is started again by itself: it is started, too, and first.
        manager.do("stop", agent)
        before = manager.show(agent, "InvocationID")
        manager.do("kill", "--signal=KILL", train)
        until(lambda: home.ended(4))
        until(lambda: manager.show(train, "SubState") == "dead")
        assert manager.show(agent, "InvocationID") != before
        assert manager.show(train, "Result") == "success"
        until(lambda: manager.show(agent, "SubState") == "dead")
        assert manager.show(agent, "Result") == "success"
    finally:
        manager.close()
    log = manager.log.read_text()
    attempts = [home.attempt(number, 0, log) for number in range(5)]
    assert [one.restored_step for one in attempts] == [None, 8, 14, 20, 22]
    # Stopped, killed, stopped: from storage where both were gone.
    assert log.count("resuming from storage") == 2
    lab.check_same(PLAIN, *attempts)
