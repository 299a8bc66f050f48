"""One node's part in an attempt: what it sends to whom, what it keeps for whom, and how far all have got."""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable

import msgspec

from memckpt.errors import PeerError
from memckpt.memory.region import Region
from memckpt.protocol.replication import (
    GiveUp,
    PeerJob,
    PeerLinkStatus,
    PeersStatus,
    SendGeneration,
    SendRecord,
    TakeState,
    WatermarkAdvanced,
)
from memckpt.replication.coding.blob import Blob
from memckpt.replication.coding.code import Code
from memckpt.replication.coding.placement import place
from memckpt.replication.keeping.sender import Outgoing, Sender
from memckpt.replication.keeping.watermark import Leader
from memckpt.replication.keeping.windows import sizes_of
from memckpt.replication.pacing.cadence import NONE_CAN_BE_HAD, Cadence
from memckpt.replication.pacing.overdue import Absence, Overdue
from memckpt.replication.pacing.pace import Pacer
from memckpt.replication.process.cuts import Cuts, cuts_for
from memckpt.replication.process.holding_up import HeldUp
from memckpt.replication.process.source import Part, RegionSource
from memckpt.replication.process.standby_feed import StandbyFeed
from memckpt.replication.transport.transport import Delivery, Transport
from memckpt.replication.transport.wire import (
    Abandon,
    Acknowledged,
    NotStored,
    Open,
    Put,
    Stored,
    Watermark,
    Window,
    WireMessage,
    encode,
)

#: Handed over before the loop looks at what has arrived.
_PUMP_BYTES = 1 << 20
#: The longest reason from a peer that is logged, in characters.
_MOST_WORDS = 500
_log = logging.getLogger("memckpt.replicator")


class _OwnSource:
    """One generation of a unit's records, as far as its holders get them."""

    def __init__(self, source: RegionSource, part: Part) -> None:
        self._source, self._part = source, part

    def open(self, record: int) -> Blob | None:
        return self._source.open(record, self._part)

    def intact(self, record: int) -> bool:
        return self._source.intact(record)

    def step(self, record: int) -> int:
        return self._source.step(record)

    def close(self) -> None:
        self._source.close()


class ReplicationNode:
    """Belongs to the replicator's loop.

    Args:
        node: this one's name.
        job: what there is to know of the attempt.
        feed: keeps other nodes' pieces, and passes on what is for standby replicas; belongs to the caller, as does
            the transport.
        watermark_advanced: told when the watermark has got further, or protection has changed.
        rejoined: the node has taken part before, and has lost what its own records were on their way to.
        ask: has the agent copy a state; None: no states are sent in place of records.

    Attributes:
        cuts: states that are sent in place of records; None where they are not.
        loopback: messages of this node to itself.
        refused: what could not be understood, by reason.
        unheard: peers of which nothing is heard, as the transport says.
        deserted: why no record becomes whole on this node, in words; empty if they do.
    """

    def __init__(
        self,
        node: str,
        job: PeerJob,
        feed: StandbyFeed,
        transport: Transport,
        watermark_advanced: Callable[[WatermarkAdvanced], None],
        rejoined: bool = False,
        ask: Callable[[TakeState], None] | None = None,
    ) -> None:
        self._rejoined = rejoined
        self._leaving = False
        self._node = node
        self.job = job
        self._feed = feed
        self._transport = transport
        self._watermark_advanced = watermark_advanced
        self._addresses = {one.name: one.address for one in job.nodes}
        self._connected: set[str] = set()
        self.loopback: deque[Delivery] = deque()
        self.refused: Counter[str] = Counter()
        self.unheard: frozenset[str] = frozenset()
        self.deserted = ""
        #: Holders that acknowledge nothing of what they are sent, and nodes of which nothing is heard, for too long.
        self._overdue = Overdue(job.ack_timeout_seconds)
        self._away = Absence(job.ack_timeout_seconds)
        names = [one.name for one in job.nodes]
        self._leader_node = names[0]
        self.placement = place([one.domain for one in job.nodes], job.data, job.tolerate)
        self._code = Code(job.data, job.tolerate, job.backend)
        self._codes: dict[int, Code] = {job.data: self._code}
        index = names.index(node)
        holders = [names[other] for other in self.placement.holders(index)]
        start = job.record or 0
        self._senders = {
            unit.ranks: Sender(unit.ranks, self._code, holders, self.send, self.room, start, not job.wait)
            for unit in job.units
            if unit.node == index
        }
        self.cuts: Cuts | None = None
        if job.cadence and ask is not None:
            self.cuts = cuts_for(
                node, job.attempt, self._code, feed.fragment_store, self._senders, holders, self.send, self.room, ask
            )
        self._turns = deque(self._all_senders())
        self._private = {unit.ranks for unit in job.units if unit.private}
        pieces = {names[sender]: piece for sender, piece in self.placement.kept_by(index)}
        #: By their ranks, the node, and which of its pieces is kept here.
        self._kept = {
            unit.ranks: (names[unit.node], pieces[names[unit.node]]) for unit in job.units if names[unit.node] in pieces
        }
        if job.forget and not rejoined:
            feed.forget()
        feed.begin(job.attempt, job.record, self._code, rejoined)
        self._sources: dict[tuple[int, ...], RegionSource] = {}
        cadence = Cadence() if self.cuts is not None else None
        self._leader = Leader(names, start, cadence) if node == self._leader_node else None
        self.pacer = Pacer(job.rate_bytes_per_second, job.overhead)
        self._paused_until = 0.0
        #: By unit: how many records training may be ahead of the watermark; and since when it has been that far.
        self._ahead: dict[tuple[int, ...], int] = {}
        self._waiting_since: float | None = None
        self._held_up = HeldUp(job.overhead)
        self._spaced = False
        #: Nobody waited for a while, and training may still be further ahead than it is to be.
        self._out_of_reach = rejoined
        #: By unit: how many records later the node cannot go back to one.
        self._reach: dict[tuple[int, ...], int] = {}
        self._told = Acknowledged(node, start, start, False, rejoined)
        self.watermark = self._led = Watermark(start, False)
        for other in {*holders, self._leader_node, *(names[sender] for sender, _ in self.placement.kept_by(index))}:
            self._connect(other)
        if self._leader is not None:
            for other in names:
                self._connect(other)
            self._lead(self._told)

    def close(self) -> None:
        for sender in self._senders.values():
            sender.close()
        if self.cuts is not None:
            self.cuts.close()
        self._sources.clear()
        for code in self._codes.values():
            code.close()

    @property
    def senders(self) -> list[Sender]:
        return list(self._senders.values())

    def _all_senders(self) -> list[Sender]:
        """Those who send records, and those who send states."""
        return [*self._senders.values(), *(self.cuts.senders if self.cuts is not None else ())]

    def code_for(self, data: int) -> Code:
        """The code of pieces that make a stripe whole by `data`; one of another attempt's is made for it."""
        if data not in self._codes:
            self._codes[data] = Code(data, self.job.tolerate, self.job.backend)
        return self._codes[data]

    def knows(self, peer: str) -> bool:
        """Whether it is a node of the job."""
        return peer in self._addresses

    def refuse(self, reason: str) -> None:
        """Something came that is no message, or none that this peer may send."""
        _log.warning("refused: %s", reason[:_MOST_WORDS])
        self.refused["malformed"] += 1

    # Messages

    def _connect(self, peer: str) -> None:
        if peer != self._node and peer not in self._connected and peer in self._addresses:
            self._connected.add(peer)
            self._transport.connect(peer, self._addresses[peer])

    def send(self, peer: str, message: WireMessage, payload: bytes | memoryview) -> None:
        """Give a message to a peer, or to ourselves."""
        if peer == self._node:
            self.loopback.append(Delivery(peer, encode(message), bytes(payload)))
            return
        self._connect(peer)
        try:
            self._transport.send(peer, encode(message), payload)
        except PeerError as error:
            # The peer does not drain its queue: drop it, and resynchronize when it reconnects.
            _log.warning("dropping peer %s: %s", peer, error)
            self._transport.forget(peer)
            self._connected.discard(peer)

    def room(self, peer: str) -> int:
        """Bytes that a peer takes now; 0 or less: none."""
        return 1 if peer == self._node else self._transport.room(peer)

    def met(self, peer: str) -> None:
        """A peer is there for the first time, or has lost all that it had."""
        self._connected.add(peer)
        for sender in self._all_senders():
            sender.met(peer)
        if peer == self._leader_node:
            self.send(peer, self._told, b"")
        if self._leader is not None:
            self.send(peer, self._leader.watermark, b"")

    def handle(self, peer: str, message: WireMessage, payload: bytes | memoryview, now: float) -> None:
        """A message of a peer."""
        problem = self._unfit(peer, message)
        if problem:
            self.refuse(f"{peer}: {type(message).__name__}: {problem}")
            return
        match message:
            case Open():
                refusal = self._feed.open(message.window)
                if refusal is not None:
                    self.send(peer, refusal, b"")
            case Put():
                answer = self._feed.put(message.fragment, message.step, payload)
                if answer is not None:
                    self.send(peer, answer, b"")
            case Abandon():
                self._feed.abandon(message.owner, message.generation, message.record)
            case Stored():
                for sender in self._all_senders():
                    if sender.ranks == message.owner:
                        sender.stored(peer, message)
            case NotStored():
                for sender in self._all_senders():
                    if sender.ranks == message.owner:
                        sender.not_stored(peer, message, now)
            case Acknowledged():
                self._lead(message)
            case Watermark():
                self._led = message
                self._pass_led()

    def _unfit(self, peer: str, message: WireMessage) -> str:
        """Why a peer may not say something, in words; empty if it may."""
        match message:
            case Open(window):
                expected = (*self._kept.get(window.owner, ("", 0)), self.job.data, self.job.tolerate)
                if (peer, window.piece, window.data, window.tolerate) != expected or window.node != peer:
                    return f"piece {window.piece} of ranks {list(window.owner)} on {window.node} is not to be kept"
                if window.private != (window.owner in self._private):
                    return f"private={window.private} is not as planned"
                if window.cut and (window.private or not self.job.cadence):
                    return "no state by value of it is planned"
                if window.standby and (window.private or self.job.scheme != "mirror"):
                    return "no standby replica of it is planned"
            case Put() | Abandon():
                owner = message.fragment.owner if isinstance(message, Put) else message.owner
                if self._kept.get(owner, ("", 0))[0] != peer:
                    return f"ranks {list(owner)} are not on it"
            case Stored() | NotStored():
                own = self._senders.get(message.owner)
                if own is None or peer not in own.holders:
                    return f"it keeps nothing of ranks {list(message.owner)} for this node"
            case Acknowledged():
                if self._leader is None or message.node != peer:
                    return f"it speaks for {message.node}"
            case Watermark():
                if peer != self._leader_node or self._leader is not None:
                    return "it does not lead"
            case _:
                return "unexpected"
        return ""

    def _lead(self, message: Acknowledged) -> None:
        assert self._leader is not None
        self._announce(self._leader.acknowledged(message))

    def _announce(self, changed: Watermark | None) -> None:
        if changed is None:
            return
        for node in self._addresses:
            if node != self._node:
                self.send(node, changed, b"")
        self._pass(changed)

    def _pass_led(self) -> None:
        """What the leader has said counts as whole only while it is heard."""
        led, waits_suspended = self._led, self._led.waits_suspended or self._leader_node in self._away.nodes
        whole = led.whole and not waits_suspended and self._leader_node not in self.unheard
        # It has got no further than this node has; its records may reach it after the leader's word has.
        record = min(led.record, max(self._told.record, self._told.cut))
        self._pass(msgspec.structs.replace(led, record=record, whole=whole, waits_suspended=waits_suspended))

    def _pass(self, watermark: Watermark) -> None:
        # A leader that has rejoined knows of no record at first.
        watermark = msgspec.structs.replace(watermark, record=max(watermark.record, self.watermark.record))
        if watermark == self.watermark:
            return
        self.watermark = watermark
        self._out_of_reach |= watermark.waits_suspended or watermark.every > 0
        self._feed.watermark_advanced(watermark.record, watermark.whole)
        for sender in self._senders.values():
            sender.watermark_advanced(watermark.record)
            self._forget_virtual(sender)
        self._space_out(watermark)
        suspended = watermark.waits_suspended or watermark.every > 0
        self._watermark_advanced(WatermarkAdvanced(watermark.record, watermark.whole, suspended))

    def _space_out(self, watermark: Watermark) -> None:
        """Send records, or the state that is due in their place."""
        if self.cuts is None:
            return
        if (watermark.every > 0) != self._spaced:
            self._spaced = watermark.every > 0
            _log.warning(
                "links do not carry every record: states are sent instead, one after the other"
                if self._spaced
                else "states cannot be copied: records are sent again, as links carry them"
                if watermark.cut == NONE_CAN_BE_HAD
                else "links carry every record again"
            )
        self.cuts.watermark_advanced(watermark.record)
        for ranks, sender in self._senders.items():
            sender.proceeds = not self.job.wait or watermark.every > 0
            sender.spaces = watermark.cut != NONE_CAN_BE_HAD and self._may_space(ranks)
            sender.too_slow &= sender.spaces
            if watermark.cut > 0 and not sender.paused:
                sender.pause()
            elif watermark.cut <= 0 and sender.paused and not sender.too_slow:
                # A leader that was replaced knows of no states: training waits again.
                sender.go_on(awaited=self.job.wait and not watermark.every)
            sender.too_slow &= watermark.cut <= 0
        if watermark.cut > 0:
            self._held_up.forget()
            self.cuts.order(watermark.cut)

    def _may_space(self, ranks: tuple[int, ...]) -> bool:
        """Whether states may be sent in place of a unit's records."""
        source = self._sources.get(ranks)
        return self.cuts is not None and source is not None and source.spec.mode != "capture"

    def _forget_virtual(self, sender: Sender) -> None:
        """Once its base is acknowledged a replica goes on, and no virtual records can be cut from it."""
        source = self._sources.get(sender.ranks)
        if source is None or source.spec.mode != "eager" or sender.ranks in self._private:
            return
        window = sender.window
        if window is not None and window.base <= self.watermark.record:
            sender.give_up(window.generation)

    def answer(self, answers: Iterable[tuple[str, WireMessage]]) -> None:
        """What owners are to get of the standby replicas here."""
        for node, message in answers:
            self.send(node, message, b"")

    # What this node's ranks do

    def begin(self, message: SendGeneration, regions: list[Region]) -> None:
        """A generation is complete on this node."""
        source = RegionSource(message.spec, message.number, message.base, regions, message.missing, message.plain)
        sender = self._senders.get(message.ranks)
        if sender is None:
            source.close()
            return
        for record, (step, meta, rank_states) in message.records.items():
            source.note(record, step, meta, rank_states)
        private = message.ranks in self._private
        spec = message.spec
        sizes = sizes_of(spec, private)
        window = Window(
            owner=message.ranks,
            node=self._node,
            generation=message.generation,
            attempt=self.job.attempt,
            piece=0,
            data=self.job.data,
            tolerate=self.job.tolerate,
            base=message.base,
            period=sizes.period,
            kept=sizes.kept,
            every=sizes.every,
            private=private,
            replicas=spec.serves,
            record_bytes=sizes.record_bytes,
            static=sizes.static,
            history=message.history,
            spec=msgspec.msgpack.encode(spec),
            standby=self.job.scheme == "mirror" and not private and spec.mode != "capture",
        )
        self._sources[message.ranks] = source
        standing = 1 + spec.trails if spec.mode == "eager" else 0  # as where training waits for room
        self._ahead[message.ranks] = sizes.kept - sizes.period - standing
        self._reach[message.ranks] = self._ahead[message.ranks] * sizes.every
        records = [record for record in sorted(message.records) if not private or record >= message.base]
        own = _OwnSource(source, "private" if private else "all")
        sender.spaces = self.watermark.cut != NONE_CAN_BE_HAD and self._may_space(message.ranks)
        sender.begin(Outgoing(window, own, records, source.layout.ring))

    def committed(self, message: SendRecord) -> None:
        """A record is whole on this node."""
        source = self._sources.get(message.ranks)
        if source is not None:
            source.note(message.record, message.step, message.meta, message.rank_states)
            self._senders[message.ranks].committed(message.record)
            if message.ranks == next(iter(self._senders)):
                self._held_up.committed()

    def give_up(self, message: GiveUp) -> None:
        """What a generation begins with cannot be sent any more."""
        sender = self._senders.get(message.ranks)
        if sender is not None:
            sender.give_up(message.generation)

    # Work

    def work(self, now: float) -> None:
        """Send some of what is due, if it may go now, and say how far all is."""
        for sender in self._all_senders():
            sender.retry(now)
        if self.cuts is not None:
            self.cuts.work()
        self._paused_until = 0.0
        self._note_waiting(now)
        self.pacer.in_flight(self._transport.in_flight_bytes)
        if any(sender.wants for sender in self._all_senders()):
            self._tell_pacer()
            piece = self.pacer.piece(_PUMP_BYTES)
            delay = self.pacer.delay(piece, now)
            if delay > 0:
                self._paused_until = now + delay
            else:
                self.pacer.sent(self._pump(piece), now)
        self._look_for_overdue(now)
        told = self._how_far()
        if told != self._told:
            self._told = told
            if self._leader is not None:
                self._lead(told)
            else:
                self.send(self._leader_node, told, b"")
        if self._leader is not None:
            self._announce(self._leader.unheard(self.unheard))
            self._announce(self._leader.give_up(self._away.nodes))
        else:
            self._pass_led()

    def _look_for_overdue(self, now: float) -> None:
        """Who has acknowledged nothing, or was not heard, for so long that training does not wait for it."""
        if not self.job.wait:
            return
        owing: dict[str, Hashable] = {}
        for sender in self._senders.values():
            for holder, progress in sender.owing(self._transport.progress).items():
                owing[holder] = owing.get(holder), progress
        before = self._overdue.nodes
        # Of one that is not heard at all nobody knows whether it is lost: that is the leader's to judge.
        self._overdue.look({node: one for node, one in owing.items() if node not in self.unheard}, now)
        self._tell_overdue(before, self._overdue.nodes, "acknowledges nothing")
        newest = max((sender.newest or 0 for sender in self._senders.values()), default=0)
        before, every = self._away.nodes, max((one.every for one in self._senders.values()), default=1)
        self._away.look(
            {node: at for node, at in self._transport.heard().items() if self.knows(node)}, newest, every, now
        )
        self._tell_overdue(before, self._away.nodes, "is not heard")

    def _tell_overdue(self, before: frozenset[str], after: frozenset[str], what: str) -> None:
        for node in sorted(after - before):
            _log.warning(
                "%s %s for too long (ack_timeout_seconds=%g): training does not wait for it, and what it lacks is a "
                "gap in protection",
                node,
                what,
                self.job.ack_timeout_seconds,
            )
        for node in sorted(before - after):
            _log.info("%s is waited for again; it is sent what it lacks", node)

    def _how_far(self) -> Acknowledged:
        """What the leader is to know of this node."""
        record = min((sender.acknowledged for sender in self._senders.values()), default=self._told.record)
        late = [ranks for ranks in self._senders if self._late(ranks)]
        self._out_of_reach &= self.watermark.waits_suspended or self.watermark.every > 0 or bool(late)
        # While training here does not wait it may get too far ahead of others at any time.
        whole = not self.watermark.waits_suspended and all(
            sender.whole and self.unheard.isdisjoint(sender.holders) and ranks not in late
            for ranks, sender in self._senders.items()
        )
        since = max((sender.since for sender in self._senders.values()), default=record)
        anew = self._rejoined and any(sender.newest is None for sender in self._senders.values())
        away = any(not self._away.nodes.isdisjoint(sender.holders) for sender in self._senders.values())
        lost = anew or self._leaving or (self.job.wait and bool(self.deserted or self._overdue.nodes or away))
        if self.cuts is None:
            return Acknowledged(self._node, record, since, whole, lost)
        newest = max((sender.newest or 0 for sender in self._senders.values()), default=0)
        if self._leader is not None:
            self._leader.newest = newest
        mark = self.watermark
        held = self.cuts.hold(mark.record)
        if (mark.every or held) and not (whole and record > mark.record):
            # Until all records are there that a later state takes, it is the one sent by value that counts.
            heard = all(self.unheard.isdisjoint(sender.holders) for sender in self._senders.values())
            record = since = mark.record
            whole = held and heard and not mark.waits_suspended
        elif mark.every or held:
            since = max(sender.reaches_from for sender in self._senders.values())
        behind = any(sender.too_slow for sender in self._senders.values())
        behind |= self.job.wait and not mark.every and self._held_up.too_long
        # Not before that record: storage may be served just now, and what comes next is not to be missed, too.
        missed = self.cuts.missed if newest >= self.cuts.missed else 0
        return Acknowledged(self._node, record, since, whole, lost, behind, self.cuts.acknowledged, missed)

    def _pump(self, limit: int) -> int:
        """Send a piece, of the senders in turns; returns the bytes."""
        sent = 0
        for sender in list(self._turns):
            self._turns.rotate(-1)
            sent += sender.pump(limit - sent)
            if sent >= limit:
                break
        return sent

    def leave(self, now: float) -> None:
        """Training is over on this node, and soon on all: nobody is to wait for what it keeps or leads any more."""
        self._leaving = True
        self.work(now)

    def _late(self, ranks: tuple[int, ...]) -> bool:
        """Whether training has gone on without peers so far that this node cannot go back to what they have."""
        sender = self._senders[ranks]
        if self.cuts is not None and self.cuts.hold(self.watermark.record):
            return False
        if sender.newest is None or ranks not in self._reach or (self.job.wait and not self._out_of_reach):
            return False
        known = self.watermark.record if self.job.wait else sender.acknowledged
        return sender.newest - known >= self._reach[ranks]

    def _tell_pacer(self) -> None:
        senders = self._senders.values()
        needed = sum(sender.bytes_per_step for sender in senders)
        record = sum(sender.record_bytes for sender in senders)
        waiting = sum(sender.waiting_bytes for sender in senders)
        # Where training waits for what is acknowledged, it does so long before peers have no room.
        records = (
            min(self._ahead.values(), default=0) if self.job.wait else max((one.kept for one in senders), default=0)
        )
        self.pacer.needs(needed, waiting, record * records or None)

    def _note_waiting(self, now: float) -> None:
        """Tell the pacer for how long training has waited for acknowledgements by now."""
        newest = {ranks: sender.newest for ranks, sender in self._senders.items()}
        waits = (
            self.job.wait
            and not self.watermark.every
            and any(
                record is not None and record - self.watermark.record >= self._reach[ranks]
                for ranks, record in newest.items()
                if ranks in self._reach
            )
        )
        if self._waiting_since is not None:
            self.pacer.waited(now - self._waiting_since)
            self._held_up.waited(now - self._waiting_since)
        self._waiting_since = now if waits else None
        self._held_up.look(now, counts=self.watermark.whole or self._held_up.began)

    def patience(self, now: float) -> float:
        """Seconds until there is something to do without anything arriving."""
        if self.loopback or (self.cuts is not None and self.cuts.busy):
            return 0.0
        if any(sender.wants for sender in self._all_senders()):
            return max(0.0, self._paused_until - now)
        times = [at - now for sender in self._all_senders() if (at := sender.retry_at()) is not None]
        return max(0.0, min(times, default=60.0))

    # What is shown

    def status(self, security: str, recovering: str) -> PeersStatus:
        """How things are.

        Args:
            security: of the transport.
            recovering: what is being fetched, in words; empty if nothing is.
        """
        job = self.job
        senders = list(self._senders.values())
        code = f"k={job.data}, m={job.tolerate}" if job.data > 1 else f"{job.tolerate + 1} copies"
        sizes = [sender.last_record_bytes for sender in senders if sender.last_record_bytes is not None]
        pace = self.pacer.state()
        return PeersStatus(
            scheme=f"mirror, {job.tolerate + 1} copies" if job.scheme == "mirror" else f"erasure code, {code}",
            security=security,
            ack="wait" if job.wait else "proceed",
            watermark=self.watermark.record if self.watermark.record else None,
            acknowledged=tuple((sender.ranks, record) for sender in senders if (record := self._newest_of(sender))),
            protected=self.watermark.whole,
            problem=self._problem(),
            held_bytes=self._feed.nbytes,
            kept=self._feed.kept(),
            links=self._links(),
            bytes_sent=self._transport.bytes_sent,
            bytes_per_record=float(sum(sizes)) if sizes else None,
            rate_limit_bytes_per_second=pace.rate_limit_bytes_per_second,
            pace=pace.reason,
            refused=sum(self._transport.refused.values()) + sum(self.refused.values()),
            gap=next((sender.gap for sender in senders if sender.gap is not None), None),
            recovering=recovering,
            every=self.watermark.every,
        )

    def _newest_of(self, sender: Sender) -> int:
        """The newest record of a unit's that all its holders have, or whose state they have."""
        return max(sender.acknowledged, self.cuts.acknowledged_of(sender.ranks) if self.cuts is not None else 0)

    def _links(self) -> tuple[PeerLinkStatus, ...]:
        problems: dict[str, str] = {}
        for sender in self._all_senders():
            problems |= sender.problems
        return tuple(
            PeerLinkStatus(
                node=node,
                connected=bool(state.incarnation) and state.connected and not state.silent,
                behind_bytes=state.unacknowledged_bytes,
                seconds_silent=state.heard_seconds if state.incarnation else None,
                problem=problems.get(node, ""),
            )
            for node, state in sorted(self._transport.peers().items())
        )

    def _problem(self) -> str:
        """Why not every node can be lost, in words; empty if each can."""
        if self.watermark.whole:
            problem = self._feed.problem
            return f"plain copies are kept here in place of replicas: {problem}" if problem else ""
        if self.deserted:
            return f"training goes on without the peers of this node: {self.deserted}"
        for sender in self._all_senders():
            for holder, problem in sender.problems.items():
                return f"{holder} does not keep the records of ranks {list(sender.ranks)}: {problem}"
        if left := self._overdue.nodes | self._away.nodes:
            return f"training does not wait for {', '.join(sorted(left))}, of which nothing comes"
        silent = [link.node for link in self._links() if not link.connected]
        if silent:
            return f"nothing is heard of {', '.join(silent)}"
        if self.cuts is not None and self.cuts.ordered > self.cuts.acknowledged and self.cuts.problem:
            return f"the state after record {self.cuts.ordered} is not copied: {self.cuts.problem}"
        if any(self._late(ranks) for ranks in self._senders):
            return "training is so far ahead of its peers that it cannot go back to what they have"
        if self._leader is not None and (missing := self._leader.missing()):
            return f"the records of {', '.join(missing)} are not with all their peers yet"
        return "records are on their way"
