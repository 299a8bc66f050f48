"""What a supervisor and its warm process say to each other: one JSON object in each packet."""

from __future__ import annotations

import socket
from typing import Union

import msgspec

#: Largest packet, in bytes. What is larger goes through files.
_PACKET_BYTES = 1 << 16


class Import(msgspec.Struct, frozen=True, tag="import"):
    """Import these, and wait.

    Attributes:
        recorded: file with a cold start's :class:`Recorded`.
        also: modules of the user's own that are imported, too, with all below them.
    """

    recorded: str
    also: list[str]


class Fork(msgspec.Struct, frozen=True, tag="fork"):
    """Start an attempt.

    Attributes:
        variables: changes of the environment since the warm process's start; None: remove.
        mask: numbers of blocked signals.
    """

    variables: dict[str, str | None]
    mask: list[int]


class Here(msgspec.Struct, frozen=True, tag="here"):
    """The process runs, and waits for orders."""


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """So many modules are imported, in so many seconds."""

    modules: int
    seconds: float


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """No attempt can be forked from this process, and it ends; why."""

    reason: str


class Forked(msgspec.Struct, frozen=True, tag="forked"):
    """An attempt has begun, as an orphan of this process."""

    pid: int


ToWarm = Union[Import, Fork]  # noqa: UP007
FromWarm = Union[Here, Ready, Refused, Forked]  # noqa: UP007
_to_warm = msgspec.json.Decoder(ToWarm)
_from_warm = msgspec.json.Decoder(FromWarm)


def send(link: socket.socket, message: ToWarm | FromWarm) -> None:
    link.send(msgspec.json.encode(message))


def receive_order(link: socket.socket) -> ToWarm | None:
    """The next one, in the warm process; None if the supervisor is gone."""
    packet = link.recv(_PACKET_BYTES)
    return _to_warm.decode(packet) if packet else None


def receive_answer(link: socket.socket) -> FromWarm | None:
    """The next one, in the supervisor; None if the warm process is gone."""
    try:
        packet = link.recv(_PACKET_BYTES)
    except ConnectionResetError:
        return None
    return _from_warm.decode(packet) if packet else None
