"""Messages of a node to its peers, and to itself."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping

from memckpt.errors import PeerError
from memckpt.replication.transport.transport import Delivery, Transport
from memckpt.replication.transport.wire import WireMessage, encode

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

    def met(self, peer: str) -> None:
        """Note that a peer is there, whoever has connected first."""
        self._connected.add(peer)

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
