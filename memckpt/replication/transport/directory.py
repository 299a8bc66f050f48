"""The peers of a replicator: where they are, and who of those that announce themselves is taken for one."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import zmq

from memckpt.errors import PeerError, UsageError
from memckpt.replication.transport.links import Data, Link, State, Traffic, is_address
from memckpt.replication.transport.sockets import Socket, hand_to

#: In place of an incarnation that has said its address; what the peer itself says then counts for more, whoever it is.
_HEARSAY = "?"
MAX_PEERS = 1024
"""Number of peers above which those that announce themselves are not connected to."""


@dataclass(frozen=True)
class PeerState:
    """What is known of a peer. `incarnation`: the one that we have met; empty before.

    `heard_seconds`: since anything came of it, or it was named first; `silent`: longer than several heartbeats.
    `connected`: the last message could be handed to a connection. Unacknowledged is what was handed over (in flight),
    or waits for that.
    """

    address: str
    incarnation: str
    connected: bool
    heard_seconds: float
    silent: bool
    in_flight_bytes: int
    unacknowledged_bytes: int
    unacknowledged_messages: int
    traffic: Traffic


@dataclass
class Peer:
    """A peer that we send to.

    `named_by`: the incarnation that has said its address; empty where it was given to us, :data:`_HEARSAY` where
    another peer has said it. `hint`: another address that a peer has said, and that was not tried. `heard_at`,
    `tried_at`: when anything last came of it, and the last heartbeat to it.
    """

    link: Link
    socket: Socket
    address: str
    named_by: str = ""
    hint: str = ""
    heard_at: float | None = None
    tried_at: float | None = None

    def seconds_unheard(self, now: float) -> float:
        return 0.0 if self.link.heard or self.heard_at is None else now - self.heard_at

    def describe(self, now: float, silent_seconds: float) -> PeerState:
        link = self.link
        heard = self.seconds_unheard(now)
        return PeerState(
            address=self.address,
            incarnation=link.met,
            connected=not link.down,
            heard_seconds=heard,
            silent=heard > silent_seconds,
            in_flight_bytes=link.in_flight_bytes,
            unacknowledged_bytes=link.unacknowledged_bytes,
            unacknowledged_messages=link.unacknowledged_messages,
            traffic=link.traffic,
        )


class Directory:
    """All peers by name. Its sockets, made by `connect`, are the context's, which closes them in the end."""

    def __init__(
        self, node: str, incarnation: str, address: str, window_bytes: int, connect: Callable[[str], Socket]
    ) -> None:
        self.peers: dict[str, Peer] = {}
        self._node = node
        self._incarnation = incarnation
        self._address = address
        self._window_bytes = window_bytes
        self._connect = connect
        self._links_made = 0
        self._sent_to_former = 0
        self._forgotten: OrderedDict[str, str] = OrderedDict()

    @property
    def bytes_sent(self) -> int:
        """Bytes of bodies and payloads that were handed over, to former peers too."""
        return self._sent_to_former + sum(known.link.traffic.sent_bytes for known in self.peers.values())

    def connect(self, peer: str, address: str) -> None:
        """Speak with a peer that listens at an address, or from now on at another one.

        What a peer that we have met says of itself counts for more: a plan that is made once more may still name the
        address of the process that it has replaced.

        Raises:
            PeerError: that is no address.
            UsageError: the peer has our own name.
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
        link = Link(
            self._node, f"{self._incarnation}.{self._links_made}", self._address, self._window_bytes, hand_to(socket)
        )
        found = self.peers[peer] = Peer(link, socket, address, named_by)
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
        known.link.move(hand_to(socket))
        known.tried_at = None

    def forget_peer(self, peer: str) -> None:
        """Drop a peer and what waits for it; this incarnation of it is not listened to any more."""
        known = self.peers.pop(peer, None)
        if known is None:
            return
        known.socket.close()
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
