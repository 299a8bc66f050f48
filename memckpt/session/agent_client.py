"""Requests of a trainer rank to its node's agent, and the agent's notices."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence

from memckpt import errors
from memckpt.config import AgentConfig
from memckpt.errors import AgentError, AgentGoneError, MemoryBudgetError
from memckpt.memory.phases import PhasesPage
from memckpt.memory.region import Region
from memckpt.processes.address import AgentAddress
from memckpt.protocol.channel import TrainerChannel
from memckpt.protocol.messages import AgentToTrainer, TrainerToAgent
from memckpt.protocol.peers import AskPhases, Listen, Listening, PhasesAre
from memckpt.protocol.recovery import Recover, Recovered, RecoveryProgress
from memckpt.protocol.replication import ReplicatorLost, WatermarkAdvanced
from memckpt.protocol.status import Status, StopRequest
from memckpt.protocol.storing import Logged, RecordSaved, Saved, SaveFailed, SaveRecord, TakeSnapshot
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
    Hello,
    Inventory,
    Leaving,
    NeedGeneration,
    NeedSlots,
    Prepare,
    Prepared,
    Protected,
    Refused,
    Resume,
    SlotsMade,
)
from memckpt.session.agent_regions import PreparedRegions, SnapshotOrder
from memckpt.session.conversation import Conversation, reach_agent
from memckpt.session.farewell import say_goodbye

Notice = Begin | Protected | Drift | Gap | Alarm | Saved | SaveFailed | Logged
_log = logging.getLogger("memckpt")
#: Time limit on the redo of a record, as a multiple of the limit on an answer.
_RECORD_LIMITS = 10
#: Interval of warnings while training waits for peers.
_PATIENCE_SECONDS = 30.0


class AgentClient:
    """A rank's requests to its agent. Not thread-safe; the session serializes its use. Its owner calls :meth:`close`.

    Attributes:
        started: whether the agent was started for this connection, and held nothing before.
        applied: newest record that the replica has applied.
        watermark: newest record that peers have acknowledged for every node.
        whole: whether all nodes are protected by peers.
        waits_suspended: whether nobody is to wait for peers, just now.
    """

    def __init__(self, channel: TrainerChannel, config: AgentConfig, started: bool = False) -> None:
        self._conversation = Conversation(channel, config)
        self.started = started
        self.applied = 0
        self.watermark = 0
        self.whole = False
        self.waits_suspended = False
        self._config = config
        self._notices: list[Notice] = []
        #: Whether it has said that it leaves. Until what it holds is in storage it still answers, and takes commits.
        self._leaving = False
        self._order: SnapshotOrder | None = None
        #: Answers about slots of generations, by the generation's number.
        self._slots_made: dict[int, SlotsMade] = {}

    @classmethod
    def connect(cls, address: AgentAddress, config: AgentConfig) -> AgentClient:
        """Connect to the run's agent on this node; start one if none answers.

        Raises:
            AgentError: there is none and none could be started.
        """
        sock, started = reach_agent(address, config)
        return cls(TrainerChannel(sock), config, started)

    @property
    def channel(self) -> TrainerChannel:
        """The connection."""
        return self._conversation.channel

    @property
    def agent_pid(self) -> int:
        """Process id of the agent."""
        return self._conversation.agent_pid

    def send(self, message: TrainerToAgent) -> None:
        """Send one of the messages that have no answer.

        Raises:
            AgentGoneError: the agent is gone, stands still, or has taken nothing within the time limit.
        """
        self._conversation.send(message)

    def _request(self, message: TrainerToAgent, expected: type) -> tuple[AgentToTrainer, list[int]]:
        self.send(message)
        return self._answer(expected)

    def _answer(self, expected: type) -> tuple[AgentToTrainer, list[int]]:
        while True:
            received = self._conversation.poll(self._config.start_seconds)
            if received is None:
                raise AgentGoneError(f"no answer within {self._config.start_seconds:.0f} s")
            answer, fds = received
            if isinstance(answer, Refused):
                kind = getattr(errors, answer.kind, AgentError)
                raise kind(answer.reason)
            if isinstance(answer, expected):
                return answer, fds
            self._note(answer, fds)

    def _note(self, message: AgentToTrainer, fds: Sequence[int] = ()) -> None:
        if isinstance(message, TakeSnapshot):
            self._drop_order()
            self._order = SnapshotOrder(message.record, message.order, Region.open(fds[0]))
            # The copy is a few steps away: by then all pages are mapped.
            self._order.region.populate_in_background()
        elif isinstance(message, Credit):
            self.applied = max(self.applied, message.applied)
        elif isinstance(message, ReplicatorLost):
            # Logged at once: while training waits for peers, notices are not read.
            _log.warning("memckpt: peers get nothing from this node: %s", message.reason)
        elif isinstance(message, WatermarkAdvanced):
            self.watermark = max(self.watermark, message.record)
            if self.waits_suspended != message.waits_suspended:
                _log.info(
                    "memckpt: training %s for peers",
                    "does not wait" if message.waits_suspended else "waits, where it has to,",
                )
            self.whole, self.waits_suspended = message.whole, message.waits_suspended
        elif isinstance(message, Prepared):
            for fd in fds:  # the answer to a question that was given up
                os.close(fd)
        elif isinstance(message, SlotsMade):
            self._slots_made[message.generation] = message
        elif isinstance(message, Notice):
            self._notices.append(message)
        elif isinstance(message, Fencing):
            _log.warning("memckpt: the start waits for trainers of the last attempt, %s", message.reason)
        elif isinstance(message, (RecoveryProgress, Recovered, Status)):
            pass  # messages of a recovery that was given up; a sign of life
        elif isinstance(message, Leaving):
            self._leaving = True
            self._refuse_leaving()
        elif isinstance(message, Refused):
            raise AgentError(f"the agent refused: {message.reason}")
        else:
            raise AgentError(f"unexpected {type(message).__name__} from the agent")

    def _refuse_leaving(self) -> None:
        """Raise AgentGoneError if the agent leaves: it does not keep what comes."""
        if self._leaving:
            raise AgentGoneError("it leaves: it was told to, or an error has ended it, which its log has")

    def hello(self, hello: Hello) -> Inventory:
        """Introduce this rank. Returns what the node holds and knows.

        Raises:
            RunBusyError: another live trainer holds the run.
        """
        answer, fds = self._request(hello, Inventory)
        assert isinstance(answer, Inventory)
        self._conversation.watch(fds[0])
        return answer

    def configure(self, message: Configure) -> None:
        """Send the run's settings."""
        self.send(message)

    def save_record(self, record: int, url: str, timeout: float) -> RecordSaved | None:
        """Have the agent write a record to a store; None if that takes longer than `timeout` seconds.

        Notices about other checkpoints are kept for :meth:`notices`.
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
        """Allocate a new generation. Raises MemoryBudgetError if it does not fit."""
        while True:
            regions = self._regions(message)
            if (regions.message.begins, regions.message.spec) == (message.record, message.spec):
                return regions
            regions.close()  # the answer to a question that was given up

    def resume(self, message: Resume) -> PreparedRegions:
        """Have the agent produce the state after a record."""
        return self._regions(message)

    def make_slots(self, generation: int) -> bool:
        """Allocate the slots of a generation whose start is written; waits for all local ranks, and for others.

        Returns:
            False if another generation follows, so that nothing is staged in this one.

        Raises:
            MemoryBudgetError: the slots do not fit. The start of the generation is kept.
            AgentGoneError: the agent is gone, or stands still.
        """
        self.send(NeedSlots(generation))
        until = time.monotonic() + self._config.start_seconds
        while generation not in self._slots_made:
            if any(isinstance(notice, Alarm) for notice in self._notices):
                return False
            received = self._conversation.poll(max(0.0, until - time.monotonic()))
            if received is None:
                # The agent's loop runs, and a rank is not through its record: then both generations are held.
                self.send(NeedSlots(generation, now=True))
                received = self._conversation.sign_of_life(self._config.start_seconds)
            self._note(*received)
        made = self._slots_made.pop(generation)
        if made.problem:
            raise MemoryBudgetError(made.problem)
        return not made.dropped

    def advance(self, record: int) -> Advanced:
        """Advance the replica to the resumed record; waits until all local ranks have asked."""
        answer, _ = self._request(Advance(record), Advanced)
        assert isinstance(answer, Advanced)
        return answer

    def _regions(self, message: TrainerToAgent) -> PreparedRegions:
        answer, fds = self._request(message, Prepared)
        assert isinstance(answer, Prepared)
        self.applied = max(self.applied, answer.record)
        return PreparedRegions(answer, Region.open_all(fds))

    def ask_for_generation(
        self, record: int, reason: str, changing: frozenset[str] = frozenset(), later: str = ""
    ) -> Begin:
        """Have all local ranks begin a new generation after `record` or later. Returns the order that they all get."""
        order, _ = self._request(NeedGeneration(record, reason, changing, later), Begin)
        assert isinstance(order, Begin)
        while order.record < record:  # the answer to an earlier question, which another rank's order had met
            self._notices.append(order)
            order, _ = self._answer(Begin)
            assert isinstance(order, Begin)
        return order

    def notices(self) -> list[Notice]:
        """Notices since the last call, without waiting. Raises AgentGoneError if the agent is gone, or leaves."""
        self._refuse_leaving()
        while True:
            received = self.channel.poll()
            if received is None:
                break
            self._note(*received)
        said, self._notices = self._notices, []
        return said

    def listen(self, message: Listen) -> Listening:
        """Have the node listen for its peers. Returns the records of theirs that it keeps."""
        answer, _ = self._request(message, Listening)
        assert isinstance(answer, Listening)
        return answer

    def open_phases(self) -> tuple[PhasesPage, int]:
        """Page on which this rank marks the phases of its steps, which the caller closes, and its index there."""
        answer, fds = self._request(AskPhases(), PhasesAre)
        assert isinstance(answer, PhasesAre)
        return PhasesPage.open(fds[0]), answer.position

    def recover(self, message: Recover, progress: Callable[[RecoveryProgress], None]) -> Recovered:
        """Have the agent fetch states that this node lacks, and serve those that others lack.

        There is no time limit, as a state may be large and the network slow. A warning is logged now and then.

        Args:
            message: the states.
            progress: called with each progress message.

        Raises:
            AgentGoneError: the agent is gone.
            MemckptError: the agent refuses; the message says why.
        """
        self.send(message)
        waited = 0
        while True:
            received = self._conversation.poll(_PATIENCE_SECONDS)
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
        """Wait until peers have acknowledged `record` for every node, or waits are suspended; logs warnings meanwhile.

        Raises:
            AgentGoneError: the agent is gone, or stands still.
        """
        waited = 0
        while self.watermark < record and not self.waits_suspended:
            if any(isinstance(notice, Alarm) for notice in self._notices):
                return
            received = self._conversation.poll(_PATIENCE_SECONDS)
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
            self._note(*self._conversation.sign_of_life(self._config.start_seconds))

    def wait_applied(self, record: int, give_up: Callable[[], bool] = lambda: False) -> None:
        """Wait until the replica has applied `record`; returns early after an alarm, or where `give_up()` is true.

        Raises:
            AgentGoneError: the agent is gone, stands still, or applies no record for ten time limits.
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
            self._note(*self._conversation.hear())

    def take_order(self, record: int) -> SnapshotOrder | None:
        """The order for a snapshot after `record` or an earlier one, None without one; the caller closes it."""
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
        """Say goodbye and close the connection: see :func:`memckpt.session.farewell.say_goodbye`.

        Args:
            finished: whether training has finished. Once all ranks have, the agent leaves.
            saving_seconds: time that the agent may take to write the last step to storage.
        """
        if self.channel.fileno() < 0:
            return
        try:
            say_goodbye(self._conversation, finished, saving_seconds)
        finally:
            self.abandon()

    def abandon(self, dismiss: bool = False) -> None:
        """Close the connection without a goodbye; with `dismiss`, tell an agent that was started for it to leave."""
        if dismiss and self.started:
            try:
                self.channel.send(StopRequest("the start that it was made for was refused"), timeout=1.0)
            except AgentGoneError as error:
                _log.info("memckpt: the agent (pid %d) leaves by itself: %s", self.agent_pid, error)
        self._drop_order()
        self._conversation.close()
