"""The log between checkpoints: what an attempt that goes back or elsewhere may go on with; processes that fail."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest

from memckpt.agent.saving import record_log
from memckpt.agent.saving.record_log import RecordLog
from memckpt.agent.saving.writer import record_writer as records
from memckpt.errors import AgentError
from memckpt.processes.helper_process import HelperProcess
from memckpt.protocol.trainer import Drift
from memckpt.state.records import Timeline, decode_meta
from memckpt.storage.batch import RecordReader, gradient_name, meta_name
from memckpt.storage.catalog import read_catalog
from memckpt.storage.chain import stored_points
from memckpt.storage.format import encode_commit
from memckpt.storage.local_store import LocalStore
from memckpt.storage.store import Store
from tests.support.cluster.storage_node import Clock, Filled, RecordsProcess
from tests.support.storage.stored_parts import part_of

T1, T2, T3 = Timeline(1, "a"), Timeline(2, "b"), Timeline(3, "c")
TIMEOUT_SECONDS = 1800.0


class Node:
    """A log, what is trained, and two places for it. Values of records are those of the attempt, then the record's."""

    def __init__(self, directory: Path) -> None:
        self.here, self.elsewhere = (LocalStore(directory / name) for name in ("here", "elsewhere"))
        self.filled = Filled()
        self.processes: list[RecordsProcess] = []
        self.failing: Exception | None = None
        self.log = RecordLog("n", self._start, lambda: None)
        self.timeline = T1
        self.configure(self.here, T1)

    def _start(self) -> HelperProcess:
        self.processes.append(RecordsProcess(self.log.appended))
        if self.failing is not None:
            raise self.failing
        return cast("HelperProcess", self.processes[-1])

    @property
    def process(self) -> RecordsProcess:
        return self.processes[-1]

    def configure(self, store: LocalStore, timeline: Timeline, batch_steps: int = 3) -> None:
        self.store, self.timeline = store, timeline
        self.log.configure(store.url, batch_steps, TIMEOUT_SECONDS, timeline)

    def resume(self, timeline: Timeline, record: int, follows: Timeline, store: LocalStore | None = None) -> None:
        """As the agent does it for an attempt that goes on from memory."""
        self.configure(store or self.store, timeline)
        self.filled.settle(record)
        self.log.branch(record, follows)

    def train(self, until: int, work: bool = True) -> None:
        for record in range(self.filled.newest + 1, until + 1):
            self.filled.commit(record, value_of(self.timeline, record))
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
        part = part_of(record, timeline=self.timeline, node="n", content=self.filled.held.spec.content())
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


def value_of(timeline: Timeline, record: int) -> float:
    return timeline.number * 1000.0 + record


def batches_of(store: Store) -> list[tuple[Timeline, int, int]]:
    return [(one.timeline, one.first, one.last) for one in read_catalog(store).batches]


def newest(store: Store) -> tuple[Timeline, int] | None:
    points = stored_points(read_catalog(store))
    return (points[0].timeline, points[0].record) if points else None


def gradients(store: Store, timeline: Timeline, record: int) -> list[float]:
    """What would be redone on the way to a stored state: the value of each record."""
    points = stored_points(read_catalog(store), also=record)
    point = next(one for one in points if (one.timeline, one.record) == (timeline, record))
    reader, found = RecordReader(store), []
    for number, batch in point.gradient_batches(point.checkpoint.part_serving(0)):
        meta = decode_meta(reader.data(batch, meta_name(number)))
        gradient = reader.data(batch, gradient_name(number, meta.sub_steps[0], "w"))
        found.append(struct.unpack("4f", gradient)[0])
        assert meta.plain == repr(found[-1]).encode()
    return found


# Another place


def test_what_was_on_its_way_goes_to_the_place_it_was_meant_for(node: Node) -> None:
    """Two attempts end while the process is still busy with the first one's; the third one writes elsewhere."""
    node.train(3, work=False)
    node.resume(T2, 3, T1)
    node.train(4, work=False)
    node.resume(T3, 4, T2, node.elsewhere)
    node.train(5, work=False)
    node.work()
    node.flush()
    assert {timeline for timeline, _, _ in batches_of(node.elsewhere)} == {T3}
    assert batches_of(node.here) == [(T1, 1, 3), (T2, 4, 4)]


# Back behind the log


def test_what_has_not_been_handed_on_of_an_abandoned_future_is_dropped(node: Node) -> None:
    """Memory held less than was logged, or an older step was asked for: its slots are filled anew."""
    node.train(3)
    node.checkpoint(3)
    node.train(6, work=False)  # 4 is with the process, 5 and 6 wait
    node.resume(T2, 4, T1)
    assert not node.process.closed, "what it reads stays as it is"
    node.train(7, work=False)
    node.work()
    node.flush()
    assert node.log.covers(7)
    assert gradients(node.here, T2, 7) == [value_of(T1, 4), *(value_of(T2, record) for record in (5, 6, 7))]
    logged = {
        (timeline, record) for timeline, first, last in batches_of(node.here) for record in range(first, last + 1)
    }
    assert not {(T1, 5), (T1, 6)} & logged


def test_a_process_that_reads_an_abandoned_future_is_ended(node: Node) -> None:
    """It would take the new attempt's gradients for the old one's: the slot says the right number and generation."""
    node.train(3)
    node.checkpoint(3)
    node.train(4)
    node.train(6, work=False)  # 5 is with the process
    reads = node.process
    node.resume(T2, 4, T1)
    assert reads.closed
    assert not node.log.based
    node.train(6, work=False)
    node.work()
    node.flush()
    assert [one for one in batches_of(node.here) if one[0] == T1 and one[2] > 4] == []
    assert newest(node.here) in [(T1, 3), (T1, 4)]


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
    said = {point.record: point.inexact for point in stored_points(read_catalog(node.here))}
    assert said[9] == "the audit found w off by 2 units in the last place when steps 4 to 5 were redone"
    (base,) = (point for point in stored_points(read_catalog(node.here), also=6) if point.record == 6)
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
    assert batches_of(node.here)[-1] == (T1, 74, 76)


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
    assert batches_of(node.here) == [(T1, 41, 43)]


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
