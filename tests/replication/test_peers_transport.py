"""Transports over real sockets: order, cut connections, back-pressure, incarnations, and those who may not speak."""

from __future__ import annotations

import contextlib
import random
import socket
from collections.abc import Iterator

import pytest
import zmq

from memckpt.errors import PeerError, PeerOverrunError, UsageError
from memckpt.protocol.descriptors import readable
from memckpt.protocol.replication import PeerKeys
from memckpt.replication.transport import directory, links
from memckpt.replication.transport.directory import make_keys, make_password
from memckpt.replication.transport.transport import Transport
from tests.support.cluster.peers_harness import (
    PAYLOAD,
    Node,
    Proxy,
    Sender,
    acquaint,
    assert_nothing_is_left_beyond,
    drive,
    free_port,
    nodes_of,
    open_things,
    payload_of,
)


@pytest.fixture(params=["curve", "plain"])
def keys(request: pytest.FixtureRequest) -> PeerKeys | str:
    return make_keys() if request.param == "curve" else make_password()


@pytest.fixture
def proxied(keys: PeerKeys | str) -> Iterator[tuple[Node, Node, Proxy, Proxy]]:
    """Two nodes that reach each other through proxies only."""
    with contextlib.ExitStack() as stack:
        nodes, proxies = [], []
        for name in "ab":
            ports = free_port(), free_port()
            advertise = f"tcp://127.0.0.1:{ports[0]}", f"tcp://127.0.0.1:{ports[1]}"
            nodes.append(Node(name, keys, window_bytes=2 << 20, advertise=advertise))
            stack.enter_context(nodes_of(nodes[-1]))
            proxies.append(Proxy(ports[0], nodes[-1].port, Proxy(ports[1], nodes[-1].bulk_port)))
            stack.callback(proxies[-1].close)
        acquaint(*nodes)
        yield nodes[0], nodes[1], proxies[0], proxies[1]


def test_all_arrives_once_however_often_connections_are_cut(proxied: tuple[Node, Node, Proxy, Proxy]) -> None:
    a, b, to_a, to_b = proxied
    rng = random.Random(1)
    senders = (Sender(a, "b", 300), Sender(b, "a", 300))
    cut_at = [rng.randrange(5, 40)]

    def done() -> bool:
        if len(a.received) + len(b.received) > cut_at[-1]:
            rng.choice((to_a, to_b)).cut()
            cut_at.append(cut_at[-1] + rng.randrange(10, 90))
        return senders[0].done(b) & senders[1].done(a)

    drive(a, b, until=done)
    senders[0].check(b)
    senders[1].check(a)
    assert to_a.cuts + to_b.cuts >= 5
    states = a.transport.peers()["b"], b.transport.peers()["a"]
    assert sum(state.link.traffic.resent_messages for state in states) > 0
    assert len(a.met) == len(b.met) == 1


def test_a_connection_that_brings_nothing_any_more_is_noticed(proxied: tuple[Node, Node, Proxy, Proxy]) -> None:
    """Its ends are open, but in between all is lost, as with a cable that is cut."""
    a, b, _, to_b = proxied
    to_b.stopped = True
    sender = Sender(a, "b", 40)
    drive(a, b, until=lambda: sender.done(b) or b.transport.peers()["a"].silent)
    assert a.transport.room("b") < PAYLOAD
    to_b.stopped = False
    to_b.cut()
    drive(a, b, until=lambda: sender.done(b))
    sender.check(b)
    drive(a, b, until=lambda: not b.transport.peers()["a"].silent)


def test_whoever_does_not_read_is_sent_a_window_and_no_more(keys: PeerKeys | str) -> None:
    with nodes_of(Node("a", keys, window_bytes=1 << 20), Node("b", keys)) as (a, b):
        acquaint(a, b)
        sender = Sender(a, "b", 50)
        sender.send()
        stopped_at = sender.sent
        assert stopped_at < 20
        b.reads = False
        before = a.transport.peers()["b"].link.unacknowledged_bytes
        for _ in range(20_000):
            # Hours of heartbeats.
            a.ahead += 1
            a.tend()
        a.read()
        sender.send()
        after = a.transport.peers()["b"].link.unacknowledged_bytes
        assert sender.sent == stopped_at
        assert after == before <= (1 << 20) + PAYLOAD
        b.reads = True
        drive(a, b, until=lambda: sender.done(b))
        sender.check(b)


def test_small_messages_are_taken_without_room_up_to_a_number(
    monkeypatch: pytest.MonkeyPatch, keys: PeerKeys | str
) -> None:
    monkeypatch.setattr(links, "MAX_MESSAGES", 3000)
    with nodes_of(Node("a", keys, window_bytes=1000), Node("b", keys)) as (a, b):
        acquaint(a, b)
        for number in range(3000):
            a.transport.send("b", b"%d" % number)
        assert a.transport.room("b") < 0
        with pytest.raises(PeerOverrunError):
            a.transport.send("b", b"one more")
        drive(a, b, until=lambda: len(b.received) == 3000)
        assert b.bodies() == [b"%d" % number for number in range(3000)]


def test_nothing_may_be_sent_to_a_peer_that_was_not_met(keys: PeerKeys | str) -> None:
    with nodes_of(Node("a", keys), Node("b", keys)) as (a, b):
        with pytest.raises(UsageError, match="no peer 'b'"):
            a.transport.send("b", b"")
        assert a.transport.room("b") == 0
        a.transport.connect("b", b.transport.address)
        assert a.transport.room("b") == 0
        a.transport.send("b", b"small")
        drive(a, b, until=lambda: bool(b.received))
        assert b.bodies() == [b"small"]
        assert [met.peer for met in b.met] == ["a"]


# Incarnations


def test_who_comes_back_is_met_anew(keys: PeerKeys | str) -> None:
    port = free_port()
    with nodes_of(Node("a", keys, window_bytes=1 << 20), Node("b", keys, port=port)) as (a, b):
        acquaint(a, b)
        b.reads = False
        sender = Sender(a, "b", 50)
        sender.send()
        b.transport.close()
        with nodes_of(Node("b", keys, port=port)) as (again,):
            drive(a, again, until=lambda: len(a.met) == 2 and len(again.met) == 1)
            assert a.met[1].incarnation != a.met[0].incarnation
            assert a.transport.room("b") == 1 << 20
            a.transport.send("b", b"first")
            again.transport.send("a", b"hello")
            drive(a, again, until=lambda: bool(again.received) and bool(a.received))
            assert again.bodies() == [b"first"]


def test_who_comes_back_elsewhere_says_where(keys: PeerKeys | str) -> None:
    with nodes_of(Node("a", keys), Node("b", keys)) as (a, b):
        acquaint(a, b)
        b.transport.close()
        with nodes_of(Node("b", keys)) as (again,):
            again.transport.connect("a", a.transport.address)
            drive(a, again, until=lambda: len(a.met) == 2 and len(again.met) == 1)
            assert a.transport.peers()["b"].address == again.transport.address
            a.transport.send("b", b"x")
            drive(a, again, until=lambda: again.bodies() == [b"x"])
            # A plan that is made once more names where the first one was.
            a.transport.connect("b", b.transport.address)
            assert a.transport.peers()["b"].address == again.transport.address
            a.transport.send("b", b"y")
            drive(a, again, until=lambda: again.bodies() == [b"x", b"y"])


def test_two_that_come_back_elsewhere_find_each_other_by_what_a_third_one_says(keys: PeerKeys | str) -> None:
    with nodes_of(Node("a", keys), Node("b", keys)) as (a, b):
        acquaint(a, b)
        b.transport.close()
        with nodes_of(Node("b", keys)) as (again,):
            # Each knows where the other one was.
            a.transport.close()
            again.transport.connect("a", a.transport.address)
            with nodes_of(Node("a", keys)) as (other,):
                other.transport.connect("b", b.transport.address)
                drive(other, again, until=lambda: other.transport.silent == {"b"} and again.transport.silent == {"a"})
                other.transport.hint("b", again.transport.address)
                drive(other, again, until=lambda: len(other.met) == 1 and len(again.met) == 1)
                again.transport.send("a", b"x")
                drive(other, again, until=lambda: other.bodies() == [b"x"])


def test_what_others_say_of_a_peer_counts_less_than_what_it_says(keys: PeerKeys | str) -> None:
    nowhere = f"tcp://127.0.0.1:{free_port()}"
    with nodes_of(Node("a", keys), Node("b", keys)) as (a, b):
        acquaint(a, b)
        a.transport.hint("b", nowhere)
        a.transport.send("b", b"x")
        drive(a, b, until=lambda: b.bodies() == [b"x"])
        assert a.transport.address_of("b") == b.transport.address
        b.reads = False
        drive(a, b, until=lambda: a.transport.silent == {"b"} and a.transport.address_of("b") == nowhere)
        b.reads = True
        drive(a, b, until=lambda: a.transport.address_of("b") == b.transport.address)
        a.transport.send("b", b"y")
        drive(a, b, until=lambda: b.bodies() == [b"x", b"y"])


def test_those_who_announce_themselves_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory, "MAX_PEERS", 2)
    with nodes_of(Node("a", None), *(Node(f"n{number}", None) for number in range(4))) as (a, *others):
        for other in others:
            other.transport.connect("a", a.transport.address)
        drive(a, *others, until=lambda: a.transport.refused["too many peers"] >= 4)
        assert len(a.transport.peers()) == 2


def test_who_is_forgotten_is_not_heard_until_it_is_named_again(keys: PeerKeys | str) -> None:
    with nodes_of(Node("a", keys), Node("b", keys)) as (a, b):
        acquaint(a, b)
        a.transport.send("b", b"before")
        drive(a, b, until=lambda: bool(b.received))
        a.transport.forget_peer("b")
        a.transport.forget_peer("b")
        b.transport.send("a", b"to nobody")
        drive(a, b, until=lambda: a.transport.refused["unknown sender"] >= 3)
        assert not a.received
        assert a.transport.peers() == {}
        a.transport.connect("b", b.transport.address)
        drive(a, b, until=lambda: len(a.met) == 2 and len(b.met) == 2)
        b.transport.send("a", b"again")
        a.transport.send("b", b"again")
        drive(a, b, until=lambda: bool(a.received) and len(b.received) == 2)
        assert a.bodies() == [b"again"]
        assert b.bodies() == [b"before", b"again"]
        assert a.transport.bytes_sent == len(b"before" + b"again")


def test_another_address_replaces_the_first(keys: PeerKeys | str) -> None:
    with nodes_of(Node("a", keys), Node("b", keys)) as (a, b):
        a.transport.connect("b", f"tcp://127.0.0.1:{free_port()}")
        drive(a, b, until=lambda: a.transport.peers()["b"].link.down)
        a.transport.send("b", b"x")
        a.transport.connect("b", b.transport.address)
        drive(a, b, until=lambda: b.bodies() == [b"x"])


# Those who may not


@pytest.mark.promise(
    "a process without keys can neither read, write nor stop a replicator, and gets at most 1 MiB buffered"
)
def test_an_outsider_can_neither_write_nor_read() -> None:
    keys, others = make_keys(), make_keys()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        with nodes_of(Node("a", keys), Node("b", keys)) as (a, b):
            acquaint(a, b)
            refused = a.transport.refused
            for public, server in (
                (None, None),
                (others, keys.server_public),
                (others, others.server_public),
                (keys, others.server_public),
            ):
                outsider = context.socket(zmq.DEALER)
                outsider.linger = 0
                if public is not None and server is not None:
                    outsider.curve_publickey = public.client_public.encode()
                    outsider.curve_secretkey = public.client_secret.encode()
                    outsider.curve_serverkey = server.encode()
                before = refused["handshake"] + refused["unauthenticated"]
                outsider.connect(a.transport.address)
                outsider.send(b"x")
                drive(a, b, until=lambda start=before: refused["handshake"] + refused["unauthenticated"] > start)  # type: ignore[misc]
                outsider.close()
            assert refused["unauthenticated"] > 0
            assert refused["handshake"] > 0
            assert set(refused) == {"handshake", "unauthenticated"}
            # Who listens in the place of a peer gets nothing.
            for curve in (False, True):
                fake = context.socket(zmq.ROUTER)
                fake.linger = 0
                if curve:
                    fake.curve_server = True
                    fake.curve_secretkey = others.server_secret.encode()
                fake.bind("tcp://127.0.0.1:*")
                monitor = fake.get_monitor_socket(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
                a.transport.connect("c", fake.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0"))
                a.transport.send("c", b"secret")
                drive(a, b, until=lambda seen=monitor: seen.poll(0) != 0)  # type: ignore[misc]
                assert fake.poll(0) == 0
                fake.disable_monitor()
                fake.close()
                a.transport.forget_peer("c")
            a.transport.send("b", b"still")
            drive(a, b, until=lambda: b.bodies() == [b"still"])
            assert not a.received
    finally:
        context.destroy(linger=0)


@pytest.mark.promise(
    "a process without keys can neither read, write nor stop a replicator, and gets at most 1 MiB buffered"
)
def test_a_stranger_gets_no_message_in_however_many_frames_it_has(keys: PeerKeys | str) -> None:
    """A message of many frames is buffered until it is whole, so strangers are stopped before their first."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        with nodes_of(Node("a", keys)) as (a,):
            refused = a.transport.refused
            for word in (None, b"guess"):
                stranger = context.socket(zmq.DEALER)
                stranger.linger = 0
                stranger.immediate = True
                if word is not None:
                    stranger.plain_username, stranger.plain_password = b"memckpt", word
                before = refused["handshake"] + refused["unauthenticated"]
                stranger.connect(a.transport.address)
                drive(a, until=lambda start=before: refused["handshake"] + refused["unauthenticated"] > start)  # type: ignore[misc]
                with pytest.raises(zmq.Again):
                    stranger.send(b"x", zmq.NOBLOCK | zmq.SNDMORE)
                stranger.close()
            assert set(refused) <= {"handshake", "unauthenticated"}
    finally:
        context.destroy(linger=0)


@pytest.mark.promise(
    "a process without keys can neither read, write nor stop a replicator, and gets at most 1 MiB buffered"
)
def test_a_stranger_has_little_buffered_before_it_has_shown_its_keys(keys: PeerKeys | str) -> None:
    mechanism = b"CURVE" if isinstance(keys, PeerKeys) else b"PLAIN"
    with nodes_of(Node("a", keys)) as (a,), socket.create_connection(("127.0.0.1", a.port)) as stranger:
        stranger.settimeout(20.0)
        stranger.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x00" + mechanism.ljust(20, b"\0") + bytes(32))
        stranger.sendall(b"\x06" + (links.FRAME_BYTES * 2).to_bytes(8, "big"))  # a command's header
        while True:  # until it is cut off, having sent nothing of that yet
            try:
                if not stranger.recv(4096):
                    break
            except ConnectionResetError:
                break


def test_bodies_larger_than_a_frame_arrive_whole(keys: PeerKeys | str) -> None:
    bodies = [bytes([number]) * (number * links.FRAME_BYTES // 2 + number) for number in range(7)]
    with nodes_of(Node("a", keys), Node("b", keys)) as (a, b):
        acquaint(a, b)
        for body in bodies:
            a.transport.send("b", body, b"beside")
        drive(a, b, until=lambda: len(b.received) == len(bodies))
        assert b.bodies() == bodies
        assert {bytes(one.payload) for one in b.received} == {b"beside"}
        assert not b.transport.refused


@pytest.mark.promise("replicators of different versions do not connect")
def test_who_speaks_another_version_is_not_met(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    keys = make_keys()
    with nodes_of(Node("a", keys), Node("b", keys)) as (a, b):
        monkeypatch.setattr(links, "WIRE_VERSION", links.WIRE_VERSION + 1)
        for one, other in ((a, b), (b, a)):
            one.transport.connect(other.name, other.transport.address)
        drive(a, b, until=lambda: min(one.transport.refused["version"] for one in (a, b)) > 0)
        assert not a.met
        assert not b.met
        assert "install the same memckpt on all nodes" in caplog.text


def test_what_was_captured_is_of_no_use(proxied: tuple[Node, Node, Proxy, Proxy], keys: PeerKeys | str) -> None:
    a, b, _, to_b = proxied
    sender = Sender(a, "b", 4)
    drive(a, b, until=lambda: sender.done(b))
    captured = bytes(to_b.captured[0])
    refused = b.transport.refused
    with socket.create_connection(("127.0.0.1", b.port)) as replay:
        # As the one who was listened to: a greeting, the first command, and the rest, each after an answer.
        begin = 64 + 2 + captured[65]
        for part, answer_bytes in ((captured[:64], 64), (captured[64:begin], 1)):
            replay.sendall(part)
            while answer_bytes > 0:  # a greeting comes in parts
                drive(a, b, until=lambda: readable(replay, 0.0))
                said = replay.recv(1 << 16)
                assert said
                answer_bytes -= len(said)
        replay.sendall(captured[begin:])
        # Who listens has the password, which lets it in: what it repeats is known.
        encrypted = isinstance(keys, PeerKeys)
        drive(a, b, until=lambda: refused["handshake" if encrypted else "duplicate"] >= (1 if encrypted else 4))
    sender.check(b)
    assert len(b.met) == 1
    drive(a, b, until=lambda: a.transport.room("b") == 2 << 20)


def test_the_secrets_are_not_shown() -> None:
    keys = make_keys()
    assert keys.server_secret not in repr(keys)
    assert keys.client_secret not in repr(keys)


# Errors, and the end


def test_messages_too_large_are_the_senders_mistake(keys: PeerKeys | str) -> None:
    with nodes_of(Node("a", keys, max_body=10, max_payload=20), Node("b", keys)) as (a, b):
        acquaint(a, b)
        a.transport.send("b", b"x" * 10, b"y" * 20)
        for body, payload in ((b"x" * 11, b""), (b"", b"y" * 21)):
            with pytest.raises(PeerError, match="at most 10 bytes"):
                a.transport.send("b", body, payload)
        drive(a, b, until=lambda: len(b.received) == 1)


@pytest.mark.parametrize("host", ["0.0.0.0", "*", "::", "no-such-interface"])
def test_where_nobody_can_listen_is_named(host: str) -> None:
    before = open_things()
    with pytest.raises(PeerError, match=r"peers\.host"):
        Transport("a", host, keys=None)
    assert_nothing_is_left_beyond(before)


def test_a_port_in_use_is_named() -> None:
    with nodes_of(Node("a", None)) as (a,), pytest.raises(PeerError, match="free port"):
        Transport("b", "127.0.0.1", a.port, keys=None)


@pytest.mark.parametrize("address", ["", "tcp://", "tcp://x", "ipc://x", "tcp://x:0", "tcp://x:70000", "tcp://a;b:1"])
def test_addresses_that_are_none(address: str) -> None:
    with nodes_of(Node("a", None)) as (a,):
        with pytest.raises(PeerError, match="tcp://host:port"):
            a.transport.connect("b", address)
        assert a.transport.peers() == {}
        with pytest.raises(UsageError, match="itself"):
            a.transport.connect("a", "tcp://127.0.0.1:1")


def test_nothing_remains(keys: PeerKeys | str) -> None:
    def use() -> None:
        with nodes_of(Node("a", keys), Node("b", keys)) as (a, b):
            acquaint(a, b)
            a.transport.connect("c", f"tcp://127.0.0.1:{free_port()}")
            a.transport.send("c", b"to nobody", payload_of(0))
            b.reads = False
            for _ in range(20):
                a.transport.send("b", b"", payload_of(0))
            poller = zmq.Poller()
            a.transport.register(poller)
            a.transport.register(poller)
            a.transport.close()
            a.transport.unregister(poller)
            assert not poller.sockets

    use()  # what pyzmq starts once for the process
    before = open_things()
    for _ in range(3):
        use()
    assert_nothing_is_left_beyond(before)
