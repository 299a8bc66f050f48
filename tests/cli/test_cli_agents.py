"""``memckpt ps`` and ``memckpt stop``: agents of this machine, and what is left of what they held."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest

from memckpt.config import StorageConfig
from memckpt.errors import AgentNotFoundError, ConfigurationError, StorageError
from memckpt.processes import control
from memckpt.processes.address import AgentAddress, agent_sockets
from memckpt.storage.catalog import read_catalog
from memckpt.storage.local_store import LocalStore
from tests.support.cluster.processes import kill_and_wait
from tests.support.trainings.cli_harness import exit_status, invoke, invoke_json
from tests.support.trainings.engine_cases import PLAIN
from tests.support.trainings.engine_child import config, kill_self
from tests.support.trainings.engine_harness import Lab

#: Storage that gets its first checkpoint long after the kill.
LATE = StorageConfig(every_steps=100, min_seconds=3600)


def held_at_7(lab: Lab, redo: str = "lazy", storage: StorageConfig | None = LATE) -> int:
    """Train, and die in step 8; returns the pid of the agent, which holds step 7."""
    lab.train(PLAIN, config(redo, storage=storage), actions={("backward", 8): kill_self})
    return int(lab.status().pid)


def stored_steps(lab: Lab) -> list[int]:
    return [one.step for one in read_catalog(LocalStore(lab.run_dir / "storage")).complete]


@pytest.mark.promise("`memckpt stop`")
@pytest.mark.parametrize("redo", ["lazy", pytest.param("eager", marks=pytest.mark.slow)])
def test_stop_writes_what_storage_lacks(lab: Lab, redo: str) -> None:
    pid = held_at_7(lab, redo)
    assert stored_steps(lab) == []
    code, text = invoke("stop", lab.run_dir)
    assert code == 0
    left = f"agent pid {pid} of {lab.run_dir} has left; step 7 is no longer held in memory"
    assert f"{left}, and what was held is in storage" in text
    assert stored_steps(lab) == [7]
    with pytest.raises(AgentNotFoundError, match="nothing to stop"):
        invoke("stop", lab.run_dir)
    resumed = lab.train(PLAIN, config(redo, storage=LATE))
    assert resumed.restored_step == 7
    lab.check_same(PLAIN, resumed)


def test_stop_discards_on_request(lab: Lab) -> None:
    pid = held_at_7(lab)
    code, found = invoke_json("stop", lab.run_dir, "--discard")
    assert code == 0
    said = {"stopped": pid, "step": 7, "saved": False, "problem": ""}
    assert {key: found[key] for key in said} == said
    assert stored_steps(lab) == []


def test_stop_says_that_there_is_no_storage(lab: Lab) -> None:
    held_at_7(lab, storage=None)
    code, text = invoke("stop", lab.run_dir)
    assert code == 0
    assert "step 7 is no longer held in memory" in text
    assert "storage" not in text


def test_stop_says_what_it_let_go_of(lab: Lab) -> None:
    child = lab.start_agent()
    code, found = invoke_json("stop", lab.run_dir)
    assert code == 0
    assert (found["stopped"], found["step"], found["saved"]) == (child.pid, None, False)
    assert child.wait() == 0


def test_an_agent_whose_storage_fails_stays_unless_its_state_is_discarded(lab: Lab, tmp_path: Path) -> None:
    url = tmp_path / "store"
    url.write_text("no directory")
    pid = held_at_7(lab, storage=StorageConfig(url=str(url), every_steps=2, min_seconds=0))
    code, text = invoke("stop", lab.run_dir)
    assert code == StorageError.exit_code
    assert f"the agent of {lab.run_dir} stays until it can write step 7, which is in its memory only: " in text
    assert lab.status().pid == pid
    assert invoke("stop", lab.run_dir, "--discard")[0] == 0


def test_an_agent_that_is_killed_while_it_writes_has_not_written(lab: Lab) -> None:
    child = lab.start_agent()
    sock = AgentAddress.of(lab.run_dir).connect()
    assert sock is not None
    os.kill(child.pid, signal.SIGKILL)
    assert control.stop_at(sock, save=True).kept == "it ended before it said that it is"
    assert child.wait() == -signal.SIGKILL


def test_ps_lists_agents_also_of_directories_that_are_gone(lab: Lab) -> None:
    pid = held_at_7(lab)
    found = next(one for one in invoke_json("ps")[1]["agents"] if one["pid"] == pid)
    agent = found["agent"]
    assert (agent["run_dir"], agent["step"], found["run_dir_removed"]) == (str(lab.run_dir), 7, False)
    assert agent["held_bytes"] > 0
    shutil.rmtree(lab.run_dir)
    found = next(one for one in invoke_json("ps")[1]["agents"] if one["pid"] == pid)
    assert found["run_dir_removed"]
    assert "(removed)" in invoke("ps")[1].replace("\n", " ")
    kill_and_wait(pid)  # it would end by itself, some time later


def test_ps_names_an_agent_that_does_not_answer(lab: Lab) -> None:
    child = lab.start_agent()
    os.kill(child.pid, signal.SIGSTOP)
    try:
        answered = {each.pid: each.status for each in control.agents_here(timeout=0.2)}
    finally:
        os.kill(child.pid, signal.SIGCONT)
    assert answered[child.pid] is None
    lab.stop()


def test_all_agents_are_stopped_at_once(lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of this test: others run beside it."""
    runs = [lab.run_dir, tmp_path / "second"]
    children = [lab.start_agent(run) for run in runs]
    names = [serving.socket for run in runs if (serving := AgentAddress.of(run).serving()) is not None]
    assert set(names) <= set(agent_sockets())
    monkeypatch.setattr(control, "agent_sockets", lambda: names)
    shutil.rmtree(runs[1])
    code, found = invoke_json("stop", "--all")
    assert code == 0
    assert sorted(one["stopped"] for one in found["agents"]) == sorted(child.pid for child in children)
    assert [child.wait() for child in children] == [0, 0]
    assert invoke("stop", "--all") == (0, "no agent of yours runs on this machine\n")


@pytest.mark.parametrize("arguments", [[], ["run", "--all"], ["--all", "--node", "n"]])
def test_stop_wants_a_run_or_all(monkeypatch: pytest.MonkeyPatch, arguments: list[str]) -> None:
    assert exit_status(monkeypatch, "stop", *arguments) == ConfigurationError.exit_code
