"""Packets between processes of one user on one machine: bytes, and descriptors that come along."""

from __future__ import annotations

import socket
from array import array
from collections.abc import Sequence

#: Largest packet, in bytes. What is larger goes through files.
_PACKET_BYTES = 1 << 18
_MOST_DESCRIPTORS = 3


def send_packet(link: socket.socket, packet: bytes, fds: Sequence[int] = ()) -> None:
    """Send one; descriptors are duplicated into the receiver.

    Raises:
        OSError: the other end is gone, or the packet is too large.
    """
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", fds))] if fds else []
    link.sendmsg([packet], rights, socket.MSG_NOSIGNAL)


def receive_packet(link: socket.socket) -> tuple[bytes, list[int]]:
    """The next one, and the descriptors, which are the caller's; empty if the other end is gone."""
    space = socket.CMSG_SPACE(_MOST_DESCRIPTORS * 4)
    try:
        packet, ancillary, _, _ = link.recvmsg(_PACKET_BYTES, space, socket.MSG_CMSG_CLOEXEC)
    except ConnectionResetError:
        return b"", []
    return packet, [fd for _, _, data in ancillary for fd in array("i", data)]
