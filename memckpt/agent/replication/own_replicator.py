"""The replicator process of a node: started, watched, and replaced when it dies; the memory that outlives it."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import Protocol

import msgspec

from memckpt.errors import AgentError, AgentGoneError, MemckptError, PeerError
from memckpt.processes.backoff import Backoff
from memckpt.processes.event_loop import EventLoop
from memckpt.processes.helper_process import ReplicatorProcess
from memckpt.protocol import replication
from memckpt.protocol.channel import AgentToReplicator, ReplicatorToAgent
from memckpt.protocol.replication import Listen, Listening
from memckpt.state.records import HeldFragments, RankGroup

_log = logging.getLogger("memckpt.agent")
_ANSWER_SECONDS = 20.0
#: Seconds for a replicator that lives and does not halt at once: what it has received and not written down dies with
#: it. Less than the 60 s that trainers wait for the agent.
_HALT_SECONDS = 50.0
#: Pause between two attempts at starting a replicator that does not come up, in multiples of the time that one took.
_REST_FACTOR = 5.0
#: Number of replicators that stand still as they begin to listen, and are replaced at once.
_MOST_STANDING = 2


class Owner(Protocol):
    """The owner of a replicator, which is told what becomes of it."""

    def replicator_said(self, message: ReplicatorToAgent) -> None:
        """Handle a message that is no answer to a question."""

    def replicator_died(self) -> None:
        """Note that it is gone, with all that it was told. Another one may follow."""

    def replicator_replaced(self) -> None:
        """Tell a successor of the attempt, of which it knows nothing yet."""

    def replicator_lost(self, reason: str) -> None:
        """Note that there is none, for a while or for the rest of the attempt."""


class OwnReplicator:
    """Owns a node's replicator, and the memory of others' fragments, with which the next one goes on."""

    def __init__(self, loop: EventLoop, owner: Owner) -> None:
        self.process: ReplicatorProcess | None = None
        #: Whether it has a plan, so that its peers know the job and a successor tells them where it listens.
        self.planned = False
        #: Fingerprints of the models of the node's ranks, compared with those that are kept.
        self.fingerprints: dict[int, tuple[str, ...]] = {}
        #: Why there is no process, in words.
        self.problem = ""
        self._loop, self._owner = loop, owner
        #: Memory of fragments that outlives the process, by window and slot: what it said of it, and the descriptor.
        self._rooms: dict[tuple[RankGroup, str, int], tuple[replication.KeepRoom, int]] = {}
        #: What it was told of the attempt, and where it listens.
        self._listening: tuple[Listen, Listening] | None = None
        self._backoff = Backoff(loop.clock)
        #: When another one is started, where the last one died soon after those before it.
        self._retry_at: float | None = None
        self._died_of = ""
        #: Memory of the node that it was told of, in bytes; None: it was not.
        self._told_own: int | None = None
        loop.each_turn(self._look_at_clock, self._deadline)

    @property
    def kept_bytes(self) -> int:
        """Memory of the fragments that it keeps for other nodes, in bytes."""
        return sum(os.fstat(fd).st_size for _, fd in self._rooms.values())

    @property
    def told(self) -> Listen | None:
        """What it was told of the attempt; None before that, or where there is none for the rest of the attempt."""
        return None if self._listening is None else self._listening[0]

    # Messages

    def send(self, message: AgentToReplicator, fds: Sequence[int] = ()) -> None:
        """Send a message, if there is a process; one that cannot be reached is replaced."""
        if self.process is None:
            return
        try:
            self.process.send(message, list(fds))
        except AgentGoneError as error:
            self._die(str(error))

    def tell_own(self, nbytes: int) -> None:
        """Tell it what memory the node holds beside that of fragments."""
        if self.process is not None and nbytes != self._told_own:
            self._told_own = nbytes
            self.send(replication.Holds(nbytes))

    def has_taken_all(self) -> bool:
        """Whether the process is alive, and has taken all that was sent to it until now."""
        process = self.process
        try:
            self._fragments()
        except AgentGoneError as error:
            if self.process is process:
                self._die(str(error))
            return False
        return True

    def drain(self) -> None:
        """Wait until peers have received what is on its way to them, for some seconds."""
        if self.process is None:
            return
        try:
            self.process.ask(replication.Drain(), replication.Drained, _ANSWER_SECONDS)
        except AgentGoneError as error:
            _log.warning("could not confirm that peers received the final records: %s", error)

    def leave_peers(self) -> None:
        """Have it leave its peers, once they have what is on its way, to one that listens in its place."""
        self._forget_attempt()
        self.send(replication.Drain(finished=False))

    def _received(self, message: ReplicatorToAgent) -> None:
        match message:
            case replication.KeepRoom() | replication.LetGoOfRoom():
                self._note_room(message, self.process.take_descriptors() if self.process is not None else [])
            case Listening() | replication.Fragments() | replication.Halted() | replication.Drained():
                pass  # an answer that is not waited for any more
            case _:
                self._owner.replicator_said(message)

    def _note_room(self, message: replication.KeepRoom | replication.LetGoOfRoom, fds: list[int]) -> None:
        """Take over the descriptor of memory, or close it. Raises AgentError: not one descriptor has come."""
        key = message.owner, message.generation, message.slot
        expected = int(isinstance(message, replication.KeepRoom))
        if len(fds) != expected:
            for fd in fds:
                os.close(fd)
            raise AgentError(f"expected {expected} descriptors of memory for fragments, found {len(fds)}")
        _, former = self._rooms.pop(key, (None, None))
        if former is not None:
            os.close(former)
        if isinstance(message, replication.KeepRoom):
            self._rooms[key] = message, fds[0]

    def _fragments(self) -> tuple[HeldFragments, ...]:
        assert self.process is not None
        return self.process.ask(
            replication.ListFragments(self.fingerprints), replication.Fragments, _ANSWER_SECONDS
        ).fragments

    # Attempts

    def begin_attempt(self) -> None:
        """Have it write down all that it has received, and nothing more: what was acknowledged has to be found here."""
        if self.process is not None:
            try:
                self.process.ask(replication.Halt(), replication.Halted, _ANSWER_SECONDS, _HALT_SECONDS)
            except AgentError as error:
                _log.error("the replicator is gone: %s", error)
                self._kill_process()  # or its successor, which is not needed either
        self._forget_attempt()
        self.fingerprints.clear()
        self._backoff.reset()
        self.problem = ""

    def _forget_attempt(self) -> None:
        self._listening = self._retry_at = None
        self.planned = False

    def close(self) -> None:
        """Kill it: what is to reach peers was drained before, and what it keeps of theirs ends with the agent."""
        self._forget_attempt()
        self._kill_process()
        for _, fd in self._rooms.values():
            os.close(fd)
        self._rooms.clear()

    def listen(self, message: Listen) -> Listening:
        """Have it listen for peers; returns where, and what fragments it keeps. AgentError: it does not come up."""
        if self._retry_at is not None:
            self._restart()  # a trainer that is back asks for it before its time
            if self.process is None:
                raise AgentError(f"there is no replicator: {self.problem}")
        for standing in range(_MOST_STANDING + 1):
            try:
                return self._have_listen(message)
            except AgentGoneError as error:
                if standing == _MOST_STANDING or not self._replaces_standing(message, str(error)):
                    raise AgentError(f"the replicator does not answer: {error}") from error
        raise AssertionError("the last one is an answer or an error")

    def _have_listen(self, message: Listen) -> Listening:
        if self._listening is None or self._listening[0].attempt != message.attempt or self.process is None:
            if self.process is None:
                self._backoff.started()
                self._told_own = None
                self.process = self._start(message.liveness_seconds)
            self.process.watch_for(message.liveness_seconds)
            self._listening = message, self.process.ask(message, Listening, _ANSWER_SECONDS)
        return msgspec.structs.replace(self._listening[1], fragments=self._fragments())

    def _replaces_standing(self, message: Listen, reason: str) -> bool:
        """Whether it has not answered because it stands still; then it is killed, and may be replaced."""
        if self.process is None or not self.process.stands_still():
            return False
        if self._listening is not None and self._listening[0].attempt == message.attempt:
            self._die(reason)  # others may know where it listens
            return self.process is not None
        _log.error("the replicator stands still as it begins to listen, and is replaced: %s", reason)
        self._lose(reason)
        return True

    def check(self) -> None:
        """See that a process listens; PeerError: it is gone, and no other one is where peers look for it."""
        if self._retry_at is not None:
            self._restart()
        if self.process is None or self._listening is None:
            raise PeerError(
                "expected a replicator through which this node reaches its peers, found that it is gone "
                f"({self.problem or 'it was never started'}); see the agent's log, and start the attempt again"
            )

    # Life and death

    def _start(self, liveness_seconds: float) -> ReplicatorProcess:
        """Start a process; it goes on with what the last one kept."""
        process = ReplicatorProcess(
            "memckpt.replication.process.replicator", self._loop, self._received, self._die, liveness_seconds
        )
        try:
            for message, fd in self._rooms.values():
                process.send(message, [fd])
        except AgentGoneError:
            process.close()
            raise
        return process

    def _kill_process(self) -> None:
        """Kill the process, if there is one; of what it has said only its memory counts."""
        process, self.process = self.process, None

        def note_room(message: ReplicatorToAgent) -> None:
            if isinstance(message, replication.KeepRoom | replication.LetGoOfRoom):
                assert process is not None
                self._note_room(message, process.take_descriptors())

        if process is not None:
            process.close(note_room)

    def _lose(self, reason: str) -> None:
        self.problem = reason
        self._kill_process()

    def _die(self, reason: str) -> None:
        _log.error("the replicator is gone: %s", reason)
        self._died_of = reason
        self._lose(reason)
        self._owner.replicator_died()
        pause = self._backoff.died()
        if not self.planned and (self._listening is None or pause):
            self._do_without(reason)
        elif pause:
            self._wait_with_another(pause)
        else:
            self._restart()

    def _do_without(self, reason: str) -> None:
        """Fail the start of the attempt: peers look for one at an address where there is none any more."""
        self._listening = None
        self._owner.replicator_lost(reason)

    def _wait_with_another(self, pause: float) -> None:
        self._retry_at = self._loop.clock() + pause
        self._owner.replicator_lost(f"{self.problem}; another replicator is started in {pause:.0f} s")

    def _deadline(self) -> float | None:
        looks = None if self.process is None else self.process.look_at
        return min((at for at in (self._retry_at, looks) if at is not None), default=None)

    def _look_at_clock(self) -> None:
        if self.process is not None and self.process.stands_still():
            self._die("it shows no sign of life (stopped, or dead-locked), and is killed")
        if self._retry_at is not None and self._loop.clock() >= self._retry_at:
            self._restart()

    def _restart(self) -> None:
        self._retry_at = None
        planned, began = self.planned, self._loop.clock()
        try:
            self._replace(planned)
        except MemckptError as error:
            self._lose(f"{self._died_of}; no other one takes its place: {error}")
            if not planned:
                self._do_without(self.problem)
            else:
                # While it is waited for, the loop does nothing else: that must be rare.
                took = self._loop.clock() - began
                self._wait_with_another(max(1.0, self._backoff.died(), _REST_FACTOR * took))
            return
        if planned:
            self._owner.replicator_replaced()

    def _replace(self, planned: bool) -> None:
        assert self._listening is not None
        listen, listening = where, _ = self._listening
        if not planned:
            # All that others know of this node yet is the address that was told to the trainers: it has to stay.
            where = msgspec.structs.replace(listen, port=int(listening.address.rpartition(":")[2]))
        self.listen(where)
        if self._listening is not None:
            self._listening = listen, self._listening[1]
