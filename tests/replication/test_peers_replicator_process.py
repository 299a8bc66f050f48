"""The agent and its replicators: what they are told, how they die, and what takes their place."""

from __future__ import annotations

import errno
import logging
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from memckpt.agent.replication import own_replicator, peer_tier
from memckpt.agent.replication.peer_tier import Peers
from memckpt.errors import AgentError, AgentGoneError, PeerError
from memckpt.processes import helper_process
from memckpt.processes.event_loop import EventLoop
from memckpt.processes.helper_process import HelperProcess
from memckpt.protocol import replication
from memckpt.protocol.channel import Channel
from tests.support.trainings.recovery_lab import SPEC, Place, wanted


class Desk:
    """An agent's part in the tier. Its replicators are what a test makes of them.

    Attributes:
        started: those that it has started, all of them.
        make: makes the next one.
        now: by the clock of its loop.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.started: list[FakeReplicator] = []
        self.make: Callable[[Desk, Callable[[str], None]], FakeReplicator] = FakeReplicator
        self.lost: list[str] = []
        self.watermarks: list[replication.WatermarkAdvanced] = []
        self.places = {(0,): Place(), (1,): Place()}
        monkeypatch.setattr(own_replicator, "ReplicatorProcess", self._start)
        groups: Any = SimpleNamespace(get=self.places.get, adopt=self.places.get)
        self.now = 100.0
        self.loop = EventLoop(clock=lambda: self.now)
        self.peers = Peers(self.loop, groups, self._told)

    def _told(self, message: replication.WatermarkAdvanced | replication.ReplicatorLost) -> None:
        if isinstance(message, replication.ReplicatorLost):
            self.lost.append(message.reason)
        else:
            self.watermarks.append(message)

    def _start(self, module: str, loop: object, received: Any, ended: Any, *watched: object) -> FakeReplicator:
        replicator = self.make(self, ended)
        self.started.append(replicator)
        return replicator

    def turn_at(self, now: float) -> None:
        """A turn of the loop, at that time; nothing but the clock wakes it."""
        self.now = now
        self.loop.post(lambda: None)
        self.loop.turn()

    def begin(self, **other: Any) -> None:
        """Listen, and join the job."""
        self.peers.replicator.listen(LISTEN)
        self.join(**other)

    def join(self, **other: Any) -> None:
        self.peers.join(replication.Join(msgspec.structs.replace(JOB, **other)))


class FakeReplicator:
    """Stands for the process."""

    address = "tcp://127.0.0.1:4321"

    def __init__(self, desk: Desk, ended: Callable[[str], None]) -> None:
        self.ended = ended
        self.sent: list[Any] = []
        self.asked: list[Any] = []
        self.closed = False
        self.stopped = False

    look_at = None

    def stands_still(self) -> bool:
        return self.stopped

    def watch_for(self, liveness_seconds: float) -> None:
        pass

    def send(self, message: object, fds: object) -> None:
        assert not self.closed
        self.sent.append(message)

    def ask(self, message: object, expected: type, timeout: float, patience: float | None = None) -> Any:
        assert not self.closed
        self.asked.append(message)
        if self.stopped:
            raise AgentGoneError("it has shown no sign of life")
        if isinstance(message, replication.Listen):
            return replication.Listening(f"tcp://127.0.0.1:{message.port}" if message.port else self.address)
        return replication.Fragments(()) if isinstance(message, replication.ListFragments) else replication.Halted()

    def close(self, last: object = None) -> None:
        self.closed = True


LISTEN = replication.Listen("a1", "a", "127.0.0.1", 0, None)
JOB = replication.PeerJob(
    "a1", (replication.PeerNode("a", FakeReplicator.address, ("a",)),), (), 1, 1, "", True, None, 0.01, 0
)


@pytest.fixture
def desk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Desk]:
    desk = Desk(monkeypatch)
    with closing(desk.loop), closing(desk.peers):
        yield desk


@pytest.mark.parametrize(
    "end", [lambda desk: desk.peers.begin_attempt(), lambda desk: desk.peers.close(), lambda desk: desk.join()]
)
def test_a_recovery_that_is_cut_off_lets_go_of_what_it_has(desk: Desk, end: Callable[[Desk], None]) -> None:
    answers: list[Any] = []
    desk.begin()
    desk.peers.recover(replication.Recover(5, (), (wanted(0), wanted(1)), None), answers.append)
    desk.peers.replicator_said(replication.Described((0,), SPEC, recovery=1))
    [room] = desk.places[(0,)].rooms
    assert not room.closed
    end(desk)
    assert room.closed
    assert [bool(one.problem) for one in answers] == [True]
    desk.peers.replicator_said(replication.Filled((0,), recovery=1))
    assert not room.filled


def test_an_agent_that_leaves_has_its_replicator_leave_at_once(desk: Desk) -> None:
    """It may save for minutes, and its successor's listens at the same port."""
    desk.begin()
    desk.peers.leave_node()
    assert desk.started[0].sent[-1] == replication.Drain(finished=False)
    desk.peers.sync(holding(1, 1, 3))
    assert desk.started[0].sent[-1] == replication.Drain(finished=False), "nothing follows"
    desk.started[0].ended("killed")
    assert len(desk.started) == 1, "it is not replaced"


# Replicators that die


def dies_of(kind: type) -> type[FakeReplicator]:
    """A replicator that dies as it is sent a message of this type."""

    class Dies(FakeReplicator):
        def send(self, message: object, fds: object) -> None:
            if isinstance(message, kind):
                raise AgentGoneError("killed")
            super().send(message, fds)

    return Dies


def holding(base: int, newest: int, slots: int, mode: str = "eager") -> Any:
    """Stands for a group with a generation that is complete."""
    held = SimpleNamespace(
        complete=True, base=base, ledger=SimpleNamespace(committed={0: newest}), newest=newest, common=newest,
        number=1, replica=None, regions=(), sendable=lambda with_base: {base: (0, b"", {})} if with_base else {},
        spec=SimpleNamespace(mode=mode, slots=slots, every=1, trails=False),
        log_record=lambda record: SimpleNamespace(record=record, step=0, meta=b"", rank_states={}),
    )  # fmt: skip
    return SimpleNamespace(held=held, ranks=(0,), history=())


def broken(desk: Desk, ended: Callable[[str], None]) -> FakeReplicator:
    """One that dies as it is asked."""

    class Broken(FakeReplicator):
        def ask(self, message: object, *arguments: object) -> Any:
            raise AgentGoneError("the port is taken")

    return Broken(desk, ended)


def test_a_replicator_that_dies_before_the_plan_is_made_is_replaced_where_it_listened(desk: Desk) -> None:
    before = desk.peers.replicator.listen(LISTEN)
    desk.started[0].ended("killed")
    assert desk.started[0].closed
    assert not desk.started[1].closed
    assert desk.started[1].asked[0] == msgspec.structs.replace(LISTEN, port=4321)
    assert desk.peers.replicator.listen(LISTEN) == before
    desk.join()
    assert [type(one) for one in desk.started[1].sent] == [replication.Join]
    # From now on peers are told where another one listens.
    desk.started[1].ended("killed")
    assert desk.started[2].asked[0] == LISTEN
    assert [type(one) for one in desk.started[2].sent] == [replication.Join]
    assert not desk.lost


@pytest.mark.promise("this node's replicator: stopped, deadlocked, dead")
@pytest.mark.promise(
    "a stopped or deadlocked replicator is killed and replaced, a busy one is not; no acknowledged record is lost "
    "with it"
)
def test_a_replicator_that_stands_still_is_killed_and_replaced(desk: Desk) -> None:
    desk.begin()
    desk.turn_at(1.0)
    assert len(desk.started) == 1
    desk.started[0].stopped = True
    desk.turn_at(2.0)
    assert [one.closed for one in desk.started] == [True, False]
    assert [type(one) for one in desk.started[1].sent] == [replication.Join]


@pytest.mark.promise(
    "a stopped or deadlocked replicator is killed and replaced, a busy one is not; no acknowledged record is lost "
    "with it"
)
def test_a_replicator_that_stands_still_as_it_begins_to_listen_is_replaced(desk: Desk) -> None:
    class Stopped(FakeReplicator):
        def __init__(self, desk: Desk, ended: Callable[[str], None]) -> None:
            super().__init__(desk, ended)
            self.stopped = True
            if len(desk.started) == 1:
                desk.make = FakeReplicator

    desk.make = Stopped
    assert desk.peers.replicator.listen(LISTEN).address == FakeReplicator.address
    assert [one.closed for one in desk.started] == [True, True, False]
    desk.peers.begin_attempt()
    desk.peers.close()
    desk.make = Stopped
    desk.started.clear()
    desk.started.extend([FakeReplicator(desk, lambda reason: None)] * 2)
    with pytest.raises(AgentError, match="no sign of life"):
        desk.peers.replicator.listen(LISTEN)


def test_a_replicator_that_stands_still_where_others_know_it_is_replaced_at_its_address(desk: Desk) -> None:
    before = desk.peers.replicator.listen(LISTEN)
    desk.started[0].stopped = True
    assert desk.peers.replicator.listen(LISTEN) == before
    assert [one.closed for one in desk.started] == [True, False]
    assert desk.started[1].asked[0] == msgspec.structs.replace(LISTEN, port=4321)


@pytest.mark.promise(
    "agents and replicators may die in mid-run, repeatedly: training goes on according to `ack`, and protection "
    "becomes complete again by itself"
)
def test_replicators_that_die_again_and_again_are_started_ever_more_seldom(desk: Desk) -> None:
    desk.begin()
    pauses = []
    for _ in range(10):
        living = len(desk.started)
        desk.started[-1].ended("killed")
        deadline = desk.loop.deadline()
        pauses.append(0.0 if deadline is None else deadline - desk.now)
        if deadline is not None:
            assert len(desk.started) == living
            assert desk.lost[-1] == f"killed; another replicator is started in {pauses[-1]:.0f} s"
            desk.turn_at(deadline - 0.1)
            assert len(desk.started) == living
            desk.turn_at(deadline)
        assert len(desk.started) == living + 1
        assert [type(one) for one in desk.started[-1].sent] == [replication.Join]
        assert desk.loop.deadline() is None
    assert pauses == [0, 0, 1, 2, 4, 8, 16, 32, 60, 60]
    desk.now += 60  # the last one has lived
    desk.started[-1].ended("killed")
    assert desk.loop.deadline() is None
    assert not desk.started[-1].closed


def test_what_cannot_be_started_during_training_is_tried_again_and_redo_does_not_pass_the_watermark(desk: Desk) -> None:
    group: Any = SimpleNamespace(held=None, ranks=(0,))
    desk.begin()
    desk.peers.replicator_said(replication.WatermarkAdvanced(7, True))
    desk.make = broken
    desk.started[0].ended("killed")
    for _ in range(3):
        assert all(one.closed for one in desk.started)
        assert "killed; no other one takes its place: the replicator does not answer" in desk.lost[-1]
        assert desk.lost[-1].count("the port is taken") == 1
        assert desk.peers.redo_limit(group) == 7
        desk.turn_at(desk.loop.deadline() or 0.0)
    tried = len(desk.started)
    with pytest.raises(AgentError, match="the port is taken"):
        desk.peers.replicator.listen(LISTEN)
    assert len(desk.started) == tried + 1
    desk.make = FakeReplicator
    # A trainer that is back does not wait for the clock.
    assert desk.peers.replicator.listen(LISTEN).address == FakeReplicator.address
    desk.peers.join(replication.Join(JOB, rejoin=True))
    assert [type(one) for one in desk.started[-1].sent] == [replication.Join]
    assert desk.loop.deadline() is None
    desk.started[-1].ended("killed")
    desk.peers.begin_attempt()
    assert desk.loop.deadline() is None


@pytest.mark.parametrize("held", [True, False])
def test_training_goes_on_without_peers_only_where_a_successor_has_nothing_to_send(desk: Desk, held: bool) -> None:
    """Where it did not wait it could get beyond what peers have, and a second failure would lose all."""
    places: dict[Any, Any] = desk.places
    places[(0,)] = holding(base=4, newest=9, slots=3) if held else SimpleNamespace(held=None, ranks=(0,))
    desk.begin(units=(replication.PeerUnit(0, (0,), True),))
    desk.peers.replicator_said(replication.WatermarkAdvanced(7, True))
    desk.started[0].ended("killed")
    assert desk.watermarks[1:] == [replication.WatermarkAdvanced(7, False, waits_suspended=not held)]
    assert [(one.rejoin, one.records) for one in desk.started[1].sent[:1]] == [(True, held)]
    assert [type(one) for one in desk.started[1].sent[1:2]] == [replication.SendGeneration][:held]
    desk.make = broken
    desk.started[1].ended("killed")
    assert desk.lost, "none takes its place for now"
    assert desk.watermarks[-1] == replication.WatermarkAdvanced(7, False, waits_suspended=True)


def test_what_is_given_to_a_replicator_as_it_dies_does_not_count_as_sent(desk: Desk) -> None:
    group = holding(base=4, newest=9, slots=3)
    desk.make = dies_of(replication.SendGeneration)
    desk.begin(wait=False)
    for _ in range(3):
        desk.peers.sync(group)
    assert len(desk.started) == 3
    assert desk.loop.deadline() is not None
    # Nobody is there who could answer: redo goes on as far as the slots ask for.
    assert desk.peers.redo_limit(group) == 9 - (3 - 2)
    desk.make = FakeReplicator
    desk.peers.recover(replication.Recover(5, (), (), None), lambda answer: None)  # it is not waited with any more
    desk.peers.sync(group)
    assert [type(one) for one in desk.started[-1].sent[:2]] == [replication.Join, replication.SendGeneration]
    assert desk.peers.redo_limit(group) == 0
    assert isinstance(desk.started[-1].sent[-1], replication.GiveUp)


def test_without_a_replica_nothing_has_to_go_on_and_the_state_that_a_generation_begins_with_is_sent(desk: Desk) -> None:
    desk.begin(wait=False)
    for mode, given_up in [("lazy", False), ("eager", True)]:
        group = holding(base=4, newest=9, slots=3, mode=mode)
        desk.peers.sync(group)
        assert desk.peers.redo_limit(group) == 0
        assert isinstance(desk.started[-1].sent[-1], replication.GiveUp) is given_up


@pytest.mark.parametrize(("acknowledged", "read"), [(3, [4]), (4, []), (7, [])])
def test_a_replicator_that_takes_over_does_not_read_a_base_that_was_acknowledged(
    desk: Desk, acknowledged: int, read: list[int]
) -> None:
    """The replica may go on from it at any time."""
    group = holding(base=4, newest=9, slots=8)
    desk.begin(wait=False)
    desk.peers.replicator_said(replication.WatermarkAdvanced(acknowledged, True))
    desk.started[0].ended("killed")
    desk.peers.sync(group)
    (sent,) = [one for one in desk.started[-1].sent if isinstance(one, replication.SendGeneration)]
    assert list(sent.records) == read


@pytest.mark.parametrize(("then", "acknowledged"), [(None, 0), (20, 20)])
def test_a_plan_that_is_made_once_more_has_another_record_to_begin_with(
    desk: Desk, then: int | None, acknowledged: int
) -> None:
    """Peers' states prove to be damaged, and an earlier one serves. What follows it is sent from its start.

    The base of a generation that counts as acknowledged is not sent: then nobody ever acknowledges a record.
    """
    desk.begin(record=32)
    assert desk.peers.watermark == 32
    desk.join(record=then)
    assert desk.peers.watermark == acknowledged


def test_a_replicator_that_is_replaced_changes_nothing_of_what_is_acknowledged(desk: Desk) -> None:
    desk.begin(record=32)
    desk.peers.replicator_said(replication.WatermarkAdvanced(40, True))
    desk.started[0].ended("killed")
    assert len(desk.started) == 2
    assert desk.peers.watermark == 40


def test_redo_goes_on_when_the_replicator_dies_of_what_it_is_asked(desk: Desk) -> None:
    group = holding(base=4, newest=9, slots=3)
    desk.make = dies_of(replication.GiveUp)
    desk.begin(wait=False)
    desk.peers.sync(group)
    desk.make = broken
    assert desk.peers.redo_limit(group) == 9 - (3 - 2)


def hand_out_something(desk: Desk, monkeypatch: pytest.MonkeyPatch, first: Callable[[], None] = lambda: None) -> None:
    """Whatever is to be handed out is here, once `first` has happened."""

    def stand_at(*_: object) -> Any:
        first()
        return SimpleNamespace(regions=())

    monkeypatch.setattr(desk.places[(0,)], "generations", SimpleNamespace(stand_at=stand_at), raising=False)
    monkeypatch.setattr(peer_tier, "hand_out", lambda *_: "a state")


def test_a_replicator_that_dies_as_it_is_asked_dies_once(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    class Dies(FakeReplicator):
        def ask(self, message: object, *arguments: Any) -> Any:
            if isinstance(message, replication.ListFragments) and not isinstance(self.asked[-1], replication.Listen):
                self.ended("it was not in its right mind")
                raise AgentGoneError("what it said has led to its end")
            return super().ask(message, *arguments)

    desk.make = Dies
    desk.begin()
    hand_out_something(desk, monkeypatch)
    answers: list[Any] = []
    desk.peers.recover(replication.Recover(5, ((0,),), (), None), answers.append)
    assert [one.problem for one in answers] == ["the replicator is gone"]
    assert [one.closed for one in desk.started] == [True, False]


def test_a_replicator_knows_what_else_is_held_here(desk: Desk) -> None:
    def told() -> list[int]:
        return [one.nbytes for one in desk.started[-1].sent if isinstance(one, replication.Holds)]

    desk.peers.replicator.tell_own(5)  # there is none yet
    desk.begin()
    for nbytes in (7, 7, 8):
        desk.peers.replicator.tell_own(nbytes)
    assert told() == [7, 8]
    desk.started[-1].ended("killed")
    desk.peers.replicator.tell_own(8)
    assert told() == [8]


def test_without_a_replicator_where_peers_look_for_it_the_start_ends(desk: Desk) -> None:
    desk.peers.replicator.listen(LISTEN)
    desk.make = broken
    desk.started[0].ended("killed")
    assert all(one.closed for one in desk.started)
    assert len(desk.lost) == 1
    for ask in (
        desk.join,
        lambda: desk.peers.recover(replication.Recover(5, (), (wanted(0),), None), desk.lost.append),
    ):
        with pytest.raises(PeerError, match=r"killed.*the port is taken"):
            ask()
    desk.peers.join(replication.Join(JOB, rejoin=True))
    desk.make = FakeReplicator
    desk.peers.begin_attempt()
    desk.begin()
    assert [type(one) for one in desk.started[-1].sent] == [replication.Join]


def test_what_was_handed_out_to_a_replicator_that_has_died_is_not_taken_for_handed_out(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers: list[Any] = []
    desk.begin()
    hand_out_something(desk, monkeypatch, lambda: desk.started[0].ended("killed"))
    desk.peers.recover(replication.Recover(5, ((0,),), (), None), answers.append)
    assert [one.problem for one in answers] == ["the replicator is gone"]


def test_a_replicator_that_dies_as_it_is_halted_is_let_go_of(desk: Desk) -> None:
    class Dies(FakeReplicator):
        def ask(self, message: Any, *arguments: Any) -> Any:
            if isinstance(message, replication.Halt):
                self.ended("it was not in its right mind")
                raise AgentGoneError("what it said has led to its end")
            return super().ask(message, *arguments)

    desk.make = Dies
    for _ in range(2):
        desk.peers.replicator.listen(LISTEN)
        desk.peers.begin_attempt()
        assert all(one.closed for one in desk.started)


class Started:
    """Stands for a process that was started; `channel` is its end. What it does once it is looked at is `looked`."""

    pid = 1

    def __init__(self, arguments: object, pass_fds: list[int], **other: object) -> None:
        self.channel = Channel(socket.socket(fileno=os.dup(pass_fds[0])))
        self.looked: Callable[[], int | None] = lambda: None

    def poll(self) -> int | None:
        return self.looked()

    def kill(self) -> None:
        self.channel.close()

    def wait(self, timeout: float) -> int:
        return 0


@pytest.fixture
def helper(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[HelperProcess, Any, list[Any]]]:
    received: list[Any] = []
    monkeypatch.setattr(helper_process.subprocess, "Popen", Started)

    def take(message: Any) -> None:
        received.append(message)
        if isinstance(message, replication.WatermarkAdvanced):
            process.close()

    with closing(EventLoop()) as loop:
        process = HelperProcess("memckpt.replication.process.replicator", loop, take, received.append)
        with closing(process):
            yield process, process._process, received


def test_an_answer_is_not_waited_for_from_a_process_that_was_let_go_of(helper: Any) -> None:
    process, started, received = helper
    started.channel.send(replication.RecoveryProgress(1))
    started.channel.send(replication.WatermarkAdvanced(1, True))
    with pytest.raises(AgentGoneError):
        process.ask(replication.Halt(), replication.Halted, 10.0)
    assert [type(one) for one in received] == [replication.RecoveryProgress, replication.WatermarkAdvanced]
    with pytest.raises(AgentGoneError):
        process.ask(replication.Halt(), replication.Halted, 10.0)


def test_last_words_are_heard_and_those_that_make_no_sense_end_nothing(
    helper: Any, caplog: pytest.LogCaptureFixture
) -> None:
    process, started, received = helper
    heard: list[Any] = []
    started.channel.send(replication.RecoveryProgress(1))
    started.channel.sock.send(b"i no message")
    process.close(heard.append)
    assert heard == [replication.RecoveryProgress(1)]
    assert received == []
    assert "cannot be decoded" in caplog.text
    assert process._channel.fileno() < 0


def test_a_process_that_lives_gets_longer_to_answer(helper: Any, caplog: pytest.LogCaptureFixture) -> None:
    process, started, _ = helper
    started.looked = lambda: started.channel.send(replication.Halted())
    with caplog.at_level(logging.WARNING):
        assert process.ask(replication.Halt(), replication.Halted, 0.01, patience=20.0) == replication.Halted()
    assert "it is alive" in caplog.text
    started.looked = lambda: -9
    with pytest.raises(AgentGoneError, match="no answer"):
        process.ask(replication.Halt(), replication.Halted, 0.01, patience=20.0)
    started.looked = lambda: None
    with pytest.raises(AgentGoneError, match="no answer"):
        process.ask(replication.Halt(), replication.Halted, 0.01, patience=0.02)


def test_a_process_that_sends_other_messages_is_not_waited_for_without_end(
    helper: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    process, started, received = helper
    monkeypatch.setattr(helper_process, "_LONGEST_ANSWER_SECONDS", 0.0)
    started.channel.send(replication.RecoveryProgress(1))
    started.channel.send(replication.Halted())
    with pytest.raises(AgentGoneError, match="sends other messages"):
        process.ask(replication.Halt(), replication.Halted, 10.0)
    assert received == [replication.RecoveryProgress(1)]


@pytest.mark.parametrize("error", [BlockingIOError(errno.EAGAIN, "no more"), OSError(errno.ENOMEM, "no memory")])
def test_a_process_that_cannot_be_started_is_an_error_of_the_agent(
    error: OSError, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object, **other: object) -> None:
        raise error

    monkeypatch.setattr(helper_process.subprocess, "Popen", fail)
    before = set(os.listdir("/proc/self/fd"))
    with closing(EventLoop()) as loop, pytest.raises(AgentError, match=error.args[1]):
        HelperProcess("memckpt.replication.process.replicator", loop, lambda message: None, lambda reason: None)
    assert set(os.listdir("/proc/self/fd")) == before
