"""The agent's part in the peers tier: what it has its replicator send, and the states it has it fetch."""

from __future__ import annotations

import logging
import secrets
import selectors
import time
from collections.abc import Callable
from functools import partial

import msgspec

from memckpt.agent.group_state import GroupState
from memckpt.agent.replication.fragment_memory import PieceRooms
from memckpt.agent.replication.handing_out import announce, by_value, hand_out
from memckpt.agent.replication.recovery import Recovery
from memckpt.agent.replication.standbys import StandbyKey, StandbyReplicas
from memckpt.checkpointing.snapshots import Snapshot
from memckpt.errors import AgentError, AgentGoneError, MemckptError, PeerError
from memckpt.memory.life import LifePage
from memckpt.memory.phases import PhasesPage
from memckpt.node.generation import Generation
from memckpt.processes.backoff import Backoff
from memckpt.processes.helper_process import HelperProcess
from memckpt.protocol.replication import (
    BadSourceSeen,
    Described,
    Deserted,
    Drain,
    Drained,
    Filled,
    GivenUp,
    GiveUp,
    Halt,
    Halted,
    Holds,
    Join,
    KeepRoom,
    LetGoOfRoom,
    Listen,
    Listening,
    ListPieces,
    PeerJob,
    PeersReport,
    PeersStatus,
    PhasesAre,
    Pieces,
    Recover,
    Recovered,
    RecoveryProgress,
    SendRecord,
    StateMissed,
    TakeState,
    WatermarkAdvanced,
)
from memckpt.protocol.standby import CloseStandby, OpenStandby, StandbyRecord, StandbySkip
from memckpt.protocol.trainer import Message
from memckpt.state.layout import optimizers_of
from memckpt.state.records import HeldPieces, HeldRecords

_log = logging.getLogger("memckpt.agent")
_ANSWER_SECONDS = 20.0
#: Seconds for a replicator that lives and does not halt at once: what it has received and not written down dies with
#: it. Less than the 60 s that trainers wait for the agent.
_HALT_SECONDS = 50.0
#: Between two attempts at starting one that does not come up, so many times as long as that took.
_REST_FACTOR = 5.0
#: So many replicators that stand still as they begin to listen are replaced at once.
_MOST_STANDING = 2
#: It says every second how things are.
_QUIET_SECONDS = 5.0


class Peers:
    """Belongs to the agent's event loop. Owns the replicator.

    Args:
        selector: of the loop.
        group: of the ranks that share shards, or None.
        adopt: makes one for ranks that are not here.
        watermark_advanced: called when the watermark has got further.
        lost: called with the reason when there is no replicator for a while, or for the rest of the attempt.
        standby replicas: of other nodes' ranks; belong to the caller.
        life: the page that the agent's loop moves; belongs to the caller.

    Attributes:
        watermark: the newest record that is acknowledged for every node of the job; None: no peers take part.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        group: Callable[[tuple[int, ...]], GroupState | None],
        adopt: Callable[[tuple[int, ...]], GroupState],
        watermark_advanced: Callable[[WatermarkAdvanced], None],
        lost: Callable[[str], None],
        standbys: StandbyReplicas,
        life: LifePage | None = None,
    ) -> None:
        self._standbys = standbys
        self._life = life
        self._rooms = PieceRooms()
        self._selector = selector
        self._group = group
        self._adopt = adopt
        self._tell_watermark = watermark_advanced
        self._told_lost = lost
        self._replicator: HelperProcess | None = None
        self._listening: tuple[Listen, Listening] | None = None
        self._job: PeerJob | None = None
        self._fingerprints: dict[int, tuple[str, ...]] = {}
        self._recovery: Recovery | None = None
        self._recoveries = 0
        #: By unit: the name of the generation that is sent, and the newest record that has been given to the
        #: replicator.
        self._sent: dict[tuple[int, ...], tuple[str, int]] = {}
        self._given_up: set[str] = set()
        self._report: PeersStatus | None = None
        #: When, of this attempt.
        self._reported: float | None = None
        self._phases: PhasesPage | None = None
        self._backoff = Backoff()
        #: When another replicator is started, where the last one died soon after those before it.
        self._retry_at: float | None = None
        self._newest = WatermarkAdvanced(0, False)
        #: What the last one that died has died of, and why there is none now.
        self._died_of = self._problem = ""
        #: The replicator knows of so many bytes; None: it has not been told.
        self._told_own: int | None = None
        self._token = secrets.token_hex(4)
        self.watermark: int | None = None

    def finish(self) -> None:
        """Training has ended as it should: peers get what they still wait for, before the replicator goes."""
        if self._replicator is None or self._job is None:
            return
        try:
            self._replicator.ask(Drain(), Drained, _ANSWER_SECONDS)
        except AgentGoneError as error:
            _log.warning("could not confirm that peers received the final records: %s", error)

    def close(self) -> None:
        self._give_up_recovery("the agent leaves")
        self._listening = self._job = self.watermark = self._retry_at = None
        self._sent.clear()
        replicator, self._replicator = self._replicator, None
        if replicator is not None:
            replicator.close()
        self._rooms.close()
        self._close_phases()

    def _close_phases(self) -> None:
        phases, self._phases = self._phases, None
        if phases is not None:
            phases.close()

    def tell_own(self, nbytes: int) -> None:
        """Have the replicator know what this node's memory holds beside what it keeps: base and log of its own
        ranks.
        """
        nbytes += self._standbys.nbytes
        if self._replicator is not None and nbytes != self._told_own:
            self._told_own = nbytes
            self._send(Holds(nbytes))

    @property
    def held_bytes(self) -> int:
        """Memory of what is kept of other nodes' records, in pieces and in standby replicas."""
        return self.kept_bytes + self._standbys.nbytes

    @property
    def kept_bytes(self) -> int:
        """Memory of the fragments that the replicator keeps for other nodes, in bytes."""
        return self._rooms.nbytes

    @property
    def status(self) -> PeersStatus | None:
        """The replicator's last report; if it is old, the replicator stands still, and nothing is protected."""
        if self._job is None or self._report is None or self._reported is None:
            return None
        if self._replicator is None:
            return msgspec.structs.replace(
                self._report, protected=False, problem=self._problem, held_bytes=self.kept_bytes, links=()
            )
        quiet = time.monotonic() - self._reported
        if quiet < _QUIET_SECONDS:
            return self._report
        return msgspec.structs.replace(
            self._report, protected=False, problem=f"the replicator of this node has said nothing for {quiet:.0f} s"
        )

    def tell_deserted(self) -> None:
        """A trainer of this node goes on without us: have nobody wait for what it would have committed."""
        if self._job is not None:
            self._send(Deserted())

    def introduce(self, rank: int, fingerprint: tuple[str, ...]) -> None:
        """A rank of the attempt, and what its model consists of."""
        self._fingerprints[rank] = fingerprint
        self._standbys.optimizers = frozenset[str]().union(*map(optimizers_of, self._fingerprints.values()))

    def begin_attempt(self) -> None:
        """The trainers of the last attempt are dead."""
        self._give_up_recovery("its attempt is over")
        self._halt()
        self._reported = None
        self._listening = self._job = self.watermark = self._retry_at = None
        self._fingerprints.clear()
        self._sent.clear()
        self._given_up.clear()
        self._newest = WatermarkAdvanced(0, False)
        self._backoff.reset()
        self._problem = ""
        self._close_phases()

    def _halt(self) -> None:
        """Have all that the replicator has received, and nothing more: what was acknowledged has to be found here."""
        replicator = self._replicator
        if replicator is not None:
            try:
                replicator.ask(Halt(), Halted, _ANSWER_SECONDS, _HALT_SECONDS)
            except AgentError as error:
                _log.error("the replicator is gone: %s", error)
                self._end_replicator(replicator)
                # Had it died meanwhile, then another one is here, or none: nobody needs that one either.
                replaced, self._replicator = self._replicator, None
                if replaced is not None:
                    self._end_replicator(replaced)
        self._standbys.halt()

    # Start of an attempt

    def listen(self, message: Listen) -> Listening:
        """Be there for peers; what is kept of others' records.

        Raises:
            AgentError: the replicator does not come up.
        """
        if self._retry_at is not None:
            self._restart()  # a trainer that is back asks for it before its time
            if self._replicator is None:
                raise AgentError(f"there is no replicator: {self._problem}")
        for standing in range(_MOST_STANDING + 1):
            try:
                return self._have_listen(message)
            except AgentGoneError as error:
                if standing == _MOST_STANDING or not self._replaces_standing(message, str(error)):
                    raise AgentError(f"the replicator does not answer: {error}") from error
        raise AssertionError("the last one is an answer or an error")

    def _have_listen(self, message: Listen) -> Listening:
        if self._listening is None or self._listening[0].attempt != message.attempt or self._replicator is None:
            if self._replicator is None:
                self._backoff.started()
                self._told_own = None
                self._replicator = self._start_replicator(message.liveness_seconds)
            self._replicator.watch_for(message.liveness_seconds)
            self._listening = message, self._replicator.ask(message, Listening, _ANSWER_SECONDS)
        return msgspec.structs.replace(self._listening[1], pieces=self._pieces())

    def _replaces_standing(self, message: Listen, reason: str) -> bool:
        """Whether the replicator has not answered because it stands still; then it is killed, and may be replaced."""
        replicator = self._replicator
        if replicator is None or not replicator.stands_still():
            return False
        if self._listening is not None and self._listening[0].attempt == message.attempt:
            self._ended(reason)  # others may know where it listens
            return self._replicator is not None
        _log.error("the replicator stands still as it begins to listen, and is replaced: %s", reason)
        self._lose_replicator(reason)
        return True

    def _start_replicator(self, liveness_seconds: float) -> HelperProcess:
        """Another replicator; it goes on with what the last one kept."""
        replicator = HelperProcess(
            "memckpt.replication.process", [], self._selector, self._received, self._ended, liveness_seconds, self._life
        )
        try:
            for message, fd in self._rooms.handover():
                replicator.send(message, [fd])
        except AgentGoneError:
            replicator.close()
            raise
        return replicator

    def _end_replicator(self, replicator: HelperProcess) -> None:
        """Have it end, if it has not yet; what it has said of its memory counts, and nothing else."""

        def note(message: Message) -> None:
            if isinstance(message, KeepRoom | LetGoOfRoom):
                self._note_room(message, replicator.take_descriptors())

        replicator.close(note)

    def _note_room(self, message: KeepRoom | LetGoOfRoom, fds: list[int]) -> None:
        if isinstance(message, KeepRoom):
            self._rooms.keep(message, fds)
        else:
            self._rooms.let_go(message)

    def _pieces(self) -> tuple[HeldPieces, ...]:
        assert self._replicator is not None
        return self._replicator.ask(ListPieces(self._fingerprints), Pieces, _ANSWER_SECONDS).pieces

    def join(self, message: Join) -> None:
        """The plan is made: take part.

        Raises:
            PeerError: the replicator is gone, and there is no other one where peers look for it.
        """
        if message.rejoin and (self._replicator is None or self._listening is None or self._job is not None):
            return
        self._check_replicator()
        self._give_up_recovery("the plan is made once more")
        self._take_part(message)

    def _take_part(self, message: Join) -> None:
        self._job = job = message.job
        if not message.rejoin or self._standbys.attempt != job.attempt:
            assert self._listening is not None
            listen = self._listening[0]
            if job.forget:
                self._standbys.close()
            self._standbys.begin(job.attempt, job.record, listen.memory_budget_bytes, listen.threads)
        if self.watermark is None:
            self.watermark = message.job.record or 0
        self._sent.clear()
        self._send(message)

    def _check_replicator(self) -> None:
        if self._retry_at is not None:
            self._restart()
        if self._replicator is None or self._listening is None:
            raise PeerError(
                "expected a replicator through which this node reaches its peers, found that it is gone "
                f"({self._problem or 'it was never started'}); see the agent's log, and start the attempt again"
            )

    def phases(self, position: int, ranks: int) -> tuple[PhasesAre, int]:
        """Where a rank of this node marks its phases: the answer, and the descriptor that goes with it.

        Args:
            position: of the rank among those of the node.
            ranks: how many there are.
        """
        if self._phases is None:
            self._phases = PhasesPage.create(ranks)
            self._send(PhasesAre(), [self._phases.fd])
        return PhasesAre(position), self._phases.fd

    def inventory_of_standbys(self) -> tuple[HeldRecords, ...]:
        """What standby replicas on this node can produce of others' ranks."""

        def fingerprint_of(ranks: tuple[int, ...]) -> tuple[str, ...] | None:
            return next((self._fingerprints[rank] for rank in ranks if rank in self._fingerprints), None)

        return self._standbys.inventory(fingerprint_of)

    # Records on their way to peers

    def sync(self, group: GroupState) -> None:
        """Have the replicator send what is whole of a group and has not been given to it."""
        held, replicator = group.held, self._replicator
        if self._job is None or replicator is None or held is None or not held.complete:
            return
        if held.base is None or held.base <= (self._job.record or 0):
            return  # of an earlier attempt: a new one follows
        # An agent that replaces another one in its attempt counts from 1 again, so numbers are not unique.
        name = f"{self._job.attempt}/{self._token}/{'-'.join(map(str, group.ranks))}/{held.number}"
        sent_name, sent = self._sent.get(group.ranks, ("", 0))
        whole = min(held.committed.values())
        if sent_name != name:
            self._send_generation(group, held, name)
            sent = whole
        while sent < whole and self._replicator is replicator:
            sent += 1
            if held.spec.mode == "capture" and sent % held.spec.every:
                continue  # it is not captured
            record = held.log_record(sent)
            if record is None:
                _log.warning("record %d of ranks %s is not sent: not all of it is known", sent, group.ranks)
                continue
            self._send(SendRecord(group.ranks, name, record.record, record.step, record.meta, record.rank_states))
        if (
            self._replicator is replicator
        ):  # else it died meanwhile, and one that took its place has been given all of it
            self._sent[group.ranks] = name, sent

    def _send_generation(self, group: GroupState, held: Generation, name: str) -> None:
        self._send(announce(group, held, name), [region.fd for region in held.regions])

    def _serve(self, ranks: tuple[int, ...], message: Recover) -> str:
        """Hand out the state of some ranks, their own or that of their standby replica, where it stands still.

        Returns:
            Why their standby replica cannot get there, or the state before is not there, in words; empty if all is.

        Raises:
            AgentError: it is not here.
        """
        record, behind = message.record, int(message.before)
        standby, group = self._standbys.find(ranks, record, message.history, behind), self._group(ranks)
        if standby is not None:
            try:
                held = standby.stand_at(record, behind)
            except AgentError as error:
                if not behind:
                    self._standbys.close_one(CloseStandby(ranks, standby.opened.generation))
                return f"the replica of ranks {list(ranks)}: {error}"
            history = standby.opened.history
        elif behind and (group is None or group.why_not_repeated(record)):
            reason = group.why_not_repeated(record) if group is not None else "no replica here has both"
            return f"ranks {list(ranks)} cannot be handed out before record {record}: {reason}"
        elif group is not None:
            held, history = group.stand_at(record, behind), group.history
        else:
            raise AgentError(f"ranks {list(ranks)} were to be handed out, but are not held here")
        self._send(hand_out(ranks, held, record, history, behind), [region.fd for region in held.regions])
        return ""

    def _take_state(self, record: int) -> None:
        """Have the state of this node's ranks copied after a record."""
        if self._job is None or self._listening is None:
            return
        node = self._listening[0].node
        for unit in self._job.units:
            group = self._group(unit.ranks) if self._job.nodes[unit.node].name == node else None
            held = group.held if group is not None else None
            if group is not None and held is not None and held.complete and held.spec.mode != "capture":
                group.saver.copy_for_peers(held, record, partial(self._state_taken, group, record))
            elif self._job.nodes[unit.node].name == node:
                self._send(StateMissed(record))

    def _state_taken(self, group: GroupState, record: int, snapshot: Snapshot | None) -> None:
        if snapshot is None:
            self._send(StateMissed(record))
            return
        try:
            if self._job is not None:
                ranks = "-".join(map(str, group.ranks))
                name = f"{self._job.attempt}/{self._token}/{ranks}/state {record}"
                static = snapshot.generation.static
                regions = [snapshot.region] + ([static] if static is not None else [])
                self._send(by_value(group, snapshot, name), [region.fd for region in regions])
        finally:
            snapshot.region.close()

    def redo_limit(self, group: GroupState) -> int | None:
        """Up to which record redo may go on, as far as peers are concerned; None: as far as it likes."""
        if self.watermark is None or self._job is None:
            return None
        held = group.held
        waits = self._job.wait and not self._newest.waits_suspended
        if waits or held is None or held.base is None or not held.committed:
            return self.watermark
        # Training does not wait for peers, so that the replica cannot either, once the slots run out.
        needed = max(held.committed.values()) - (held.spec.slots - 2 - held.spec.trails)
        name, _ = self._sent.get(group.ranks, ("", 0))
        if self.watermark < held.base < needed and name and name not in self._given_up:
            self._send(GiveUp(group.ranks, name))
            if self._replicator is not None:  # else nobody is there to answer, or to read the replica
                return self.watermark
        return max(self.watermark, needed)

    # Recovery

    def recover(self, message: Recover, done: Callable[[Message], None]) -> None:
        """Fetch what this node is to get, hand out what others are to; `done` gets Recovered, and progress before.

        Raises:
            PeerError: the replicator is gone for good.
        """
        if self._recovery is not None:
            raise AgentError("a recovery is under way")
        self._check_replicator()
        replicator = self._replicator
        for ranks in message.serve:
            problem = self._serve(ranks, message)
            if problem:
                assert self._listening is not None
                bad = BadSourceSeen(self._listening[0].node, ranks, "")
                done(Recovered(problem, (bad,)))
                return
        # One that has taken the place of another knows nothing of what that one was told to hand out.
        if self._replicator is not replicator or (message.serve and not self._listens_to_us()):
            done(Recovered("the replicator is gone"))
            return
        self._recoveries += 1
        group = self._adopt if message.adopt else self._group
        self._recovery = recovery = Recovery(self._recoveries, message, group, self._send, done)
        recovery.start()
        self._end_recovery()

    def _listens_to_us(self) -> bool:
        """Whether the replicator is alive, and has taken all that was sent to it until now."""
        replicator = self._replicator
        try:
            self._pieces()
        except AgentGoneError as error:
            if self._replicator is replicator:
                self._ended(str(error))
            return False
        return True

    def _give_up_recovery(self, reason: str) -> None:
        """Let go of what it has fetched so far, if one is under way."""
        recovery, self._recovery = self._recovery, None
        if recovery is not None:
            recovery.fail(reason)

    def _end_recovery(self) -> None:
        if self._recovery is not None and self._recovery.over:
            self._recovery = None

    # The replicator

    def _send(self, message: Message, fds: list[int] | None = None) -> None:
        if self._replicator is None:
            return
        try:
            self._replicator.send(message, fds or [])
        except AgentGoneError as error:
            self._ended(str(error))

    def _received(self, message: Message) -> None:
        match message:
            case KeepRoom() | LetGoOfRoom():
                self._note_room(message, self._replicator.take_descriptors() if self._replicator is not None else [])
            case WatermarkAdvanced():
                self.watermark, self._newest = message.record, message
                self._standbys.watermark_advanced(message.record, message.whole)
                self._tell_watermark(message)
            case TakeState():
                self._take_state(message.record)
            case PeersReport():
                self._report, self._reported = message.status, time.monotonic()
            case GivenUp():
                self._given_up.add(message.generation)
                self._tell_watermark(self._newest)
            case OpenStandby():
                answer, fds = self._standbys.open(message)
                self._send(answer, fds)
            case StandbyRecord():
                failed = self._standbys.record(message)
                if failed is not None:
                    self._send(failed)
            case StandbySkip():
                self._standbys.skip(message)
            case CloseStandby():
                self._standbys.close_one(message)
            case Described() | Filled() | RecoveryProgress():
                if self._recovery is not None:
                    self._recovery.answered(message)
                    self._end_recovery()
            case Listening() | Pieces() | Halted():
                pass  # an answer for which nobody waits any more
            case _:
                raise AgentError(f"unexpected {type(message).__name__} from the replicator")

    def standby_said(self, key: StandbyKey, message: Message) -> None:
        """Hear the redo thread of a standby replica."""
        news = self._standbys.told(key, message)
        if news is not None:
            self._send(news)

    def _ended(self, reason: str) -> None:
        _log.error("the replicator is gone: %s", reason)
        self._died_of = reason
        self._lose_replicator(reason)
        self._give_up_recovery("the replicator is gone")
        self._sent.clear()
        if self._job is not None and self._job.wait and self.watermark is not None:
            # One that takes its place begins with nothing, so that all others are told the same.
            self._newest = WatermarkAdvanced(self.watermark, False, waits_suspended=True)
            self._tell_watermark(self._newest)
        pause = self._backoff.died()
        if self._job is None and (self._listening is None or pause):
            self._do_without(reason)
        elif pause:
            self._wait_with_another(pause)
        else:
            self._restart()

    def _lose_replicator(self, reason: str) -> None:
        self._problem = reason
        replicator, self._replicator = self._replicator, None
        if replicator is not None:
            self._end_replicator(replicator)

    def _do_without(self, reason: str) -> None:
        """Peers look for one at an address where there is none any more: the start of the attempt fails."""
        self._listening = None
        self._told_lost(reason)

    def _wait_with_another(self, pause: float) -> None:
        self._retry_at = time.monotonic() + pause
        self._told_lost(f"{self._problem}; another replicator is started in {pause:.0f} s")

    def deadline(self) -> float | None:
        """When :meth:`look_at_clock` has something to do; None: never, as far as is known."""
        looks = None if self._replicator is None else self._replicator.look_at
        return min((at for at in (self._retry_at, looks) if at is not None), default=None)

    def look_at_clock(self) -> None:
        """Do what is due."""
        if self._replicator is not None and self._replicator.stands_still():
            self._ended("it shows no sign of life (stopped, or dead-locked), and is killed")
        if self._retry_at is not None and time.monotonic() >= self._retry_at:
            self._restart()

    def _restart(self) -> None:
        """Another one takes its place, and goes on with what it kept; its owners send anew what was on its way."""
        assert self._listening is not None
        self._retry_at = None
        listen, listening = self._listening
        job, began = self._job, time.monotonic()
        try:
            self._replace(listen, listening, planned=job is not None)
        except MemckptError as error:
            self._lose_replicator(f"{self._died_of}; no other one takes its place: {error}")
            if job is None:
                self._do_without(self._problem)
            else:
                # While it is waited for, the loop does nothing else: that must be rare.
                took = time.monotonic() - began
                self._wait_with_another(max(1.0, self._backoff.died(), _REST_FACTOR * took))
            return
        if job is None:
            return
        self._take_part(Join(msgspec.structs.replace(job, record=None), rejoin=True))
        if self._phases is not None:
            self._send(PhasesAre(), [self._phases.fd])
        for unit in job.units:
            group = self._group(unit.ranks)
            if group is not None and job.nodes[unit.node].name == listen.node:
                self.sync(group)

    def _replace(self, listen: Listen, listening: Listening, planned: bool) -> None:
        """Start another replicator; `planned`: peers know the job, and the new one tells them where it listens."""
        where = listen
        if not planned:
            # All that others know of this node yet is the address that was told to the trainers: it has to stay.
            where = msgspec.structs.replace(listen, port=int(listening.address.rpartition(":")[2]))
        self.listen(where)
        if self._listening is not None:
            self._listening = listen, self._listening[1]
