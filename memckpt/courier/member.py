"""One node's part in an attempt: what it sends to whom, what it keeps for whom, and how far all have got."""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable

import msgspec

from memckpt.agent.peer_messages import GiveUp, Passed, PeerJob, SendGeneration, SendRecord
from memckpt.courier.source import Part, RegionSource
from memckpt.memory.region import Region
from memckpt.peers.blob import Blob
from memckpt.peers.code import Code
from memckpt.peers.holder import Holder
from memckpt.peers.owner import Outgoing, Owner
from memckpt.peers.placement import place
from memckpt.peers.transport import Delivery, Transport
from memckpt.peers.watermark import Leader
from memckpt.peers.wire import (
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

_log = logging.getLogger("memckpt.courier")


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


class Member:
    """Belongs to the courier's loop.

    Args:
        node: this one's name.
        job: what there is to know of the attempt.
        holder: keeps other nodes' pieces; belongs to the caller, as does the transport.
        passed: told when the watermark has got further, or protection has changed.

    Attributes:
        loopback: messages of this node to itself.
        refused: what could not be understood, by reason.
    """

    def __init__(
        self, node: str, job: PeerJob, holder: Holder, transport: Transport, passed: Callable[[Passed], None]
    ) -> None:
        self._node = node
        self.job = job
        self._holder = holder
        self._transport = transport
        self._passed = passed
        self._addresses = {one.name: one.address for one in job.nodes}
        self._connected: set[str] = set()
        self.loopback: deque[Delivery] = deque()
        self.refused: Counter[str] = Counter()
        names = [one.name for one in job.nodes]
        self._leader_node = names[0]
        self.placement = place([one.domain for one in job.nodes], job.data, job.tolerate)
        self._code = Code(job.data, job.tolerate, job.backend)
        index = names.index(node)
        holders = [names[other] for other in self.placement.holders(index)]
        start = job.record or 0
        self._owners = {
            unit.ranks: Owner(unit.ranks, self._code, holders, self.send, self._room, start)
            for unit in job.units
            if unit.node == index
        }
        self._private = {unit.ranks for unit in job.units if unit.private}
        self._sources: dict[tuple[int, ...], RegionSource] = {}
        self._leader = Leader(names, start) if node == self._leader_node else None
        self._told = Acknowledged(node, start, False)
        self.watermark = Watermark(start, False)
        for other in {*holders, self._leader_node, *(names[owner] for owner, _ in self.placement.kept_by(index))}:
            self._connect(other)
        if self._leader is not None:
            for other in names:
                self._connect(other)

    def close(self) -> None:
        for owner in self._owners.values():
            owner.close()
        self._sources.clear()
        self._code.close()

    @property
    def owners(self) -> list[Owner]:
        return list(self._owners.values())

    def code_for(self, data: int) -> Code:
        """The code of pieces that make a stripe whole by `data`; one of another attempt's is made for it."""
        return self._code if data == self._code.data else Code(data, self.job.tolerate, self.job.backend)

    def refuse(self, reason: str) -> None:
        """Something came that is no message."""
        _log.warning("refused: %s", reason)
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
        self._transport.send(peer, encode(message), payload)

    def _room(self, peer: str) -> int:
        return self._transport.room(peer)

    def met(self, peer: str) -> None:
        """A peer is there for the first time, or has lost all that it had."""
        self._connected.add(peer)
        for owner in self._owners.values():
            owner.met(peer)
        if peer == self._leader_node:
            self.send(peer, self._told, b"")
        if self._leader is not None:
            self.send(peer, self._leader.watermark, b"")

    def handle(self, peer: str, message: WireMessage, payload: bytes | memoryview, now: float) -> None:
        """A message of a peer."""
        match message:
            case Open():
                refusal = self._holder.open(message.window)
                if refusal is not None:
                    self.send(peer, refusal, b"")
            case Put():
                if message.watermark > self._holder.watermark:
                    self._holder.passed(message.watermark, False)
                answer = self._holder.put(message.fragment, message.step, payload)
                if answer is not None:
                    self.send(peer, answer, b"")
            case Abandon():
                self._holder.abandon(message.owner, message.generation, message.record)
            case Stored():
                if message.owner in self._owners:
                    self._owners[message.owner].stored(peer, message)
            case NotStored():
                if message.owner in self._owners:
                    self._owners[message.owner].not_stored(peer, message, now)
            case Acknowledged():
                if self._leader is not None:
                    self._lead(message)
            case Watermark():
                if peer == self._leader_node:
                    self._pass(message)
            case _:
                self.refuse(f"{peer}: unexpected {type(message).__name__}")

    def _lead(self, message: Acknowledged) -> None:
        assert self._leader is not None
        changed = self._leader.acknowledged(message)
        if changed is None:
            return
        for node in self._addresses:
            if node != self._node:
                self.send(node, changed, b"")
        self._pass(changed)

    def _pass(self, watermark: Watermark) -> None:
        if watermark == self.watermark or watermark.record < self.watermark.record:
            return
        self.watermark = watermark
        self._holder.passed(watermark.record, watermark.whole)
        for owner in self._owners.values():
            owner.passed(watermark.record)
        self._passed(Passed(watermark.record, watermark.whole))

    # What this node's ranks do

    def begin(self, message: SendGeneration, regions: list[Region]) -> None:
        """A generation is complete on this node."""
        source = RegionSource(message.spec, message.number, message.base, regions, message.missing, message.plain)
        owner = self._owners.get(message.ranks)
        if owner is None:
            source.close()
            return
        for record, (step, meta, rank_states) in message.records.items():
            source.note(record, step, meta, rank_states)
        private = message.ranks in self._private
        spec, layout = message.spec, source.layout
        period = 1 if private else spec.period
        record_bytes = layout.by_value_area()[1]
        if not private:
            record_bytes += layout.gradient_bytes + layout.anchor_bytes
        window = Window(
            owner=message.ranks,
            node=self._node,
            generation=message.generation,
            attempt=self.job.attempt,
            piece=0,
            data=self.job.data,
            tolerate=self.job.tolerate,
            base=message.base,
            period=period,
            kept=period + spec.slots,
            every=1,
            private=private,
            replicas=spec.serves,
            record_bytes=record_bytes,
            static=source.has_static and not private,
            history=message.history,
            spec=msgspec.msgpack.encode(spec),
        )
        self._sources[message.ranks] = source
        records = [record for record in sorted(message.records) if not private or record >= message.base]
        owner.begin(Outgoing(window, _OwnSource(source, "private" if private else "all"), records))

    def committed(self, message: SendRecord) -> None:
        """A record is whole on this node."""
        source = self._sources.get(message.ranks)
        if source is not None:
            source.note(message.record, message.step, message.meta, message.rank_states)
            self._owners[message.ranks].committed(message.record)

    def give_up(self, message: GiveUp) -> None:
        """What a generation begins with cannot be sent any more."""
        owner = self._owners.get(message.ranks)
        if owner is not None:
            owner.give_up(message.generation)

    # Work

    def work(self, limit: int, now: float) -> None:
        """Send what is due, about `limit` bytes of it."""
        for owner in self._owners.values():
            owner.retry(now)
            owner.pump(limit)
        record = min((owner.acknowledged for owner in self._owners.values()), default=self._told.record)
        whole = all(owner.whole for owner in self._owners.values())
        told = Acknowledged(self._node, record, whole)
        if told != self._told:
            self._told = told
            if self._leader is not None:
                self._lead(told)
            else:
                self.send(self._leader_node, told, b"")

    def patience(self, now: float) -> float:
        """Seconds until there is something to do without anything arriving."""
        if self.loopback or any(owner.wants for owner in self._owners.values()):
            return 0.0
        times = [at - now for owner in self._owners.values() if (at := owner.retry_at()) is not None]
        return max(0.0, min(times, default=60.0))
