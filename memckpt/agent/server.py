"""The agent: one process per node and run that outlives trainers and holds base and log.

One thread runs the event loop and owns everything here; in eager mode the replica's redo thread sits beside it and
reaches the loop only through :meth:`Agent.notify`.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import os
import selectors
import time
from collections.abc import Callable

from memckpt.agent.address import AgentAddress
from memckpt.agent.attempt import Attempt, Member
from memckpt.agent.building import Building
from memckpt.agent.connections import Connection, Connections
from memckpt.agent.generation import Generation, branch_off
from memckpt.agent.messages import (
    PROTOCOL_VERSION,
    Alarm,
    Begin,
    Commit,
    Configure,
    Drift,
    Gap,
    GenerationCommit,
    Goodbye,
    Hello,
    HoldingOn,
    Inventory,
    Leaving,
    Message,
    NeedGeneration,
    Preempted,
    Prepare,
    Prepared,
    Protected,
    ReplicaCopied,
    Resume,
    SaveFailed,
    SaveTo,
    SnapshotTaken,
    Status,
    StatusRequest,
    StopRequest,
    Void,
)
from memckpt.agent.saver import Saver
from memckpt.agent.writer_process import WriterProcess
from memckpt.errors import AgentError, RunBusyError
from memckpt.state.layout import first_difference
from memckpt.state.records import Branch, HeldRecords, timeline_of

_log = logging.getLogger("memckpt.agent")
_ORPHAN_SECONDS = 120.0
#: Of a new value in the moving average of stalls.
_STALL_WEIGHT = 0.05


class Agent:
    """Serves one run on one node until it is told to leave.

    Args:
        address: where it listens.
        linger_seconds: how long it holds the state with no trainer.
        by_operator: started by a person or a supervisor, beside the job: then it waits for the first trainer as long
            as that takes, and keeps its own linger time whatever the trainers' configuration says.
        stopping: called once, right before it stops to answer.
    """

    def __init__(
        self,
        address: AgentAddress,
        linger_seconds: float,
        by_operator: bool = False,
        stopping: Callable[[], None] = lambda: None,
    ) -> None:
        self._by_operator = by_operator
        self._stopping: Callable[[], None] | None = stopping
        self._address = address
        self._linger_seconds = linger_seconds
        self._selector = selectors.DefaultSelector()
        self._connections = Connections(address, self._selector, self._handle, self._trainer_left)
        self._attempt: Attempt | None = None
        self._past_nonces: set[str] = set()
        self._held: Generation | None = None
        self._building = Building(self.notify, self._make_room)
        self._resumed_to: int | None = None
        self._history: tuple[Branch, ...] = ()
        self._max_drift = 0.0
        self._leaving: str | None = None
        self._started = time.monotonic()
        self._committed_at: float | None = None
        self._stall_ms: float | None = None
        self._lonely_since: float | None = self._started
        self._inbox: collections.deque[Message] = collections.deque()
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._saver = Saver(
            address.node,
            lambda message, fd: self._tell_members(message, fd=fd),
            self._tell_members,
            lambda what, received, ended: WriterProcess(what, self._selector, received, ended),
            self._checkpoint_failed,
        )
        #: Why the agent leaves as soon as what it holds is in storage; None: it stays.
        self._leaving_when_saved: str | None = None
        #: Training has finished: its final step has to be in storage first, whatever time that takes.
        self._finishing = False
        self._saved_alone = False

    # Life

    def listen(self) -> None:
        """Begin to answer. The caller holds the address's starting lock."""
        self._connections.listen()
        self._selector.register(self._wake_read, selectors.EVENT_READ, self._drain_inbox)

    def run(self) -> None:
        """Serve until told to leave."""
        _log.info("serving %s as node %s, pid %d", self._address.run_dir, self._address.node, os.getpid())
        try:
            while self._leaving is None:
                for key, _ in self._selector.select(self._patience()):
                    key.data()
                self._look_at_clock()
        finally:
            _log.info("leaving: %s", self._leaving or "error")
            self._close()

    def leave(self, reason: str) -> None:
        """End :meth:`run` as soon as what is held is in storage; safe to call from a signal handler."""
        self.notify(StopRequest(reason))

    def _linger_left(self) -> float | None:
        """Seconds until lingering ends; None while a trainer is here."""
        if self._lonely_since is None or (self._by_operator and self._attempt is None):
            return None
        limit = self._linger_seconds if self._held is not None else min(self._linger_seconds, _ORPHAN_SECONDS)
        return max(0.0, self._lonely_since + limit - time.monotonic())

    def _patience(self) -> float | None:
        """How long to wait for events: until something is due by the clock, or for ever."""
        limits = [self._linger_left()]
        if self._must_save_alone:
            limits.append(self._saver.patience(self._lonely_since or 0.0))
        deadline = self._saver.deadline()
        if deadline is not None:
            limits.append(deadline - time.monotonic())
        known = [limit for limit in limits if limit is not None]
        return max(0.0, min(known)) if known else None

    @property
    def _must_save_alone(self) -> bool:
        """Whether no trainer is here and what they left is not on its way to storage yet."""
        alone = self._lonely_since is not None and self._held is not None
        return alone and not self._saved_alone and self._saver.enabled

    def _look_at_clock(self) -> None:
        self._saver.look_at_clock()
        if self._lonely_since is not None and self._held is not None:
            self._saver.save_asked(self._held)
        if self._must_save_alone and self._saver.patience(self._lonely_since or 0.0) <= 0:
            self._save_held(as_checkpoint=self._finishing)
        owed = self._finishing and not self._saved_alone
        if self._leaving_when_saved is not None and not self._saver.saving and not owed:
            self._leaving = self._leaving_when_saved
        if self._linger_left() == 0.0 and not self._saver.saving:
            self._leaving = f"no trainer came back within {self._linger_seconds:.0f} s"

    def _save_held(self, as_checkpoint: bool = False) -> None:
        """No trainer runs: what is held goes to storage, too."""
        self._saved_alone = True
        if self._held is not None:
            self._saver.save_held(self._held, as_checkpoint)

    def _save_to(self, connection: Connection, url: str) -> None:
        """Somebody wants what memory holds, in a place of their own."""
        if self._held is None or not self._held.complete:
            self._connections.answer(connection, SaveFailed(0, "nothing is held in memory"))
            return
        self._saver.save_to(
            url, lambda answer: self._connections.answer(connection, answer), self._held, self._lonely_since is None
        )

    def _checkpoint_failed(self) -> None:
        if self._saved_alone:
            self._saved_alone = False
            self._saver.retry_later()
            if self._finishing:
                self._tell_members(HoldingOn(self._saver.alarm, self._linger_seconds))

    def _leave_when_saved(self, reason: str, finishing: bool = False) -> None:
        self._leaving_when_saved, self._finishing = reason, finishing
        self._save_held(as_checkpoint=finishing)

    def _stop_answering(self) -> None:
        """From here on a trainer that looks for an agent starts another one."""
        stopping, self._stopping = self._stopping, None
        if stopping is not None:
            stopping()
        self._connections.stop_listening()

    def _close(self) -> None:
        self._stop_answering()
        self._saver.close()
        # State goes first, so that a trainer which sees the connection end knows that nothing is left.
        for generation in (self._held, self._building.generation):
            if generation is not None:
                generation.close()
        self._connections.close(Leaving())
        self._selector.close()
        os.close(self._wake_read)
        os.close(self._wake_write)

    # Trainers

    def _trainer_left(self, connection: Connection) -> None:
        assert connection.member is not None
        if self._attempt is not None and self._attempt.nonce == connection.nonce:
            connection.member.left = True
            if not self._attempt.living():
                self._lonely_since = time.monotonic()

    def _tell_members(self, message: Message, besides: Connection | None = None, fd: int | None = None) -> None:
        """To all trainers of the attempt, with a descriptor."""
        for connection in self._connections.of_attempt(self._attempt.nonce if self._attempt is not None else ""):
            if connection is not besides:
                self._connections.answer(connection, message, [fd] if fd is not None else None)

    # From the redo thread and from signal handlers

    def notify(self, message: Message) -> None:
        """Hand a message to the loop, from any thread."""
        self._inbox.append(message)
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake_write, b"x")

    def _drain_inbox(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while os.read(self._wake_read, 4096):
                pass
        while self._inbox:
            message = self._inbox.popleft()
            if isinstance(message, ReplicaCopied):
                self._saver.replica_copied(message)
                continue
            if isinstance(message, StopRequest):
                self._stop_answering()
                self._saver.preempt()
                self._tell_members(Leaving())
                self._leave_when_saved(message.reason)
                continue
            if isinstance(message, Drift):
                self._max_drift = max(self._max_drift, message.max_ulp)
                _log.info("drift of %g ulp at record %d in %s", message.max_ulp, message.record, message.tensor)
            if isinstance(message, Alarm):
                _log.error("%s", message.reason)
                self._let_go_of_held()
            self._tell_members(message)

    def _let_go_of_held(self) -> None:
        if self._held is not None:
            self._saver.forget(self._held)
            self._held.close()
            self._held = None

    # Messages

    def _handle(self, connection: Connection, message: Message) -> None:
        match message:
            case Hello():
                self._hello(connection, message)
                return
            case StatusRequest():
                self._connections.answer(connection, self._status())
                return
            case SaveTo():
                self._save_to(connection, message.url)
                return
            case StopRequest():
                self._leaving = f"stopped by pid {connection.process.pid}"
                return
        member = connection.member
        if member is None or self._attempt is None or connection.nonce != self._attempt.nonce:
            _log.info(
                "ignored %s from pid %d: not of the current attempt", type(message).__name__, connection.process.pid
            )
            return
        match message:
            case Prepare():
                self._prepare(connection, message)
            case Resume():
                self._resume(connection, message)
            case Configure():
                if not self._by_operator:
                    self._linger_seconds = message.linger_seconds
                if message.timeline is not None:
                    run_dir, threads = self._address.run_dir, message.compute_threads
                    self._saver.configure(message.storage, run_dir, message.timeline, threads)
            case GenerationCommit():
                self._start_generation(member, message)
            case Commit():
                generation = self._generation(message.generation)
                if generation is not None:
                    generation.commit(member.rank, message)
                member.next_record = message.record + 1
                self._committed_at = time.monotonic()
                before = message.stall_ms if self._stall_ms is None else self._stall_ms
                self._stall_ms = before + _STALL_WEIGHT * (message.stall_ms - before)
                if generation is not None and generation is self._held:
                    self._saver.after_commit(generation, self._attempt)
            case SnapshotTaken():
                self._saver.snapshot_taken(member.rank, message)
            case Void():
                _log.warning("rank %d could not stage record %d: %s", member.rank, message.record, message.reason)
                member.next_record = message.record + 1
            case NeedGeneration():
                self._order_generation(message.record, message.reason, connection)
            case Preempted():
                _log.warning("rank %d got SIGTERM: what is held goes to storage now", member.rank)
                self._saver.preempt()
            case Goodbye():
                member.finished = message.finished
                if self._attempt.all_finished:
                    # Its connection ends when everything is gone.
                    self._leave_when_saved("training finished", finishing=True)
                else:
                    self._connections.drop(connection)
            case _:
                raise AgentError(f"unexpected {type(message).__name__} from a trainer")

    def _generation(self, number: int) -> Generation | None:
        for generation in (self._held, self._building.generation):
            if generation is not None and generation.number == number:
                return generation
        return None

    def _hello(self, connection: Connection, hello: Hello) -> None:
        if hello.version != PROTOCOL_VERSION:
            raise AgentError(
                f"expected protocol {PROTOCOL_VERSION}, found {hello.version}: trainer and agent differ in version; "
                "stop the agent (memckpt stop) and start again"
            )
        if hello.nonce in self._past_nonces:
            raise RunBusyError("this attempt was superseded by a later one")
        if self._attempt is None or self._attempt.nonce != hello.nonce:
            self._new_attempt(connection, hello)
        assert self._attempt is not None
        connection.nonce = hello.nonce
        connection.member = Member(
            hello.rank, connection.process, connection.channel, hello.launcher, hello.next_record
        )
        self._attempt.members[hello.rank] = connection.member
        self._lonely_since = None
        self._connections.answer(connection, Inventory(self._inventory(hello), os.getpid()))
        if self._held is not None and self._held.spec.world_size != hello.world_size:
            # Another number of ranks resumes from storage.
            saved = self._saver.save_held(self._held, as_checkpoint=True)
            if saved is not None:
                self._connections.answer(connection, saved)
        if hello.rejoining and hello.world_size > 1 and self._attempt.all_here:
            # The others may be one record ahead of this one, never two: it has not entered the next backward yet.
            self._tell_members(Begin(hello.next_record + 1, "a new agent took over"))

    def _new_attempt(self, connection: Connection, hello: Hello) -> None:
        if self._attempt is not None:
            killed = self._attempt.fence(hello, connection.process.pid)
            if killed:
                _log.warning("killed %d trainers of an earlier attempt", killed)
            # Commits that the dead ones had sent count: read them before anything else is decided.
            for old in self._connections.of_attempt(self._attempt.nonce):
                self._connections.read(old)
                self._connections.drop(old)
            for member in self._attempt.members.values():
                member.process.close()
            self._past_nonces.add(self._attempt.nonce)
            self._leaving = self._leaving_when_saved = None
            self._finishing = False
        if self._held is None or self._held.spec.world_size == hello.world_size:
            self._saver.abort()
        self._saved_alone = False
        if self._building.generation is not None:
            _log.warning("the generation that an earlier attempt had begun was not complete; it is dropped")
        self._building.forget()
        self._attempt = Attempt.of(hello)
        self._resumed_to = None

    def _inventory(self, hello: Hello) -> HeldRecords:
        if self._held is None:
            return HeldRecords(node=self._address.node)
        difference = first_difference(self._held.spec.fingerprint(), hello.fingerprint)
        if difference is not None:
            return HeldRecords(node=self._address.node, problem=difference)
        return self._held.inventory(self._address.node, self._history)

    def _prepare(self, connection: Connection, message: Prepare) -> None:
        if message.discard:
            self._let_go_of_held()
        assert connection.member is not None
        rank = connection.member.rank
        differing = self._building.ask(rank, message)
        if differing is not None:
            self._bring_together(message.record, differing)
        held = self._held.nbytes if self._held is not None else 0
        generation, fresh = self._building.allocate(rank, message, held)
        generation.reason = message.reason
        if fresh and (not self._history or self._history[-1].timeline != message.timeline):
            self._history = (Branch(message.timeline, None),) if self._held is None else self._history
        self._send_regions(connection, Prepared(generation.number, generation.spec), generation)

    def _bring_together(self, record: int, differing: frozenset[str]) -> None:
        """Local ranks are about to begin generations that differ: none can be complete, so that another one follows.

        The rank that has just asked waits for its answer, and no other one gets past the next record without it.
        """
        names = ", ".join(sorted(differing))
        if differing:
            _log.info("a new generation begins after record %d: not all ranks had seen %s change", record + 1, names)
            self._tell_members(Begin(record + 1, f"another rank has seen {names} change", differing))
        else:
            self._tell_members(Gap("the ranks of this node differ in their parameters or optimizers"))

    def _make_room(self, reason: str) -> None:
        self._let_go_of_held()
        self._tell_members(Gap(reason))

    def _send_regions(self, connection: Connection, message: Prepared, generation: Generation) -> None:
        self._connections.answer(connection, message, [region.fd for region in generation.regions])

    def _resume(self, connection: Connection, message: Resume) -> None:
        if self._held is None or message.record not in self._held.reachable():
            raise AgentError(f"record {message.record} was to be resumed, but it cannot be produced here")
        if self._resumed_to is None:
            self._held.settle(message.record)
            self._resumed_to = message.record
            self._saver.resumed(message.record, timeline_of(self._history, message.record))
            self._history = branch_off(self._history, message.record, message.timeline)
            _log.info("resuming at record %d", message.record)
        if self._resumed_to != message.record:
            raise AgentError(f"ranks of one node resume at different records: {self._resumed_to} and {message.record}")
        held = self._held
        if held.replica is not None:
            held.replica.freeze()
            missing, plain = held.replica.describe_state()
            held.replica.advance_to(message.record)
            metas: tuple[bytes, ...] = ()
        else:
            missing, plain, metas = (), b"", held.metas_for(message.record)
        reply = Prepared(
            generation=held.number,
            spec=held.spec,
            record=message.record,
            metas=metas,
            rank_states=held.rank_states(message.record),
            missing=missing,
            plain=plain,
        )
        self._send_regions(connection, reply, held)

    def _start_generation(self, member: Member, message: GenerationCommit) -> None:
        member.next_record = message.record + 1
        self._committed_at = time.monotonic()
        generation = self._generation(message.generation)
        if generation is None:
            return
        if generation.start(member.rank, message) and generation is self._building.generation:
            self._let_go_of_held()
            self._held = generation
            self._building.take()
            _log.info("generation %d is complete after record %d", generation.number, message.record)
            self._tell_members(Protected(generation.number, message.record))

    def _order_generation(self, record: int, reason: str, asker: Connection) -> None:
        _log.info("a new generation begins after record %d: %s", record, reason)
        order = Begin(record, reason)
        # The asker last: once it has its answer, the order lies in every other rank's socket, and none of them can
        # pass the record without a backward that needs the asker.
        self._tell_members(order, besides=asker)
        self._connections.answer(asker, order)

    def _status(self) -> Status:
        held = self._held
        members = self._attempt.living() if self._attempt is not None else []
        replica = held.replica if held is not None else None
        now, rate = time.monotonic(), None
        if replica is not None and replica.records_applied:
            rate = replica.seconds_applying / replica.records_applied
        return Status(
            pid=os.getpid(),
            run_dir=str(self._address.run_dir),
            node=self._address.node,
            mode=held.spec.mode if held is not None else "",
            trainers=tuple((member.rank, member.process.pid) for member in members),
            committed=tuple(sorted(held.committed.items())) if held is not None else (),
            applied=replica.applied if replica is not None else None,
            step=held.newest_step() if held is not None else None,
            held_bytes=sum(g.nbytes for g in (self._held, self._building.generation) if g is not None),
            generation=held.number if held is not None else 0,
            max_drift_ulp=self._max_drift,
            redo_seconds_per_record=rate,
            storage=self._saver.status(held.newest_step() if held is not None else None),
            records_held=held.records_held if held is not None else 0,
            seconds_since_commit=now - self._committed_at if self._committed_at is not None else None,
            uptime_seconds=now - self._started,
            stall_ms=self._stall_ms,
            by_operator=self._by_operator,
            mode_reason=held.reason if held is not None else "",
            every=held.spec.every if held is not None else 1,
        )
