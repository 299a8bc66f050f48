"""A process that is stopped or dead-locked is told from one that is busy, and from one that waits for its turn."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from memckpt.errors import AgentGoneError
from memckpt.memory.pages import LifePage, LifeWatch
from memckpt.processes.event_loop import EventLoop
from memckpt.processes.helper_process import HelperProcess
from memckpt.protocol.replication import Halt, Halted
from tests.support.cluster.processes import kill_and_wait
from tests.support.cluster.waiting import until


@pytest.fixture
def page() -> Iterator[LifePage]:
    page = LifePage.create()
    yield page
    page.close()


@contextlib.contextmanager
def child(body: Callable[[], None]) -> Iterator[int]:
    """A process that does something and then nothing; one that does nothing sleeps already."""
    pid = os.fork()
    if pid == 0:
        try:
            body()
            signal.pause()
        finally:
            os._exit(0)
    try:
        if body is nothing:
            until(lambda: Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "S", "it sleeps")
        yield pid
    finally:
        kill_and_wait(pid)
        os.waitpid(pid, 0)


def nothing() -> None:
    pass


def compute() -> None:
    while True:
        pass


def wait_for_a_lock_that_is_taken() -> None:
    lock = threading.Lock()
    with lock:
        lock.acquire()


def looks_quiet(watch: LifeWatch) -> None:
    """Wait until a process counts as standing still."""
    until(watch.stands_still, "it stands still")


@pytest.mark.promise(
    "a stopped or deadlocked replicator is killed and replaced, a busy one is not; no acknowledged record is lost "
    "with it"
)
@pytest.mark.parametrize("body", [nothing, wait_for_a_lock_that_is_taken], ids=["sleeps", "dead-locked"])
def test_a_process_that_does_nothing_stands_still(page: LifePage, body: Callable[[], None]) -> None:
    with child(body) as pid:
        looks_quiet(LifeWatch(page, pid, 0.2, "main"))


def test_a_process_that_computes_lives_until_it_is_stopped(page: LifePage) -> None:
    """Its loop comes round never, as in a call that takes long."""
    with child(compute) as pid:
        now = 0.0
        watch = LifeWatch(page, pid, 15.0, "main", clock=lambda: now)
        for _ in range(100):
            now += 1.0
            assert not watch.stands_still()
        os.kill(pid, signal.SIGSTOP)
        looks_quiet(LifeWatch(page, pid, 0.2, "main"))


def test_a_loop_that_comes_round_lives(page: LifePage) -> None:
    with child(nothing) as pid:
        now = 0.0
        watch = LifeWatch(page, pid, 15.0, "main", clock=lambda: now)
        watch.look_for_life()
        for _ in range(100):
            now += 1.0
            page.beat()
            assert watch.look_for_life() == 0.0
        for seconds in range(1, 15):
            now += 1.0
            assert watch.look_for_life() == seconds
        assert not watch.stands_still()
        now += 1.0
        assert watch.stands_still()


def test_a_look_waits_until_it_is_due_unless_the_process_stands_still(
    page: LifePage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loop asks in each of its turns; a look reads a file of the kernel's."""
    now, looks = 0.0, 0
    watch = LifeWatch(page, os.getpid(), 8.0, "main", clock=lambda: now)

    def account() -> tuple[bool, int]:
        nonlocal looks
        looks += 1
        return False, 0

    monkeypatch.setattr(watch, "_account", account)
    for _ in range(9):
        now += 1.0
        answers = [watch.stands_still() for _ in range(100)]
    assert looks == 8 + 100, "one a second, and each once the limit is reached"
    assert all(answers)
    page.beat()
    assert not watch.stands_still(), "it lives again, and that shows at once"


def test_who_was_stopped_itself_has_seen_nothing(page: LifePage) -> None:
    with child(nothing) as pid:
        now = 0.0
        watch = LifeWatch(page, pid, 15.0, "main", clock=lambda: now)
        watch.look_for_life()
        now += 3600.0
        assert watch.look_for_life() <= 2 * watch.pause


def test_the_counter_comes_round(page: LifePage) -> None:
    page.words[0] = 2**64 - 1
    page.beat()
    assert page.beats == 0
    page.close()
    page.beat()
    assert page.beats == -1


def test_a_replicator_that_is_stopped_is_not_waited_for() -> None:
    before = set(os.listdir("/proc/self/fd"))
    own = LifePage.create()
    with contextlib.closing(EventLoop(own)) as loop:
        process = HelperProcess(
            "memckpt.replication.process.replicator", loop, lambda message: None, lambda reason: None, 60.0
        )
        with contextlib.closing(process):
            assert process.ask(Halt(), Halted, 60.0) == Halted()
            assert not process.stands_still()
            os.kill(process._process.pid, signal.SIGSTOP)
            process.watch_for(0.5)
            beats = own.beats
            with pytest.raises(AgentGoneError, match=r"no sign of life for 0\.5 s"):
                process.ask(Halt(), Halted, 600.0)
            assert own.beats > beats, "the agent's own loop counts as alive meanwhile"
            assert process.stands_still()
    own.close()
    assert set(os.listdir("/proc/self/fd")) == before
