"""What a trainer has sent before its death counts, whatever the agent was doing meanwhile."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from memckpt.agent import connections as connections_module
from memckpt.agent.connections import Connection, Connections
from memckpt.errors import AgentError, AgentGoneError
from memckpt.processes.address import AgentAddress
from memckpt.processes.attempt import TrainerHandle
from memckpt.processes.event_loop import EventLoop
from memckpt.protocol.channel import Channel, Message
from memckpt.protocol.status import StatusRequest
from memckpt.protocol.trainer import Commit, Goodbye, Launcher, Leaving, Protected


@dataclass
class Desk:
    """An agent's connections, and what has become of them."""

    connections: Connections
    loop: EventLoop
    address: AgentAddress
    handled: list[tuple[Connection, Message]]
    left: list[Connection]
    refuses: bool = False

    def call(self) -> Channel:
        """The other end of a new connection."""
        sock = self.address.connect()
        assert sock is not None
        self.loop.turn()
        return Channel(sock)

    def trainer(self) -> tuple[Channel, Connection]:
        """One that has been heard, and our end of its connection."""
        trainer = self.call()
        trainer.send(StatusRequest())
        self.loop.turn()
        return trainer, self.handled[-1][0]


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    address = AgentAddress.of(tmp_path, "node")
    loop = EventLoop()
    handled: list[tuple[Connection, Message]] = []
    left: list[Connection] = []

    def handle(connection: Connection, message: Message) -> None:
        handled.append((connection, message))
        if connection.trainer is None:
            connection.trainer = TrainerHandle(0, (0,), connection.process, Launcher(0, 0, 0), 1)
        if desk.refuses:
            raise AgentError("no")

    desk = Desk(Connections(address, loop, handle, left.append), loop, address, handled, left)
    with address.starting():
        desk.connections.listen()
    yield desk
    desk.connections.close(Leaving())
    for connection in left:
        connection.process.close()
    loop.close()
    assert not address.file_path.exists()


def _commit(record: int) -> Commit:
    return Commit(generation=1, record=record, step=record, meta=b"", rank_state=b"")


@pytest.mark.parametrize("fails", [False, True], ids=["unread", "failed"])
def test_commits_of_a_trainer_that_died_are_read_whatever_became_of_our_answer(desk: Desk, fails: bool) -> None:
    trainer, connection = desk.trainer()
    if not fails:
        desk.connections.answer(connection, Protected(1, 1))
    for record in (2, 3):
        trainer.send(_commit(record))
    trainer.close()
    if fails:
        desk.connections.answer(connection, Protected(1, 1))
        assert not desk.left, "it is not let go of before everything is read"
    desk.loop.turn()
    assert [message for _, message in desk.handled[1:]] == [_commit(2), _commit(3)]
    assert desk.left == [connection]


def test_the_last_words_of_an_agent_are_read_though_it_left_ours_unread(desk: Desk) -> None:
    trainer = desk.call()
    trainer.send(_commit(1))
    desk.connections.close(Leaving())
    message, _ = trainer.receive(5.0)
    assert message == Leaving()
    with pytest.raises(AgentGoneError):
        trainer.receive(5.0)
    trainer.close()


def test_a_trainer_that_takes_nothing_ends_after_what_it_has_sent(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, connection = desk.trainer()
    trainer.send(_commit(2))

    def full(*_: object, **__: object) -> None:
        raise AgentGoneError("the other end took no message for 5 s (stopped or overloaded?)")

    monkeypatch.setattr(connection.channel, "send", full)
    desk.connections.answer(connection, Protected(1, 1))
    desk.loop.turn()
    assert desk.handled[-1] == (connection, _commit(2))
    assert desk.left == [connection]
    with pytest.raises(AgentGoneError):
        trainer.send(_commit(3))
    trainer.close()


def test_a_refusal_is_told_and_ends_the_connection(desk: Desk) -> None:
    trainer = desk.call()
    desk.refuses = True
    trainer.send(Goodbye(finished=False))
    trainer.send(_commit(2))
    desk.loop.turn()
    assert type(trainer.receive(5.0)[0]).__name__ == "Refused"
    assert [type(message) for _, message in desk.handled] == [Goodbye], "nothing is read after a refusal"
    trainer.close()


def test_who_has_stopped_listening_leaves_its_place(desk: Desk) -> None:
    desk.connections.stop_listening()
    assert desk.address.connect() is None
    assert not desk.address.file_path.exists()
    desk.connections.stop_listening()


def test_an_agent_that_cannot_take_its_name_away_closes_its_sockets_all_the_same(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(path: Path, *arguments: object, **named: object) -> None:
        raise PermissionError("a read-only mount")

    monkeypatch.setattr(Path, "replace", fail)
    monkeypatch.setattr(Path, "unlink", fail)
    desk.connections.stop_listening()
    assert not desk.connections.listening
    assert "still names this agent, which answers no more: a read-only mount" in caplog.text
    monkeypatch.undo()
    desk.address.file_path.unlink()


def test_an_agent_ends_though_somebody_hangs_with_the_lock_for_starting_one(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(connections_module, "_LOCK_SECONDS", 0.05)
    with desk.address.starting():
        desk.connections.stop_listening()
    assert not desk.address.file_path.exists()
    assert "it ends all the same: pid" in caplog.text
    assert [serving.pid for serving in desk.address.leaving()] == [os.getpid()]


def test_without_descriptors_nobody_is_accepted_and_the_agent_lives_on(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    error = OSError(errno.EMFILE, "Too many open files")

    def fail(*arguments: object) -> None:
        raise error

    monkeypatch.setattr(connections_module.ProcessHandle, "of_peer", fail)
    for _ in range(2):
        desk.call().close()
    monkeypatch.undo()

    class Listening:
        def accept(self) -> None:
            raise error

    desk.connections._accept(Listening())  # type: ignore[arg-type]
    assert caplog.text.count("a connection cannot be accepted: [Errno 24] Too many open files") == 1
    sock = desk.address.connect()
    assert sock is not None
    trainer = Channel(sock)
    trainer.send(StatusRequest())
    assert desk.loop.deadline() is not None, "it rests, as it would find the same at once"
    for _ in range(3):  # when the rest is over, the connection, the message
        desk.loop.turn()
    assert len(desk.handled) == 1
    assert desk.loop.deadline() is None
    desk.left.append(desk.handled[0][0])
    trainer.close()
