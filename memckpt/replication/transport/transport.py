"""Messages between replicators: in order, exactly once, bounded, and between those who have the attempt's keys only.

Each side receives on one socket (ROUTER, bound), and sends on one for each peer (DEALER). ZeroMQ connects again but
loses messages, which :mod:`memckpt.replication.transport.links` repeats. Payloads come beside them, on lanes.
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
from memckpt.replication.transport.bulk import Bulk
from memckpt.replication.transport.directory import (
    Context,
    Directory,
    Doorkeeper,
    Peer,
    receiving_socket,
    sending_socket,
)
from memckpt.replication.transport.links import MAX_ON_THE_WAY, WIRE_VERSION, Data, Link, Payload, State

_log = logging.getLogger("memckpt.replicator")
_MAX_SOCKETS = 4096
_ACKNOWLEDGE_SECONDS = 0.005
_NOBLOCK = int(zmq.NOBLOCK)
_STEPS_IN_ONE_CALL = 512
_SILENT_AFTER_BEATS = 5
_WILDCARDS = ("0.0.0.0", "*", "::", "[::]")


class Delivery(NamedTuple):
    """A message of a peer; the payload is a view of memory that the next :meth:`Transport.receive` uses again."""

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
    silence. `advertise`: addresses that peers are told, if others. `refused`: messages and connections, by reason.
    Payloads come at the port above `port`. Raises PeerError: it cannot listen there.
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
        advertise: tuple[str, str] | None = None,
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
        #: Peers whose messages wait for a payload, and whether :meth:`receive` has more to do without being woken.
        self._held: dict[str, Peer] = {}
        self._more = False
        self._context: Context = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, _MAX_SOCKETS)
        try:
            self._doorkeeper = Doorkeeper(self._context, keys, self.refused)
            frame = min(limits.max_body, links.FRAME_BYTES)
            largest = max(frame, links.ENVELOPE_BYTES) + 1024
            self._router = receiving_socket(self._context, keys, heartbeat_seconds, largest, ipv6=":" in host)
            self._doorkeeper.watch(self._router)
            bound = self._bind(host, port)
            self.address = bound if advertise is None else advertise[0]
            if not links.is_address(self.address):
                raise PeerError(f"expected an address like tcp://host:port to be told to peers, found {self.address!r}")
            self._bulk = self._open_bulk(bound, port, keys, advertise and advertise[1])
            self._directory = Directory(
                node,
                self.incarnation,
                self.address,
                limits.window_bytes,
                partial(sending_socket, self._context, keys, heartbeat_seconds),
                self._bulk,
            )
        except BaseException:  # closes what nobody else owns
            self._context.destroy(linger=0)
            raise

    def _open_bulk(self, bound: str, port: int, keys: PeerKeys | str | None, advertise: str | None) -> Bulk:
        where = bound.removeprefix("tcp://").rpartition(":")[0].strip("[]"), port and port + 1
        patience = max(5.0, 10 * self._heartbeat_seconds)
        try:
            return Bulk(where, keys, self._limits.max_payload, patience, self.refused, advertise)
        except (OSError, OverflowError) as error:
            raise PeerError(
                f"cannot listen on {where}: {error}; payloads come above peers.port: give one with a free one above it "
                "(0: any)"
            ) from error

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
        self._held.pop(peer, None)
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

    def send(self, peer: str, body: bytes, *payload: Payload) -> None:
        """Queue a message. Its payload, in parts, must not change until it is acknowledged.

        Raises PeerError or UsageError.
        """
        known = self._directory.peers.get(peer)
        if known is None:
            raise UsageError(f"no peer {peer!r} is connected; known are {sorted(self._directory.peers)}")
        nbytes = sum(map(len, payload))
        limits = self._limits
        if len(body) > limits.max_body or nbytes > limits.max_payload:
            raise PeerError(
                f"expected a body of at most {limits.max_body} bytes and a payload of at most {limits.max_payload}, "
                f"found {len(body)} and {nbytes}; cut it into several messages"
            )
        known.link.send(body, [piece for piece in payload if piece])

    def room(self, peer: str) -> int:
        """Bytes that may be sent to a peer now: its window less what it has not acknowledged; 0 before it is met."""
        known = self._directory.peers.get(peer)
        return 0 if known is None else known.link.room()

    # Receiving

    def register(self, poller: zmq.Poller) -> None:
        """Have a poller wake up while there is something for :meth:`receive`."""
        if poller not in self._pollers:
            for source in (self._router, *self._doorkeeper.sockets, self._bulk.poll.fileno()):
                poller.register(source, zmq.POLLIN)
            self._pollers.append(poller)

    def unregister(self, poller: zmq.Poller) -> None:
        """The reverse; a poller that is not registered stays as it is."""
        if poller in self._pollers:
            for source in (self._router, *self._doorkeeper.sockets, self._bulk.poll.fileno()):
                poller.unregister(source)
            self._pollers.remove(poller)

    def receive(self) -> Delivery | Met | None:
        """The next message or event, then acknowledged; None: nothing is there, or much was refused."""
        if not self._events:
            self._bulk.give_back()
            self._bulk.work()
        for _ in range(_STEPS_IN_ONE_CALL):
            if self._events:
                self._more = True
                return self._events.popleft()
            if not self._take_held() and not self._take_frames():
                break
        else:
            self._more = True
            return None
        self._more = False
        self._doorkeeper.attend()
        return None

    def _take_held(self) -> bool:
        """Take a message whose payload is here, or that has none; False: there is none."""
        for peer, known in self._held.items():
            envelope, frames = known.held[0]
            payload: Payload | str | None = b""
            if isinstance(envelope, Data) and len(frames[-1].buffer) and known.link.wants(envelope):
                said = b"".join(frame.buffer for frame in frames[:-1])
                payload = self._bulk.take_payload(envelope.incarnation, frames[-1].bytes, said)
            if payload is not None:
                known.held.popleft()
                if not known.held:
                    del self._held[peer]
                reason = payload if isinstance(payload, str) else self._take(known, envelope, frames, payload)
                self._count_refusal(reason)
                return True
        return False

    def _count_refusal(self, reason: str | None) -> None:
        if reason is not None:
            self.refused[reason] += 1

    def _take_frames(self) -> bool:
        """Read a message; False: there is none."""
        frames = self._read()
        if frames is not None:
            self._count_refusal(self._hold(frames) if frames else "malformed")
        return frames is not None

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

    def _hold(self, frames: Sequence[zmq.Frame]) -> str | None:
        """Put a message behind those of its peer that wait for a payload; or why not."""
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
        if len(known.held) >= 2 * MAX_ON_THE_WAY:
            return "overrun"
        known.link.heard |= envelope.incarnation == known.link.met
        known.held.append((envelope, frames))
        self._held[envelope.node] = known
        return None

    def _take(self, known: Peer, envelope: Data | State, frames: Sequence[zmq.Frame], payload: Payload) -> str | None:
        link = known.link
        before, content = link.met, None
        if isinstance(envelope, Data):
            parts = frames[1:-1]
            nbytes = sum(len(part.buffer) for part in parts)
            if nbytes > self._limits.max_body:
                return "oversized"
            reason = link.take_data(envelope, nbytes + len(payload))
            if reason is None:
                body = parts[0].bytes if len(parts) == 1 else b"".join(part.buffer for part in parts)
                content = Delivery(envelope.node, body, payload)
            if link.owes:
                self._owing[envelope.node] = link
        else:
            if envelope.meant == link.own and envelope.incarnation not in link.retired:
                known.lane.move(envelope.bulk)  # nobody else knows us by that name
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
        return 0.0 if self._more else max(0.0, min(due - now, self._acknowledge(now)))

    def _interval(self, link: Link) -> float:
        return self._retry_seconds if link.down else self._heartbeat_seconds

    def close(self) -> None:
        """Close all sockets and end their threads; what was not sent yet is dropped, so that this waits for no peer."""
        for poller in list(self._pollers):
            self.unregister(poller)
        self._directory.peers.clear()
        self._events.clear()
        self._bulk.close()
        self._context.destroy(linger=0)
