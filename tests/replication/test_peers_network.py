"""Transports on a network whose cables are cut and slowed down."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from memckpt.protocol.replication import PeerKeys
from memckpt.replication.transport import bulk
from memckpt.replication.transport.directory import make_keys
from tests.support.cluster import netns
from tests.support.cluster.netns import Network
from tests.support.cluster.peers_harness import PAYLOAD, Node, Sender, acquaint, drive, nodes_of

pytestmark = pytest.mark.skipif(netns.problem(as_root=True) is not None, reason=str(netns.problem(as_root=True)))

WINDOW = 4 << 20


@pytest.fixture(params=["curve", "plain"])
def keys(request: pytest.FixtureRequest) -> PeerKeys | None:
    return make_keys() if request.param == "curve" else None


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> Iterator[Network]:
    begin = bulk.Lane.__init__

    def begin_inside(lane: bulk.Lane, owner: bulk.Bulk, link: bytes, address: str) -> None:
        """ZeroMQ connects in threads that are where its node was made; lanes begin in the loop's."""
        with network.inside(network.addresses.index(owner.listener.getsockname()[0])):
            begin(lane, owner, link, address)

    with Network(2) as network:
        monkeypatch.setattr(bulk.Lane, "__init__", begin_inside)
        yield network


def node_on(network: Network, number: int, keys: PeerKeys | None) -> Node:
    with network.inside(number):
        return Node("ab"[number], keys, host=network.addresses[number], window_bytes=WINDOW)


@pytest.mark.promise('acknowledgements that keep coming, with `ack="wait"`')
@pytest.mark.promise("over an interrupted or slow network everything is delivered once, in order, with bounded memory")
@pytest.mark.thinned(2)
@pytest.mark.parametrize("way", ["cut", "unplug"])
def test_a_network_that_was_away_loses_nothing(network: Network, keys: PeerKeys | None, way: str) -> None:
    lose, find = (network.cut, network.mend) if way == "cut" else (network.unplug, network.plug)
    with nodes_of(node_on(network, 0, keys), node_on(network, 1, keys)) as (a, b):
        acquaint(a, b)
        senders = (Sender(a, "b", 0), Sender(b, "a", 0))

        def all_arrived() -> bool:
            return senders[0].done(b) & senders[1].done(a)

        def silent() -> bool:
            all_arrived()
            return a.transport.peers()["b"].silent and b.transport.peers()["a"].silent

        for _ in range(2):
            for sender in senders:
                sender.count += 50
            drive(a, b, until=all_arrived)
            lose(1)
            for sender in senders:
                sender.count += 50
            drive(a, b, until=silent)
            assert (a.transport.silent, b.transport.silent) == ({"b"}, {"a"})
            for node in (a, b):
                (state,) = node.transport.peers().values()
                assert 0 < state.link.unacknowledged_bytes <= WINDOW + PAYLOAD
                node.ahead += 3600
                node.tend()
            # ZeroMQ's own heartbeats have noticed, and the connections are given up.
            drive(a, b, until=lambda: a.transport.peers()["b"].link.down)
            drive(a, b, until=lambda: b.transport.peers()["a"].link.down)
            find(1)
        drive(a, b, until=all_arrived)
        for sender, node in zip(senders, (b, a), strict=True):
            sender.check(node)
            (state,) = sender.node.transport.peers().values()
            assert state.link.traffic.resent_messages > 0
            assert len(node.met) == 1
        drive(a, b, until=lambda: a.transport.room("b") == WINDOW)
        assert a.transport.silent == b.transport.silent == frozenset()


def test_a_slow_cable_loses_nothing(network: Network) -> None:
    keys = make_keys()
    network.limit(1, 400_000_000)
    with nodes_of(node_on(network, 0, keys), node_on(network, 1, keys)) as (a, b):
        acquaint(a, b)
        sender = Sender(a, "b", 200)
        drive(a, b, until=lambda: sender.done(b))
        sender.check(b)
        # The queue of the cable drops packets, but the connection stays.
        assert a.transport.peers()["b"].link.traffic.resent_messages == 0
