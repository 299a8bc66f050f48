"""How the sockets between replicators are set."""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Callable, Sequence

import zmq
from zmq.utils import z85

from memckpt.protocol.peer_job import PeerKeys
from memckpt.replication.transport.links import Payload

Context = zmq.Context[zmq.Socket[bytes]]
Socket = zmq.Socket[bytes]

# More messages than are on the way at once: a peer that keeps to that never blocks the heartbeats behind them.
_MESSAGES = 4096
# Size below which copying a frame costs less than keeping it.
_COPY_BELOW_BYTES = 64 << 10
USERNAME = b"memckpt"
_LAST, _MORE = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)


def make_keys() -> PeerKeys:
    """Make CURVE keys in Z85, of the operating system's random numbers."""
    (server_public, server_secret), (client_public, client_secret) = zmq.curve_keypair(), zmq.curve_keypair()
    return PeerKeys(server_public.decode(), server_secret.decode(), client_public.decode(), client_secret.decode())


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


def hand_to(socket: Socket) -> Callable[[Sequence[Payload]], bool]:
    """How a link hands messages to a socket."""

    def hand(frames: Sequence[Payload]) -> bool:
        last = len(frames) - 1
        for index, frame in enumerate(frames):
            try:
                socket.send(frame, _MORE if index < last else _LAST, copy=memoryview(frame).nbytes < _COPY_BELOW_BYTES)
            except zmq.Again:
                if 0 < index < last:
                    # The connection ended in between. The socket drops all up to a message's end, so end this one.
                    socket.send(b"", _LAST)
                return False
        return True

    return hand


_NOBLOCK = int(zmq.NOBLOCK)
_ZAP = "inproc://zeromq.zap.01"
_MONITOR = "inproc://monitor"
_FAILED = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
# Number of unread failures at which the thread that reports them waits.
_UNREAD_FAILURES = 100_000


class Doorkeeper:
    """Lets in who has the client's key, or the password. Its sockets are the context's, which closes them.

    It is made before they are bound. It counts what it refused: "unauthenticated" is another client's key, or password;
    "handshake" are garbage, the wrong server's key, and clients without either.
    """

    def __init__(self, context: Context, keys: PeerKeys | str | None, refused: Counter[str]) -> None:
        self.sockets: list[Socket] = []
        self._context = context
        self._refused = refused
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
        """Answer all questions that are there."""
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
