"""A trainer rank's end of the connection to its node's agent."""

from __future__ import annotations

import contextlib
import logging
import os
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from memckpt import errors
from memckpt.config import AgentConfig
from memckpt.errors import AgentError, AgentGoneError, MemoryBudgetError
from memckpt.memory.life import LifePage, LifeWatch
from memckpt.memory.phases import PhasesPage
from memckpt.memory.region import Region
from memckpt.processes.address import AgentAddress, peer
from memckpt.processes.launch import spawn_agent
from memckpt.protocol.channel import Channel, encode
from memckpt.protocol.descriptors import readable, writable
from memckpt.protocol.replication import (
    AskPhases,
    Listen,
    Listening,
    PhasesAre,
    Recover,
    Recovered,
    RecoveryProgress,
    ReplicatorLost,
    WatermarkAdvanced,
)
from memckpt.protocol.trainer import (
    Advance,
    Advanced,
    Alarm,
    Begin,
    Configure,
    Credit,
    Drift,
    Fencing,
    Gap,
    Goodbye,
    Hello,
    HoldingOn,
    Inventory,
    Leaving,
    Logged,
    Message,
    NeedGeneration,
    NeedSlots,
    OthersStay,
    Prepare,
    Prepared,
    Protected,
    RecordSaved,
    Refused,
    Resume,
    Saved,
    SaveFailed,
    SaveRecord,
    SlotsMade,
    Status,
    StatusRequest,
    StopRequest,
    TakeSnapshot,
)
from memckpt.state.records import HeldRecords

Notice = Begin | Protected | Drift | Gap | Alarm | Saved | SaveFailed | Logged
_log = logging.getLogger("memckpt")
#: At the end of a training, how long to see the agent leave once all is in storage.
_END_SECONDS = 20.0
#: A record may take so many times as long to be applied as the agent may take to answer.
_RECORD_LIMITS = 10
#: How often to say that training waits for peers.
_PATIENCE_SECONDS = 30.0
_live: weakref.WeakSet[AgentClient] = weakref.WeakSet()


class PreparedRegions:
    """A generation as the agent handed it over: the message and the mapped regions, which the receiver closes."""

    def __init__(self, message: Prepared, regions: list[Region]) -> None:
        self.message = message
        self.slots = regions[0]
        rest = regions[1:]
        has_replica = message.spec.mode == "eager"
        self.replica = rest.pop() if has_replica and rest else None
        self.static = rest.pop() if rest else None

    def close(self) -> None:
        for region in (self.slots, self.static, self.replica):
            if region is not None:
                region.close()


@dataclass(frozen=True)
class SnapshotOrder:
    """The agent wants the state after `record` copied into `region`, which the receiver closes."""

    record: int
    region: Region


class AgentClient:
    """One connection. Not thread-safe; the session serializes its use. Its owner calls :meth:`close`.

    In a forked child the socket is closed: loader workers must not keep a dead trainer's connection open.
    """

    def __init__(self, channel: Channel, config: AgentConfig, started: bool = False) -> None:
        self.channel = channel
        #: Whether the agent was started for this connection, and held nothing before.
        self.started = started
        self.agent_pid = peer(channel.sock)[0]
        self.applied = 0
        #: The newest record that peers have acknowledged for every node, and whether all of them are protected.
        self.watermark = 0
        self.whole = False
        #: Whether nobody is to wait for that, just now.
        self.waits_suspended = False
        self._config = config
        self._notices: list[Notice] = []
        self._order: SnapshotOrder | None = None
        #: What has become of generations whose slots were asked for, by their numbers.
        self._slots_made: dict[int, SlotsMade] = {}
        #: The page that the agent's loop moves, once it has said hello.
        self._life: LifePage | None = None
        self._watch: LifeWatch | None = None
        _live.add(self)

    @classmethod
    def connect(cls, address: AgentAddress, config: AgentConfig) -> AgentClient:
        """Connect to the run's agent on this node; start one if none answers.

        Raises:
            AgentError: there is none and none could be started.
        """
        sock, started = address.connect(), False
        if sock is None:
            address.say_if_copied(_log)
            try:
                spawn_agent(address, config)
                started = True
            except AgentError:
                # Another rank of this node may have been faster.
                sock = address.connect()
                if sock is None:
                    raise
            else:
                sock = address.connect()
        if sock is None:
            raise AgentError(f"the agent of {address.run_dir} started but does not answer; see {address.log_path}")
        return cls(Channel(sock), config, started)

    def _request(self, message: Message, expected: type) -> tuple[Message, list[int]]:
        self.send(message)
        return self._answer(expected)

    def _answer(self, expected: type) -> tuple[Message, list[int]]:
        while True:
            received = self._poll(self._config.start_seconds)
            if received is None:
                raise AgentGoneError(f"no answer within {self._config.start_seconds:.0f} s")
            answer, fds = received
            if isinstance(answer, Refused):
                kind = getattr(errors, answer.kind, AgentError)
                raise kind(answer.reason)
            if isinstance(answer, expected):
                return answer, fds
            self._note(answer, fds)

    def _poll(self, limit: float) -> tuple[Message, list[int]] | None:
        """The next message; None if there is none within `limit` seconds, for which the agent has shown that it lives.

        Raises:
            AgentGoneError: it is gone, or stands still.
        """
        received: tuple[Message, list[int]] | None = None

        def hear(seconds: float) -> bool:
            nonlocal received
            received = self.channel.poll(seconds)
            return received is not None

        self._wait(hear, limit)
        return received

    def _wait(self, ready: Callable[[float], bool], limit: float) -> bool:
        """Wait for something, and look meanwhile whether the agent lives; False after `limit` seconds."""
        until, watch = time.monotonic() + limit, self._watch
        while True:
            left = max(0.0, until - time.monotonic())
            if ready(left if watch is None else min(left, watch.pause)):
                return True
            if left == 0.0:
                return False
            if watch is not None and watch.stands_still():
                raise AgentGoneError(f"it has shown no sign of life for {watch.limit:g} s (stopped?)")

    def _note(self, message: Message, fds: Sequence[int] = ()) -> None:
        if isinstance(message, TakeSnapshot):
            self._drop_order()
            self._order = SnapshotOrder(message.record, Region.open(fds[0]))
            # The copy is a few steps away: by then no page of it need be mapped for the first time.
            self._order.region.populate_in_background()
        elif isinstance(message, Credit):
            self.applied = max(self.applied, message.applied)
        elif isinstance(message, ReplicatorLost):
            # At once: where training waits for peers, nobody looks at notices.
            _log.warning("memckpt: peers get nothing from this node: %s", message.reason)
        elif isinstance(message, WatermarkAdvanced):
            self.watermark = max(self.watermark, message.record)
            if self.waits_suspended != message.waits_suspended:
                _log.info(
                    "memckpt: training %s for peers",
                    "does not wait" if message.waits_suspended else "waits, where it has to,",
                )
            self.whole, self.waits_suspended = message.whole, message.waits_suspended
        elif isinstance(message, SlotsMade):
            self._slots_made[message.generation] = message
        elif isinstance(message, Notice):
            self._notices.append(message)
        elif isinstance(message, Fencing):
            _log.warning("memckpt: the start waits for trainers of the last attempt, %s", message.reason)
        elif isinstance(message, (RecoveryProgress, Recovered, Status)):
            pass  # of a recovery that has been given up; a sign of life
        elif isinstance(message, Leaving):
            raise AgentGoneError("it was told to leave")
        elif isinstance(message, Refused):
            raise AgentError(f"the agent refused: {message.reason}")
        else:
            raise AgentError(f"unexpected {type(message).__name__} from the agent")

    def hello(self, hello: Hello) -> tuple[HeldRecords, ...]:
        """Introduce this rank; returns what the node holds of each set of shards.

        Raises:
            RunBusyError: another live trainer holds the run.
        """
        answer, fds = self._request(hello, Inventory)
        assert isinstance(answer, Inventory)
        self._stop_watching()
        self._life = LifePage.open(fds[0])
        # Its redo thread computes while its loop waits for that.
        self._watch = LifeWatch(self._life, self.agent_pid, self._config.liveness_seconds, "all")
        return answer.held

    def configure(self, message: Configure) -> None:
        """Give the agent the run's settings."""
        self.send(message)

    def save_record(self, record: int, url: str, timeout: float) -> RecordSaved | None:
        """Have all that the agent holds of a record written; None if that takes longer than `timeout` seconds.

        What is said of other checkpoints meanwhile is kept for :meth:`notices`.
        """
        self.send(SaveRecord(record, url))
        deadline = time.monotonic() + timeout
        while (left := deadline - time.monotonic()) > 0:
            received = self.channel.poll(left)
            if received is None:
                break
            if isinstance(received[0], RecordSaved):
                return received[0]
            self._note(*received)
        return None

    def prepare(self, message: Prepare) -> PreparedRegions:
        """Have a new generation allocated. Raises MemoryBudgetError if it does not fit."""
        return self._regions(message)

    def resume(self, message: Resume) -> PreparedRegions:
        """Have the state after the record that the plan chose produced."""
        return self._regions(message)

    def make_slots(self, generation: int) -> bool:
        """Have the slots of a generation made whose start is written; waits for all local ranks, and for others.

        Returns:
            False where nothing is to be staged in it: another one follows.

        Raises:
            MemoryBudgetError: there is no room. What its start takes is kept.
            AgentGoneError: the agent is gone, or stands still.
        """
        self.send(NeedSlots(generation))
        until = time.monotonic() + self._config.start_seconds
        while generation not in self._slots_made:
            if any(isinstance(notice, Alarm) for notice in self._notices):
                return False
            received = self._poll(max(0.0, until - time.monotonic()))
            if received is None:
                # Its loop runs, and a rank is not through its record: then both generations are held.
                self.send(NeedSlots(generation, now=True))
                received = self._sign_of_life(self._config.start_seconds)
            self._note(*received)
        made = self._slots_made.pop(generation)
        if made.problem:
            raise MemoryBudgetError(made.problem)
        return not made.dropped

    def advance(self, record: int) -> Advanced:
        """Have the replica go on to the resumed record; waits until all local ranks have asked."""
        answer, _ = self._request(Advance(record), Advanced)
        assert isinstance(answer, Advanced)
        return answer

    def _regions(self, message: Message) -> PreparedRegions:
        answer, fds = self._request(message, Prepared)
        assert isinstance(answer, Prepared)
        self.applied = max(self.applied, answer.record)
        return PreparedRegions(answer, [Region.open(fd) for fd in fds])

    def ask_for_generation(self, record: int, reason: str, changing: frozenset[str] = frozenset()) -> Begin:
        """Have all local ranks begin a new generation, after `record` or later; returns the order that they all get."""
        order, _ = self._request(NeedGeneration(record, reason, changing), Begin)
        assert isinstance(order, Begin)
        while order.record < record:  # the answer to an earlier question, which another rank's order had met
            self._notices.append(order)
            order, _ = self._answer(Begin)
            assert isinstance(order, Begin)
        return order

    def send(self, message: Message) -> None:
        """Send one of the messages that have no answer.

        Raises:
            AgentGoneError: the agent is gone, stands still, or has taken nothing within the time limit.
        """
        body = encode(message)
        if self.channel.offer(body):
            return
        limit = self._config.start_seconds
        if not self._wait(lambda seconds: writable(self.channel.sock, seconds) and self.channel.offer(body), limit):
            raise AgentGoneError(f"it has taken no message for {limit:.0f} s (overloaded?)")

    def notices(self) -> list[Notice]:
        """What the agent has said since the last call, without waiting. Raises AgentGoneError if it is gone."""
        while True:
            received = self.channel.poll()
            if received is None:
                break
            self._note(*received)
        said, self._notices = self._notices, []
        return said

    def listen(self, message: Listen) -> Listening:
        """Have the node be there for its peers; what it keeps of their records."""
        answer, _ = self._request(message, Listening)
        assert isinstance(answer, Listening)
        return answer

    def open_phases(self) -> tuple[PhasesPage, int]:
        """Where this rank marks the phases of its steps, and its position there; the caller closes the page."""
        answer, fds = self._request(AskPhases(), PhasesAre)
        assert isinstance(answer, PhasesAre)
        return PhasesPage.open(fds[0]), answer.position

    def recover(self, message: Recover, progress: Callable[[RecoveryProgress], None]) -> Recovered:
        """Have fetched what this node lacks, and handed out what others lack.

        Args:
            message: which.
            progress: told how far it is.

        A state may be large and the network slow, so this takes as long as the agent lives, and says so now and then.

        Raises:
            AgentGoneError: the agent is gone.
            MemckptError: what it refuses, and why.
        """
        self.send(message)
        waited = 0
        while True:
            received = self._poll(_PATIENCE_SECONDS)
            if received is None:
                waited += 1
                _log.warning(
                    "memckpt: the agent (pid %d) fetches from peers, and has said nothing for %.0f s; see its log",
                    self.agent_pid,
                    waited * _PATIENCE_SECONDS,
                )
                continue
            waited = 0
            answer, fds = received
            if isinstance(answer, RecoveryProgress):
                progress(answer)
            elif isinstance(answer, Recovered):
                return answer
            elif isinstance(answer, Refused):
                raise getattr(errors, answer.kind, AgentError)(answer.reason)
            else:
                self._note(answer, fds)

    def wait_for_watermark(self, record: int) -> None:
        """Wait until peers have acknowledged `record` for every node, or nobody is to wait; says so now and then.

        Raises:
            AgentGoneError: the agent is gone, or stands still.
        """
        waited = 0
        while self.watermark < record and not self.waits_suspended:
            if any(isinstance(notice, Alarm) for notice in self._notices):
                return
            received = self._poll(_PATIENCE_SECONDS)
            if received is not None:
                self._note(*received)
                continue
            waited += 1
            _log.warning(
                "memckpt: training waits for peers since %.0f s: record %d is to be acknowledged for every node, %d "
                "is; see `memckpt status`",
                waited * _PATIENCE_SECONDS,
                record,
                self.watermark,
            )
            self._note(*self._sign_of_life(self._config.start_seconds))

    def wait_applied(self, record: int, give_up: Callable[[], bool] = lambda: False) -> None:
        """Wait until the replica has applied `record`; ends early when an alarm or order says it never will.

        Raises:
            AgentGoneError: the agent is gone, stands still, or answers and applies nothing for ten time limits.
        """
        limit, applied = _RECORD_LIMITS * self._config.start_seconds, self.applied
        until = time.monotonic() + limit
        while self.applied < record:
            if any(isinstance(notice, Alarm) for notice in self._notices) or give_up():
                return
            if self.applied > applied:
                applied, until = self.applied, time.monotonic() + limit
            if time.monotonic() >= until:
                raise AgentGoneError(f"it answers, and has applied no record for {limit:g} s")
            self._note(*self._hear())

    def _hear(self) -> tuple[Message, list[int]]:
        """The next message of an agent that may have nothing to say for long, as long as its loop runs.

        Raises:
            AgentGoneError: the agent is gone, or stands still: it has not answered within the time limit.
        """
        half = self._config.start_seconds / 2
        return self._poll(half) or self._sign_of_life(half)

    def _sign_of_life(self, limit: float) -> tuple[Message, list[int]]:
        """The agent's answer to a question that it answers at once, or what it says before that.

        Raises:
            AgentGoneError: it is gone, stands still, or has not answered within `limit` seconds.
        """
        self.send(StatusRequest())
        received = self._poll(limit)
        if received is None:
            raise AgentGoneError(f"it has not answered for {limit:g} s (stopped or overloaded?)")
        return received

    def take_order(self, record: int) -> SnapshotOrder | None:
        """The order for a snapshot after `record`, or one that came too late for its record; the caller closes it."""
        order = self._order
        if order is None or order.record > record:
            return None
        self._order = None
        return order

    def _drop_order(self) -> None:
        order, self._order = self._order, None
        if order is not None:
            order.region.close()

    def close(self, finished: bool, saving_seconds: float = 0.0) -> None:
        """Say goodbye. With `finished` the agent lets go of everything when the last rank has said so.

        Args:
            finished: training ended as it should.
            saving_seconds: how long the agent may take to bring the last step to storage before it goes.
        """
        if self.channel.fileno() < 0:
            return
        try:
            self.channel.send(Goodbye(finished), timeout=5.0)
            if finished:
                self._wait_for_end(saving_seconds)
        except AgentGoneError as error:
            # That it is gone is all that a goodbye asks for, unless it had something to do before.
            if finished and saving_seconds:
                _log.warning("memckpt: whether the final step is in storage is not known: %s", error)
        finally:
            self.abandon()

    def _wait_for_end(self, saving_seconds: float) -> None:
        """Unless other ranks still train, the agent says that it leaves; see it end. Or it says that it cannot yet."""
        deadline = time.monotonic() + _END_SECONDS + saving_seconds
        while True:
            message, fds = self._hear()
            if time.monotonic() > deadline:
                raise AgentGoneError(f"the agent has not left within {_END_SECONDS + saving_seconds:.0f} s")
            for fd in fds:
                os.close(fd)
            if isinstance(message, OthersStay):
                return
            if isinstance(message, Leaving):
                break
            if isinstance(message, HoldingOn):
                _log.warning(
                    "memckpt: the final step is not in storage: %s; the agent (pid %d) keeps it in memory for "
                    "%.0f s, and tries again",
                    message.reason,
                    self.agent_pid,
                    message.linger_seconds,
                )
                return
        try:
            process_fd = os.pidfd_open(self.agent_pid)
        except ProcessLookupError:
            return
        try:
            if not readable(process_fd, _END_SECONDS):
                _log.warning("memckpt: the agent (pid %d) has let go of everything but does not end", self.agent_pid)
        finally:
            os.close(process_fd)
        if os.getpid() == 1:  # the first process of a container gets all orphans
            with contextlib.suppress(ChildProcessError):
                os.waitpid(self.agent_pid, os.WNOHANG)

    def abandon(self, dismiss: bool = False) -> None:
        """Close the connection without a word; with `dismiss`, tell an agent that was started for it to leave."""
        if dismiss and self.started:
            try:
                self.channel.send(StopRequest("the start that it was made for was refused"), timeout=1.0)
            except AgentGoneError as error:
                _log.info("memckpt: the agent (pid %d) leaves by itself: %s", self.agent_pid, error)
        self._drop_order()
        self._stop_watching()
        self.channel.close()

    def _stop_watching(self) -> None:
        life, self._life, self._watch = self._life, None, None
        if life is not None:
            life.close()


def _forget_in_child() -> None:
    for client in list(_live):
        client.channel.close()


os.register_at_fork(after_in_child=_forget_in_child)
