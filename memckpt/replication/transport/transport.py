"""Messages between replicators: in order, exactly once, bounded, and between those who have the attempt's keys only.

Each side receives on one socket (ROUTER, bound), and sends on one for each peer (DEALER). ZeroMQ connects again but
loses messages, which :mod:`memckpt.replication.transport.links` repeats.
"""

from __future__ import annotations

import logging
import math
import secrets
from collections import Counter, deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import zmq

from memckpt.errors import PeerError, UsageError
from memckpt.protocol.replication import PeerKeys
from memckpt.replication.transport import links
from memckpt.replication.transport.directory import (
    Context,
    Directory,
    Doorkeeper,
    Peer,
    receiving_socket,
    sending_socket,
)
from memckpt.replication.transport.links import WIRE_VERSION, Data, Link, Payload, State

_log = logging.getLogger("memckpt.replicator")
_MAX_SOCKETS = 4096
_ACKNOWLEDGE_SECONDS = 0.005
_NOBLOCK = int(zmq.NOBLOCK)
_REFUSALS_IN_ONE_CALL = 256
_SILENT_AFTER_BEATS = 5
_WILDCARDS = ("0.0.0.0", "*", "::", "[::]")


class Delivery(NamedTuple):
    """A message of a peer; the payload is a view of the memory it was received into."""

    peer: str
    body: bytes
    payload: Payload


class Met(NamedTuple):
    """First contact with this incarnation of a peer: whatever was on its way to an earlier one is gone."""

    peer: str
    incarnation: str


@dataclass(frozen=True)
class Limits:
    """Limits in bytes: of one message, and of what is on its way to one peer without an acknowledgement."""

    max_body: int = 64 << 20
    max_payload: int = 1 << 20
    window_bytes: int = 32 << 20


class Transport:
    """One replicator's sockets; :meth:`close` it. Not for use by several threads. Calls never block.

    A loop polls the sockets, calls :meth:`receive` until it returns None, and :meth:`tend` before it waits again.
    `keys`: of the attempt, or a password, which encrypts nothing. `heartbeat_seconds`: five without an answer are
    silence. `advertise`: address that peers are told, if another. `refused`: messages and connections, by reason.
    Raises PeerError: it cannot listen there.
    """

    def __init__(
        self,
        node: str,
        host: str,
        port: int = 0,
        *,
        keys: PeerKeys | str | None,
        limits: Limits = Limits(),
        heartbeat_seconds: float = 1.0,
        advertise: str | None = None,
    ) -> None:
        self.node = node
        self.incarnation = secrets.token_hex(8)
        self.refused: Counter[str] = Counter()
        self.silent: frozenset[str] = frozenset()
        self._limits = limits
        self._most_frames = math.ceil(limits.max_body / links.FRAME_BYTES) + 2
        self._heartbeat_seconds = heartbeat_seconds
        self._retry_seconds = min(0.05, heartbeat_seconds / 4)
        self._owing: dict[str, Link] = {}
        self._acknowledge_at: float | None = None
        self._events: deque[Delivery | Met] = deque()
        self._pollers: list[zmq.Poller] = []
        self._context: Context = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, _MAX_SOCKETS)
        try:
            self._doorkeeper = Doorkeeper(self._context, keys, self.refused)
            frame = min(limits.max_body, links.FRAME_BYTES)
            largest = max(frame, limits.max_payload, links.ENVELOPE_BYTES) + 1024
            self._router = receiving_socket(self._context, keys, heartbeat_seconds, largest, ipv6=":" in host)
            self._doorkeeper.watch(self._router)
            bound = self._bind(host, port)
            self.address = bound if advertise is None else advertise
            if not links.is_address(self.address):
                raise PeerError(f"expected an address like tcp://host:port to be told to peers, found {self.address!r}")
            self._directory = Directory(
                node,
                self.incarnation,
                self.address,
                limits.window_bytes,
                partial(sending_socket, self._context, keys, heartbeat_seconds),
            )
        except BaseException:  # closes what nobody else owns
            self._context.destroy(linger=0)
            raise

    def _bind(self, host: str, port: int) -> str:
        if host in _WILDCARDS:
            raise PeerError(f"expected one address or interface to listen on, found {host!r}; name it in peers.host")
        where = f"tcp://[{host}]:{port or '*'}" if ":" in host and host[0] != "[" else f"tcp://{host}:{port or '*'}"
        try:
            self._router.bind(where)
        except zmq.ZMQError as error:
            raise PeerError(
                f"cannot listen on {where}: {error}; give peers.host an address or interface of this machine and "
                "peers.port a free port (0: any)"
            ) from error
        return self._router.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")

    # Peers

    def connect(self, peer: str, address: str) -> None:
        """Speak with a peer that listens at an address, or from now on at another one (Directory.connect)."""
        self._directory.connect(peer, address)

    def address_of(self, peer: str) -> str | None:
        """Address to which we connect; None: there is no such peer."""
        known = self._directory.peers.get(peer)
        return None if known is None else known.address

    def hint(self, peer: str, address: str) -> None:
        """Note where others say that a peer is: it is looked for there if it is silent where we know it."""
        self._directory.hint(peer, address)

    def forget_peer(self, peer: str) -> None:
        """Drop a peer and what waits for it; this incarnation of it is not listened to any more."""
        self._directory.forget_peer(peer)
        self._owing.pop(peer, None)
        self._events = deque(event for event in self._events if event.peer != peer)

    def peers(self) -> dict[str, Peer]:
        """All peers, as of the last :meth:`tend`."""
        return dict(self._directory.peers)

    @property
    def bytes_sent(self) -> int:
        """Bytes of bodies and payloads that were handed over, those sent again included."""
        return self._directory.bytes_sent

    @property
    def in_flight_bytes(self) -> int:
        """Bytes of bodies and payloads that were handed over, and that peers that are heard have not acknowledged."""
        peers = self._directory.peers.items()
        return sum(known.link.in_flight_bytes for peer, known in peers if peer not in self.silent)

    def progress(self, peer: str) -> tuple[int, Hashable]:
        """Bytes that a peer has not acknowledged, and what changes whenever it acknowledges something."""
        known = self._directory.peers.get(peer)
        if known is None:
            return 0, None
        return known.link.unacknowledged_bytes, (known.link.met, known.link.acknowledged_messages)

    def heard(self) -> dict[str, float | None]:
        """When anything last came of each peer, or it was named first, as of the last :meth:`tend`."""
        return {peer: known.heard_at for peer, known in self._directory.peers.items()}

    # Sending

    def send(self, peer: str, body: bytes, payload: Payload = b"") -> None:
        """Queue a message. The payload must not change until it is acknowledged. Raises PeerError or UsageError."""
        known = self._directory.peers.get(peer)
        if known is None:
            raise UsageError(f"no peer {peer!r} is connected; known are {sorted(self._directory.peers)}")
        nbytes = memoryview(payload).nbytes
        limits = self._limits
        if len(body) > limits.max_body or nbytes > limits.max_payload:
            raise PeerError(
                f"expected a body of at most {limits.max_body} bytes and a payload of at most {limits.max_payload}, "
                f"found {len(body)} and {nbytes}; cut it into several messages"
            )
        known.link.send(body, payload)

    def room(self, peer: str) -> int:
        """Bytes that may be sent to a peer now: its window less what it has not acknowledged; 0 before it is met."""
        known = self._directory.peers.get(peer)
        return 0 if known is None else known.link.room()

    # Receiving

    def register(self, poller: zmq.Poller) -> None:
        """Have a poller wake up while there is something for :meth:`receive`."""
        if poller not in self._pollers:
            for socket in (self._router, *self._doorkeeper.sockets):
                poller.register(socket, zmq.POLLIN)
            self._pollers.append(poller)

    def unregister(self, poller: zmq.Poller) -> None:
        """The reverse; a poller that is not registered stays as it is."""
        if poller in self._pollers:
            for socket in (self._router, *self._doorkeeper.sockets):
                poller.unregister(socket)
            self._pollers.remove(poller)

    def receive(self) -> Delivery | Met | None:
        """The next message or event, then acknowledged; None: nothing is there, or much was refused."""
        for _ in range(_REFUSALS_IN_ONE_CALL):
            if self._events:
                return self._events.popleft()
            frames = self._read()
            if frames is None:
                break
            reason = self._take_frames(frames) if frames else "malformed"
            if reason is not None:
                self.refused[reason] += 1
        if self._events:
            return self._events.popleft()
        self._doorkeeper.attend()
        return None

    def _read(self) -> list[zmq.Frame] | None:
        """The frames of the next message, an empty list if they are too few or too many; None: there is none."""
        try:
            frame = self._router.recv(_NOBLOCK, copy=False)
        except zmq.Again:
            return None
        frames: list[zmq.Frame] = []
        count = 0
        while frame.more:
            # The rest of a message is there with its first frame.
            frame = self._router.recv(_NOBLOCK, copy=False)
            count += 1
            if count <= self._most_frames:
                frames.append(frame)
        return frames if count <= self._most_frames else []

    def _take_frames(self, frames: Sequence[zmq.Frame]) -> str | None:
        if len(frames[0].buffer) > links.ENVELOPE_BYTES:
            return "oversized"
        try:
            envelope = links.decode(frames[0].bytes)
        except ValueError:
            return "malformed"
        if len(frames) != (envelope.parts + 2 if isinstance(envelope, Data) else 1):
            return "malformed"
        if isinstance(envelope, State) and envelope.version != WIRE_VERSION:
            return self._refuse_version(envelope)
        known = self._directory.find(envelope)
        if isinstance(known, str):
            return known
        link = known.link
        before, content = link.met, None
        if isinstance(envelope, Data):
            parts, payload = frames[1:-1], frames[-1]
            nbytes, payload_bytes = sum(len(part.buffer) for part in parts), len(payload.buffer)
            if nbytes > self._limits.max_body or payload_bytes > self._limits.max_payload:
                return "oversized"
            reason = link.take_data(envelope, nbytes + payload_bytes)
            if reason is None:
                body = parts[0].bytes if len(parts) == 1 else b"".join(part.buffer for part in parts)
                content = Delivery(envelope.node, body, payload.buffer)
            if link.owes:
                self._owing[envelope.node] = link
        else:
            reason = self._directory.follow(known, envelope) or link.take_state(envelope)
        if link.met != before:
            self._events.append(Met(envelope.node, link.met))
        if content is not None:
            self._events.append(content)
        return reason

    def _refuse_version(self, state: State) -> str:
        """A replicator whose messages mean something else: nothing of it is taken, whatever it says of us."""
        known = self._directory.peers.get(state.node)
        if known is not None and state.incarnation not in known.link.retired:
            known.link.retired.append(state.incarnation)
            _log.error(
                "%s speaks version %d of the replicators' protocol, and this node version %d: install the same memckpt "
                "on all nodes",
                state.node,
                state.version,
                WIRE_VERSION,
            )
        return "version"

    def _acknowledge(self, now: float) -> float:
        """Acknowledge what has waited for more to come with it; seconds until something has."""
        if not self._owing:
            self._acknowledge_at = None
        elif self._acknowledge_at is None:
            self._acknowledge_at = now + _ACKNOWLEDGE_SECONDS
        elif now >= self._acknowledge_at:
            self._owing = {peer: link for peer, link in self._owing.items() if link.owes and not link.tell()}
            self._acknowledge_at = now + self._retry_seconds if self._owing else None
        return math.inf if self._acknowledge_at is None else self._acknowledge_at - now

    # Time

    def tend(self, now: float) -> float:
        """Do what is due: heartbeats, acknowledgements, sending again. Returns seconds until the next call."""
        self._doorkeeper.attend()
        due = now + self._heartbeat_seconds
        for known in self._directory.peers.values():
            link = known.link
            if link.heard or known.heard_at is None:
                known.heard_at, link.heard = now, False
            if known.tried_at is None or now >= known.tried_at + self._interval(link):
                link.beat()
                known.tried_at = now
            due = min(due, known.tried_at + self._interval(link))
            link.pump()
            known.heard_seconds = 0.0 if link.heard else now - known.heard_at
            known.silent = known.heard_seconds > _SILENT_AFTER_BEATS * self._heartbeat_seconds
        self.silent = frozenset(peer for peer, known in self._directory.peers.items() if known.silent)
        for peer in self.silent:
            self._directory.follow_hint(peer)
        return max(0.0, min(due - now, self._acknowledge(now)))

    def _interval(self, link: Link) -> float:
        return self._retry_seconds if link.down else self._heartbeat_seconds

    def close(self) -> None:
        """Close all sockets and end their threads; what was not sent yet is dropped, so that this waits for no peer."""
        for poller in list(self._pollers):
            self.unregister(poller)
        self._directory.peers.clear()
        self._events.clear()
        self._context.destroy(linger=0)
