"""What an agent tells its run's journal: from messages as they pass, and from a look at its status each second."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from memckpt.agent.observer import Observer, resident_bytes
from memckpt.journal.events import (
    AttemptBegan,
    CaughtUp,
    Degraded,
    Drifted,
    FirstStep,
    Lagging,
    NotStored,
    PeersGap,
    Sample,
    Stalled,
    Stored,
    TrainerDied,
    TrainerLeft,
    Whole,
)
from memckpt.journal.events import Protected as ProtectedEvent
from memckpt.journal.journal import read_journal
from memckpt.processes.address import AgentAddress
from memckpt.processes.attempt import Attempt, TrainerHandle
from memckpt.protocol.status import PeersStatus, Status, StorageStatus
from memckpt.protocol.storing import Saved, SaveFailed
from memckpt.protocol.trainer import Alarm, Commit, Configure, Credit, Drift, Gap, Launcher, Protected, TrainingFigures
from memckpt.state.records import Timeline
from tests.support.monitoring.statuses import an_agent, some_peers


class Process:
    """A trainer's, which may have died."""

    pid = 42

    def __init__(self) -> None:
        self.dead = False

    def dying(self) -> bool:
        return self.dead


class Run:
    """An observer of a made-up agent, and a clock."""

    def __init__(self, run_dir: Path) -> None:
        self.now = 100.0
        self.status = an_agent(storage=None, committed=((0, 10),), applied=10, slots=3)
        self.run_dir = run_dir
        address = AgentAddress(run_dir, "node")
        self.observer = Observer(address, False, lambda: self.status, lambda: self.now)
        self.process: Any = Process()
        self.trainer = TrainerHandle(0, (0,), self.process, Launcher(0, 0, 0), 0)
        self.attempt = Attempt("n", 1, (0,), {0: self.trainer})

    def begin(self, number: int = 1) -> None:
        self.says(Configure(60.0, Timeline(number, f"nonce {number}")))

    def says(self, message: Any) -> None:
        self.observer.heard(self.trainer, self.attempt, message)

    def commit(self, step: int, stall_ms: float = 0.0) -> None:
        self.says(Commit(1, step, step, b"", stall_ms=stall_ms))

    def after(self, seconds: float, **changes: Any) -> None:
        """Look each second, the status having changed."""
        self.status: Status = msgspec.structs.replace(self.status, **changes)
        until = self.now + seconds
        while self.now < until:
            self.now += 1.0
            self.observer.look_at_clock()

    def events(self, *without: type) -> list[Any]:
        """All events; to be called once, at the end."""
        self.observer.close("the end")
        return [entry.event for entry in read_journal(self.run_dir) if not isinstance(entry.event, without)][:-1]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    run = Run(tmp_path)
    yield run
    run.observer.journal.close()


def storage(alarm: str) -> StorageStatus:
    return StorageStatus("/s", 8, 60.0, None, 5e8, False, alarm)


def test_tiers_that_are_degraded_and_whole_again_are_one_event_each(run: Run) -> None:
    run.begin()
    run.after(3, storage=storage(""))
    run.after(5, storage=storage("no space left"))
    run.after(5, storage=storage("no space left, 3 MiB are missing"))
    run.after(3, storage=storage(""))
    run.observer.told((0,), Gap("two do not fit"))
    run.observer.told((0,), Alarm("redo failed"))
    assert run.observer.unprotected == "two do not fit"
    run.now += 2
    run.observer.told((0,), Protected(2, 11))
    assert run.observer.unprotected == ""
    run.observer.told((0,), Credit(11))
    tiers = [one for one in run.events() if isinstance(one, (Degraded, Whole))]
    assert tiers == [
        Degraded("storage", "no space left"),
        Whole("storage", 10.0),
        Degraded("memory", "two do not fit"),
        Whole("memory", 2.0),
    ]


def test_peers_that_are_not_whole_yet_are_not_degraded(run: Run) -> None:
    away: PeersStatus = some_peers(protected=False, problem="node b is silent")
    run.begin()
    run.after(3, peers=some_peers(protected=False, problem="not every record is there yet"))
    run.after(3, peers=some_peers())
    run.after(3, peers=away)
    run.after(3, peers=some_peers(gap=(4, 6)))
    run.begin(2)
    run.after(3, peers=some_peers(protected=False, problem="not every record is there yet"))
    found = [one for one in run.events() if isinstance(one, (Degraded, Whole, PeersGap))]
    assert found == [Whole("peers", 4.0), Degraded("peers", "node b is silent"), Whole("peers", 3.0), PeersGap(4, 6)]


def test_a_lag_is_an_event_once_it_lasts(run: Run) -> None:
    run.begin()
    for _ in range(5):  # in every other second all slots are in use
        run.after(1, applied=8)
        run.after(1, applied=10)
    run.after(8, applied=7)
    run.after(3, applied=9)
    found = [one for one in run.events() if isinstance(one, (Lagging, CaughtUp))]
    assert found == [Lagging("replica", 3, 2), CaughtUp("replica", 8.0)]


def test_long_stalls_are_one_event_in_ten_seconds(run: Run) -> None:
    run.begin()
    run.commit(11, 999.0)
    for step in (12, 13, 14):
        run.commit(step, 1000.0 * (step - 10))
        run.after(1)
    run.after(20)
    assert [one for one in run.events() if isinstance(one, Stalled)] == [Stalled(12, 2000.0, 1), Stalled(14, 4000.0, 2)]


def test_a_drift_is_an_event_when_it_has_doubled(run: Run) -> None:
    run.begin()
    for record, ulp in enumerate((1.0, 1.0, 1.5, 2.0, 3.0, 5.0)):
        run.observer.told((0,), Drift(record, ulp, "weight"))
    assert [one.max_ulp for one in run.events() if isinstance(one, Drifted)] == [1.0, 2.0, 5.0]


def test_checkpoints_and_what_they_add_up_to(run: Run) -> None:
    run.begin()
    run.observer.told((0,), Saved(5, 5, 100, 1.5, 1.0))
    run.observer.told((1,), Saved(5, 5, 200, 1.5, 1.0))
    run.observer.told((0,), SaveFailed(6, "no space left"))
    assert run.observer.figures.stored_bytes == 300
    assert run.observer.figures.events["stored"] == 2
    found = [one for one in run.events() if isinstance(one, (Stored, NotStored))]
    assert found == [Stored((0,), 5, 5, 100, 1.5), Stored((1,), 5, 5, 200, 1.5), NotStored((0,), 6, "no space left")]


def test_a_trainer_that_dies_and_one_that_disconnects(run: Run) -> None:
    run.begin()
    run.commit(1)
    run.commit(2)
    run.observer.trainer_left(run.trainer, last=False)
    run.process.dead = True
    run.observer.trainer_left(run.trainer, last=True)
    run.now += 7
    run.begin(2)
    run.now += 1
    run.commit(11)
    run.trainer.finished = True
    run.observer.trainer_left(run.trainer, last=True)
    assert run.events(Sample) == [
        AttemptBegan(1, ((0, 42),)),
        FirstStep(1, 0.0),
        TrainerLeft(0, 42, 10),
        TrainerDied(0, 42, 10),
        AttemptBegan(1, ((0, 42),)),
        FirstStep(11, 8.0),
    ]


def test_samples_become_rare(run: Run) -> None:
    run.begin()
    for step in range(1, 4):
        run.commit(step, 1.5 * step)
    run.after(40_000)
    # One in 5 s for 2,500 s, then one in 0.2% of the time that has passed.
    assert 1_500 < run.observer.figures.events["sample"] < 2_000
    samples = [one for one in run.events() if isinstance(one, Sample)]
    assert (samples[0].commits, samples[0].stall_ms, samples[0].longest_stall_ms) == (3, 3.0, 4.5)
    assert (samples[1].commits, samples[1].stall_ms, samples[1].longest_stall_ms) == (0, None, 0.0)
    assert samples[0].agent_bytes > 0


def test_a_sample_has_the_newest_of_what_was_logged_since_the_last_one(run: Run) -> None:
    run.begin()
    run.after(1)
    for step in range(1, 4):
        run.says(TrainingFigures({"lr": 0.1, "loss": 1.0 / step}))
    run.says(TrainingFigures({"lr": 0.2}))
    run.after(10)
    logged = [one.logged for one in run.events() if isinstance(one, Sample)]
    assert logged == [{}, {"lr": 0.2, "loss": 1.0 / 3}, {}]


def test_the_agent_is_woken_by_the_clock_while_trainers_are_here_only(run: Run) -> None:
    assert run.observer.deadline() is None
    run.begin()
    assert run.observer.deadline() == 100.0
    run.after(1)
    assert run.observer.deadline() == 102.0
    run.trainer.left = True
    assert run.observer.deadline() is None


def test_resident_memory_counts_no_shared_memory() -> None:
    before = resident_bytes()
    fd = os.memfd_create("test")
    try:
        os.ftruncate(fd, 32 << 20)
        with mmap.mmap(fd, 32 << 20) as shared:
            for place in range(0, 32 << 20, 4096):  # no buffer: the allocator may keep its memory
                shared[place] = 1
            assert resident_bytes() - before < 16 << 20
    finally:
        os.close(fd)


def test_a_generation_at_each_step_leaves_room_for_what_else_there_is(run: Run) -> None:
    """As where a script clips its weights by hand; another mode is told at once."""
    run.begin()
    for record in range(1, 101):
        run.now += 0.5
        if record == 50:
            run.status = msgspec.structs.replace(run.status, mode="snapshot")
        run.observer.told((0,), Protected(record, record))
    told = [one for one in run.events() if isinstance(one, ProtectedEvent)]
    assert [each.record for each in told] == [*range(1, 12), 50]
    assert told[-1].mode == "snapshot"
    assert run.observer.figures.events["protected"] == 100
