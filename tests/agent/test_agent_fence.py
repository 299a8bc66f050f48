"""Fencing: trainers of an earlier attempt are dead before a new one begins, however long they take to die."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from memckpt.agent.fencing import Fence, Gate
from memckpt.errors import RunBusyError
from memckpt.processes.attempt import Attempt, TrainerHandle
from memckpt.processes.event_loop import EventLoop
from memckpt.processes.handles import ProcessHandle
from memckpt.protocol.trainer import PROTOCOL_VERSION, Hello, Launcher
from tests.support.cluster.made_up_time import MadeUp
from tests.support.cluster.waiting import until


class Victim:
    """A process that waits to be ended. Its owner closes it."""

    def __init__(self) -> None:
        self.pid = os.fork()
        if self.pid == 0:
            signal.pause()
            os._exit(0)
        self.handle = ProcessHandle(self.pid, os.pidfd_open(self.pid))

    def trainer(self, launcher: Launcher, left: bool = False) -> TrainerHandle:
        return TrainerHandle(0, (0,), self.handle, launcher, 5, left=left)

    def end(self) -> None:
        """Kill it and leave its zombie, whose handle says that it is dead."""
        os.kill(self.pid, signal.SIGKILL)
        assert self.handle.wait(20)

    def close(self) -> None:
        self.end()
        self.handle.close()
        os.waitpid(self.pid, 0)


@pytest.fixture
def victim() -> Iterator[Victim]:
    victim = Victim()
    yield victim
    victim.close()


BY_HAND, GONE = Launcher(0, 0, 0), Launcher(2**22 + 1, 1, 0)


def hello(launcher: Launcher = BY_HAND) -> Hello:
    return Hello(PROTOCOL_VERSION, "new", 0, 1, (0,), (0,), launcher, ())


def attempt(*trainers: TrainerHandle) -> Attempt:
    return Attempt("old", len(trainers), (0,), dict(enumerate(trainers)))


def test_one_that_was_killed_and_has_not_ended_is_waited_for_whoever_has_started_it(
    victim: Victim, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its connection may be closed already: descriptors go one after the other."""
    for left in (False, True):
        trainer = victim.trainer(BY_HAND, left)
        with monkeypatch.context() as patch:
            patch.setattr(ProcessHandle, "dying", lambda process: True)
            assert attempt(trainer).fence(hello(), os.getpid()) == [trainer]
    assert attempt(victim.trainer(BY_HAND, left=True)).fence(hello(), os.getpid()) == [], "it has let go of the run"
    with pytest.raises(RunBusyError, match=f"held by a live trainer \\(pid {victim.pid}\\)"):
        attempt(victim.trainer(BY_HAND)).fence(hello(), os.getpid())
    assert not victim.handle.dying()


def test_an_orphan_is_killed(victim: Victim) -> None:
    trainer = victim.trainer(GONE)
    assert attempt(trainer).fence(hello(), os.getpid()) == [trainer]
    assert victim.handle.wait(20)
    assert victim.handle.dying()
    assert attempt(trainer).fence(hello(), os.getpid()) == []


def test_a_stopped_process_that_was_killed_is_dying(victim: Victim) -> None:
    """A signal that waits to be handled shows, too: a process in a system call that nothing interrupts."""
    os.kill(victim.pid, signal.SIGSTOP)
    until(lambda: victim.handle.state().startswith("T"))
    assert not victim.handle.dying()
    victim.handle.kill()
    assert victim.handle.wait(20)
    assert victim.handle.dying()


@pytest.fixture
def clock() -> MadeUp:
    return MadeUp(0.0)


@pytest.fixture
def loop(clock: MadeUp) -> Iterator[EventLoop]:
    loop = EventLoop(clock=clock)
    with contextlib.closing(loop):
        yield loop


def test_a_fence_says_whom_it_waits_for_and_for_how_long(victim: Victim, loop: EventLoop, clock: MadeUp) -> None:
    before = len(os.listdir("/proc/self/fd"))
    fence = Fence([victim.trainer(BY_HAND)], 60.0, loop)
    assert fence.report() is None
    assert fence.deadline == 5.0
    clock.now = 5.0
    said = f"killed and not ended since 5 s (at most 60 s): pid {victim.pid} (rank 0), state "
    report = fence.report()
    assert report.removeprefix(said) in ("S (sleeping)", "R (running)")
    assert fence.report() is None
    clock.now = 58.0
    assert fence.report() is not None
    assert fence.deadline == 60.0
    assert not fence.done
    clock.now = 60.0
    with pytest.raises(RunBusyError, match=f"not ended within 60 s: pid {victim.pid} .rank 0., state [SR]"):
        fence.report()
    fence.close()
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize(
    ("accelerated", "seconds"),
    [((True,), 180.0), ((False,), 60.0), ((False, True, False), 180.0), ((True, True), 180.0)],
)
def test_a_trainer_on_an_accelerator_has_time_to_unlock_what_is_held(
    victim: Victim, loop: EventLoop, accelerated: tuple[bool, ...], seconds: float
) -> None:
    """All of them have as long as the slowest needs: they unlock what they share side by side."""
    agent: Any = SimpleNamespace(fencing=lambda dying: None, trainer_came=lambda: None)
    gate = Gate(loop, agent, agent, agent, held_bytes=lambda: 480 << 30)
    trainers = [
        dataclasses.replace(victim.trainer(GONE), rank=rank, accelerated=on) for rank, on in enumerate(accelerated)
    ]
    connection: Any = SimpleNamespace(process=SimpleNamespace(pid=os.getpid()))
    assert not gate.lets_in(connection, hello(), attempt(*trainers))
    assert gate._fence._seconds == seconds
    assert len(gate._fence._dying) == len(trainers)
    gate.close()


def test_the_end_of_the_last_one_wakes_the_loop(victim: Victim, loop: EventLoop, clock: MadeUp) -> None:
    before = len(os.listdir("/proc/self/fd"))
    fence = Fence([victim.trainer(BY_HAND)], 60.0, loop)
    loop.each_turn(lambda: None, lambda: clock.now)
    loop.turn()
    assert fence._dying
    victim.end()
    loop.turn()
    assert not fence._dying
    assert fence.done
    assert len(os.listdir("/proc/self/fd")) == before
