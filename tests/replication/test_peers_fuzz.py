"""Whatever comes over the network: it is refused and counted, and those who speak properly do not notice."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import pytest
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from memckpt.protocol.replication import PeerKeys
from memckpt.replication.transport import links
from memckpt.replication.transport.directory import MAX_PEERS, make_keys
from memckpt.replication.transport.transport import Delivery
from tests.support.cluster.peers_harness import Node, acquaint, drive, nodes_of

FUZZ = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
LIMIT = 4096


def greeting_of(name: str, own: str = "1", meant: str = "") -> bytes:
    said = links.State(name, own, meant, 0, 0, 0, 0, False, False, "tcp://127.0.0.1:1", links.WIRE_VERSION)
    return links.encode(said)


class Stage:
    """Two nodes that have met, and somebody who connects to the first one, with its keys if there are any."""

    def __init__(self, a: Node, b: Node, keys: PeerKeys | None, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self.a, self.b = a, b
        self.number = 0
        self._keys = keys
        self._context = context

    @property
    def encrypted(self) -> bool:
        return self._keys is not None

    @contextlib.contextmanager
    def intruder(self, address: str | None = None) -> Iterator[zmq.Socket[bytes]]:
        sock = self._context.socket(zmq.DEALER)
        try:
            sock.linger = 0
            if self._keys is not None:
                sock.curve_publickey = self._keys.client_public.encode()
                sock.curve_secretkey = self._keys.client_secret.encode()
                sock.curve_serverkey = self._keys.server_public.encode()
            sock.connect(address or self.a.transport.address)
            yield sock
        finally:
            sock.close()

    def throw(self, *messages: Sequence[bytes]) -> None:
        """Send messages as the intruder, and wait until all have been looked at: then its last one, a greeting, was."""
        self.number += 1
        name = f"last {self.number}"
        greeting = greeting_of(name)
        with self.intruder() as sock:
            for frames in (*messages, [greeting]):
                sock.send_multipart(frames)
            drive(self.a, self.b, until=lambda: name in self.a.transport.peers())
        self.a.transport.forget_peer(name)

    def check(self) -> None:
        """The two still speak with each other, and nobody else has said anything to them."""
        self.number += 1
        body = b"proper %d" % self.number
        self.b.transport.send("a", body, bytes(100))
        self.a.transport.send("b", body)
        drive(self.a, self.b, until=lambda: body in self.a.bodies("b") and body in self.b.bodies("a"))
        assert len([each for each in self.a.met if each.peer == "b"]) == 1
        assert len(self.b.met) == 1
        assert all(isinstance(each, Delivery) for each in self.a.received)
        assert len(self.a.transport.peers()) <= MAX_PEERS
        for peer in self.a.transport.peers():
            if peer != "b":
                self.a.transport.forget_peer(peer)
        self.a.received.clear()
        self.b.received.clear()


@pytest.fixture(scope="module", params=["plain", "curve"])
def stage(request: pytest.FixtureRequest) -> Iterator[Stage]:
    keys = make_keys() if request.param == "curve" else None
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with nodes_of(Node("a", keys, max_body=LIMIT, max_payload=LIMIT), Node("b", keys)) as (a, b):
        try:
            acquaint(a, b)
            yield Stage(a, b, keys, context)
        finally:
            context.destroy(linger=0)


@pytest.mark.promise(
    "a process without keys can neither read, write nor stop a replicator, and gets at most 1 MiB buffered"
)
@pytest.mark.promise("up to m whole nodes of a group: trainers, agents, memory (peers)")
@given(messages=st.lists(st.lists(st.binary(max_size=200), min_size=1, max_size=6), max_size=5))
@FUZZ
def test_frames_of_garbage(stage: Stage, messages: list[list[bytes]]) -> None:
    before = stage.a.transport.refused["malformed"]
    stage.throw(*messages)
    assert stage.a.transport.refused["malformed"] == before + len(messages)
    stage.check()
    assert not stage.a.transport.refused["no such address"]


SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**63), 2**64 - 1), st.floats(), st.text(max_size=9), st.binary(max_size=9)
)
NAMES = st.one_of(st.sampled_from(["a", "b", "c", "", "x" * 300]), st.text(max_size=5))
ADDRESSES = st.sampled_from(
    ["tcp://127.0.0.1:1", "tcp://127.0.0.1:99999", "tcp://[::1]:1", "ipc:///x", "tcp://127.0.0.1", "", "tcp://a;b:1"]
)
NUMBERS = st.one_of(st.integers(0, 3), st.integers(0, 2**63), st.integers(-5, -1))


@st.composite
def envelope_of(draw: st.DrawFn, incarnations: Sequence[str]) -> bytes:
    """Something like an envelope, by somebody who may even know the incarnations of those who have met."""
    known = st.one_of(st.sampled_from(list(incarnations)), st.text(max_size=70))
    fields: list[Any] = [draw(st.sampled_from([1, 2, 2, 3])), draw(NAMES), draw(known), draw(known)]
    fields += [draw(NUMBERS), draw(NUMBERS)]
    if fields[0] == 2:
        fields += [draw(NUMBERS), draw(NUMBERS), draw(st.booleans()), draw(st.booleans()), draw(ADDRESSES)]
        fields.append(links.WIRE_VERSION if draw(st.integers(0, 5)) else draw(NUMBERS))
    elif draw(st.booleans()):
        fields.append(draw(NUMBERS))  # parts of a body
    if draw(st.integers(0, 3)) == 0:
        fields[draw(st.integers(0, len(fields) - 1))] = draw(SCALARS)
    if draw(st.integers(0, 9)) == 0:
        fields = fields[: draw(st.integers(0, len(fields)))]
    encoded = msgspec.msgpack.encode(fields)
    return encoded[: draw(st.integers(0, len(encoded)))] if draw(st.integers(0, 9)) == 0 else encoded


@given(data=st.data())
@FUZZ
def test_envelopes_that_lie(stage: Stage, data: st.DataObject) -> None:
    """A holder of the keys may speak for nodes that are not there, but it cannot make others fail."""
    mine = stage.a.transport.peers()
    own = [stage.a.transport._directory.peers[peer].link.own for peer in mine if peer != "b"]
    envelope = envelope_of([*own, "liar", "liar.2", stage.a.transport.incarnation, "", ""])
    frames = st.one_of(
        envelope.map(lambda head: [head]),
        st.tuples(envelope, st.binary(max_size=LIMIT + 10), st.binary(max_size=LIMIT + 10)).map(list),
    )
    stage.throw(*data.draw(st.lists(frames, min_size=1, max_size=5)))
    # What it claims of "b" is not believed: only b knows a's incarnation for it.
    stage.check()


def test_states_out_of_any_order(stage: Stage) -> None:
    """Somebody that was met properly, and then says what cannot be."""
    name, own = "liar", "liar.1"

    def state(**fields: Any) -> bytes:
        said = {"meant": "", "turn": 0, "number": 0, "expected": 0, "seen": 0, "gap": False, "ask": True} | fields
        said.setdefault("version", links.WIRE_VERSION)
        return links.encode(
            links.State(node=name, incarnation=own, address="tcp://127.0.0.1:1", **said)  # type: ignore[arg-type]
        )

    stage.throw([state()])
    link = stage.a.transport._directory.peers[name].link
    stage.a.transport.send(name, b"never arrives", bytes(100))
    far = (1 << 62) - 1
    for field in ("turn", "number", "expected", "seen"):
        stage.throw([state(meant=link.own, **{field: far})], [state(meant=link.own, **{field: 0})])
    stage.throw([state(meant=link.own, gap=True)])
    for turn, number in ((far, far), (far, 0), (0, far), (0, 0)):
        stage.throw([links.encode(links.Data(name, own, link.own, turn, number)), b"", b""])
    assert link.met == own
    # It has taken nothing, whatever it has said.
    assert link.unacknowledged_messages == 1
    stage.check()


def test_envelopes_with_other_frames_than_theirs(stage: Stage) -> None:
    name, own = "miscounter", "miscounter.1"

    stage.throw([greeting_of(name, own)])
    link = stage.a.transport._directory.peers[name].link
    data = links.encode(links.Data(name, own, link.own, 0, 0))
    before = stage.a.transport.refused["malformed"]
    said = greeting_of(name, own, link.own)
    wrong = [[data], [data, b""], [data, b"", b"", b""], [said, b""], [said, b"", b""]]
    stage.throw(*wrong)
    assert stage.a.transport.refused["malformed"] == before + len(wrong)
    assert not link.met
    stage.throw([data, b"", b""])
    assert link.met == own
    assert stage.a.bodies(name) == [b""]
    stage.check()


def test_lists_in_lists(stage: Stage) -> None:
    """What does not belong into an envelope is skipped, however deep it is."""
    state = greeting_of("deep")
    longer = bytes([state[0] + 1]) + state[1:] + b"\x91" * 1900 + b"\x90"
    before = stage.a.transport.refused["malformed"]
    stage.throw([longer])
    assert stage.a.transport.refused["malformed"] == before + 1
    stage.check()


GREETING = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x01"
STREAMS = st.one_of(
    st.binary(max_size=300),
    st.binary(max_size=300).map(lambda rest: GREETING + rest),
    st.sampled_from([b"CURVE", b"NULL", b"PLAIN", b"GSSAPI"]).flatmap(
        lambda mechanism: st.binary(max_size=300).map(
            lambda rest: GREETING + mechanism.ljust(20, b"\0") + bytes(32) + rest
        )
    ),
    st.just(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"),
    st.just(GREETING + b"NULL".ljust(52, b"\0") + b"\x06" + b"\xff" * 8),
)


@pytest.mark.promise("up to m whole nodes of a group: trainers, agents, memory (peers)")
@given(streams=st.lists(STREAMS, min_size=1, max_size=3))
@settings(parent=FUZZ, max_examples=80)
def test_bytes_of_garbage(stage: Stage, streams: list[bytes]) -> None:
    with contextlib.ExitStack() as stack:
        for stream in streams:
            sock = stack.enter_context(socket.create_connection(("127.0.0.1", stage.a.port)))
            # It may have hung up already.
            with contextlib.suppress(ConnectionError):
                sock.sendall(stream)
        stage.check()
    stage.check()


@given(cut=st.integers(1, 1200))
@settings(parent=FUZZ, max_examples=60)
def test_a_conversation_is_cut_off_and_its_bytes_come_once_more(stage: Stage, cut: int) -> None:
    """All that a proper client says, up to some byte; then the same, as who has listened sends it."""
    stage.number += 1
    name, heard = f"cut {stage.number}", bytearray()
    greeting = greeting_of(name)
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        sock = stack.enter_context(stage.intruder(f"tcp://127.0.0.1:{listener.getsockname()[1]}"))
        sock.send(greeting)
        client = stack.enter_context(listener.accept()[0])
        server = stack.enter_context(socket.create_connection(("127.0.0.1", stage.a.port)))
        client.setblocking(False)
        server.setblocking(False)

        def pass_on() -> bool:
            with contextlib.suppress(BlockingIOError):
                said = client.recv(cut - len(heard))
                heard.extend(said)
                server.sendall(said)
            with contextlib.suppress(BlockingIOError):
                client.sendall(server.recv(1 << 16))
            return len(heard) == cut or name in stage.a.transport.peers()

        drive(stage.a, stage.b, until=pass_on)
    stage.check()
    with socket.create_connection(("127.0.0.1", stage.a.port)) as replay:
        replay.sendall(heard)
        stage.check()
        if stage.encrypted:
            assert name not in stage.a.transport.peers()


@pytest.mark.parametrize("size", [LIMIT + 1, 64 << 10])
def test_what_is_too_large_gets_nowhere(stage: Stage, size: int) -> None:
    """A little above the limits it is counted; far above, the connection is closed."""
    refused = stage.a.transport.refused
    before = refused["oversized"]
    with stage.intruder() as sock:
        monitor = sock.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        sock.send(bytes(size))
        drive(stage.a, stage.b, until=lambda: refused["oversized"] > before or monitor.poll(0) != 0)
        sock.disable_monitor()
    assert (refused["oversized"] > before) == (size == LIMIT + 1)
    stage.check()


def test_a_flood_of_frames_is_one_refusal(stage: Stage) -> None:
    before = stage.a.transport.refused["malformed"]
    stage.throw([b"x"] * 10_000)
    assert stage.a.transport.refused["malformed"] == before + 1
    stage.check()
