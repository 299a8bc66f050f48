"""The peers of a replicator: sockets and keys, where peers are, and which of those that announce themselves is one."""

from __future__ import annotations

import contextlib
import secrets
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import zmq
from zmq.utils import z85

from memckpt.errors import PeerError, UsageError
from memckpt.protocol.replication import PeerKeys
from memckpt.replication.transport.bulk import Bulk, Outgoing
from memckpt.replication.transport.links import Data, Hand, Link, Pieces, State, is_address

Context = zmq.Context[zmq.Socket[bytes]]
Socket = zmq.Socket[bytes]

# More messages than are on the way at once: a peer that keeps to that never blocks the heartbeats behind them.
_MESSAGES = 4096
USERNAME = b"memckpt"
_LAST, _MORE = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)


def make_keys() -> PeerKeys:
    """Make CURVE keys in Z85, and a secret for lanes, of the operating system's random numbers."""
    server, client = ([key.decode() for key in zmq.curve_keypair()] for _ in range(2))
    return PeerKeys(server[0], server[1], client[0], client[1], secrets.token_hex(32))


def make_password() -> str:
    """Make a password, which keeps strangers out where nothing is encrypted. It goes over the network as it is."""
    return secrets.token_hex(32)


def receiving_socket(
    context: Context, keys: PeerKeys | str | None, heartbeat: float, max_bytes: int, ipv6: bool
) -> Socket:
    """A ROUTER to be bound. A connection that sends a frame of more than `max_bytes` is closed."""
    socket = _make(context, zmq.ROUTER, heartbeat, ipv6)
    socket.rcvhwm = _MESSAGES
    socket.maxmsgsize = max_bytes
    if isinstance(keys, str):
        socket.plain_server = True
    elif keys is not None:
        socket.curve_server = True
        socket.curve_secretkey = keys.server_secret.encode()
    return socket


def sending_socket(context: Context, keys: PeerKeys | str | None, heartbeat: float, address: str) -> Socket:
    """A DEALER that connects to a peer, and again whenever the connection ends; ZMQError: that is no address."""
    socket = _make(context, zmq.DEALER, heartbeat, ipv6="[" in address)
    # Nobody answers on this connection; whoever tries is not read.
    socket.rcvhwm = 1
    socket.maxmsgsize = 1024
    # Without a connection nothing is taken, and what a lost one had taken is dropped: links send it again.
    socket.immediate = True
    socket.reconnect_ivl = 50
    socket.reconnect_ivl_max = 1000
    socket.connect_timeout = 2000
    if isinstance(keys, str):
        socket.plain_username, socket.plain_password = USERNAME, keys.encode()
    elif keys is not None:
        socket.curve_publickey = keys.client_public.encode()
        socket.curve_secretkey = keys.client_secret.encode()
        socket.curve_serverkey = keys.server_public.encode()
    try:
        socket.connect(address)
    except zmq.ZMQError:
        socket.close()
        raise
    return socket


def _make(context: Context, kind: int, heartbeat: float, ipv6: bool) -> Socket:
    beat = max(100, int(heartbeat * 1000))
    socket = context.socket(kind)
    socket.linger = 0
    socket.ipv6 = ipv6
    socket.sndhwm = _MESSAGES
    # A cut network shows in ZeroMQ's own heartbeats: they are answered even while the peer's process is busy. They wait
    # behind what the kernel holds, up to some MiB, which takes seconds on a slow network.
    socket.heartbeat_ivl = beat
    socket.heartbeat_timeout = socket.heartbeat_ttl = 10 * beat
    socket.handshake_ivl = max(5000, 10 * beat)
    socket.tcp_keepalive = 1
    socket.tcp_keepalive_idle = socket.tcp_keepalive_intvl = 10
    socket.tcp_keepalive_cnt = 3
    return socket


def hand_to(socket: Socket, lane: Outgoing) -> Hand:
    """How a link hands messages to a socket, and their payloads to a lane."""

    def hand(frames: Sequence[bytes], payload: Pieces | None) -> bool:
        if payload is None:
            lane.renew()
            return _send(socket, frames)
        ticket = lane.ticket(sum(map(len, payload))) if payload else b""
        if ticket is None or not _send(socket, (*frames, ticket)):
            return False
        if payload:
            lane.put(payload, b"".join(frames))
        return True

    return hand


def _send(socket: Socket, frames: Sequence[bytes]) -> bool:
    last = len(frames) - 1
    for index, frame in enumerate(frames):
        try:
            socket.send(frame, _MORE if index < last else _LAST)
        except zmq.Again:
            if 0 < index < last:
                # The connection ended in between. The socket drops all up to a message's end, so end this one.
                socket.send(b"", _LAST)
            return False
    return True


_NOBLOCK = int(zmq.NOBLOCK)
_ZAP = "inproc://zeromq.zap.01"
_MONITOR = "inproc://monitor"
_FAILED = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
# Number of unread failures at which the thread that reports them waits.
_UNREAD_FAILURES = 100_000


class Doorkeeper:
    """Lets in who has the client's key, or the password. Its sockets are the context's, which closes them.

    It counts refusals: "unauthenticated" for another client's key or password; "handshake" for garbage, the wrong
    server's key, and clients without either.
    """

    def __init__(self, context: Context, keys: PeerKeys | str | None, refused: Counter[str]) -> None:
        self.sockets: list[Socket] = []
        self._context, self._refused = context, refused
        self._questions: Socket | None = None
        self._failures: Socket | None = None
        if keys is not None:
            self._allowed = (
                [b"PLAIN", USERNAME, keys.encode()]
                if isinstance(keys, str)
                else [b"CURVE", z85.decode(keys.client_public.encode())]
            )
            self._questions = context.socket(zmq.REP)
            self._questions.linger = 0
            self._questions.bind(_ZAP)
            self.sockets.append(self._questions)

    def watch(self, socket: Socket) -> None:
        """Count the connections that fail on a socket that is about to be bound."""
        socket.monitor(_MONITOR, _FAILED)
        self._failures = self._context.socket(zmq.PAIR)
        self._failures.linger = 0
        self._failures.rcvhwm = _UNREAD_FAILURES
        self._failures.connect(_MONITOR)
        self.sockets.append(self._failures)

    def attend(self) -> None:
        while (question := _read(self._questions)) is not None:
            self._answer(question)
        while _read(self._failures) is not None:
            self._refused["handshake"] += 1

    def _answer(self, question: list[bytes]) -> None:
        assert self._questions is not None
        # version, request, domain, address, identity, mechanism, credentials
        welcome = question[5:] == self._allowed
        if not welcome:
            self._refused["unauthenticated"] += 1
        status = [b"200", b"OK"] if welcome else [b"400", b"unknown key"]
        self._questions.send_multipart([question[0], question[1], *status, b"", b""])


def _read(socket: Socket | None) -> list[bytes] | None:
    if socket is None:
        return None
    try:
        return socket.recv_multipart(_NOBLOCK)
    except zmq.Again:
        return None


#: In place of an incarnation that has said its address; what the peer itself says then counts for more, whoever it is.
_HEARSAY = "?"
MAX_PEERS = 1024
"""Number of peers above which those that announce themselves are not connected to."""


@dataclass
class Peer:
    """A peer that we send to, at `address`.

    `named_by`: the incarnation that has said that; empty: it was given to us; :data:`_HEARSAY`: another peer has said
    it. `hint`: another such address, untried. The owner notes when anything came of it, whether it is `silent`, and
    what is `held` until the first one's payload is here.
    """

    link: Link
    socket: Socket
    lane: Outgoing
    address: str
    named_by: str = ""
    hint: str = ""
    heard_at: float | None = None
    tried_at: float | None = None
    heard_seconds: float = 0.0
    silent: bool = False
    held: deque[tuple[Data | State, Sequence[zmq.Frame]]] = field(default_factory=deque)


class Directory:
    """All peers by name. Its sockets, made by `connect`, are the context's, which closes them in the end."""

    def __init__(
        self,
        node: str,
        incarnation: str,
        address: str,
        window_bytes: int,
        connect: Callable[[str], Socket],
        bulk: Bulk,
    ) -> None:
        self.peers: dict[str, Peer] = {}
        self._node, self._incarnation, self._address = node, incarnation, address
        self._window_bytes, self._connect, self._bulk = window_bytes, connect, bulk
        self._links_made = 0
        self._sent_to_former = 0
        self._forgotten: OrderedDict[str, str] = OrderedDict()

    @property
    def bytes_sent(self) -> int:
        """Bytes of bodies and payloads that were handed over, to former peers too."""
        return self._sent_to_former + sum(known.link.traffic.sent_bytes for known in self.peers.values())

    def connect(self, peer: str, address: str) -> None:
        """Speak with a peer at an address, or from now on at another one; its own word counts for more.

        Raises PeerError: that is no address. UsageError: the peer has our own name.
        """
        if not peer or len(peer) > 255 or not is_address(address):
            raise PeerError(f"expected a peer's name and an address like tcp://host:port, found {peer!r}, {address!r}")
        if peer == self._node:
            raise UsageError(f"node {peer!r} was told to connect to itself; nodes need different names")
        known = self.peers.get(peer)
        if known is None:
            self._forgotten.pop(peer, None)
            self._add(peer, address)
        elif known.address != address and not (known.named_by and known.named_by == known.link.met):
            self._move(known, address, named_by="")

    def hint(self, peer: str, address: str) -> None:
        """Note where another peer says that this one is."""
        known = self.peers.get(peer)
        if known is not None and is_address(address):
            known.hint = "" if address == known.address else address

    def follow_hint(self, peer: str) -> None:
        """Look for a peer that is silent where another one has said that it is."""
        known = self.peers[peer]
        address, known.hint = known.hint, ""
        if address and address != known.address:
            with contextlib.suppress(PeerError):  # it was the other one's word only
                self._move(known, address, named_by=_HEARSAY)

    def _add(self, peer: str, address: str, named_by: str = "") -> Peer:
        self._links_made += 1
        socket = self._open(address)
        own = f"{self._incarnation}.{self._links_made}"
        lane = Outgoing(self._bulk, own)
        hand, bulk = hand_to(socket, lane), self._bulk.address
        link = Link(self._node, own, self._address, self._window_bytes, hand, bulk)
        found = self.peers[peer] = Peer(link, socket, lane, address, named_by)
        return found

    def _open(self, address: str) -> Socket:
        try:
            return self._connect(address)
        except zmq.ZMQError as error:
            raise PeerError(f"cannot connect to {address}: {error}; name a host and port of a peer") from error

    def _move(self, known: Peer, address: str, named_by: str) -> None:
        socket = self._open(address)
        known.socket.close()
        known.socket, known.address, known.named_by = socket, address, named_by
        known.link.move(hand_to(socket, known.lane))
        known.tried_at = None

    def forget_peer(self, peer: str) -> None:
        """Drop a peer and what waits for it; this incarnation of it is not listened to any more."""
        known = self.peers.pop(peer, None)
        if known is None:
            return
        known.socket.close()
        known.lane.close()
        self._sent_to_former += known.link.traffic.sent_bytes
        self._forgotten[peer] = known.link.met
        while len(self._forgotten) > MAX_PEERS:
            self._forgotten.popitem(last=False)

    def find(self, envelope: Data | State) -> Peer | str:
        """The peer of that name; one that announces itself is connected to. Or why not."""
        known = self.peers.get(envelope.node)
        if known is not None:
            return known
        if isinstance(envelope, Data) or envelope.node == self._node:
            return "unknown sender"
        if self._forgotten.get(envelope.node) == envelope.incarnation:
            return "unknown sender"
        if len(self.peers) >= MAX_PEERS:
            return "too many peers"
        try:
            return self._add(envelope.node, envelope.address, named_by=envelope.incarnation)
        except PeerError:
            return "no such address"

    def follow(self, known: Peer, state: State) -> str | None:
        """Follow a new incarnation, or correct what another peer has said of the one that we have met. Or why not."""
        link = known.link
        if state.address == known.address or state.incarnation in link.retired:
            return None
        if state.incarnation == link.met and known.named_by in ("", state.incarnation):
            return None
        if not link.met and not known.named_by and not link.down:
            return None
        try:
            self._move(known, state.address, named_by=state.incarnation)
        except PeerError:
            return "no such address"
        return None
