"""What a supervisor and its warm process say to each other: one JSON object in each packet."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Union

import msgspec

from memckpt_run.packets import receive_packet, send_packet


class Import(msgspec.Struct, frozen=True, tag="import"):
    """Import what a cold start has, and wait. Its :class:`Recorded` is a file that comes along as a descriptor.

    Attributes:
        also: modules of the user's own that are imported, too, with all below them.
    """

    also: list[str]


class Fork(msgspec.Struct, frozen=True, tag="fork"):
    """Start an attempt. Three descriptors that come along are its standard streams; then it begins a session.

    Attributes:
        variables: changes of the environment since the warm process's start; None: remove.
        mask: numbers of blocked signals.
        parent: process id of the supervisor.
        farewell: signal that it gets when the supervisor has ended.
    """

    variables: dict[str, str | None]
    mask: list[int]
    parent: int
    farewell: int


class Here(msgspec.Struct, frozen=True, tag="here"):
    """The process runs, and waits for orders."""


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The imports are made.

    Attributes:
        modules: number of modules of the cold start that are imported.
        seconds: time that it took.
        missing: for each of the user's own modules that could not be imported, its name and the reason.
    """

    modules: int
    seconds: float
    missing: dict[str, str]


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


def send(link: socket.socket, message: ToWarm | FromWarm, fds: Sequence[int] = ()) -> None:
    send_packet(link, msgspec.json.encode(message), fds)


def receive_order(link: socket.socket) -> tuple[ToWarm, list[int]] | None:
    """The next one, in the warm process, which owns the descriptors; None if the supervisor is gone."""
    packet, fds = receive_packet(link)
    return (_to_warm.decode(packet), fds) if packet else None


def receive_answer(link: socket.socket) -> FromWarm | None:
    """The next one, in the supervisor; None if the warm process is gone."""
    packet, _ = receive_packet(link)
    return _from_warm.decode(packet) if packet else None
