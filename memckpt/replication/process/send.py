"""What this node sends: messages to peers, its generations, and their bytes as fast as these may go."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Collection, Iterable, Mapping

import msgspec

from memckpt.errors import PeerError
from memckpt.protocol.replication import PeerJob, SendGeneration, StateCopied
from memckpt.replication.coding.placement import place
from memckpt.replication.keeping.sender import Sender
from memckpt.replication.pacing.pace import Pacer
from memckpt.replication.transport import messages
from memckpt.replication.transport.links import Pieces
from memckpt.replication.transport.transport import Delivery, Transport


class NodePlan:
    """One node's part in a job's plan: whom it sends to, whom it keeps for, and who leads. It does not change.

    `holders`: by the index of the fragment. `private`: units of which only their ranks' own bytes are sent.
    """

    def __init__(self, node: str, job: PeerJob) -> None:
        self.node, self.job = node, job
        self.addresses = {one.name: one.address for one in job.nodes}
        names = list(self.addresses)
        own = names.index(node)
        self.leader = names[0]
        self.placement = place([one.domain for one in job.nodes], job.data, job.tolerate)
        self.holders = tuple(names[other] for other in self.placement.holders[own])
        self.own = tuple(unit.ranks for unit in job.units if unit.node == own)
        self.private = frozenset(unit.ranks for unit in job.units if unit.private)
        kept = {names[owner]: index for owner, index in self.placement.kept[own]}
        self._owners = frozenset(kept)
        #: By unit, its node and which of the node's fragments is kept here.
        self._kept = {
            unit.ranks: (names[unit.node], kept[names[unit.node]]) for unit in job.units if names[unit.node] in kept
        }

    @property
    def leads(self) -> bool:
        return self.node == self.leader

    @property
    def partners(self) -> frozenset[str]:
        """Nodes with which this one exchanges messages all the time; it may be among them."""
        return frozenset(self.addresses) if self.leads else frozenset({*self.holders, *self._owners, self.leader})

    def window(self, message: SendGeneration | StateCopied) -> messages.Window:
        """A generation of this node's records, or one of its states by value, as holders are told; for fragment 0."""
        by_value = isinstance(message, StateCopied)
        return messages.Window(
            owner=message.ranks,
            node=self.node,
            generation=message.generation,
            attempt=self.job.attempt,
            index=0,
            data=self.job.data,
            tolerate=self.job.tolerate,
            base=message.record if isinstance(message, StateCopied) else message.base,
            private=message.ranks in self.private and not by_value,
            history=message.history,
            spec=msgspec.msgpack.encode(message.spec),
            by_value=by_value,
        )

    def unfit(self, peer: str, message: messages.WireMessage) -> str:
        """Why a peer may not say something, in words; empty if it may."""
        job = self.job
        match message:
            case messages.Open(window):
                expected = (*self._kept.get(window.owner, ("", 0)), job.data, job.tolerate)
                if (peer, window.index, window.data, window.tolerate) != expected or window.node != peer:
                    return f"fragment {window.index} of ranks {list(window.owner)} on {window.node} is not to be kept"
                if window.private != (window.owner in self.private):
                    return f"private={window.private} is not as planned"
                if window.by_value and (window.private or job.every_steps == 1):
                    return "no state by value of it is planned"
            case messages.Put() | messages.Abandon():
                told = message.fragments if isinstance(message, messages.Put) else (message,)
                for owner in {one.owner for one in told}:
                    if self._kept.get(owner, ("", 0))[0] != peer:
                        return f"ranks {list(owner)} are not on it"
            case messages.Stored() | messages.Kept() | messages.NotStored():
                if message.owner not in self.own or peer not in self.holders:
                    return f"it keeps nothing of ranks {list(message.owner)} for this node"
            case messages.Acknowledged():
                if not self.leads or message.node != peer:
                    return f"it speaks for {message.node}"
            case messages.Watermark():
                if peer != self.leader or self.leads:
                    return "it does not lead"
            case messages.Whereabouts():
                if message.node not in self.addresses or message.node == self.node:
                    return f"{message.node} is no other node of this job"
            case _:
                return "unexpected"
        return ""


_log = logging.getLogger("memckpt.replicator")


class Mail:
    """Gives messages to peers, connecting to them when needed, and to the node itself, which handles `loopback`."""

    def __init__(self, node: str, addresses: Mapping[str, str], transport: Transport) -> None:
        self._node, self._addresses, self._transport = node, addresses, transport
        self._connected: set[str] = set()
        self.loopback: deque[Delivery] = deque()

    def connect(self, peer: str) -> None:
        """Connect to a node of the job, unless that has been done."""
        if peer != self._node and peer not in self._connected and peer in self._addresses:
            self._connected.add(peer)
            self._transport.connect(peer, self._addresses[peer])

    def met(self, peer: str, partners: Collection[str]) -> None:
        """Note that a peer is there, whoever has connected first, and tell it and `partners` who has been replaced."""
        self._connected.add(peer)
        others = [other for other in partners if other not in (peer, self._node)]
        if (moved := self._moved(peer)) is not None:
            for other in others:
                self.send(other, moved)
        for other in others:
            if (moved := self._moved(other)) is not None:
                self.send(peer, moved)

    def _moved(self, peer: str) -> messages.Whereabouts | None:
        """Address of a peer that is elsewhere than the plan says; None: it is there, or not known."""
        address = self._transport.address_of(peer)
        return None if address in (None, self._addresses.get(peer)) else messages.Whereabouts(peer, address)

    def send(self, peer: str, message: messages.WireMessage, payload: Pieces = ()) -> None:
        """Give a message to a peer, or to this node."""
        if peer == self._node:
            self.loopback.append(Delivery(peer, messages.encode(message), b"".join(payload)))
            return
        self.connect(peer)
        try:
            self._transport.send(peer, messages.encode(message), *payload)
        except PeerError as error:
            # The peer does not drain its queue: drop it, and resynchronize when it reconnects.
            _log.warning("dropping peer %s: %s", peer, error)
            self._transport.forget_peer(peer)
            self._connected.discard(peer)

    def room(self, peer: str) -> int:
        """Bytes that a peer takes now; 0 or less: none."""
        return 1 if peer == self._node else self._transport.room(peer)


#: Bytes that are handed over before the loop looks at what has arrived.
PUMP_BYTES = 1 << 20


class Pump:
    """Sends what a node's senders have, in turns and as fast as the pacer allows."""

    def __init__(self, senders: Iterable[Sender], pacer: Pacer) -> None:
        self._turns = deque(senders)
        self._pacer = pacer
        self._paused_until = 0.0

    @property
    def wants(self) -> bool:
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
