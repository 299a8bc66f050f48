"""What a worker and the keeper of its local rank say to each other: one JSON object in each packet."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from typing import Union

import msgspec

from memckpt_run.packets import receive_packet, send_packet


class Begin(msgspec.Struct, frozen=True, tag="begin"):
    """Start an attempt. The worker's three standard streams come along as descriptors.

    Attributes:
        command: words of the training's command.
        directory: path of the working directory.
        environment: variables, as in /proc/PID/environ.
        mask: numbers of blocked signals.
    """

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
_to_keeper = msgspec.json.Decoder(ToKeeper)
_from_keeper = msgspec.json.Decoder(FromKeeper)


def send(link: socket.socket, message: ToKeeper | FromKeeper, fds: Sequence[int] = ()) -> None:
    """Send a message.

    Raises:
        OSError: the other end is gone, or the message is too large.
    """
    send_packet(link, msgspec.json.encode(message), fds)


def receive_request(link: socket.socket) -> tuple[ToKeeper | None, list[int]]:
    """The next one, in the keeper, which owns the descriptors; None if the worker is gone."""
    packet, fds = receive_packet(link)
    return (_to_keeper.decode(packet) if packet else None), fds


def receive_reply(link: socket.socket) -> FromKeeper | None:
    """The next one, in the worker; None if the keeper is gone."""
    packet, _ = receive_packet(link)
    return _from_keeper.decode(packet) if packet else None


def packed(environment: Mapping[str, str]) -> bytes:
    """Variables as bytes, whatever they hold."""
    return b"\0".join(os.fsencode(f"{name}={value}") for name, value in environment.items())


def unpacked(environment: bytes) -> dict[str, str]:
    """The reverse; also of the content of /proc/PID/environ."""
    pairs = (os.fsdecode(each).partition("=") for each in environment.split(b"\0"))
    return {name: value for name, equals, value in pairs if equals}
