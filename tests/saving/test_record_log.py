"""The log between checkpoints: processes that fail, and how long they may take."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import cast

import msgspec
import pytest

from memckpt.agent.saving import record_log
from memckpt.agent.saving.record_log import RecordLog
from memckpt.agent.saving.writer import record_writer as records
from memckpt.errors import AgentError
from memckpt.processes.helper_process import HelperProcess
from memckpt.protocol.channel import Message
from memckpt.protocol.storing import Appended, OpenLog
from memckpt.protocol.trainer import Drift
from memckpt.state.records import Timeline
from memckpt.storage.catalog import read_catalog
from memckpt.storage.chain import stored_points
from memckpt.storage.format import encode_commit
from memckpt.storage.local_store import LocalStore
from memckpt.storage.store import Store
from tests.support.cluster.storage_node import Clock, Filled, RecordsProcess
from tests.support.faults.full_disk import LimitedDisk
from tests.support.storage.stored_parts import part_of

T1 = Timeline(1, "a")
TIMEOUT_SECONDS = 1800.0


class Node:
    """A log, what is trained, and the process that writes."""

    def __init__(self, directory: Path, process: type[RecordsProcess] = RecordsProcess) -> None:
        self.store = LocalStore(directory)
        self.filled = Filled()
        self.processes: list[RecordsProcess] = []
        self.answers: list[Appended] = []
        self.failing: Exception | None = None
        self._process = process
        self.log = RecordLog("n", self._start, lambda: None)
        self.log.configure(self.store.url, 3, TIMEOUT_SECONDS, T1)

    def _start(self) -> HelperProcess:
        self.processes.append(self._process(self._said))
        if self.failing is not None:
            raise self.failing
        return cast("HelperProcess", self.processes[-1])

    def _said(self, message: Appended) -> None:
        self.answers.append(message)
        self.log.appended(message)

    @property
    def process(self) -> RecordsProcess:
        return self.processes[-1]

    def train(self, until: int, work: bool = True) -> None:
        for record in range(self.filled.newest + 1, until + 1):
            self.filled.commit(record)
            self.log.collect(self.filled.held)
            if work:
                self.work()

    def work(self) -> None:
        """The process does all that it has been given."""
        while self.processes and self.process.work():
            pass

    def flush(self) -> None:
        self.log.flush()
        self.work()

    def checkpoint(self, record: int) -> None:
        part = part_of(record, timeline=T1, node="n", content=self.filled.held.spec.content())
        self.store.write(part.commit_path, encode_commit(part))
        self.log.checkpoint_saved(record)

    def close(self) -> None:
        self.log.close()
        for process in self.processes:
            process.close()
        self.filled.close()


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    node = Node(tmp_path)
    yield node
    node.close()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(record_log, "time", clock)
    monkeypatch.setattr(records, "time", clock)
    return clock


def batches_of(store: Store) -> list[tuple[Timeline, int, int]]:
    return [(one.timeline, one.first, one.last) for one in read_catalog(store).batches]


def test_a_flush_of_nothing_ends_at_once(node: Node) -> None:
    """Else the agent would wait for it with its leave."""
    node.filled.commit(1)
    node.log.collect(node.filled.held)
    node.log.pause()
    node.log.flush()
    assert not node.log.busy


def test_what_is_logged_after_a_finding_of_the_audit_says_so(node: Node) -> None:
    node.train(3)
    node.checkpoint(3)
    node.train(6)
    node.filled.held.drift = Drift(6, 2.0, "w", steps=(4, 5))
    node.train(9)
    node.flush()
    said = {point.record: point.inexact for point in stored_points(read_catalog(node.store))}
    assert said[9] == "the audit found w off by 2 units in the last place when steps 4 to 5 were redone"
    (base,) = (point for point in stored_points(read_catalog(node.store), also=6) if point.record == 6)
    assert base.inexact == ""


# Processes that fail


@pytest.mark.parametrize("error", [AgentError("no module"), OSError("no process")], ids=["refused", "no-process"])
def test_a_process_that_cannot_be_started_is_tried_again_after_a_while_and_not_at_every_record(
    node: Node, clock: Clock, error: Exception
) -> None:
    node.failing = error
    node.train(50, work=False)
    assert len(node.processes) == 1
    assert str(error) in node.log.alarm
    clock.passes(record_log._RETRY_SECONDS * 0.99)
    node.train(60, work=False)
    assert len(node.processes) == 1
    clock.passes(record_log._RETRY_SECONDS * 0.01)
    node.train(70, work=False)
    assert len(node.processes) == 2
    node.failing = None
    clock.passes(record_log._RETRY_SECONDS)
    node.train(76)
    assert len(node.processes) == 3
    assert node.log.alarm == ""
    assert batches_of(node.store)[-1] == (T1, 74, 76)


def test_a_process_that_dies_is_followed_by_another_one_after_a_while(node: Node, clock: Clock) -> None:
    node.train(1)
    node.checkpoint(1)
    assert node.log.based
    node.log.writer_ended("killed")
    assert not node.log.based
    node.train(40, work=False)
    node.log.flush()
    assert len(node.processes) == 1
    assert not node.log.busy
    clock.passes(record_log._RETRY_SECONDS)
    node.train(43)
    assert len(node.processes) == 2
    assert batches_of(node.store) == [(T1, 41, 43)]


def test_a_process_that_takes_nothing_any_more_is_ended(node: Node, clock: Clock) -> None:
    node.train(1)
    node.process.broken = True
    node.train(2, work=False)
    assert node.process.closed
    assert "cannot be used" in node.log.alarm


# Time limits


def test_what_is_handed_on_may_take_the_time_limit(node: Node, clock: Clock) -> None:
    assert node.log.deadline(float("-inf")) is None
    node.train(1, work=False)
    assert node.log.deadline(float("-inf")) == clock.now + TIMEOUT_SECONDS
    node.work()
    assert node.log.deadline(float("-inf")) is None


def test_in_a_grace_period_it_may_take_what_is_left_of_that(node: Node, clock: Clock) -> None:
    node.train(1, work=False)
    began = clock.now
    clock.passes(10.0)
    assert node.log.deadline(began + 25.0) == began + 25.0
    # One that had ended before says nothing: it was an ordinary restart.
    assert node.log.deadline(began - 1.0) == began + TIMEOUT_SECONDS
    # One that leaves more time than there is changes nothing.
    assert node.log.deadline(began + 2 * TIMEOUT_SECONDS) == began + TIMEOUT_SECONDS


def test_a_process_that_is_late_when_it_starts_is_no_alarm_and_one_that_stays_late_is(node: Node) -> None:
    """It imports while the first slots are filled anew."""
    ring = node.filled.held.layout.ring
    node.train(1, work=False)
    node.train(1 + ring + 1, work=False)
    node.work()
    assert node.log.alarm == ""
    assert not node.log.based
    newest = node.filled.newest
    node.train(newest + 1, work=False)
    node.train(newest + ring + 2, work=False)
    node.work()
    assert "it is not logged in time" in node.log.alarm


# A disk with little room


class SmallProcess(RecordsProcess):
    """One that leaves room for a checkpoint of 5000 bytes."""

    batch_bytes = 1 << 20

    def send(self, message: Message, fds: Sequence[int]) -> None:
        if isinstance(message, OpenLog):
            message = msgspec.structs.replace(message, batch_bytes=self.batch_bytes, reserve=5000)
        super().send(message, fds)


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Node, LimitedDisk]]:
    disk = LimitedDisk(monkeypatch, tmp_path / "disk")
    with closing(Node(disk.root, SmallProcess)) as node:
        yield node, disk


def train(node: Node, clock: Clock, count: int) -> None:
    """A record each second."""
    for _ in range(count):
        clock.passes(1.0)
        node.train(node.filled.newest + 1)


def test_records_wait_in_memory_for_room_and_leave_room_for_a_checkpoint(
    small: tuple[Node, LimitedDisk], clock: Clock
) -> None:
    node, disk = small
    train(node, clock, 6)
    assert batches_of(node.store) == [(T1, 1, 3), (T1, 4, 6)]
    disk.room = disk.used() + 5000
    train(node, clock, 20)
    assert batches_of(node.store) == [(T1, 1, 3), (T1, 4, 6)]
    assert disk.refused == 0
    assert "has no room for records 7 to " in node.answers[9].short
    disk.room = None
    train(node, clock, 12)
    _, first, last = batches_of(node.store)[2]
    assert first == 7, "there is no hole"
    assert last >= 26
    assert not any(one.hole for one in node.answers)
    assert node.answers[-1].short == ""


def test_no_more_waits_than_a_batch_may_take(
    small: tuple[Node, LimitedDisk], clock: Clock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    node, disk = small
    monkeypatch.setattr(SmallProcess, "batch_bytes", 200)
    train(node, clock, 2)
    disk.room = disk.used() + 5000
    train(node, clock, 400)
    assert sum(bool(one.hole) for one in node.answers) > 5
    warned = [one for one in caplog.records if one.levelname in ("WARNING", "ERROR") and one.name != "memckpt.storage"]
    assert len(warned) < 8
    assert caplog.text.count("Traceback") <= 2
    disk.room = None
    train(node, clock, 40)
    assert node.answers[-1].hole == ""
    assert batches_of(node.store)[-1][2] > 400
