"""One pair of replicators: numbering, acknowledging, sending again. No sockets, no clock.

Messages go out in the order of their numbers, and a connection keeps it; only what is on its way when a connection ends
is lost, or comes without its payload. So a receiver sees each loss as a gap, at the latest in the next state, and asks
for all from there on; the sender never guesses by time. Each going back begins a new turn, by which both ignore what
was said of an older one.

An acknowledgement here bounds what is on its way. That a record is stored is another message, which comes later.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, NamedTuple

import msgspec

from memckpt.errors import PeerOverrunError

WIRE_VERSION = 8
"""Version of the protocol between replicators. Nodes of different versions do not meet."""
ENVELOPE_BYTES = 2048
"""Limit on the size of an envelope, in bytes."""
FRAME_BYTES = 1 << 20
"""Limit on a frame, in bytes: whoever connects can have one buffered before it has shown its keys."""
MAX_PARTS = 1024

_ADDRESS = re.compile(r"tcp://(\[[0-9A-Fa-f:.%]+\]|[A-Za-z0-9._-]+):[0-9]{1,5}")

_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=255)]
_Incarnation = Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
_Number = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]


class Envelope(msgspec.Struct, frozen=True, array_like=True):
    """Fields that all envelopes have.

    `meant`: the receiver's incarnation, which the sender can know only from the receiver; empty before it does.
    `turn`: how often the sender has gone back so far to send again what was lost. `number`: of this message; in a
    state, of the next one.
    """

    node: _Name
    incarnation: _Incarnation
    meant: Annotated[str, msgspec.Meta(max_length=64)]
    turn: _Number
    number: _Number


class Data(Envelope, frozen=True, array_like=True, tag=1):
    """A message; its body, in so many parts, and its payload's ticket follow as frames of their own."""

    parts: Annotated[int, msgspec.Meta(ge=1, le=MAX_PARTS)] = 1


class State(Envelope, frozen=True, array_like=True, tag=2):
    """What the sender has sent and received; it is a greeting, a heartbeat and an acknowledgement in one.

    `expected`: all messages below this number have been received. `seen`: the receiver's turn as the sender knows it.
    `gap`: something of that turn is missing: go back to `expected`. `ask`: the sender wants an answer. `bulk`: where
    payloads go.
    """

    expected: _Number
    seen: _Number
    gap: bool
    ask: bool
    address: Annotated[str, msgspec.Meta(max_length=300)]
    version: _Number = 0
    bulk: Annotated[str, msgspec.Meta(max_length=300)] = ""


_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Data | State] = msgspec.msgpack.Decoder(Data | State)


def parts_of(body: bytes) -> list[bytes]:
    """A body as it is sent, in frames."""
    return [body[start : start + FRAME_BYTES] for start in range(0, len(body), FRAME_BYTES)] or [body]


def encode(envelope: Data | State) -> bytes:
    return _encoder.encode(envelope)


def decode(data: bytes) -> Data | State:
    """Read an envelope; ValueError: it is none, or names an address that cannot be connected to."""
    try:
        envelope = _decoder.decode(data)
    except RecursionError as error:
        raise ValueError("expected an envelope, found lists in lists") from error
    for address in (envelope.address, envelope.bulk or envelope.address) if isinstance(envelope, State) else ():
        if not is_address(address):
            raise ValueError(f"expected an address like tcp://host:port, found {address!r}")
    return envelope


def is_address(address: str) -> bool:
    """Whether it is one that names a TCP host and port, and nothing beside."""
    return _ADDRESS.fullmatch(address) is not None and 0 < int(address.rpartition(":")[2]) <= 65535


Payload = bytes | memoryview
Pieces = Sequence[Payload]
"""A payload as it lies, in parts."""

MAX_MESSAGES = 100_000
"""Limit on messages that wait for one peer."""
MAX_ON_THE_WAY = 1024
"""Limit on messages without an acknowledgement; less than what sockets take on both sides."""
_ACKNOWLEDGE_BYTES = 1 << 20
_ACKNOWLEDGE_MESSAGES = 128
_RETIRED = 256


class _Message(NamedTuple):
    body: bytes
    payload: Pieces
    nbytes: int


@dataclass
class Traffic:
    """What went over a link; bytes are those of bodies and payloads."""

    sent_bytes: int = 0
    sent_messages: int = 0
    resent_messages: int = 0
    received_bytes: int = 0
    received_messages: int = 0


Hand = Callable[[Sequence[bytes], Pieces | None], bool]


class Link:
    """What one side keeps of a pair.

    `own`: our incarnation for this peer alone. `window_bytes`: how much may be unacknowledged. `hand`: takes a
    message's frames, and its payload; False: there is no connection or room. `met`: the peer's incarnation, once it has
    said ours. `heard`: anything has come since the owner set it to False. `down`: the last message could not be handed
    over.
    """

    def __init__(self, node: str, own: str, address: str, window_bytes: int, hand: Hand, bulk: str = "") -> None:
        self.own = own
        self.met = ""
        self.retired: deque[str] = deque(maxlen=_RETIRED)
        self.traffic = Traffic()
        self.heard = False
        self.down = False
        self._node = node
        self._address, self._bulk = address, bulk
        self._window_bytes = window_bytes
        self._hand = hand
        self._waiting: deque[_Message] = deque()
        self._waiting_bytes = 0
        self._reset()

    def _reset(self) -> None:
        # What we send: `_on_the_way` has the numbers up to `_next`, `_sent_up_to` is the highest ever handed over.
        self._on_the_way: deque[_Message] = deque()
        self.in_flight_bytes = 0
        self._next = 0
        self._sent_up_to = 0
        self._turn = 0
        self._probing = False
        # What we receive.
        self._expected = 0
        self._seen = 0
        self._gap = False
        self._gap_told = -1
        self._owed_bytes = 0
        self._owed_messages = 0

    # Sending

    @property
    def unacknowledged_bytes(self) -> int:
        return self._waiting_bytes + self.in_flight_bytes

    @property
    def unacknowledged_messages(self) -> int:
        return len(self._waiting) + len(self._on_the_way)

    @property
    def acknowledged_messages(self) -> int:
        """Those of this pair that the peer has said that it has."""
        return self._next - len(self._on_the_way)

    def room(self) -> int:
        return self._window_bytes - self.unacknowledged_bytes if self.met else 0

    def send(self, body: bytes, payload: Pieces) -> None:
        """Queue a message behind those before it; PeerOverrunError: too many wait already."""
        if self.unacknowledged_messages >= MAX_MESSAGES:
            raise PeerOverrunError(
                f"expected at most {MAX_MESSAGES} messages waiting for a peer, found {self.unacknowledged_messages}; "
                "it does not read: forget it, or send less"
            )
        message = _Message(body, payload, len(body) + sum(map(len, payload)))
        self._waiting.append(message)
        self._waiting_bytes += message.nbytes
        self.pump()

    def pump(self) -> None:
        """Hand over what waits, as far as the window goes; one message always, however large."""
        while self._waiting and self.met and not self._probing:
            message = self._waiting[0]
            if self._on_the_way and (
                self.in_flight_bytes + message.nbytes > self._window_bytes or len(self._on_the_way) >= MAX_ON_THE_WAY
            ):
                return
            parts = parts_of(message.body)
            envelope = Data(self._node, self.own, self.met, self._turn, self._next, len(parts))
            if not self._hand((encode(envelope), *parts), message.payload):
                self._lost_connection()
                return
            self._waiting.popleft()
            self._waiting_bytes -= message.nbytes
            self._on_the_way.append(message)
            self.in_flight_bytes += message.nbytes
            self._next += 1
            self._count_sent(message.nbytes)

    def _count_sent(self, nbytes: int) -> None:
        traffic = self.traffic
        traffic.sent_bytes += nbytes
        traffic.sent_messages += 1
        if self._next > self._sent_up_to:
            self._sent_up_to = self._next
        else:
            traffic.resent_messages += 1

    def _lost_connection(self) -> None:
        # What was on its way may be lost: nothing more goes out before the peer has said what it has.
        self.down = True
        if not self._probing:
            self._probing = True
            self._turn += 1

    def tell(self, ask: bool = False, to: str | None = None) -> bool:
        """Send our state: to the incarnation that we have met, or to one that we have not (`to`). False: it cannot."""
        pair = to is None or to == self.met
        state = State(
            node=self._node,
            incarnation=self.own,
            meant=self.met if to is None else to,
            turn=self._turn if pair else 0,
            number=self._next if pair else 0,
            expected=self._expected if pair else 0,
            seen=self._seen if pair else 0,
            gap=self._gap and pair,
            ask=ask,
            address=self._address,
            version=WIRE_VERSION,
            bulk=self._bulk,
        )
        if not self._hand((encode(state),), None):
            self._lost_connection()
            return False
        self.down = False
        if pair:
            self._owed_bytes = self._owed_messages = 0
        return True

    def move(self, hand: Hand) -> None:
        """Hand over to another connection from now on."""
        self._hand = hand
        self._lost_connection()

    def beat(self) -> bool:
        """Send our state, and ask for the peer's where something depends on it."""
        return self.tell(ask=not self.met or self._probing or bool(self._on_the_way))

    @property
    def owes(self) -> bool:
        return self._owed_messages > 0

    # Receiving

    def wants(self, data: Data) -> bool:
        """Whether a message is the next one; any other is dropped, whatever comes with it."""
        if data.meant != self.own or data.incarnation in self.retired:
            return False
        return data.number == (self._expected if data.incarnation == self.met else 0)

    def take_data(self, data: Data, nbytes: int) -> str | None:
        """Receive a message: None if it is the next one, else why it is dropped."""
        if data.meant != self.own or data.incarnation in self.retired:
            return "wrong incarnation"
        self._meet(data)
        self._see(data)
        if data.number < self._expected:
            # Its acknowledgement may be what was lost.
            self._owed_messages += 1
            return "duplicate"
        if data.number > self._expected:
            self._note_gap(data)
            return "out of order"
        self._expected += 1
        self._gap = False
        self._owed_bytes += nbytes
        self._owed_messages += 1
        self.traffic.received_bytes += nbytes
        self.traffic.received_messages += 1
        if self._owed_bytes >= _ACKNOWLEDGE_BYTES or self._owed_messages >= _ACKNOWLEDGE_MESSAGES:
            self.tell()
        return None

    def take_state(self, state: State) -> str | None:
        """Receive a state; why it is dropped, or None."""
        if state.incarnation in self.retired:
            return "wrong incarnation"
        if state.meant != self.own:
            # It greets, or knows us as who we were: say who we are.
            self.tell(to=state.incarnation)
            return "wrong incarnation" if state.meant else None
        if self._meet(state):
            self.tell()
        if state.expected > self._sent_up_to or state.seen > self._turn:
            return "malformed"
        self._see(state)
        self._acknowledged(state)
        if state.number > self._expected and state.turn == self._seen:
            self._gap = True
            self.tell()
        elif state.ask:
            self.tell()
        self.pump()
        return None

    def _meet(self, envelope: Envelope) -> bool:
        """Whether with this message the peer is met in a new incarnation.

        Only the peer itself can know our incarnation, so whoever names it is there now.
        """
        self.heard = True
        if envelope.incarnation == self.met:
            return False
        if self.met:
            self.retired.append(self.met)
            self._waiting.clear()
            self._waiting_bytes = 0
        self._reset()
        self.met = envelope.incarnation
        return True

    def _see(self, envelope: Envelope) -> None:
        if envelope.turn > self._seen:
            self._seen = envelope.turn
            self._gap = False

    def _note_gap(self, envelope: Envelope) -> None:
        if envelope.turn < self._seen:
            return
        self._gap = True
        if self._gap_told < self._seen and self.tell():
            self._gap_told = self._seen

    def _acknowledged(self, state: State) -> None:
        first = self._next - len(self._on_the_way)
        while self._on_the_way and first < state.expected:
            self.in_flight_bytes -= self._on_the_way.popleft().nbytes
            first += 1
        # Received of an earlier turn, while it waited here to be sent again.
        while self._next < state.expected:
            self._waiting_bytes -= self._waiting.popleft().nbytes
            self._next += 1
        if state.seen != self._turn:
            return
        if state.gap and state.expected < self._next:
            self._go_back()
        else:
            # It has seen our state after the loss, and misses nothing.
            self._probing = False

    def _go_back(self) -> None:
        self._waiting.extendleft(reversed(self._on_the_way))
        self._waiting_bytes += self.in_flight_bytes
        self._next -= len(self._on_the_way)
        self._on_the_way.clear()
        self.in_flight_bytes = 0
        self._turn += 1
        self._probing = False
