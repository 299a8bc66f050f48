"""What this node sends: messages to peers, its generations, and their bytes as fast as these may go."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Collection, Iterable, Mapping

from memckpt.errors import PeerError
from memckpt.memory.region import Region
from memckpt.protocol.replication import SendGeneration, SendRecord
from memckpt.replication.keeping.outgoing import Outgoing
from memckpt.replication.keeping.sender import Sender
from memckpt.replication.pacing.pace import Pacer
from memckpt.replication.process.node_plan import NodePlan
from memckpt.replication.process.source import PartSource, RegionSource
from memckpt.replication.transport.transport import Delivery, Transport
from memckpt.replication.transport.wire import Whereabouts, WireMessage, encode
from memckpt.state.records import RankGroup

_log = logging.getLogger("memckpt.replicator")


class Mail:
    """Gives messages to peers, connecting to them when needed, and to the node itself.

    Args:
        node: name of this node.
        addresses: all nodes of the job, by name.
        transport: belongs to the caller.

    Attributes:
        loopback: messages of the node to itself that are yet to be handled.
    """

    def __init__(self, node: str, addresses: Mapping[str, str], transport: Transport) -> None:
        self._node = node
        self._addresses = addresses
        self._transport = transport
        self._connected: set[str] = set()
        self.loopback: deque[Delivery] = deque()

    def connect(self, peer: str) -> None:
        """Connect to a node of the job, unless that has been done."""
        if peer != self._node and peer not in self._connected and peer in self._addresses:
            self._connected.add(peer)
            self._transport.connect(peer, self._addresses[peer])

    def met(self, peer: str, partners: Collection[str]) -> None:
        """Note that a peer is there, whoever has connected first, and tell where those are that have been replaced.

        Args:
            peer: the peer.
            partners: nodes with which this one exchanges messages; they are told of the peer, and it is told of them.
        """
        self._connected.add(peer)
        others = [other for other in partners if other not in (peer, self._node)]
        if (moved := self._moved(peer)) is not None:
            for other in others:
                self.send(other, moved)
        for other in others:
            if (moved := self._moved(other)) is not None:
                self.send(peer, moved)

    def _moved(self, peer: str) -> Whereabouts | None:
        """Address of a peer that is elsewhere than the plan says; None: it is there, or not known."""
        address = self._transport.address_of(peer)
        return None if address in (None, self._addresses.get(peer)) else Whereabouts(peer, address)

    def send(self, peer: str, message: WireMessage, payload: bytes | memoryview = b"") -> None:
        """Give a message to a peer, or to this node."""
        if peer == self._node:
            self.loopback.append(Delivery(peer, encode(message), bytes(payload)))
            return
        self.connect(peer)
        try:
            self._transport.send(peer, encode(message), payload)
        except PeerError as error:
            # The peer does not drain its queue: drop it, and resynchronize when it reconnects.
            _log.warning("dropping peer %s: %s", peer, error)
            self._transport.forget_peer(peer)
            self._connected.discard(peer)

    def room(self, peer: str) -> int:
        """Bytes that a peer takes now; 0 or less: none."""
        return 1 if peer == self._node else self._transport.room(peer)


class OwnGenerations:
    """The newest generation of each of a node's units. Whoever sends a generation closes its regions.

    Args:
        plan: the node's part in the job's plan.
    """

    def __init__(self, plan: NodePlan) -> None:
        self._plan = plan
        self._sources: dict[RankGroup, RegionSource] = {}

    def open(self, message: SendGeneration, regions: list[Region]) -> Outgoing:
        """A generation that is complete on this node, to be sent."""
        source = RegionSource(message.spec, message.number, message.base, regions, message.missing, message.plain)
        for record, (step, meta, rank_states) in message.records.items():
            source.note_record(record, step, meta, rank_states)
        self._sources[message.ranks] = source
        window = self._plan.window(message)
        records = [record for record in sorted(message.records) if not window.private or record >= message.base]
        part = PartSource(source, "private" if window.private else "all")
        return Outgoing(window, part, records, source.layout.ring)

    def note_record(self, message: SendRecord) -> bool:
        """Note a record that is whole on this node; False: no generation of its unit is known."""
        source = self._sources.get(message.ranks)
        if source is None:
            return False
        source.note_record(message.record, message.step, message.meta, message.rank_states)
        return True

    def can_be_cut(self, ranks: RankGroup) -> bool:
        """Whether the unit's state can be copied and cut into virtual records."""
        source = self._sources.get(ranks)
        return source is not None and source.spec.mode != "snapshot"

    def begins_in_replica(self, ranks: RankGroup) -> bool:
        """Whether the virtual records with which the unit's generation begins are cut from its replica."""
        source = self._sources.get(ranks)
        return source is not None and source.spec.mode == "eager" and ranks not in self._plan.private

    def clear(self) -> None:
        self._sources.clear()


#: Bytes that are handed over before the loop looks at what has arrived.
PUMP_BYTES = 1 << 20


class Pump:
    """Sends what senders have, in turns and as fast as the pacer allows.

    Args:
        senders: all of a node; they belong to the caller.
        pacer: likewise.
    """

    def __init__(self, senders: Iterable[Sender], pacer: Pacer) -> None:
        self._turns = deque(senders)
        self._pacer = pacer
        self._paused_until = 0.0

    @property
    def wants(self) -> bool:
        """Whether there is anything to send to a holder that would take it."""
        return any(sender.wants for sender in self._turns)

    def work(self, now: float) -> None:
        """Send a piece, if it may go now."""
        self._paused_until = 0.0
        if not self.wants:
            return
        piece = self._pacer.piece(PUMP_BYTES)
        delay = self._pacer.delay(piece, now)
        if delay > 0:
            self._paused_until = now + delay
        else:
            self._pacer.sent(self.send(piece), now)

    def send(self, limit: int) -> int:
        """Send about `limit` bytes, of the senders in turns; returns how many."""
        sent = 0
        for sender in list(self._turns):
            self._turns.rotate(-1)
            sent += sender.pump(limit - sent)
            if sent >= limit:
                break
        return sent

    def delay(self, now: float) -> float:
        """Seconds until more may go."""
        return max(0.0, self._paused_until - now)
