"""One connection of a trainer to its agent: messages both ways, what the agent has said, the goodbye; and the next one.

A connection that waits watches the agent's life page. An agent that stands still (stopped, or short of memory) cannot
be replaced: it holds the state, and answers once it runs again.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from memckpt import errors
from memckpt.config import AgentConfig
from memckpt.errors import AgentError, AgentGoneError
from memckpt.memory.pages import LifePage, LifeWatch
from memckpt.memory.region import GenerationRegions, Region
from memckpt.processes.address import AgentAddress, peer
from memckpt.processes.backoff import Backoff
from memckpt.processes.launch import spawn_agent
from memckpt.protocol import trainer
from memckpt.protocol.channel import AgentToTrainer, TrainerChannel, TrainerToAgent, encode
from memckpt.protocol.descriptors import readable, writable
from memckpt.protocol.replication import Recovered, RecoveryProgress, ReplicatorLost, WatermarkAdvanced
from memckpt.protocol.status import Status, StatusRequest, StopRequest
from memckpt.protocol.storing import CopyRankPart, Logged, Saved, SaveFailed
from memckpt.state.layout import Layout

Notice = (
    trainer.Begin | trainer.Protected | trainer.Drift | trainer.Cleared | trainer.Gap | trainer.Alarm |
    Saved | SaveFailed | Logged
)  # fmt: skip
Answer = TypeVar("Answer", bound=AgentToTrainer)
_log = logging.getLogger("memckpt")
#: Time that the agent may take to end after the last step is in storage.
_END_SECONDS = 20.0
#: Time that training waits for the answer of a lost agent; later commits poll without waiting.
PROBE_SECONDS = 1.0
#: Pause after a failed attempt, as a multiple of the attempt's duration.
_PAUSE_PER_COST = 10.0
#: Pauses before an agent is used that has stood still repeatedly: the first, the longest; and the time without a stop
#: after which the next one counts as a first.
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS, _STEADY_SECONDS = 60.0, 3600.0, 1800.0
_live: weakref.WeakSet[AgentConnection] = weakref.WeakSet()


class PreparedRegions(GenerationRegions):
    """Regions of a generation, mapped. The receiver closes them."""

    def __init__(self, message: trainer.Prepared, regions: list[Region]) -> None:
        layout = Layout(message.spec)
        given = GenerationRegions.of(layout, regions)
        super().__init__(layout, given.slots, given.static, given.replica)
        self.message = message


@dataclass(frozen=True)
class CopyOrder:
    """Order of the agent, with a number: copy the state after `record` into `region`, which the receiver closes."""

    record: int
    number: int
    region: Region


class AgentConnection:
    """Messages to and from one agent. Not thread-safe. Its owner calls :meth:`close`.

    The socket is closed in a forked child: loader workers must not keep a dead trainer's connection open.

    Attributes:
        started: whether the agent was started for this connection, and held nothing before.
        applied: newest record that the replica has applied.
        watermark: newest record that peers have acknowledged for every node.
        whole: whether all nodes are protected by peers.
        waits_suspended: whether waits for peers are suspended.
    """

    def __init__(self, channel: TrainerChannel, config: AgentConfig, started: bool = False) -> None:
        self.channel = channel
        self.agent_pid = peer(channel.sock)[0]
        self.started = started
        self.applied = 0
        self.watermark = 0
        self.whole = False
        self.waits_suspended = False
        self.order: CopyOrder | None = None
        self.notices: list[Notice] = []
        self.slots_made: dict[int, trainer.SlotsMade] = {}
        self._config = config
        #: Whether it has said that it leaves. Until what it holds is in storage it still answers, and takes commits.
        self._leaving = False
        #: The agent's page, on which its loop counts, after hello.
        self._life: LifePage | None = None
        self._watch: LifeWatch | None = None
        _live.add(self)

    @classmethod
    def open(cls, address: AgentAddress, config: AgentConfig) -> AgentConnection:
        """Connect to the run's agent on this node; start one if none answers. Raises AgentError if that fails."""
        sock, started = address.connect(), False
        if sock is None:
            address.say_if_copied(_log)
            try:
                spawn_agent(address, config)
                started = True
            except AgentError:
                sock = address.connect()
                if sock is None:  # else another rank of this node has been faster
                    raise
            else:
                sock = address.connect()
        if sock is None:
            raise AgentError(f"the agent of {address.run_dir} started but does not answer; see {address.log_path}")
        return cls(TrainerChannel(sock), config, started)

    def watch_life(self, descriptor: int) -> None:
        """Watch the agent's page while waiting. Takes the page's descriptor."""
        self._stop_watching()
        self._life = LifePage.open(descriptor)
        # The redo thread counts, too: the loop may wait for it.
        self._watch = LifeWatch(self._life, self.agent_pid, self._config.liveness_seconds, "all")

    # Messages

    def send(self, message: TrainerToAgent) -> None:
        """Send a message."""
        body = encode(message)
        if self.channel.offer(body):
            return
        limit = self._config.start_seconds
        if not self._wait(lambda seconds: writable(self.channel.sock, seconds) and self.channel.offer(body), limit):
            raise AgentGoneError(f"it has taken no message for {limit:.0f} s (overloaded?)")

    def poll(self, limit: float) -> tuple[AgentToTrainer, list[int]] | None:
        """The next message and its descriptors; None if there is none within `limit` seconds."""
        received: tuple[AgentToTrainer, list[int]] | None = None

        def receive(seconds: float) -> bool:
            nonlocal received
            received = self.channel.poll(seconds)
            return received is not None

        self._wait(receive, limit)
        return received

    def _wait(self, ready: Callable[[float], bool], limit: float) -> bool:
        """Wait until `ready(seconds)` is true, and watch the agent meanwhile. Returns False after `limit` seconds."""
        until, watch = time.monotonic() + limit, self._watch
        while True:
            left = max(0.0, until - time.monotonic())
            if ready(left if watch is None else min(left, watch.pause)):
                return True
            if left == 0.0:
                return False
            if watch is not None and watch.stands_still():
                raise AgentGoneError(f"it has shown no sign of life for {watch.limit:g} s (stopped?)")

    def receive(self) -> tuple[AgentToTrainer, list[int]]:
        """The next message, as long as the agent's loop runs; raises as :meth:`ask_for_life` does."""
        half = self._config.start_seconds / 2
        return self.poll(half) or self.ask_for_life(half)

    def ask_for_life(self, limit: float) -> tuple[AgentToTrainer, list[int]]:
        """Ask for the agent's status, which it answers at once. Returns the answer or an earlier message.

        Raises:
            AgentGoneError: the agent is gone, stands still, or has not answered within `limit` seconds.
        """
        self.send(StatusRequest())
        received = self.poll(limit)
        if received is None:
            raise AgentGoneError(f"it has not answered for {limit:g} s (stopped or overloaded?)")
        return received

    def request(
        self, message: TrainerToAgent, expected: type[Answer], patient: bool = False
    ) -> tuple[Answer, list[int]]:
        """Send a message, and wait for its answer as :meth:`receive_answer` does."""
        self.send(message)
        return self.receive_answer(expected, patient)

    def receive_answer(self, expected: type[Answer], patient: bool = False) -> tuple[Answer, list[int]]:
        """Wait for an answer of a type; other messages are kept. A refusal raises the error that it stands for.

        `patient`: wait as long as the agent's loop runs, as for memory that a thread of it reserves.
        """
        while True:
            received = self.receive() if patient else self.poll(self._config.start_seconds)
            if received is None:
                raise AgentGoneError(f"no answer within {self._config.start_seconds:.0f} s")
            answer, fds = received
            if isinstance(answer, trainer.Refused):
                raise refusal(answer)
            if isinstance(answer, expected):
                return answer, fds
            self.keep_news(answer, fds)

    def read_notices(self) -> list[Notice]:
        """Notices since the last call, without waiting. Raises AgentGoneError if the agent is gone, or leaves."""
        self._refuse_leaving()
        while (received := self.channel.poll()) is not None:
            self.keep_news(*received)
        notices, self.notices = self.notices, []
        return notices

    def keep_news(self, message: AgentToTrainer, fds: Sequence[int] = ()) -> None:
        """Keep what the agent has said without being asked."""
        match message:
            case CopyRankPart():
                self._drop_order()
                self.order = CopyOrder(message.record, message.order, Region.open(fds[0]))
                # The copy is a few steps away: by then all pages are mapped.
                self.order.region.populate_in_background()
            case trainer.Credit():
                self.applied = max(self.applied, message.applied)
            case ReplicatorLost():
                # Logged at once: while training waits for peers, notices are not read.
                _log.warning("memckpt: peers get nothing from this node: %s", message.reason)
            case WatermarkAdvanced():
                self.watermark = max(self.watermark, message.record)
                if self.waits_suspended != message.waits_suspended:
                    how = "does not wait" if message.waits_suspended else "waits, where it has to,"
                    _log.info("memckpt: training %s for peers", how)
                self.whole, self.waits_suspended = message.whole, message.waits_suspended
            case trainer.Prepared():
                for fd in fds:  # the answer to a question that was given up
                    os.close(fd)
            case trainer.SlotsMade():
                self.slots_made[message.generation] = message
            case _ if isinstance(message, Notice):
                self.notices.append(message)
            case trainer.Fencing():
                _log.warning("memckpt: the start waits for trainers of the last attempt, %s", message.reason)
            case RecoveryProgress() | Recovered() | Status():
                pass  # messages of a recovery that was given up; a sign of life
            case trainer.Leaving():
                self._leaving = True
                self._refuse_leaving()
            case trainer.Refused():
                raise AgentError(f"the agent refused: {message.reason}")
            case _:
                raise AgentError(f"unexpected {type(message).__name__} from the agent")

    @property
    def alarmed(self) -> bool:
        """Whether an alarm is among the unread notices: what training waits for may never come."""
        return any(isinstance(notice, trainer.Alarm) for notice in self.notices)

    def _refuse_leaving(self) -> None:
        """Raise AgentGoneError if the agent leaves: it does not keep what comes."""
        if self._leaving:
            raise AgentGoneError("it leaves: it was told to, or an error has ended it, which its log has")

    # End

    def say_goodbye(self, finished: bool, saving_seconds: float) -> None:
        """Tell the agent that this rank leaves.

        With `finished` this waits for its end, for `saving_seconds` longer where it has a last step to store.
        """
        try:
            self.channel.send(trainer.Goodbye(finished), timeout=5.0)
            if finished:
                self._wait_for_end(saving_seconds)
        except AgentGoneError as error:
            # A goodbye asks for no more, unless the agent had a step to write.
            if finished and saving_seconds:
                _log.warning("memckpt: whether the final step is in storage is not known: %s", error)

    def _wait_for_end(self, saving_seconds: float) -> None:
        """Wait until the agent ends, or says that other ranks still train, or that the last step is not in storage."""
        deadline = time.monotonic() + _END_SECONDS + saving_seconds
        while True:
            message, fds = self.receive()
            if time.monotonic() > deadline:
                raise AgentGoneError(f"the agent has not left within {_END_SECONDS + saving_seconds:.0f} s")
            for fd in fds:
                os.close(fd)
            match message:
                case trainer.OthersStay():
                    return
                case Saved() | Logged():
                    self.notices.append(message)
                case trainer.Leaving(last=True):  # before, one that was told to end says so, and has to write yet
                    break
                case trainer.HoldingOn():
                    _log.warning(
                        "memckpt: the final step is not in storage: %s; the agent (pid %d) keeps it in memory for "
                        "%.0f s, and tries again",
                        message.reason,
                        self.agent_pid,
                        message.linger_seconds,
                    )
                    return
        if message.unsaved:
            _log.warning(
                "memckpt: the final step is not in storage: %s; the agent (pid %d) was told to end, and has ended",
                message.unsaved,
                self.agent_pid,
            )
        _await_end(self.agent_pid)

    def close(self, dismiss: bool = False) -> None:
        """Close the connection without a goodbye; with `dismiss`, tell an agent that was started for it to leave."""
        if dismiss and self.started:
            try:
                self.channel.send(StopRequest(), timeout=1.0)
            except AgentGoneError as error:
                _log.info("memckpt: the agent (pid %d) leaves by itself: %s", self.agent_pid, error)
        self._drop_order()
        self._stop_watching()
        self.channel.close()

    def _drop_order(self) -> None:
        order, self.order = self.order, None
        if order is not None:
            order.region.close()

    def _stop_watching(self) -> None:
        life, self._life, self._watch = self._life, None, None
        if life is not None:
            life.close()


def refusal(answer: trainer.Refused) -> Exception:
    """The exception that a refusal of the agent stands for."""
    error: Exception = getattr(errors, answer.kind, AgentError)(answer.reason)
    return error


def _await_end(pid: int) -> None:
    """Wait until a process ends; reap it if this is the first process of a container."""
    try:
        process_fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        if not readable(process_fd, _END_SECONDS):
            _log.warning("memckpt: the agent (pid %d) has let go of everything but does not end", pid)
    finally:
        os.close(process_fd)
    if os.getpid() == 1:  # the first process of a container gets all orphans
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)


def _close_in_child() -> None:
    for one in list(_live):
        one.channel.close()


os.register_at_fork(after_in_child=_close_in_child)


class Reconnection:
    """Decides, at each commit without an agent, whether to try again: at once where it died, rarely where it stands.

    Training waits once for an agent that stands still, `patience` seconds. After that each commit polls for its answer.
    Without `pauses` it never pauses: other nodes wait for this one until it is overdue. Owns a connection.
    """

    def __init__(
        self,
        address: AgentAddress,
        patience: float = PROBE_SECONDS,
        pauses: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._address = address
        self._patience = patience
        self._pauses = pauses
        self._clock = clock
        self._question: TrainerChannel | None = None
        self._not_before = self._began = clock()
        self._failures = Backoff(clock, at_once=0, steady=math.inf)
        self._stumbles = Backoff(clock, steady=math.inf)
        self._stops = Backoff(
            clock, at_once=1, first=_FIRST_PAUSE_SECONDS, longest=_LONGEST_PAUSE_SECONDS, steady=_STEADY_SECONDS
        )

    def due(self) -> bool:
        """Whether to try now: no agent answers the address, so that one can be started, or one answers the question."""
        self._began = self._clock()
        if self._began < self._not_before:
            return False
        try:
            return self._ask() if self._question is None else self._answered_late(self._question)
        except AgentGoneError as error:
            # It has died since; or it accepts nothing, and the next commit must not wait for that, either.
            died = self._question is not None
            self.close()
            if not died:
                self.note_failure(error)
            return died
        except AgentError as error:
            self.close()
            self.note_failure(error)
            return False

    def _ask(self) -> bool:
        sock = self._address.connect()
        if sock is None:
            return True
        self._question = TrainerChannel(sock)
        self._question.send(StatusRequest(), timeout=self._patience)
        if self._question.poll(self._patience) is not None:
            self.close()
            return True
        _log.warning(
            "memckpt: the agent (pid %d) stands still: it has not answered for %g s; training goes on without "
            "protection, and uses it again when it answers",
            peer(sock)[0],
            self._patience,
        )
        return False

    def _answered_late(self, question: TrainerChannel) -> bool:
        if question.poll() is None:
            return False
        self.close()
        pause = self._stops.died() if self._pauses else 0.0
        self._not_before = self._clock() + pause
        if pause:
            _log.warning(
                "memckpt: the agent answers again; it has stood still several times, and is used again in %.0f s", pause
            )
        return pause == 0.0

    def note_success(self) -> None:
        """The session has an agent again."""
        self._failures.reset()
        self._stops.started()

    def note_failure(self, error: Exception) -> None:
        """An attempt has failed: pause."""
        now = self._clock()
        pause = max(self._failures.died(), _PAUSE_PER_COST * (now - self._began)) if self._pauses else 0.0
        self._not_before = now + pause
        _log.warning("memckpt: no agent (%s); trying again in %.0f s", error, pause)

    def note_stumble(self) -> None:
        """Protecting a step has failed for another reason: try again at once, then after growing pauses."""
        self._stumbles.started()
        pause = self._stumbles.died()
        self._not_before = self._clock() + pause
        if pause:
            _log.warning("memckpt: that happens again and again; trying again in %.0f s", pause)

    def close(self) -> None:
        """Close the connection, if there is one."""
        question, self._question = self._question, None
        if question is not None:
            question.close()
