"""Messages between supervisor and warm process, and between worker and keeper, as packets."""

from __future__ import annotations

import os
import socket
from array import array
from collections.abc import Mapping, Sequence
from typing import Any, Generic, TypeVar, Union

import msgspec

#: Largest packet, in bytes. What is larger goes through files.
_PACKET_BYTES = 1 << 18
_MOST_DESCRIPTORS = 3


def send(link: socket.socket, message: ToWarm | FromWarm | ToKeeper | FromKeeper, fds: Sequence[int] = ()) -> None:
    """Send a message; descriptors are duplicated into the receiver. Raises OSError where that is gone."""
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", fds))] if fds else []
    link.sendmsg([msgspec.json.encode(message)], rights, socket.MSG_NOSIGNAL)


T = TypeVar("T")


class _Receiver(Generic[T]):
    """Receives messages of one kind, with descriptors, which are the caller's; None if the other end is gone."""

    def __init__(self, kind: Any) -> None:
        self._decoder: msgspec.json.Decoder[T] = msgspec.json.Decoder(kind)

    def __call__(self, link: socket.socket) -> tuple[T | None, list[int]]:
        space = socket.CMSG_SPACE(_MOST_DESCRIPTORS * 4)
        try:
            packet, ancillary, _, _ = link.recvmsg(_PACKET_BYTES, space, socket.MSG_CMSG_CLOEXEC)
        except ConnectionResetError:
            return None, []
        fds = [fd for _, _, data in ancillary for fd in array("i", data)]
        return (self._decoder.decode(packet) if packet else None), fds


# Supervisor and warm process


class Import(msgspec.Struct, frozen=True, tag="import"):
    """Import what a cold start has: the :class:`Recorded` in a file that comes along, and the user's modules `also`."""

    also: list[str]
    without: list[str]


class Fork(msgspec.Struct, frozen=True, tag="fork"):
    """Start an attempt, below a `parent`, whose end sends it `farewell`. Its streams come along, with a new session.

    `variables`: changes of the environment since the warm process's start; None: remove.
    """

    variables: dict[str, str | None]
    mask: list[int]
    parent: int
    farewell: int


class Here(msgspec.Struct, frozen=True, tag="here"):
    """The process runs, and waits for orders."""


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The imports are made: of so many modules; and why those of the user's that are missing could not be made."""

    modules: int
    seconds: float
    missing: dict[str, str]


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """No attempt can be forked from this process, and it ends; why, and of which packages that is known."""

    reason: str
    packages: list[str] = []


class Forked(msgspec.Struct, frozen=True, tag="forked"):
    """An attempt has begun, as an orphan of this process."""

    pid: int


ToWarm = Union[Import, Fork]  # noqa: UP007
FromWarm = Union[Here, Ready, Refused, Forked]  # noqa: UP007
receive_order: _Receiver[ToWarm] = _Receiver(ToWarm)
receive_answer: _Receiver[FromWarm] = _Receiver(FromWarm)


# Worker and keeper


class Begin(msgspec.Struct, frozen=True, tag="begin"):
    """Start an attempt; its three standard streams come along. `environment` is as in /proc/PID/environ."""

    command: list[bytes]
    directory: bytes
    environment: bytes
    mask: list[int]


class Signal(msgspec.Struct, frozen=True, tag="signal"):
    """The worker has got a signal: it is the attempt's."""

    number: int


class Become(msgspec.Struct, frozen=True, tag="become"):
    """The attempt has to be cold: the worker becomes it, with these variables added."""

    variables: dict[str, str]


class Started(msgspec.Struct, frozen=True, tag="started"):
    """The attempt has begun."""

    pid: int


class Ended(msgspec.Struct, frozen=True, tag="ended"):
    """It has ended, with this exit status, or the negative number of a signal."""

    code: int


ToKeeper = Union[Begin, Signal]  # noqa: UP007
FromKeeper = Union[Become, Started, Ended]  # noqa: UP007
receive_request: _Receiver[ToKeeper] = _Receiver(ToKeeper)
receive_reply: _Receiver[FromKeeper] = _Receiver(FromKeeper)


def packed(environment: Mapping[str, str]) -> bytes:
    return b"\0".join(os.fsencode(f"{name}={value}") for name, value in environment.items())


def unpacked(environment: bytes) -> dict[str, str]:
    """The reverse; also of the content of /proc/PID/environ."""
    pairs = (os.fsdecode(each).partition("=") for each in environment.split(b"\0"))
    return {name: value for name, equals, value in pairs if equals}
