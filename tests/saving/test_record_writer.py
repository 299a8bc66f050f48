"""The process that writes records: when it writes a batch, and what it says of it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest

from memckpt.agent.saving.record_log import RecordLog
from memckpt.agent.saving.writer import record_writer as records
from memckpt.errors import AgentGoneError, StorageError
from memckpt.processes.helper_process import HelperProcess
from memckpt.protocol.channel import Channel, Message
from memckpt.protocol.storing import (
    Append,
    Appended,
    OpenLog,
)
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
        self._log.appended(Appended(None, None, 0, 0, 0.0))
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


def test_a_batch_that_is_not_full_is_written_when_its_oldest_record_has_waited_long_enough(
    agent: Agent, clock: Clock, tmp_path: Path
) -> None:
    channel = QuietChannel(clock, [*agent.commits(), *agent.commits()])
    serve(channel)
    assert channel.waited == [SECONDS]
    assert batches(tmp_path) == [(1, 2)]


def test_what_comes_meanwhile_does_not_put_it_off(agent: Agent, clock: Clock, tmp_path: Path) -> None:
    channel = QuietChannel(clock, [*agent.commits(), *agent.commits()], between=4.0)
    serve(channel)
    assert channel.waited == [SECONDS - 8.0]
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
