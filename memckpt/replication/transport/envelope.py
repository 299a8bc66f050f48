"""What stands before each message between replicators: from whom, for whom, and which one it is."""

from __future__ import annotations

import re
from typing import Annotated

import msgspec

WIRE_VERSION = 6
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

    Attributes:
        node: the sender's name.
        incarnation: the sender's, for this receiver.
        meant: the receiver's incarnation, which the sender can know only from the receiver; empty before it does.
        turn: how often the sender has gone back so far to send again what was lost.
        number: number of this message; in a state, of the next message that is to be sent.
    """

    node: _Name
    incarnation: _Incarnation
    meant: Annotated[str, msgspec.Meta(max_length=64)]
    turn: _Number
    number: _Number


class Data(Envelope, frozen=True, array_like=True, tag=1):
    """A message; its body, in so many parts, and its payload follow as frames of their own."""

    parts: Annotated[int, msgspec.Meta(ge=1, le=MAX_PARTS)] = 1


class State(Envelope, frozen=True, array_like=True, tag=2):
    """What the sender has sent and received; it is a greeting, a heartbeat and an acknowledgement in one.

    Attributes:
        expected: all messages below this number have been received.
        seen: the receiver's turn as the sender knows it.
        gap: something of that turn is missing: go back to `expected`.
        ask: the sender wants an answer.
        address: address at which the sender listens.
        version: version of the sender's messages; 0: from before there were versions.
    """

    expected: _Number
    seen: _Number
    gap: bool
    ask: bool
    address: Annotated[str, msgspec.Meta(max_length=300)]
    version: _Number = 0


_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Data | State] = msgspec.msgpack.Decoder(Data | State)


def parts_of(body: bytes) -> list[bytes]:
    """A body as it is sent, in frames."""
    return [body[start : start + FRAME_BYTES] for start in range(0, len(body), FRAME_BYTES)] or [body]


def encode(envelope: Data | State) -> bytes:
    return _encoder.encode(envelope)


def decode(data: bytes) -> Data | State:
    """Read an envelope.

    Raises:
        ValueError: it is none, or names an address that cannot be connected to.
    """
    try:
        envelope = _decoder.decode(data)
    except RecursionError as error:
        raise ValueError("expected an envelope, found lists in lists") from error
    if isinstance(envelope, State) and not is_address(envelope.address):
        raise ValueError(f"expected an address like tcp://host:port, found {envelope.address!r}")
    return envelope


def is_address(address: str) -> bool:
    """Whether it is one that names a TCP host and port, and nothing beside."""
    return _ADDRESS.fullmatch(address) is not None and 0 < int(address.rpartition(":")[2]) <= 65535
