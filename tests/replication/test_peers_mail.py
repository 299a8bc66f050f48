"""A node's messages to its peers: who is told where a replicator is that was replaced."""

from __future__ import annotations

from typing import Any

import pytest

from memckpt.replication.process.send import Mail
from memckpt.replication.transport.wire import Whereabouts, WireMessage, decode

PLAN = {name: f"tcp://{name}:1" for name in "abcd"}


class Wire:
    """A transport of node a."""

    def __init__(self, moved: dict[str, str]) -> None:
        self.addresses = PLAN | moved
        self.sent: list[tuple[str, WireMessage]] = []

    def address_of(self, peer: str) -> str | None:
        return self.addresses.get(peer)

    def connect(self, peer: str, address: str) -> None:
        assert address == PLAN[peer]

    def send(self, peer: str, body: bytes, payload: bytes) -> None:
        self.sent.append((peer, decode(body)))


@pytest.mark.parametrize(
    ("moved", "met", "told"),
    [
        ({}, "b", []),
        ({"b": "tcp://b:2"}, "b", [("c", "b"), ("d", "b")]),
        ({"b": "tcp://b:2"}, "c", [("c", "b")]),
        ({"b": "tcp://b:2", "c": "tcp://c:2"}, "c", [("b", "c"), ("d", "c"), ("c", "b")]),
    ],
)
def test_who_is_met_is_told_where_others_have_moved_and_they_where_it_has(
    moved: dict[str, str], met: str, told: list[tuple[str, str]]
) -> None:
    wire: Any = Wire(moved)
    Mail("a", PLAN, wire).met(met, sorted(PLAN))
    assert wire.sent == [(to, Whereabouts(node, wire.addresses[node])) for to, node in told]
