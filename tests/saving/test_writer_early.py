"""The writer process is there before it is needed, takes nothing from training, and writes the first steps soon."""

from __future__ import annotations

import ctypes
import os
import platform
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import memckpt
from memckpt.config import StorageConfig
from memckpt.processes import helper
from memckpt.storage.catalog import read_catalog
from memckpt.storage.local_store import LocalStore
from tests.support.cluster.processes import hides_devices
from tests.support.cluster.waiting import until
from tests.support.trainings.engine_cases import PLAIN
from tests.support.trainings.engine_child import config
from tests.support.trainings.engine_harness import Lab

IOPRIO_GET, IDLE = 252, 3


def has_torch(pid: int) -> bool:
    return "libtorch" in Path(f"/proc/{pid}/maps").read_text()


@pytest.mark.promise("the first steps are in storage soon, and the writer process is running before it is needed")
def test_the_writer_is_ready_before_it_is_needed(lab: Lab) -> None:
    """And it alone imports torch, the agent does not."""

    def body() -> None:
        training = PLAIN.build()
        storage = StorageConfig(every_steps=1000)  # nothing is due before the end
        session = memckpt.attach(
            training.model, training.optimizers, run_dir=lab.run_dir, config=config("lazy", storage=storage)
        )
        training.batch(1)
        assert session.commit(1)
        agent = session.agent_pid
        assert agent is not None
        (writer,) = (int(pid) for pid in Path(f"/proc/{agent}/task/{agent}/children").read_text().split())
        until(lambda: has_torch(writer))
        assert not has_torch(agent)
        assert os.getpriority(os.PRIO_PROCESS, writer) == os.getpriority(os.PRIO_PROCESS, agent)
        assert int(Path(f"/proc/{writer}/oom_score_adj").read_text()) == 500
        assert all(hides_devices(pid) for pid in (agent, writer))
        assert not hides_devices(os.getpid())
        session.close()

    child = lab.fork(body, "early")
    assert child.wait() == 0, child.log.read_text()
    (stored,) = read_catalog(LocalStore(lab.run_dir / "storage")).complete
    assert stored.step == 1


@pytest.mark.parametrize("redo", ["lazy", "eager"])
def test_the_first_steps_are_in_storage_soon(lab: Lab, redo: str) -> None:
    """Not only when `min_seconds` are over: until then, losing the machine would lose everything."""
    if redo == "eager":
        lab.start_agent()

    def body() -> None:
        training = PLAIN.build()
        settings = config(redo, storage=StorageConfig(min_seconds=3600.0))
        session = memckpt.attach(training.model, training.optimizers, run_dir=lab.run_dir, config=settings)
        step = 0

        def trained_until_stored() -> bool:
            nonlocal step
            step += 1
            training.batch(step)
            session.commit(step)
            return session.stored_step is not None

        until(trained_until_stored)
        session.close(finished=False)

    child = lab.fork(body, "soon")
    assert child.wait() == 0, child.log.read_text()
    (stored, *_) = read_catalog(LocalStore(lab.run_dir / "storage")).complete
    assert stored.step >= 2
    lab.stop()


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the system call's number is of x86-64")
def test_a_thread_that_steps_back_leaves_cores_and_disk_to_others() -> None:
    """And to the other threads of its process."""

    def priorities() -> tuple[int, int]:
        return os.getpriority(os.PRIO_PROCESS, 0), int(ctypes.CDLL(None).syscall(IOPRIO_GET, 1, 0)) >> 13

    before = priorities()
    with ThreadPoolExecutor(1, initializer=helper.step_back) as background:
        assert background.submit(priorities).result() == (min(19, before[0] + 9), IDLE)
    assert priorities() == before


def test_a_score_that_is_higher_already_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "score"
    monkeypatch.setattr(helper, "Path", lambda _: path)
    for before, after in [("-500\n", "500"), ("0\n", "500"), ("700\n", "700\n")]:
        path.write_text(before)
        helper.prefer_to_be_ended()
        assert path.read_text() == after
