"""The replicator: sends its node's records to those who keep their pieces, and keeps pieces of others' records.

One event loop owns everything here. Sending is a pipeline over stripes: some are encoded and handed over, then what has
arrived is looked at, and so on; the network's own threads send meanwhile.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque

import msgspec
import zmq

from memckpt.errors import AgentError, MemckptError
from memckpt.memory.budget import check_budget
from memckpt.memory.life import LifePage, LifeWatch, look_seconds
from memckpt.memory.phases import PhaseReader, PhasesPage
from memckpt.memory.region import Region
from memckpt.memory.reservation import Reservation
from memckpt.protocol.channel import Channel
from memckpt.protocol.replication import (
    Describe,
    Deserted,
    Drain,
    Drained,
    Fill,
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
    PeersReport,
    PhasesAre,
    Pieces,
    RecoveryProgress,
    SendGeneration,
    SendRecord,
    StateMissed,
    StateTaken,
    WatermarkAdvanced,
)
from memckpt.protocol.standby import OpenStandby, StandbyApplied, StandbyFailed, StandbyOpened, StandbyRefused
from memckpt.protocol.trainer import Message
from memckpt.replication.keeping.fragment_store import FragmentStore
from memckpt.replication.keeping.kept_window import BeingReservedError, KeptWindow, Place, Room
from memckpt.replication.process.asking import Asking
from memckpt.replication.process.node import ReplicationNode
from memckpt.replication.process.node_status import describe
from memckpt.replication.process.reader import Reader
from memckpt.replication.process.serving import Question, Serving
from memckpt.replication.process.standby_feed import StandbyFeed
from memckpt.replication.transport import wire
from memckpt.replication.transport.keys import Keys, Password
from memckpt.replication.transport.transport import Delivery, Met, Transport
from memckpt.state.records import HeldPieces

_log = logging.getLogger("memckpt.replicator")
#: How often the agent is told how things are.
_REPORT_SECONDS = 1.0
#: How long peers may take to receive the final records of a training, in seconds.
_DRAIN_SECONDS = 5.0
#: Memory that is reserved at once; it takes some milliseconds.
_AT_ONCE_BYTES = 64 << 20
#: Limit on questions of one peer that wait until it has room for the answers.
_MOST_QUESTIONS = 4096
#: Messages of peers that are handled before the loop looks at its agent.
_MOST_DELIVERIES = 256


def _touched(region: Region) -> Region:
    region.populate_in_background()
    return region


class _RegionRoom:
    """Memory for pieces. Owns the region."""

    def __init__(self, region: Region) -> None:
        self._region = region
        self._view: memoryview | None = memoryview(region.map)

    @property
    def fd(self) -> int:
        return self._region.fd

    @property
    def view(self) -> memoryview:
        assert self._view is not None
        return self._view

    def close(self) -> None:
        self._view = None
        self._region.close()


class _AgentKeeps:
    """The agent has each room, too, so that another replicator finds what is there when this one dies."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    def keep(self, place: Place, room: Room) -> None:
        assert isinstance(room, _RegionRoom)
        told = place.window
        message = KeepRoom(told.owner, told.generation, msgspec.msgpack.encode(told), place.unit, place.slot)
        self._channel.send(message, [room.fd])

    def let_go(self, place: Place) -> None:
        self._channel.send(LetGoOfRoom(place.window.owner, place.window.generation, place.slot))


class Replicator:
    """Belongs to one thread.

    Args:
        channel: to the agent; belongs to the caller.
        life: the page in which it shows that it lives; belongs to the caller.
        agent: who looks at that of its agent.
    """

    def __init__(self, channel: Channel, life: LifePage | None = None, agent: LifeWatch | None = None) -> None:
        self._channel = channel
        self._life = life
        self._agent = agent
        #: The loop comes round that often, at least.
        self._beat_seconds = 1.0
        self._poller = zmq.Poller()
        self._poller.register(channel.fileno(), zmq.POLLIN)
        self._transport: Transport | None = None
        self._node = ""
        self._feed: StandbyFeed | None = None
        self._member: ReplicationNode | None = None
        self._serving = Serving()
        self._readers: list[Reader] = []
        self._asking: list[Asking] = []
        #: Number of the recovery that the readers work for.
        self._recovery = 0
        self._questions = 0
        #: Memory for others' records that is being made.
        self._reserving: list[Reservation] = []
        #: By peer, what it has asked and has no room for the answer.
        self._questions_of: dict[str, deque[Question]] = {}
        self._phases: PhasesPage | None = None
        self._marks: PhaseReader | None = None
        self._reported = 0.0
        self._security = ""
        self._budget: int | None = None
        #: Memory that the agent of this node holds, in bytes.
        self._own_bytes = 0
        self._draining_until: float | None = None
        #: What a replicator before this one has kept, until it is known of which node this one is: by window and slot.
        self._adopted: dict[tuple[tuple[int, ...], str], dict[int, tuple[KeepRoom, Room]]] = {}

    def run(self) -> None:
        """Serve until the agent is gone; that raises AgentGoneError."""
        while True:
            self._beat()
            self._poller.poll(math.ceil(self._patience() * 1000))
            while (received := self._channel.poll()) is not None:
                self._handle(*received)
            self._take_deliveries()
            now = time.monotonic()
            if self._draining_until is not None:
                self._drain(now)
            elif self._member is not None:
                if self._marks is not None:
                    for mark in self._marks.read():
                        self._member.pacer.mark(mark.step, mark.phase, mark.ns, mark.position)
                if self._transport is not None:
                    self._member.unheard = self._transport.silent
                self._look_at_agent()
                self._member.work(now)
                self._report(now)
            for reader in self._readers:
                reader.tend(now)
            for asking in self._asking:
                asking.tend(now)
            for peer in list(self._questions_of):
                self._answer_waiting(peer)
            self._finish_readers()

    def _beat(self) -> None:
        if self._life is not None:
            self._life.beat()

    def _look_at_agent(self) -> None:
        assert self._member is not None
        if self._agent is not None and self._agent.stands_still():
            self._member.deserted = "its agent stands still"

    def _drain(self, now: float) -> None:
        """See what is on its way to peers arrive; then say so."""
        assert self._draining_until is not None
        states = [] if self._transport is None else list(self._transport.peers().values())
        if now >= self._draining_until or not any(one.unacknowledged_messages for one in states):
            self._draining_until = None
            self._leave()
            self._channel.send(Drained())

    def _patience(self) -> float:
        now = time.monotonic()
        limits = [self._beat_seconds]
        if self._transport is not None:
            limits.append(self._transport.tend(now))
        if self._member is not None:
            limits += [self._member.patience(now), self._reported + _REPORT_SECONDS - now]
        if self._readers or self._asking:
            limits.append(1.0)
        if self._draining_until is not None:
            limits.append(0.05)  # what arrives wakes us, but not that a peer is gone
        return max(0.0, min(limits))

    def close(self) -> None:
        """Let go of everything; what is kept for others stays with the agent."""
        self._leave()
        if self._feed is not None:
            self._feed.leave()
        self._close_adopted()

    def _close_adopted(self) -> None:
        for rooms in self._adopted.values():
            for _, room in rooms.values():
                room.close()
        self._adopted.clear()

    def _close_phases(self) -> None:
        phases, self._phases, self._marks = self._phases, None, None
        if phases is not None:
            phases.close()

    def _leave(self) -> None:
        """The attempt is over. What is kept stays."""
        self._stop_reading()
        self._questions_of.clear()
        for one in self._reserving:
            one.close()
        self._reserving.clear()
        self._serving.close()
        self._close_phases()
        if self._member is not None:
            self._member.close()
            self._member = None
        if self._transport is not None:
            self._transport.unregister(self._poller)
            self._transport.close()
            self._transport = None
        if self._feed is not None:
            self._feed.halt()

    def _stop_reading(self) -> None:
        """Nobody waits any more for what is being read."""
        for reader in self._readers:
            reader.close()
        self._readers.clear()
        self._asking.clear()

    # What the agent says

    def _handle(self, message: Message, fds: list[int]) -> None:
        if isinstance(message, PhasesAre):
            self._close_phases()
            self._phases = PhasesPage.open(fds[0])
            self._marks = PhaseReader(self._phases)
            return
        regions = [Region.open(fd) for fd in fds]
        match message:
            case KeepRoom():
                rooms = self._adopted.setdefault((message.owner, message.generation), {})
                rooms[message.slot] = message, _RegionRoom(regions[0])
            case Listen():
                self._listen(message)
            case Join():
                self._join(message)
            case ListPieces():
                self._channel.send(Pieces(self._list_pieces(message.fingerprints)))
            case SendGeneration():
                self._send_generation(message, regions)
            case SendRecord():
                if self._member is not None:
                    self._member.deserted = ""
                    self._member.committed(message)
            case Deserted():
                if self._member is not None:
                    self._member.deserted = "its trainers go on without their agent"
            case StateTaken() | StateMissed():
                self._take_state(message, regions)
            case GiveUp():
                if self._member is not None:
                    self._member.give_up(message)
                self._channel.send(GivenUp(message.ranks, message.generation))
            case Holds():
                self._own_bytes = message.nbytes
            case Drain():
                self._draining_until = time.monotonic() + _DRAIN_SECONDS
                if self._member is not None:
                    self._member.leave(time.monotonic())
            case Describe():
                self._describe(message)
            case Fill():
                self._fill(message, regions)
            case Halt():
                self._leave()
                self._channel.send(Halted())
            case StandbyOpened() | StandbyRefused():
                if self._feed is not None:
                    self._feed.answered(message, regions)
            case StandbyApplied() | StandbyFailed():
                if self._member is not None and self._feed is not None:
                    for node, answer in self._feed.heard(message):
                        self._member.mail.send(node, answer)
            case _:
                raise AgentError(f"unexpected {type(message).__name__} from the agent")

    def _listen(self, message: Listen) -> None:
        self._leave()
        self._budget = message.memory_budget_bytes
        keys: Keys | Password | None = None
        if isinstance(message.keys, str):
            keys = Password(message.keys)
        elif message.keys is not None:
            keys = Keys(*msgspec.structs.astuple(message.keys))
        self._security = "curve" if isinstance(keys, Keys) else "plain"
        self._node = message.node
        self._beat_seconds = look_seconds(message.liveness_seconds)
        if self._agent is not None:
            self._agent.limit = message.liveness_seconds
        if self._feed is None:
            fragment_store = FragmentStore(message.node, self._reserve, _AgentKeeps(self._channel))
            self._feed = StandbyFeed(fragment_store, self._ask_for_standby, self._channel.send)
            self._adopt()
        self._transport = Transport(message.node, host=message.host, port=message.port, keys=keys)
        self._channel.send(Listening(self._transport.address))

    def _adopt(self) -> None:
        """Take over what a replicator that has died kept for other nodes."""
        assert self._feed is not None
        for key, rooms in list(self._adopted.items()):
            told, _ = next(iter(rooms.values()))
            try:
                window = msgspec.msgpack.decode(told.window, type=wire.Window)
                self._feed.fragment_store.adopt(window, told.unit, {slot: room for slot, (_, room) in rooms.items()})
            except (MemckptError, ValueError) as error:
                _log.error("pieces of ranks %s cannot be kept on: %s", list(told.owner), error)
                for slot in rooms:
                    self._channel.send(LetGoOfRoom(*key, slot))
                continue
            del self._adopted[key]
        self._close_adopted()

    def _reserve(self, nbytes: int) -> Room:
        """Memory for others' records, if there is some beside our own. Much of it is made while the loop goes on.

        Raises:
            BeingReservedError: it is not there yet; who wants it asks again.
            MemoryBudgetError: there is none.
        """
        one = next((each for each in self._reserving if each.nbytes == nbytes), None)
        if one is None:
            kept = 0 if self._feed is None else self._feed.nbytes
            kept += sum(each.nbytes for each in self._reserving)
            check_budget(nbytes, self._own_bytes + kept, self._budget, "pieces of other nodes' records")
        if nbytes <= _AT_ONCE_BYTES:
            return _RegionRoom(_touched(Region.create("pieces", nbytes)))
        if one is None:
            one = Reservation("pieces", nbytes)
            self._reserving.append(one)
        if not one.over:
            raise BeingReservedError(
                f"memory for it is being reserved: {one.reserved / 2**30:.1f} of {nbytes / 2**30:.1f} GiB"
            )
        self._reserving.remove(one)
        return _RegionRoom(_touched(one.take()))

    def _join(self, message: Join) -> None:
        assert self._transport is not None
        assert self._feed is not None
        if self._member is not None:
            self._stop_reading()  # with the member goes its code, by which readers decode
            self._member.close()
        self._member = ReplicationNode(
            self._node,
            message.job,
            self._feed,
            self._transport,
            self._tell_watermark,
            message.rejoin,
            self._channel.send,
        )
        # Not before: nothing is taken without a plan, and what waits would keep the loop awake.
        self._transport.register(self._poller)
        for peer, state in self._transport.peers().items():
            if state.incarnation and peer in self._member.plan.addresses:  # met before the plan was made once more
                self._member.met(peer)

    def _tell_watermark(self, advanced: WatermarkAdvanced) -> None:
        if advanced.whole:
            # All have what they restore, and the agent lets go of standby replicas of earlier attempts.
            self._serving.close()
        self._channel.send(advanced)

    def _ask_for_standby(self, message: OpenStandby) -> None:
        """Have the agent make room; it takes its time for that, and the loop goes on."""
        self._channel.send(message)

    def _report(self, now: float) -> None:
        """Tell the agent how things are, now and then."""
        if self._member is None or self._transport is None or now - self._reported < _REPORT_SECONDS:
            return
        self._reported = now
        self._channel.send(PeersReport(describe(self._member, self._security, self._recovering())))

    def _recovering(self) -> str:
        """What is being fetched, and how far that is, in words."""
        if not self._readers:
            return ""
        taken = sum(reader.taken_bytes for reader in self._readers)
        expected = sum(reader.expected_bytes for reader in self._readers)
        ranks = ", ".join(str(rank) for rank in sorted({rank for one in self._readers for rank in one.source.ranks}))
        record = self._readers[0].source.record
        return (
            f"ranks {ranks} from peers after record {record}, {taken / max(1, expected):.0%} of {expected / 1e6:.1f} MB"
        )

    def _list_pieces(self, fingerprints: dict[int, tuple[str, ...]]) -> tuple[HeldPieces, ...]:
        def fingerprint_of(window: KeptWindow) -> tuple[str, ...] | None:
            return next((fingerprints[rank] for rank in window.window.owner if rank in fingerprints), None)

        return () if self._feed is None else self._feed.fragment_store.held(fingerprint_of)

    def _send_generation(self, message: SendGeneration, regions: list[Region]) -> None:
        if message.serve:
            self._serving.add(message, regions)
        elif self._member is not None:
            self._member.deserted = ""
            self._member.begin(message, regions)
        else:
            for region in regions:
                region.close()

    def _take_state(self, message: StateTaken | StateMissed, regions: list[Region]) -> None:
        """A state that was ordered has been copied, or not."""
        cuts = self._member.cuts if self._member is not None else None
        if isinstance(message, StateMissed):
            if cuts is not None:
                cuts.miss(message.record, "the order came too late, or storage was being served")
        elif cuts is not None:
            cuts.take(message, regions)
        else:
            for region in regions:
                region.close()

    # Recovery

    def _number(self) -> int:
        self._questions += 1
        return self._questions

    def _send(self, peer: str, message: wire.WireMessage) -> None:
        assert self._member is not None
        self._member.mail.send(peer, message, b"")

    def _read_for(self, recovery: int) -> None:
        if recovery != self._recovery:
            self._stop_reading()
            self._recovery = recovery

    def _describe(self, message: Describe) -> None:
        self._read_for(message.recovery)
        self._asking.append(Asking(message.source, self._number, self._send, time.monotonic()))

    def _fill(self, message: Fill, regions: list[Region]) -> None:
        assert self._member is not None
        self._read_for(message.recovery)
        source = message.source
        # What is handed out live is not encoded: any code does.
        code = self._member.code_for(source.data or self._member.job.data)
        now = time.monotonic()
        self._readers.append(Reader(source, message.spec, regions, code, self._send, self._number, self._progress, now))

    def _progress(self, nbytes: int) -> None:
        self._channel.send(RecoveryProgress(nbytes))

    def _finish_readers(self) -> None:
        for reader in [one for one in self._readers if one.result is not None]:
            self._readers.remove(reader)
            reader.close()
            assert reader.result is not None
            self._channel.send(msgspec.structs.replace(reader.result, recovery=self._recovery))
        for asking in [one for one in self._asking if one.result is not None]:
            self._asking.remove(asking)
            assert asking.result is not None
            self._channel.send(msgspec.structs.replace(asking.result, recovery=self._recovery))

    # What peers say

    def _take_deliveries(self) -> None:
        if self._transport is None or self._member is None:
            return  # before the attempt has its plan nothing is taken; it waits where it is
        now = time.monotonic()
        for _ in range(_MOST_DELIVERIES):
            loopback = self._member.mail.loopback
            event = loopback.popleft() if loopback else self._transport.receive()
            if event is None:
                return
            if event.peer not in self._member.plan.addresses:
                self._member.refuse(f"{event.peer}: no node of this job")
                self._transport.forget(event.peer)
            elif isinstance(event, Met):
                self._questions_of.pop(event.peer, None)  # whoever had asked is gone
                self._member.met(event.peer)
            else:
                self._deliver(event, now)

    def _deliver(self, delivery: Delivery, now: float) -> None:
        assert self._member is not None
        peer = delivery.peer
        try:
            message = wire.decode(delivery.body)
        except ValueError as error:  # of msgspec, or of text that is no UTF-8
            self._member.refuse(f"{peer}: {error}")
            return
        match message:
            case wire.AskManifest() | wire.Get() | wire.AskWindow():
                self._answer(peer, message)
            case wire.Manifest() | wire.Got() | wire.WindowIs() | wire.GotNone():
                self._take_answer(peer, message, delivery.payload, now)
            case _:
                self._member.handle(peer, message, delivery.payload, now)

    def _answer(self, peer: str, question: Question) -> None:
        assert self._member is not None
        # A peer that asks and does not read gets no more than it has room for: questions are small.
        waiting = self._questions_of.setdefault(peer, deque())
        if len(waiting) >= _MOST_QUESTIONS:
            self._member.refuse(f"{peer}: more than {_MOST_QUESTIONS} questions whose answers it does not take")
            return
        waiting.append(question)
        self._answer_waiting(peer)

    def _answer_waiting(self, peer: str) -> None:
        assert self._member is not None
        assert self._feed is not None
        waiting = self._questions_of[peer]
        while waiting and self._member.mail.room(peer) > 0:
            question = waiting.popleft()
            answer, payload = self._serving.answer(question)
            if answer is None:
                answer, payload = self._serving.answer_from(self._feed.fragment_store, question)
            self._member.mail.send(peer, answer, payload)
        if not waiting:
            del self._questions_of[peer]

    def _take_answer(
        self,
        peer: str,
        message: wire.Manifest | wire.Got | wire.WindowIs | wire.GotNone,
        payload: bytes | memoryview,
        now: float,
    ) -> None:
        for asking in self._asking:
            if message.request in asking.requests:
                asking.answered(peer, message, now)
        for reader in self._readers:
            if message.request in reader.requests:
                match message:
                    case wire.Manifest():
                        reader.got_manifest(peer, message, now)
                    case wire.Got():
                        reader.got(peer, message, bytes(payload), now)
                    case wire.GotNone():
                        reader.got_none(peer, message, now)
