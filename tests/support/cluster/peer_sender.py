"""A sender of records to a peer, and what it sends."""

from __future__ import annotations

import random

from tests.support.cluster.peers_harness import (
    Node,
)

PAYLOAD = 128 << 10
RANDOM = random.Random(0).randbytes(1 << 20)


def payload_of(number: int) -> memoryview:
    at = number * 7919 % (len(RANDOM) - PAYLOAD)
    return memoryview(RANDOM)[at : at + PAYLOAD]


class Sender:
    """Sends numbered messages as room allows, every fourth one without a payload."""

    def __init__(self, node: Node, peer: str, count: int) -> None:
        self.node = node
        self.peer = peer
        self.count = count
        self.sent = 0

    def send(self) -> None:
        transport = self.node.transport
        while self.sent < self.count and transport.room(self.peer) >= PAYLOAD:
            payload = payload_of(self.sent) if self.sent % 4 else b""
            transport.send(self.peer, b"%d" % self.sent, payload)
            self.sent += 1

    def done(self, node: Node) -> bool:
        """Send what may be sent; whether all has arrived."""
        self.send()
        return len(node.bodies(self.node.name)) >= self.count

    def check(self, node: Node) -> None:
        received = [each for each in node.received if each.peer == self.node.name]
        assert [int(each.body) for each in received] == list(range(self.count))
        for number, each in enumerate(received):
            assert bytes(each.payload) == (bytes(payload_of(number)) if number % 4 else b"")
