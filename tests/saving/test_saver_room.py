"""A full storage, as a node's agent sees it: when it tries again, and how the log ends in a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from memckpt.agent.saving import checkpoints, jobs, record_log, schedule
from memckpt.agent.saving import saver as saver_module
from memckpt.agent.saving.writer import record_writer as records
from memckpt.protocol.channel import Message
from memckpt.protocol.storing import Appended, LookForRoom, OpenLog, Room, Save, SaveFailed
from memckpt.storage.catalog import read_catalog
from memckpt.storage.local_store import LocalStore
from tests.support.cluster.storage_node import Clock, RecordsProcess
from tests.support.storage.saver_node import Node


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    for module in (record_log, checkpoints, saver_module, schedule, jobs, records):
        monkeypatch.setattr(module, "time", clock)
    return clock


@pytest.fixture
def make(tmp_path: Path, clock: Clock) -> Iterator[Callable[..., Node]]:
    nodes: list[Node] = []

    def make(**settings: Any) -> Node:
        nodes.append(Node(tmp_path, clock, **settings))
        return nodes[-1]

    yield make
    for node in nodes:
        node.close()


def fail(node: Node, missing: int | None = None) -> float:
    """Train until a checkpoint is handed to the process, and have it fail; returns the seconds that took."""
    began = node.clock.now
    record = node.train_until_ordered()
    node.train(max(0, record - node.attempt.at))
    node.copy(record)
    seconds = node.clock.now - began
    looks(node)
    assert isinstance(node.checkpoints[-1].sent.popleft(), Save)
    node.checkpoints[-1].received(SaveFailed(record, "no room", missing))
    return float(seconds)


def looks(node: Node) -> int:
    """How often it has been asked for room; each is answered with nothing known."""
    sent = node.checkpoints[-1].sent
    count = 0
    while sent and isinstance(sent[0], LookForRoom):
        look = sent.popleft()
        node.checkpoints[-1].received(Room(look.url, None))
        count += 1
    return count


@pytest.mark.promise(
    "a full storage is retried with growing intervals, and used for the next step once it has room; the log leaves "
    "room for a checkpoint, and ends with one"
)
def test_a_checkpoint_that_fails_is_tried_again_ever_more_seldom(make: Callable[..., Node]) -> None:
    node = make(mode="replica", min_seconds=0.5, overhead=1.0)
    waited = [fail(node) for _ in range(10)]
    assert waited[1] < 10
    assert waited[-1] >= 60
    assert waited == sorted(waited)
    record = node.train_until_ordered()
    node.train(max(0, record - node.attempt.at))
    node.copy(record)
    node.saved()
    assert fail(node) < 10, "after one that is written a failure is the first one again"


def test_when_there_is_room_again_the_next_step_is_taken(make: Callable[..., Node]) -> None:
    node = make(mode="replica", min_seconds=0.5, overhead=1.0)
    for _ in range(8):
        fail(node, missing=1000)
    orders = len(node.orders)
    node.train(3)
    assert len(node.orders) == orders
    sent = node.checkpoints[-1].sent
    look = next(one for one in sent if isinstance(one, LookForRoom))
    node.checkpoints[-1].received(Room(look.url, 999))
    node.train(1)
    assert len(node.orders) == orders, "that is too little"
    node.checkpoints[-1].received(Room(look.url, 1000))
    node.train(1)
    assert len(node.orders) == orders + 1


def test_room_is_looked_for_now_and_then_and_only_where_it_was_missing(make: Callable[..., Node]) -> None:
    node = make(mode="replica", min_seconds=100.0, overhead=1.0)
    fail(node)
    node.train(10)
    assert looks(node) == 0
    node.clock.passes(1000)
    fail(node, missing=1000)
    found = 0
    for _ in range(10):
        node.train(1)
        found += looks(node)
    assert 4 <= found <= 6


# The log


def test_records_that_wait_for_room_call_for_a_checkpoint(make: Callable[..., Node]) -> None:
    node = make(mode="log", min_seconds=1000.0, batch_steps=2)
    node.checkpoint()
    node.train(3)
    orders = len(node.orders)
    node.train(20)
    assert len(node.orders) == orders
    at = node.attempt.at
    node.records[-1].received(Appended(at, at, at, 0, short="no room for records"))
    node.train(1, work=False)
    assert len(node.orders) == orders + 1


def test_a_log_that_has_become_large_ends_in_a_checkpoint(
    make: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record_log, "_LEAST_BYTES", 20_000)
    monkeypatch.setattr(record_log, "_CHECKPOINTS", 1)
    node = make(mode="log", min_seconds=1e6, batch_steps=2)
    node.checkpoint()
    orders, written = len(node.orders), 0
    for _ in range(200):
        node.train(1)
        written = sum(one.nbytes for one in read_catalog(LocalStore(Path(node.status.url))).batches)
        if len(node.orders) > orders:
            break
    assert len(node.orders) == orders + 1
    assert 20_000 < written < 23_000


def test_until_there_is_a_checkpoint_the_log_leaves_room_for_two(
    make: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One to redo the records on, and one to end the log: else the first takes what was left for the second."""
    reserves: list[int] = []
    send = RecordsProcess.send

    def note(process: RecordsProcess, message: Message, fds: Sequence[int]) -> None:
        if isinstance(message, OpenLog):
            reserves.append(message.reserve)
        send(process, message, fds)

    monkeypatch.setattr(RecordsProcess, "send", note)
    node = make(mode="log", min_seconds=3600, batch_steps=2)
    node.train(3)
    whole = node.held.layout.checkpoint_bytes
    assert reserves == [2 * whole]
    node.train(max(0, node.orders[-1].record - node.attempt.at))
    node.copy(node.orders[-1].record)
    node.saved()
    node.train(3)
    assert reserves == [2 * whole, whole]
