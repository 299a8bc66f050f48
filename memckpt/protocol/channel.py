"""A typed message channel over a Unix seqpacket socket, and the messages of each connection, in each direction.

Each message is one packet, which survives its sender. What exceeds the packet limit travels in an anonymous memory
file.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import time
from array import array
from collections.abc import Sequence
from typing import Generic, TypeVar, cast

import msgspec

from memckpt.errors import MALFORMED, AgentError, AgentGoneError
from memckpt.protocol import replication, status, storing, trainer
from memckpt.protocol.audit import AgentToAuditor, AuditorToAgent
from memckpt.protocol.descriptors import readable, writable
from memckpt.protocol.storing import AgentToWriter, WriterToAgent

#: What trainers and visitors, such as the command line, say to an agent.
TrainerToAgent = (
    replication.TrainerToAgent | status.TrainerToAgent | storing.TrainerToAgent | trainer.TrainerToAgent
)  # fmt: skip
#: Messages of an agent to trainers and visitors.
AgentToTrainer = (
    replication.AgentToTrainer | status.AgentToTrainer | storing.AgentToTrainer | trainer.AgentToTrainer
)  # fmt: skip
#: Messages of an agent to its replicator, and of the replicator to its agent.
AgentToReplicator = replication.AgentToReplicator
ReplicatorToAgent = replication.ReplicatorToAgent | status.ReplicatorToAgent
#: Any of these, as a channel decodes them.
Message = (
    TrainerToAgent | AgentToTrainer | AgentToWriter | WriterToAgent | AgentToAuditor | AuditorToAgent
    | AgentToReplicator | ReplicatorToAgent
)  # fmt: skip


INLINE_BYTES = 64 << 10
_MAX_FDS = 8
_INLINE, _IN_FILE = b"i", b"f"

In = TypeVar("In")
Out = TypeVar("Out")

encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(Message)


def _body_of(fds: list[int]) -> bytes:
    """The body of a message in a file, the first descriptor, which is closed. Raises ValueError or OSError."""
    if not fds:
        raise ValueError("its body comes in a file, but there is none")
    fd = fds.pop(0)
    try:
        found = os.fstat(fd)
        # A pipe might never end, and a hole costs its sender nothing.
        if not stat.S_ISREG(found.st_mode) or found.st_size > 512 * found.st_blocks:
            raise ValueError("its body comes in something that is no file, or has holes")
        os.lseek(fd, 0, os.SEEK_SET)
        with open(fd, "rb", closefd=False) as stream:
            return stream.read(found.st_size)
    finally:
        os.close(fd)


class Channel(Generic[In, Out]):
    """One end of a connection, for one union of messages in and one out. Owns the socket; not for forked children."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock

    def fileno(self) -> int:
        return self.sock.fileno()

    def send(self, message: Out, fds: Sequence[int] = (), timeout: float | None = 30.0) -> None:
        """Send one message; blocks while the receiver's buffer is full. Raises AgentGoneError: closed, or `timeout`."""
        body = encode(message)
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self.offer(body, fds):
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not writable(self.sock, left):
                raise AgentGoneError(f"the other end took no message for {timeout:.0f} s (stopped or overloaded?)")

    def offer(self, body: bytes, fds: Sequence[int] = ()) -> bool:
        """Send an encoded message if there is room for it; False if not. Never blocks. Raises AgentGoneError: ended."""
        if len(body) <= INLINE_BYTES:
            return self._send(_INLINE + body, list(fds))
        file = -1
        try:
            file = os.memfd_create("memckpt:message", os.MFD_CLOEXEC)
            with open(file, "wb", closefd=False) as stream:
                stream.write(body)
            return self._send(_IN_FILE, [file, *fds])
        except OSError as error:
            raise AgentGoneError(f"no room for a message of {len(body):,} bytes: {error}") from error
        finally:
            if file >= 0:
                os.close(file)

    def _send(self, packet: bytes, fds: list[int]) -> bool:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", fds))] if fds else []
        try:
            # Not socket.send_fds: Python 3.10 to 3.12 ignore its flags.
            self.sock.sendmsg([packet], rights, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except BlockingIOError:
            return False
        except (BrokenPipeError, ConnectionResetError, OSError) as error:
            raise AgentGoneError(f"the connection is closed: {error}") from error
        return True

    def receive(self, timeout: float | None) -> tuple[In, list[int]]:
        """Wait for a message; the caller owns its descriptors. Raises AgentGoneError: the end, or none came in time."""
        received = self.poll(timeout)
        if received is None:
            raise AgentGoneError(f"no answer within {timeout:.0f} s")
        return received

    def poll(self, timeout: float | None = 0.0) -> tuple[In, list[int]] | None:
        """Like :meth:`receive`, but None when nothing came."""
        if timeout != 0.0 and not readable(self.sock, timeout):
            return None
        try:
            packet, ancillary, flags = self._receive_packet()
        except BlockingIOError:
            return None
        except OSError as error:
            raise AgentGoneError(f"the connection is closed: {error}") from error
        fds: list[int] = []
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds += array("i", data[: len(data) // 4 * 4])
        if flags & socket.MSG_CTRUNC:
            for fd in fds:
                os.close(fd)
            raise AgentError("its descriptors were lost: this process has too many open files; raise it (ulimit -n)")
        if not packet:
            raise AgentGoneError("the connection was closed by the other end")
        try:
            body = _body_of(fds) if packet[:1] == _IN_FILE else packet[1:]
            return cast("In", _decoder.decode(body)), fds
        except (*MALFORMED, OSError) as error:
            for fd in fds:
                os.close(fd)
            raise AgentError(f"a message could not be understood ({error}); do both ends run one version?") from error

    def _receive_packet(self) -> tuple[bytes, list[tuple[int, int, bytes]], int]:
        space, flags = socket.CMSG_SPACE(_MAX_FDS * 4), socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
        try:
            packet, ancillary, got, _ = self.sock.recvmsg(INLINE_BYTES + 1, space, flags)
        except ConnectionResetError:
            # The other end has died with something of ours unread. Linux says so once, ahead of what it had sent,
            # which still counts.
            packet, ancillary, got, _ = self.sock.recvmsg(INLINE_BYTES + 1, space, flags)
        return packet, ancillary, got

    def shut_down(self) -> None:
        """Both ends send nothing more; what has arrived can still be received, and then the end."""
        with contextlib.suppress(OSError):  # the other end was faster
            self.sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.sock.close()


#: The end of a trainer or visitor, and that of its agent.
TrainerChannel = Channel[AgentToTrainer, TrainerToAgent]
AgentChannel = Channel[TrainerToAgent, AgentToTrainer]
#: The end of a process that works for an agent.
WriterChannel = Channel[AgentToWriter, WriterToAgent]
AuditorChannel = Channel[AgentToAuditor, AuditorToAgent]
ReplicatorChannel = Channel[AgentToReplicator, ReplicatorToAgent]
