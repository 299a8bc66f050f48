"""What a run leaves behind on the machine, however it ends: nothing."""

from __future__ import annotations

import logging
import os
import select
import signal
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

import memckpt
from memckpt.capture.taps.tap import StreamingTap
from memckpt.config import AgentConfig
from memckpt.errors import UnsupportedStateError, UsageError
from memckpt.processes.address import AgentAddress
from tests.support.cluster.processes import kill_and_wait, memory_of_ours
from tests.support.trainings.engine_cases import PLAIN
from tests.support.trainings.engine_child import Control, config, kill_self
from tests.support.trainings.engine_harness import Lab
from tests.support.trainings.engine_training import Training, case_of

REDO = pytest.mark.parametrize("redo", ["lazy", "eager"])
DIE_AFTER_9 = {("after commit", 9): kill_self}


@pytest.mark.promise("a run leaves no process, memory or file behind except its run directory")
@REDO
def test_a_finished_run_leaves_only_its_run_directory(lab: Lab, redo: str) -> None:
    lab.train(PLAIN, config(redo))
    assert not lab.left_behind()
    assert {path.name for path in lab.run_dir.iterdir()} <= {"agent-node.log", "events-node.jsonl"}
    assert not lab.agent_answers()


@pytest.mark.promise("a run leaves no process, memory or file behind except its run directory")
@pytest.mark.promise("`memckpt stop --discard`")
@pytest.mark.parametrize("how", ["request", "SIGTERM", "SIGINT", "SIGKILL"])
def test_an_agent_that_is_told_to_leave_leaves_nothing(lab: Lab, how: str) -> None:
    lab.train(PLAIN, config("lazy"), actions=DIE_AFTER_9)
    status = lab.status()
    assert status.step == 9
    assert status.held_bytes > 0
    assert memory_of_ours(status.pid)
    if how == "request":
        lab.stop()
    elif how == "SIGKILL":
        kill_and_wait(status.pid)
        # The file that names it is left, and hinders nobody.
        assert AgentAddress.of(lab.run_dir).file_path.exists()
        lab.check_same(PLAIN, lab.train(PLAIN, config("lazy")))
    else:
        os.kill(status.pid, getattr(signal, how))
    assert not lab.left_behind()
    assert not AgentAddress.of(lab.run_dir).file_path.exists()


def test_an_agent_that_nobody_comes_back_to_leaves(lab: Lab) -> None:
    settings = config("lazy", agent=AgentConfig(linger_seconds=0.2))
    lab.train(PLAIN, settings, actions=DIE_AFTER_9)
    assert not lab.left_behind()


def test_an_unfinished_close_holds_on(lab: Lab) -> None:
    first = lab.train(PLAIN, config("lazy"), last_step=5)
    lab.goes_on(PLAIN, config("lazy"), 5, first)


@REDO
def test_one_process_may_attach_again(lab: Lab, redo: str) -> None:
    """As in a notebook: the cell is run again."""
    agent = lab.start_agent()
    settings = config(redo, resume_check="witness")

    def body() -> None:
        for attempt in range(3):
            training = PLAIN.build()
            session = memckpt.attach(training.model, training.optimizers, run_dir=lab.run_dir, config=settings)
            report = session.restore()
            assert (report.step if report else 0) == 3 * attempt
            for step in range(3 * attempt + 1, 3 * attempt + 4):
                training.batch(step)
                session.commit(step)
            session.close(finished=attempt == 2)

    child = lab.fork(body, "again")
    assert child.wait() == 0, child.log.read_text()
    assert agent.wait() == 0


def test_hooks_that_cannot_be_put_in_leave_nothing_behind(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent has been asked for room by then; the next attempt of the same process finds nobody in its way."""

    def fail(tap: StreamingTap) -> None:
        raise RuntimeError("no hooks here")

    def body() -> None:
        training = PLAIN.build()
        with monkeypatch.context() as patch:
            patch.setattr(StreamingTap, "install", fail)
            with pytest.raises(RuntimeError, match="no hooks here"):
                memckpt.attach(training.model, training.optimizers, run_dir=lab.run_dir, config=config("lazy"))
        status = lab.status()
        assert not status.trainers
        for optimizer in training.optimizers:
            hooks = vars(optimizer)
            assert not hooks["_optimizer_step_post_hooks"]
            assert not hooks["_optimizer_step_pre_hooks"]
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
        session = memckpt.attach(training.model, training.optimizers, run_dir=lab.run_dir, config=config("lazy"))
        training.batch(1)
        assert session.commit(1)
        session.close()

    child = lab.fork(body, "unhooked")
    assert child.wait() == 0, child.log.read_text()


@pytest.mark.promise("state that the safe codec does not take")
def test_state_that_cannot_be_stored_safely_is_named(lab: Lab) -> None:
    def body() -> None:
        training = PLAIN.build()
        session = memckpt.attach(training.model, training.optimizers, run_dir=lab.run_dir, config=config())
        session.provide("mine", lambda: {"handle": object()})
        training.batch(1)
        try:
            session.commit(1)
        except UnsupportedStateError as error:
            logging.getLogger("test").error("raised %s", error)
        session.close()

    child = lab.fork(body, "unsafe")
    assert child.wait() == 0, child.log.read_text()
    assert "mine.handle is of type builtins.object" in child.log.read_text()


@pytest.mark.promise("trainer: exception, any signal, out of memory, segmentation fault")
def test_an_exception_in_training_keeps_the_state(lab: Lab) -> None:
    def body() -> None:
        training = PLAIN.build()
        with memckpt.attach(training.model, training.optimizers, run_dir=lab.run_dir, config=config()) as session:
            for step in (1, 2, 3):
                training.batch(step)
                session.commit(step)
            raise ZeroDivisionError

    assert lab.fork(body, "fails").wait() == 3
    assert lab.status().step == 3
    lab.stop()


def test_a_forked_process_may_train_the_model_that_it_has_inherited(lab: Lab) -> None:
    """Its copy is not protected, and the ranges of records are not mapped there."""

    def train_in_child(training: Training, step: int) -> None:
        if step == 5:
            pid = os.fork()
            if pid == 0:
                torch.set_num_threads(1)
                training.loss(step).backward()
                training.take_step(step)
                os._exit(7)
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7

    lab.survives(case_of("forked", before=train_in_child), config("lazy"), [("after commit", 9)])


def test_a_forked_process_commits_nothing(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    with memckpt.attach(model, torch.optim.SGD(model.parameters(), 0.1), run_dir=tmp_path / "run") as session:
        session.restore()
        pid = os.fork()
        if pid == 0:
            try:
                session.commit()
            except UsageError as error:
                os._exit(7 if "in a forked process" in str(error) else 8)
            os._exit(9)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7


@pytest.mark.promise("a run leaves no process, memory or file behind except its run directory")
@pytest.mark.parametrize("redo", ["lazy", pytest.param("eager", marks=pytest.mark.slow)])
def test_children_that_outlive_a_killed_trainer_hold_nothing(lab: Lab, redo: str) -> None:
    """Loader workers of a killed trainer live on for a while: they neither keep the run busy nor its memory."""
    read_fd, write_fd = os.pipe()
    workers = lab.directory / "workers"

    def fork_worker(control: Control) -> None:
        pid = os.fork()
        if pid == 0:
            os.close(write_fd)
            select.select([read_fd], [], [], 50)  # until the test ends it
            os._exit(0)
        with workers.open("a") as stream:
            stream.write(f"{pid}\n")

    actions = {("before batch", 1): fork_worker, ("forward", 7): fork_worker, ("after commit", 9): kill_self}
    first = lab.train(PLAIN, config(redo), actions=actions)
    pids = [int(line) for line in workers.read_text().split()]
    assert len(pids) == 2
    for pid in pids:
        assert not memory_of_ours(pid)
        sockets = [os.readlink(fd) for fd in Path(f"/proc/{pid}/fd").iterdir()]
        assert not any("socket" in target for target in sockets if target not in _own_sockets())
    lab.goes_on(PLAIN, config(redo), 9, first)
    os.close(write_fd)
    os.close(read_fd)


def _own_sockets() -> set[str]:
    """Sockets of the pytest process, which every fork of it has."""
    found = set()
    for fd in Path("/proc/self/fd").iterdir():
        try:
            found.add(os.readlink(fd))
        except FileNotFoundError:
            continue
    return found


def test_data_loader_workers_that_outlive_their_trainer_hold_nothing(lab: Lab) -> None:
    workers = lab.directory / "workers"

    def with_workers(control: Control) -> None:
        loader = DataLoader(list(range(100)), num_workers=2, multiprocessing_context="fork", persistent_workers=True)  # type: ignore[arg-type]
        iterator = iter(loader)
        batches = [next(iterator), next(iterator)]  # one of each worker: both have begun
        assert len(batches) == 2
        pids = [each.pid for each in iterator._workers]  # type: ignore[attr-defined]
        for pid in pids:
            if memory_of_ours(pid):
                raise AssertionError(f"worker {pid} holds {memory_of_ours(pid)}")
        workers.write_text(" ".join(map(str, pids)))
        kill_self(control)

    # The generators move when a loader starts; this attempt's losses end here.
    first = lab.train(PLAIN, config("lazy"), actions={("before batch", 7): with_workers})
    pids = [int(pid) for pid in workers.read_text().split()]
    assert len(pids) == 2
    lab.goes_on(PLAIN, config("lazy"), 6, first)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)  # they would see only after a while that their trainer is dead
