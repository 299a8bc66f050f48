"""Messages of a node to its peers, and to itself."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Collection, Mapping

from memckpt.errors import PeerError
from memckpt.replication.transport.transport import Delivery, Transport
from memckpt.replication.transport.wire import Whereabouts, WireMessage, encode

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
            self._transport.forget(peer)
            self._connected.discard(peer)

    def room(self, peer: str) -> int:
        """Bytes that a peer takes now; 0 or less: none."""
        return 1 if peer == self._node else self._transport.room(peer)
