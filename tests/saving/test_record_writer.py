"""The process that writes records: when it writes a batch, how large that is, and what it says of it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memckpt.agent.saving.record_log import RecordLog
from memckpt.agent.saving.writer import record_writer as records
from memckpt.agent.saving.writer.record_writer import BatchSize
from memckpt.errors import AgentGoneError, StorageError
from memckpt.processes.helper_process import HelperProcess
from memckpt.protocol.channel import Channel, Message
from memckpt.protocol.storing import Append, Appended, OpenLog
from memckpt.state.records import Timeline
from memckpt.storage.catalog import read_catalog
from memckpt.storage.local_store import LocalStore
from memckpt.storage.store import Store
from memckpt.storage.urls import open_store
from tests.support.cluster.storage_node import Clock, Filled, Process

SECONDS = 10.0


class Agent:
    """What an agent sends when a record is committed, and the descriptors that come along."""

    def __init__(self, url: str) -> None:
        self._filled = Filled()
        self._process = Process()
        self._log = RecordLog("n", lambda: cast("HelperProcess", self._process), lambda: None)
        self._log.configure(url, 4, 60.0, Timeline(1, "a"))

    def commits(self) -> list[tuple[Message, list[int]]]:
        self._filled.commit()
        self._log.collect(self._filled.held)
        self._log.appended(Appended(None, None, 0, 0))
        found = []
        while self._process.sent:
            message = self._process.sent.popleft()
            fds = [os.dup(self._filled.held.regions.slots.fd)] if isinstance(message, OpenLog) else []
            found.append((message, fds))
        return found

    def close(self) -> None:
        self._filled.close()


class QuietChannel:
    """On which messages come, and then for so long nothing that whoever waits with a limit goes on.

    Args:
        turns: what comes before each time that nothing does.
        between: seconds after each answer until the next message.

    Attributes:
        waited: the limits.
        answers: what has been sent back.
    """

    def __init__(self, clock: Clock, *turns: list[tuple[Message, list[int]]], between: float = 0.0) -> None:
        self._clock = clock
        self._turns = list(turns)
        self._between = between
        self.waited: list[float] = []
        self.answers: list[Appended] = []

    def poll(self, timeout: float | None = 0.0) -> tuple[Message, list[int]] | None:
        if not self._turns:
            raise AgentGoneError("the agent has let go of us")
        if self._turns[0]:
            return self._turns[0].pop(0)
        assert timeout is not None, "it waits for ever"
        self._turns.pop(0)
        self.waited.append(timeout)
        self._clock.passes(timeout)
        return None

    def receive(self, timeout: float | None) -> tuple[Message, list[int]]:
        received = self.poll(timeout)
        assert received is not None
        return received

    def send(self, message: Message) -> None:
        assert isinstance(message, Appended)
        self.answers.append(message)
        self._clock.passes(self._between)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(records, "time", clock)
    return clock


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Agent]:
    agent = Agent(str(tmp_path))
    yield agent
    agent.close()


def serve(channel: QuietChannel) -> None:
    with pytest.raises(AgentGoneError):
        records.serve(cast("Channel", channel))


def batches(directory: Path) -> list[tuple[int, int]]:
    return [(one.first, one.last) for one in read_catalog(LocalStore(directory)).batches]


@pytest.mark.parametrize("between", [0.0, 4.0])
def test_a_batch_that_is_not_full_is_written_when_its_oldest_record_has_waited_long_enough(
    agent: Agent, clock: Clock, tmp_path: Path, between: float
) -> None:
    """What comes meanwhile does not put it off."""
    channel = QuietChannel(clock, [*agent.commits(), *agent.commits()], between=between)
    serve(channel)
    assert channel.waited == [SECONDS - 2 * between]
    assert batches(tmp_path) == [(1, 2)]


def test_the_next_answer_says_what_was_written_meanwhile(agent: Agent, clock: Clock, tmp_path: Path) -> None:
    channel = QuietChannel(clock, agent.commits(), agent.commits())
    serve(channel)
    assert [(one.taken, one.written, one.hole) for one in channel.answers] == [(1, None, ""), (2, 1, "")]
    assert batches(tmp_path) == [(1, 1), (2, 2)]


def test_the_next_answer_says_what_could_not_be_written_meanwhile(
    agent: Agent, clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = iter([True])

    def opened(url: str, witness: str) -> Store:
        if next(full, False):
            raise StorageError("no room")
        return open_store(url)

    monkeypatch.setattr(records, "open_store", opened)
    channel = QuietChannel(clock, agent.commits(), agent.commits())
    serve(channel)
    assert [one.hole for one in channel.answers] == ["", "StorageError: no room"]
    assert batches(tmp_path) == [(2, 2)]


def test_with_nothing_to_write_it_waits_as_long_as_the_agent_is_silent(agent: Agent, clock: Clock) -> None:
    channel = QuietChannel(clock, [])
    with pytest.raises(AssertionError, match="waits for ever"):
        records.serve(cast("Channel", channel))


def test_a_flush_writes_what_there_is(agent: Agent, clock: Clock, tmp_path: Path) -> None:
    channel = QuietChannel(clock, [*agent.commits(), (Append((), True), [])])
    with pytest.raises(AssertionError, match="waits for ever"):
        records.serve(cast("Channel", channel))
    assert batches(tmp_path) == [(1, 1)]
    assert channel.answers[-1].written == 1


# How many records a batch has: few where writing is fast, and steady


def history(size: BatchSize, fixed: float, each: float, step: float, batches: int, now: float = 0.0) -> list[int]:
    """Sizes of batches whose writes take `fixed` seconds, and `each` more for each record; `step` seconds a record."""
    found = []
    for _ in range(batches):
        found.append(size.records)
        now += step * found[-1]
        size.wrote(found[-1], fixed + each * found[-1], now)
    return found


@pytest.mark.parametrize(
    ("size", "fixed", "step", "last"),
    [
        (BatchSize(64, fixed=False), 0.04, 1.0, 1),
        (BatchSize(64, fixed=False), 0.0001, 0.1, 10),  # no more than a batch each second
        (BatchSize(64, fixed=False), 0.1, 0.1, 20),
        (BatchSize(64, fixed=False), 5.0, 0.01, 64),
        (BatchSize(7, fixed=True), 0.001, 10.0, 7),
    ],
)
def test_fast_writes_are_made_at_every_step_and_slow_ones_are_rare(
    size: BatchSize, fixed: float, step: float, last: int
) -> None:
    first = size.records
    found = history(size, fixed, 0.0, step, 12)
    assert (found[:2], found[-1]) == ([first] * 2, last)


def test_storage_that_becomes_slow_gets_larger_batches() -> None:
    size = BatchSize(64, fixed=False)
    assert history(size, 0.01, 0.0, 1.0, 5)[-1] == 1
    assert history(size, 2.0, 0.0, 1.0, 8, now=100.0)[-1] == 40


@given(fixed=st.floats(0.0, 10.0), each=st.floats(0.0, 1.0), step=st.floats(0.001, 10.0), most=st.integers(1, 64))
def test_it_settles_and_stays(fixed: float, each: float, step: float, most: int) -> None:
    found = history(BatchSize(most, fixed=False), fixed, each, step, 200)
    assert all(1 <= one <= most for one in found)
    assert len(set(found[-20:])) == 1, "constant times, and yet it changes"
    b = found[-1]
    assert b == most or (fixed + each * b) / (b * step) < 0.0502, "writing takes too much of the time"
    assert b == most or b * step > 0.99, "batches follow each other at once"
