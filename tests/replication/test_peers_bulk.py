"""Payloads on their lanes: no nonce serves twice, what was changed is sent again, strangers stop nobody."""

from __future__ import annotations

import contextlib
import socket
from collections import Counter
from collections.abc import Iterator

import pytest

from memckpt.protocol.descriptors import readable
from memckpt.protocol.replication import PeerKeys
from memckpt.replication.transport import bulk
from memckpt.replication.transport.directory import make_keys, make_password
from tests.support.cluster.peers_harness import Node, Proxy, Sender, acquaint, drive, free_port, nodes_of, payload_of


@contextlib.contextmanager
def laned(keys: PeerKeys | str) -> Iterator[tuple[Node, Node, Proxy]]:
    """Two nodes that have met, and the proxy through which payloads get to the second one."""
    with contextlib.ExitStack() as stack:
        port = free_port()
        ports = free_port(), port
        advertise = f"tcp://127.0.0.1:{ports[0]}", f"tcp://127.0.0.1:{port}"
        a, b = stack.enter_context(
            nodes_of(Node("a", keys), Node("b", keys, window_bytes=2 << 20, advertise=advertise))
        )
        proxy = Proxy(port, b.bulk_port)
        stack.callback(proxy.close)
        stack.callback(Proxy(ports[0], b.port).close)
        acquaint(a, b)
        yield a, b, proxy


def cut_now_and_then(node: Node, proxy: Proxy) -> bool:
    """Cut the node's proxy each time that so many messages have come; true."""
    if len(node.received) > 40 * proxy.cuts + 20:
        proxy.cut()
    return True


def lane_of(node: Node, peer: str) -> bulk.Lane | None:
    return node.transport._directory.peers[peer].lane.lane


@pytest.mark.promise("over an interrupted or slow network everything is delivered once, in order, with bounded memory")
@pytest.mark.parametrize("keys", [make_keys(), make_password()], ids=["curve", "plain"])
def test_all_arrives_though_lanes_alone_are_cut(keys: PeerKeys | str) -> None:
    with laned(keys) as (a, b, proxy):
        sender = Sender(a, "b", 300)
        drive(a, b, until=lambda: cut_now_and_then(b, proxy) & sender.done(b))
        sender.check(b)
        assert proxy.cuts >= 3
        assert a.transport.peers()["b"].link.traffic.resent_messages > 0
        assert len(b.met) == 1
        assert set(b.transport.refused) <= {"payload lost", "out of order", "handshake"}


def test_a_lane_whose_end_the_other_node_does_not_hear_of_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the network is cut, and one kernel gives up: what waits for that lane is not waited for any more."""
    keys = make_keys()
    with nodes_of(Node("a", keys), Node("b", keys)) as (a, b):
        acquaint(a, b)
        sender = Sender(a, "b", 2)
        drive(a, b, until=lambda: sender.done(b))
        [incoming] = b.transport._bulk._lanes.values()
        monkeypatch.setattr(incoming, "work", lambda: None)
        lane = lane_of(a, "b")
        assert lane is not None
        a.transport.send("b", b"2", payload_of(2))
        assert not lane._waiting
        lane.close()
        drive(a, b, until=lambda: len(b.received) == 3)
        assert bytes(b.received[-1].payload) == bytes(payload_of(2))


@pytest.mark.promise("what was changed on its way to another node is not stored, and is sent again")
def test_a_payload_that_is_changed_on_its_way_is_counted_and_sent_again() -> None:
    with laned(make_keys()) as (a, b, proxy):
        sender = Sender(a, "b", 100)
        passed = [0, 1 << 20]

        def flip(data: bytes) -> bytes:
            passed[0] += len(data)
            if passed[0] < passed[1]:
                return data
            passed[1] += 3 << 20
            return data[:-1] + bytes([data[-1] ^ 1])

        proxy.change = flip
        drive(a, b, until=lambda: sender.done(b))
        sender.check(b)
        assert b.transport.refused["tampered"] >= 2
        assert a.transport.peers()["b"].link.traffic.resent_messages > 0


def test_no_nonce_is_used_twice_under_one_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by what is sent again, on another connection, in the other direction, or by a node that comes back."""
    used: Counter[tuple[bytes, bytes]] = Counter()
    real = bulk.Cipher

    class Watched:
        def __init__(self, algorithm: bulk.AES, mode: bulk.GCM) -> None:
            self._algorithm, self._mode = algorithm, mode
            self.decryptor = real(algorithm, mode).decryptor

        def encryptor(self) -> object:
            used[bytes(self._algorithm.key), self._mode.initialization_vector] += 1
            return real(self._algorithm, self._mode).encryptor()

    monkeypatch.setattr(bulk, "Cipher", Watched)
    keys = make_keys()
    with laned(keys) as (a, b, proxy):
        there, back = Sender(a, "b", 150), Sender(b, "a", 50)
        drive(a, b, until=lambda: cut_now_and_then(b, proxy) & there.done(b) & back.done(a))
        assert proxy.cuts
        assert a.transport.peers()["b"].link.traffic.resent_messages > 0
        a.transport.close()
        with nodes_of(Node("a", keys)) as (again,):
            acquaint_one(again, b)
            more = Sender(again, "b", 200)
            drive(again, b, until=lambda: more.done(b))
    assert len({key for key, _ in used}) >= 4
    assert set(used.values()) == {1}


def acquaint_one(node: Node, other: Node) -> None:
    node.transport.connect(other.name, other.transport.address)
    drive(node, other, until=lambda: bool(node.met))


def test_what_was_overheard_of_a_lane_opens_nothing() -> None:
    """Neither does a lane that somebody else repeats begin, nor a payload open that comes twice on its own lane."""
    with laned(make_keys()) as (a, b, proxy):
        sender = Sender(a, "b", 4)
        drive(a, b, until=lambda: sender.done(b))
        [captured] = proxy.captured
        assert bytes(payload_of(1))[:64] not in bytes(captured)
        with socket.create_connection(("127.0.0.1", b.bulk_port)) as replay:
            replay.sendall(captured)
            drive(a, b, until=lambda: b.transport.refused["unauthenticated"] == 1)
        lane = lane_of(a, "b")
        assert lane is not None
        sealed = bytes(lane._memory)  # the last one
        lane._sock.sendall(sealed)
        before = len(b.received)
        a.transport.send("b", b"4", payload_of(4))
        drive(a, b, until=lambda: len(b.received) > before)
        assert b.transport.refused["tampered"] == 1
        assert bytes(b.received[-1].payload) == bytes(payload_of(4))


@pytest.mark.promise(
    "a process without keys can neither read, write nor stop a replicator, and gets at most 1 MiB buffered"
)
@pytest.mark.parametrize("keys", [make_keys(), make_password()], ids=["curve", "plain"])
def test_strangers_on_the_port_of_payloads_stop_nobody(keys: PeerKeys | str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk, "_MOST_STRANGERS", 5)
    with contextlib.ExitStack() as stack:
        a, b = stack.enter_context(nodes_of(Node("a", keys), Node("b", keys)))
        acquaint(a, b)

        def stranger() -> socket.socket:
            return stack.enter_context(socket.create_connection(("127.0.0.1", b.bulk_port), timeout=20.0))

        for number in range(20):
            stranger().sendall(b"x" * number)  # never enough
        drive(a, b, until=lambda: b.transport.refused["handshake"] == 15)
        sender = Sender(a, "b", 20)
        drive(a, b, until=lambda: sender.done(b))
        sender.check(b)
        guess = stranger()
        drive(a, b, until=lambda: readable(guess, 0.0))
        assert len(guess.recv(1 << 20)) == 32
        guess.sendall(bytes(1 << 16))
        drive(a, b, until=lambda: b.transport.refused["unauthenticated"] == 1)
        assert set(b.transport.refused) == {"handshake", "unauthenticated"}
        assert max(end._place.nbytes for end in b.transport._bulk.strangers) <= 64


def test_a_stranger_who_says_nothing_is_cut_off() -> None:
    with nodes_of(Node("a", make_keys())) as (a,):
        a.transport._bulk.patience = 0.0
        with socket.create_connection(("127.0.0.1", a.bulk_port)):
            drive(a, until=lambda: a.transport.refused["handshake"] == 1)
        assert not a.transport._bulk.ends


@pytest.mark.promise(
    "a process without keys can neither read, write nor stop a replicator, and gets at most 1 MiB buffered"
)
def test_who_listens_in_the_place_of_a_peer_gets_no_payload() -> None:
    with contextlib.ExitStack() as stack:
        keys, port = make_keys(), free_port()
        listener = stack.enter_context(socket.create_server(("127.0.0.1", port)))
        ports = free_port(), port
        advertise = f"tcp://127.0.0.1:{ports[0]}", f"tcp://127.0.0.1:{port}"
        a, b = stack.enter_context(nodes_of(Node("a", keys), Node("b", keys, advertise=advertise)))
        stack.callback(Proxy(ports[0], b.port).close)
        acquaint(a, b)
        a.transport.send("b", b"", payload_of(0))
        drive(a, b, until=lambda: readable(listener, 0.0))
        fake = stack.enter_context(listener.accept()[0])
        fake.sendall(bytes(32))
        drive(a, b, until=lambda: readable(fake, 0.0))
        assert len(fake.recv(1 << 20)) == 64
        fake.sendall(bytes(32))
        drive(a, b, until=lambda: a.transport.refused["unauthenticated"] == 1)
        fake.settimeout(20.0)
        assert fake.recv(1 << 20) == b""
        assert not b.received


def test_a_lane_to_a_port_that_says_nothing_is_opened_again() -> None:
    """As behind a firewall that lets connections through and no bytes: the next lane may get through."""
    with contextlib.ExitStack() as stack:
        keys, port = make_keys(), free_port()
        silent = stack.enter_context(socket.create_server(("127.0.0.1", port)))
        ports = free_port(), port
        advertise = f"tcp://127.0.0.1:{ports[0]}", f"tcp://127.0.0.1:{port}"
        a, b = stack.enter_context(nodes_of(Node("a", keys), Node("b", keys, advertise=advertise)))
        stack.callback(Proxy(ports[0], b.port).close)
        acquaint(a, b)
        a.transport._bulk.patience = 0.0
        a.transport.send("b", b"", payload_of(0))
        for _ in range(2):
            drive(a, b, until=lambda: readable(silent, 0.0))
            stack.enter_context(silent.accept()[0])
        a.transport._bulk.patience = 20.0
        silent.close()
        stack.callback(Proxy(port, b.bulk_port).close)
        drive(a, b, until=lambda: len(b.received) == 1)
        assert bytes(b.received[0].payload) == bytes(payload_of(0))


def test_more_bytes_than_a_payload_may_have_are_not_made_room_for() -> None:
    with nodes_of(*(Node(name, keys) for keys in [make_keys()] for name in "ab")) as (a, b):
        acquaint(a, b)
        sender = Sender(a, "b", 2)
        drive(a, b, until=lambda: sender.done(b))
        lane, [incoming] = lane_of(a, "b"), b.transport._bulk._lanes.values()
        assert lane is not None
        lane._sock.sendall(b"\x7f\xff\xff\xff")
        drive(a, b, until=lambda: incoming.closed)
        assert b.transport.refused["malformed"] == 1


def test_no_more_lanes_than_there_may_be_are_let_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of a link that has one takes its place."""
    keys = make_keys()
    with nodes_of(Node("a", keys), Node("b", keys), Node("c", keys)) as (a, b, c):
        acquaint(a, b, c)
        first = Sender(a, "b", 2)
        drive(a, b, c, until=lambda: first.done(b))
        monkeypatch.setattr(bulk, "_MOST_LANES", 1)
        c.transport.send("b", b"0", payload_of(0))
        drive(a, b, c, until=lambda: b.transport.refused["too many lanes"] >= 1)
        assert set(b.transport.refused) == {"too many lanes"}
        lane = lane_of(a, "b")
        assert lane is not None
        lane.close()
        a.transport.send("b", b"2", payload_of(2))
        drive(a, b, c, until=lambda: len(b.received) == 3)
        assert len(b.transport._bulk._lanes) == 1


def test_ports_that_are_not_there_are_named() -> None:
    from memckpt.errors import PeerError

    with pytest.raises(PeerError, match=r"above peers\.port"):
        Node("a", None, port=65535)
