"""One node's part in an attempt: records that it sends and keeps, and how far all nodes have got."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Hashable

import msgspec

from memckpt.memory.region import Region
from memckpt.protocol.replication import CopyState, GiveUp, Join, SendGeneration, SendRecord, WatermarkAdvanced
from memckpt.replication.coding.code import Code
from memckpt.replication.keeping.fragment_store import FragmentStore
from memckpt.replication.keeping.kept_window import sizes_of
from memckpt.replication.keeping.outgoing import Outgoing, RegionSource, close_all
from memckpt.replication.keeping.sender import Sender
from memckpt.replication.keeping.stream import MAX_REASON_CHARS
from memckpt.replication.pacing.pace import Pacer
from memckpt.replication.pacing.watermark import Cadence, Laggards, Leader, LinkMeter, RunAhead
from memckpt.replication.process.send import Mail, NodePlan, Pump
from memckpt.replication.process.states_by_value import StatesByValue
from memckpt.replication.transport import messages
from memckpt.replication.transport.transport import Transport
from memckpt.state.records import RankGroup
from memckpt.state.spec import StateSpec

_log = logging.getLogger("memckpt.replicator")


class ReplicationNode:
    """One node's part in an attempt. Belongs to the replicator's loop, as do store and transport.

    Attributes:
        states: sends states, which `ask` has the agent copy, in place of records; None where records alone are sent.
        leader: on one node only.
        refused: messages not understood.
        unheard: silent peers.
        deserted: why no record becomes whole here, in words; empty if nothing hinders it.
    """

    def __init__(
        self,
        node: str,
        join: Join,
        store: FragmentStore,
        transport: Transport,
        watermark_advanced: Callable[[WatermarkAdvanced], None],
        ask: Callable[[CopyState], None],
    ) -> None:
        self.job = job = join.job
        start = job.record or 0
        self.plan = plan = NodePlan(node, job)
        self.store, self.transport = store, transport
        self.mail = Mail(node, plan.addresses, transport)
        self.refused: Counter[str] = Counter()
        self.unheard: frozenset[str] = frozenset()
        self.deserted = ""
        self.laggards = Laggards(job.ack_timeout_seconds)
        self.pacer = Pacer(job.rate_bytes_per_second, job.overhead)
        self._node, self._watermark_advanced = node, watermark_advanced
        #: Whether the node has lost its records, and waits for a generation. A replicator's death loses none.
        self._empty = join.rejoin and not join.records
        self._leaving = False
        self._code = Code(job.data, job.tolerate, job.backend)
        self._codes: dict[int, Code] = {job.data: self._code}
        self._senders = {ranks: self._make_sender(ranks, start, not job.wait) for ranks in plan.own}
        self.states: StatesByValue | None = None
        if job.every_steps != 1:
            senders = {ranks: self._make_sender(ranks, 0) for ranks in plan.own}
            self.states = StatesByValue(plan, self._code, store, senders, ask)
        self._pump = Pump(self.all_senders, self.pacer)
        if job.forget and not join.rejoin:
            store.drop_all()
        store.begin_attempt(job.attempt, job.record, self._code, join.rejoin)
        #: The newest generation of each unit; senders close them.
        self._sources: dict[RankGroup, RegionSource] = {}
        cadence = Cadence(job.every_steps) if self.states is not None else None
        self.leader = Leader(list(plan.addresses), start, cadence) if plan.leads else None
        self._run_ahead = RunAhead(job.wait, beyond=join.rejoin)
        self._meter = LinkMeter(job.overhead)
        #: The last state whose way to its holders was measured, and the N that was last said to be needed.
        self._measured = self._warned_of = 0
        #: What the leader was told last, and what it has said.
        self._told = messages.Acknowledged(node, start, start, False, self._empty)
        self.watermark = messages.Watermark(start, False, every=job.every_steps or 1)
        self._led = msgspec.structs.replace(self.watermark, unheard=tuple(plan.addresses))
        for other in plan.partners:
            self.mail.connect(other)
        if self.leader is not None:
            self._take_acknowledgement(self._told)

    def _make_sender(self, ranks: RankGroup, record: int, proceeds: bool = False) -> Sender:
        return Sender(ranks, self._code, self.plan.holders, self.mail.send, self.mail.room, record, proceeds)

    def close(self) -> None:
        for sender in self._senders.values():
            sender.close()
        if self.states is not None:
            self.states.close()
        self._sources.clear()
        for code in self._codes.values():
            code.close()

    @property
    def senders(self) -> list[Sender]:
        return list(self._senders.values())

    @property
    def all_senders(self) -> list[Sender]:
        return [*self._senders.values(), *(self.states.senders if self.states is not None else ())]

    def code_for(self, data: int) -> Code:
        """The code of fragments of which `data` make a stripe whole; one of another attempt's is made for it."""
        if data not in self._codes:
            self._codes[data] = Code(data, self.job.tolerate, self.job.backend)
        return self._codes[data]

    def refuse(self, reason: str) -> None:
        """Count and log something that is no message, or none that this peer may send."""
        _log.warning("refused: %s", reason[:MAX_REASON_CHARS])
        self.refused["malformed"] += 1

    # Messages

    def met(self, peer: str) -> None:
        """Send a peer all that it needs: it is there for the first time, or has lost all that it had."""
        self.mail.met(peer, self.plan.partners)
        for sender in self.all_senders:
            sender.met(peer)
        if peer == self.plan.leader:
            self.laggards.away.leader_met()
            self.mail.send(peer, self._told)
        if self.leader is not None:
            self.mail.send(peer, self.leader.watermark)

    def handle(self, peer: str, message: messages.WireMessage, payload: bytes | memoryview, now: float) -> None:
        problem = self.plan.unfit(peer, message)
        if problem:
            self.refuse(f"{peer}: {type(message).__name__}: {problem}")
            return
        match message:
            case messages.Open():
                answer = self.store.open(message.window)
                if answer is not None:
                    self.mail.send(peer, answer)
            case messages.Put():
                stored = self.store.put(message.fragments, message.step, payload)
                if stored is not None:
                    self.mail.send(peer, stored)
            case messages.Abandon():
                self.store.abandon(message.owner, message.generation, message.record)
            case messages.Stored():
                for sender in self.all_senders:
                    if sender.ranks == message.owner:
                        sender.stored(peer, message)
            case messages.Kept():
                for sender in self.all_senders:
                    if sender.ranks == message.owner:
                        sender.kept(peer, message)
            case messages.NotStored():
                for sender in self.all_senders:
                    if sender.ranks == message.owner:
                        sender.not_stored(peer, message, now)
            case messages.Acknowledged():
                self._take_acknowledgement(message)
            case messages.Watermark():
                self._led = message
                self._take_leaders_watermark()
            case messages.Whereabouts():
                self.transport.hint(message.node, message.address)

    def _take_acknowledgement(self, message: messages.Acknowledged) -> None:
        assert self.leader is not None
        self._announce(self.leader.acknowledged(message))

    def _announce(self, changed: messages.Watermark | None) -> None:
        if changed is None:
            return
        for node in self.plan.addresses:
            if node != self._node:
                self.mail.send(node, changed)
        self._take_watermark(changed)

    def _take_leaders_watermark(self) -> None:
        """Pass on the leader's watermark, which counts as whole only while the leader is heard."""
        led, waits_suspended = self._led, self._led.waits_suspended or self.plan.leader in self.laggards.away.nodes
        whole = led.whole and not waits_suspended and self.plan.leader not in self.unheard
        # It has got no further than this node has; its records may reach it after the leader's word has.
        record = min(led.record, max(self._told.record, self._told.state))
        self._take_watermark(msgspec.structs.replace(led, record=record, whole=whole, waits_suspended=waits_suspended))

    def _take_watermark(self, watermark: messages.Watermark) -> None:
        # A leader that has rejoined knows of no record at first.
        record = max(watermark.record, self.watermark.record)
        watermark = msgspec.structs.replace(watermark, record=record, unheard=())
        if watermark == self.watermark:
            return
        before, self.watermark = self.watermark, watermark
        self._run_ahead.beyond |= watermark.waits_suspended or watermark.every > 1
        self.store.watermark_advanced(watermark.record, watermark.whole)
        for sender in self._senders.values():
            sender.watermark_advanced(watermark.record)
            self._forget_virtual(sender)
        self._follow_cadence(watermark, before.every)
        suspended = watermark.waits_suspended or watermark.every > 1
        self._watermark_advanced(WatermarkAdvanced(watermark.record, watermark.whole, suspended))

    def _follow_cadence(self, watermark: messages.Watermark, before: int) -> None:
        """Send records, or the state that is due in their place."""
        if self.states is None:
            return
        if watermark.every != before:
            what = "records are sent" if watermark.every == 1 else "states are sent in place of records"
            _log.warning("peers get each %d. record: %s", watermark.every, what)
        if self.plan.leads and watermark.needed > max(watermark.every, self._warned_of):
            self._warned_of = watermark.needed
            what = "every record" if watermark.every == 1 else f"the state after every {watermark.every}. record"
            _log.warning("links do not carry %s; peers.every_steps=%d would do", what, watermark.needed)
        self.states.watermark_advanced(watermark.record)
        for ranks, sender in self._senders.items():
            sender.proceeds = not self.job.wait or watermark.every > 1
            source = self._sources.get(ranks)
            if watermark.every > 1 and source is not None and source.spec.mode != "snapshot":
                sender.pause()
                self._meter.stop()
            else:
                sender.resume()
        if watermark.due:
            self.states.order(watermark.due)

    def _forget_virtual(self, sender: Sender) -> None:
        """Give up virtual records that are not needed: once its base is acknowledged, a replica goes on."""
        newest, source = sender.generation, self._sources.get(sender.ranks)
        if newest is None or source is None or newest.window.base > self.watermark.record:
            return
        if source.spec.mode == "eager" and not newest.window.private:
            sender.give_up(newest.generation)

    # What this node's ranks do

    def begin_generation(self, message: SendGeneration, regions: list[Region]) -> None:
        """Send a generation, which is complete on this node."""
        sender = self._senders.get(message.ranks)
        if sender is None:
            close_all(regions)
            return
        window = self.plan.window(message)
        source = RegionSource(message, regions, "private" if window.private else "all")
        self._sources[message.ranks] = source
        records = [record for record in sorted(message.records) if not window.private or record >= message.base]
        outgoing = Outgoing(window, sizes_of(source.spec, window.private), source, records, source.layout.ring)
        self.send_generation(sender, outgoing, source.spec)

    def send_generation(self, sender: Sender, outgoing: Outgoing, spec: StateSpec) -> None:
        """Send a generation, or the states of its records, as N says."""
        sizes, snapshots = outgoing.sizes, spec.mode == "snapshot"
        standing = 1 + spec.trails if spec.mode == "eager" else 0  # as where training waits for room
        self._run_ahead.begin_generation(sender.ranks, sizes.kept - sizes.period - standing, sizes.every)
        if self.watermark.every == 1 or snapshots:
            sender.resume()
        else:
            sender.pause()
        state = sizes_of(spec, outgoing.window.private, by_value=True)
        self._meter.ratio = state.period * state.record_bytes / max(1, sizes.record_bytes)
        sender.begin_generation(outgoing)
        if self.leader is not None:
            self._announce(self.leader.begin_generation(snapshots))

    def committed(self, message: SendRecord) -> None:
        """Send a record, which is whole on this node."""
        source = self._sources.get(message.ranks)
        if source is None:
            return
        source.note_record(message.record, message.step, message.meta, message.rank_states)
        self._senders[message.ranks].committed(message.record)
        if message.ranks == next(iter(self._senders)):
            self._meter.count_record()

    def give_up(self, message: GiveUp) -> None:
        """Send no more of the state with which a generation begins."""
        sender = self._senders.get(message.ranks)
        if sender is not None:
            sender.give_up(message.generation)

    # Work

    def work(self, now: float) -> None:
        """Send some of what is due, if it may go now, and tell the leader how far this node is."""
        for sender in self.all_senders:
            sender.retry(now)
        if self.states is not None:
            self.states.work()
        self._note_waiting(now)
        self._measure_links(now)
        self.pacer.in_flight(self.transport.in_flight_bytes)
        if self._pump.wants:
            self._tell_pacer()
        self._pump.work(now)
        if self.job.wait:
            self._look_at_peers(now)
        told = self._how_far()
        if told != self._told:
            self._told = told
            if self.leader is not None:
                self._take_acknowledgement(told)
            else:
                self.mail.send(self.plan.leader, told)
        if self.leader is not None:
            self._announce(self.leader.look(self._newest, self.unheard, self.laggards.away.nodes))
        else:
            self._take_leaders_watermark()

    def _look_at_peers(self, now: float) -> None:
        """Find those for which training does not wait."""
        owing: dict[str, Hashable] = {}
        for sender in self.senders:
            for holder, progress in sender.owing(self.transport.progress).items():
                if holder not in self.unheard:  # whether that is lost is the leader's to judge
                    owing[holder] = owing.get(holder), progress
        heard = {node: at for node, at in self.transport.heard().items() if node in self.plan.addresses}
        every = max((one.generation.sizes.every for one in self.senders if one.generation is not None), default=1)
        silent = self.plan.addresses if self.plan.leader in self.unheard else self._led.unheard
        self.laggards.away.vouched = frozenset(self.plan.addresses).difference(silent)
        self.laggards.check_peers(owing, heard, self._newest, every, now)

    def _how_far(self) -> messages.Acknowledged:
        """The acknowledgement of this node, for the leader."""
        mark = self.watermark
        record = min((sender.acknowledged for sender in self._senders.values()), default=self._told.record)
        late = any(self.is_late(ranks) for ranks in self._senders)
        self._run_ahead.beyond &= mark.waits_suspended or mark.every > 1 or late
        heard = self.unheard.isdisjoint(self.plan.holders)
        # While training here does not wait it may get too far ahead of others at any time.
        lasts = heard and not late and not mark.waits_suspended
        whole = lasts and all(sender.whole for sender in self._senders.values())
        since = max((sender.since for sender in self._senders.values()), default=record)
        anew = self._empty and any(sender.newest is None for sender in self._senders.values())
        away = not self.laggards.away.nodes.isdisjoint(self.plan.holders)
        lost = anew or self._leaving or (self.job.wait and bool(self.deserted or self.laggards.overdue.nodes or away))
        if (states := self.states) is None:
            return messages.Acknowledged(self._node, record, since, whole, lost)
        held = states.hold_state(mark.record)
        if (mark.every > 1 or held) and not (whole and record > mark.record):
            # Until all records are there that a later state takes, it is the one sent by value that counts.
            record = since = mark.record
            whole = held and heard and not mark.waits_suspended
        elif mark.every > 1 or held:
            since = max(sender.reaches_from for sender in self._senders.values())
        # Not before that record: storage may be served just now, and what comes next is not to be missed, too.
        missed = states.missed if self._newest >= states.missed else 0
        needed, every = self._meter.needed, mark.every
        return messages.Acknowledged(
            self._node, record, since, whole, lost, states.acknowledged, states.ordered, missed, needed, every
        )

    @property
    def _newest(self) -> int:
        """The newest record of the node's units; 0 before the first."""
        return max((sender.newest or 0 for sender in self._senders.values()), default=0)

    def _measure_links(self, now: float) -> None:
        if (states := self.states) is None:
            return
        if states.acknowledged > self._measured:
            self._measured = states.acknowledged
            self._meter.count_state(self._newest - self._measured)
        if self.watermark.every == 1:
            senders = self._senders.values()
            carried = min((sender.carried for sender in senders), default=0)
            self._meter.measure(now, self.watermark.whole, carried, max((one.left_out for one in senders), default=0))

    def leave_attempt(self, now: float) -> None:
        """Have nobody wait for this node: training is over here, and soon on all nodes."""
        self._leaving = True
        self.work(now)

    def is_late(self, ranks: RankGroup) -> bool:
        """Whether training has gone on without peers so far that this node cannot go back to what they have."""
        sender, watermark = self._senders[ranks], self.watermark.record
        if self.states is not None and self.states.hold_state(watermark):
            return False
        return self._run_ahead.is_late(ranks, sender.newest, sender.acknowledged, watermark)

    def _tell_pacer(self) -> None:
        senders = self._senders.values()
        if self.watermark.every > 1 and self.states is not None:
            state = sum(sender.record_bytes for sender in senders) * self._meter.ratio
            self.pacer.needs(state / self.watermark.every, self.states.waiting_bytes)
            return
        needed = sum(sender.bytes_per_step for sender in senders)
        record = sum(sender.record_bytes for sender in senders)
        waiting = sum(sender.waiting_bytes for sender in senders)
        # Where training waits for what is acknowledged, it does so long before peers have no room.
        kept = max((one.generation.sizes.kept for one in senders if one.generation is not None), default=0)
        records = self._run_ahead.records if self.job.wait else kept
        self.pacer.needs(needed, waiting, record * records or None)

    def _note_waiting(self, now: float) -> None:
        """Tell the pacer for how long training has waited for acknowledgements by now."""
        newest = {ranks: sender.newest for ranks, sender in self._senders.items()}
        waited = self._run_ahead.check_waiting(newest, self.watermark.record, self.watermark.every > 1, now)
        if waited is not None:
            self.pacer.waited(waited)
            self._meter.count_wait(waited)

    def patience(self, now: float) -> float:
        """Seconds until there is something to do without anything arriving."""
        if self.mail.loopback or (self.states is not None and self.states.busy):
            return 0.0
        if self._pump.wants:
            return self._pump.delay(now)
        times = [at - now for sender in self.all_senders if (at := sender.retry_at()) is not None]
        return max(0.0, min(times, default=60.0))
