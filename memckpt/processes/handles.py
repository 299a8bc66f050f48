"""Handles of processes that stay valid when process ids are reused."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
from pathlib import Path

from memckpt.protocol.descriptors import readable

#: Flag in /proc/PID/stat: the process is exiting.
_PF_EXITING = 0x4
_SO_PEERPIDFD = 77  # Linux 6.5; the socket module has no name for it


def start_ticks(pid: int) -> int:
    """Start of a process in clock ticks since boot; 0: there is none, or only a zombie without other threads."""
    fields = _stat_of(pid)
    if not fields:
        return 0
    threads = int(fields[17])
    return 0 if fields[0] in "ZX" and threads <= 1 else int(fields[19])


def _stat_of(pid: int) -> list[str]:
    """The fields of its stat file from the state on; empty if there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return []
    return stat[stat.rindex(")") + 2 :].split()


def _status_of(pid: int) -> dict[str, str]:
    """The fields of its status file; empty if there is no such process."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return {}
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def parent_of(pid: int) -> int:
    """Process id of its parent; 0 if there is no such process."""
    return int(_status_of(pid).get("PPid", 0))


def children_of(pid: int) -> list[int]:
    """Process ids of its children; empty if there is no such process."""
    found: list[int] = []
    for tasks in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # the thread has ended
            found += map(int, tasks.read_text().split())
    return found


class ProcessHandle:
    """A pidfd: refers to one process for good, even if its id is reused. Its owner closes it."""

    def __init__(self, pid: int, fd: int) -> None:
        self.pid, self.fd = pid, fd

    @classmethod
    def of_peer(cls, sock: socket.socket, pid: int) -> ProcessHandle:
        """The process at the other end of a Unix socket. Raises ProcessLookupError: it is gone already."""
        try:
            (fd,) = struct.unpack("i", sock.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD, 4))
            os.set_inheritable(fd, False)
        except OSError:
            fd = os.pidfd_open(pid)  # an older kernel: a reuse of the id is all but impossible so soon
        return cls(pid, fd)

    @classmethod
    def of(cls, pid: int, ticks: int) -> ProcessHandle:
        """The process that has this id and started at `ticks` since boot. Raises ProcessLookupError: it is gone."""
        handle = cls(pid, os.pidfd_open(pid))
        if start_ticks(pid) != ticks:
            handle.close()
            raise ProcessLookupError(f"pid {pid} is another process")
        return handle

    def fileno(self) -> int:
        return self.fd

    def alive(self) -> bool:
        return not readable(self.fd, 0)

    def duplicate(self) -> ProcessHandle:
        """Another handle of the same process, with its own owner."""
        return ProcessHandle(self.pid, os.dup(self.fd))

    def state(self) -> str:
        """The process's state as the kernel names it, such as ``D (disk sleep)``."""
        return _status_of(self.pid).get("State", "ended")

    def dying(self) -> bool:
        """Whether it is dead, exiting, or has a pending SIGKILL: its end only has to be waited for."""
        if not self.alive():
            return True
        fields = _stat_of(self.pid)
        if not fields or fields[0] in "ZX" or int(fields[6]) & _PF_EXITING:
            return True
        status = _status_of(self.pid)
        pending = int(status.get("SigPnd", "0"), 16) | int(status.get("ShdPnd", "0"), 16)
        return bool(pending & 1 << signal.SIGKILL - 1)

    def kill(self) -> None:
        if self.alive():
            signal.pidfd_send_signal(self.fd, signal.SIGKILL)

    def terminate(self) -> None:
        if self.alive():
            signal.pidfd_send_signal(self.fd, signal.SIGTERM)

    def wait(self, timeout: float) -> bool:
        """True once the process is dead; False after `timeout` seconds."""
        return readable(self.fd, timeout)

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
