"""The sockets at which an agent listens, and the content of the file that names them.

No path leads to the sockets, so none can be removed: one has a name in the abstract namespace, which belongs to the
network namespace; the other is reached from other network namespaces, through a descriptor of the agent in ``/proc``.
Both go with the agent.

The file also names its directory: in a copy of that directory it names an agent of another run.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec

from memckpt.processes.handles import start_ticks
from memckpt.protocol.descriptors import readable
from memckpt.storage.owner import lies_elsewhere

_log = logging.getLogger("memckpt.agent")
#: Length of the queue of connections that the agent has not accepted yet. A stopped agent accepts none.
BACKLOG = 64


class ServingAgent(msgspec.Struct, frozen=True):
    """Content of the file: the agent's process, its directory and its two sockets.

    Attributes:
        boot: id of the machine's boot; process ids of another boot mean nothing.
        pid_namespace: inode of the PID namespace of `pid`.
        socket: name in the abstract namespace.
        descriptor: descriptor in the process that refers to the other socket's inode; -1: none.
        directory: path of the run directory when the agent started; empty: unknown.
        device, inode: device and inode of that directory.
        directory_descriptor: descriptor in the process that refers to that directory, which may be moved; -1: none.
    """

    pid: int
    start_ticks: int
    boot: str
    pid_namespace: int
    socket: str
    descriptor: int
    directory: str = ""
    device: int = 0
    inode: int = 0
    directory_descriptor: int = -1

    @property
    def addresses(self) -> Iterator[str]:
        """Addresses to connect to, best first."""
        yield f"\0{self.socket}"
        if self.descriptor >= 0 and self._is_visible:
            yield f"/proc/{self.pid}/fd/{self.descriptor}"

    def serves_elsewhere(self, run_dir: Path) -> str:
        """The directory that the agent serves if it is another one than `run_dir`; else empty."""
        paths = [self.directory]
        if self.directory_descriptor >= 0 and self._is_visible:
            with contextlib.suppress(OSError):  # the agent is leaving
                paths.append(os.readlink(f"/proc/{self.pid}/fd/{self.directory_descriptor}"))
        return next((path for path in paths if path and lies_elsewhere(run_dir, Path(path), self._is_directory)), "")

    def _is_directory(self, found: os.stat_result) -> bool:
        return (found.st_dev, found.st_ino) == (self.device, self.inode)

    @property
    def _is_visible(self) -> bool:
        return self._pid_counts and start_ticks(self.pid) == self.start_ticks

    @property
    def _pid_counts(self) -> bool:
        return (self.boot, self.pid_namespace) == (_boot_id(), _pid_namespace())

    def ends(self, within: float) -> bool:
        """Whether the process is gone or ends within so many seconds; also True if that is unknown here."""
        if not self._pid_counts:
            return True
        try:
            handle = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return True
        try:
            if start_ticks(self.pid) != self.start_ticks:
                return True
            return readable(handle, within)
        finally:
            os.close(handle)


class Listener:
    """The two listening sockets of the agent in this process. Its owner closes it.

    `run_dir`: directory that the agent serves; None: only test whether sockets can listen.
    """

    def __init__(self, run_dir: Path | None = None) -> None:
        name = f"memckpt-{secrets.token_hex(16)}"
        self.sockets = [_listen_at(f"\0{name}")]
        self._descriptor = self._directory = -1
        try:
            self._listen_in_proc()
        except OSError as error:  # no directory for temporary files
            _log.info("trainers in another network namespace will not reach this agent: %s", error)
        pid = os.getpid()
        self.serving = ServingAgent(pid, start_ticks(pid), _boot_id(), _pid_namespace(), name, self._descriptor)
        if run_dir is not None:
            self._open_directory(run_dir)

    def _listen_in_proc(self) -> None:
        """Listen on a socket whose path is removed as soon as a descriptor refers to its inode."""
        with tempfile.TemporaryDirectory(prefix="memckpt-") as directory:
            # Through a descriptor of the directory: a socket's path has 107 bytes at most.
            fd = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                path = f"/proc/self/fd/{fd}/socket"
                self.sockets.append(_listen_at(path))
                self._descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
            finally:
                os.close(fd)

    def _open_directory(self, run_dir: Path) -> None:
        """Keep the directory open, to see where it is moved to, and to keep its inode from changing or being reused."""
        try:
            fd = os.open(run_dir, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError:  # no directory: writing the file will raise
            return
        self._directory = fd
        found = os.fstat(fd)
        self.serving = msgspec.structs.replace(
            self.serving,
            directory=str(run_dir),
            device=found.st_dev,
            inode=found.st_ino,
            directory_descriptor=fd,
        )

    @property
    def moved_to(self) -> Path | None:
        """The run directory's new path if it was moved since the agent started; None: not moved, or removed."""
        if self._directory < 0:
            return None
        now = os.readlink(f"/proc/self/fd/{self._directory}")
        try:
            same = now != self.serving.directory and os.path.samestat(os.stat(now), os.fstat(self._directory))
        except OSError:
            return None
        return Path(now) if same else None

    def close(self) -> None:
        """Idempotent."""
        for listening in self.sockets:
            listening.close()
        for fd in (self._descriptor, self._directory):
            if fd >= 0:
                os.close(fd)
        self._descriptor = self._directory = -1


def _listen_at(address: str) -> socket.socket:
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        listening.bind(address)
        listening.listen(BACKLOG)
        listening.setblocking(False)
    except BaseException:  # raised again; the socket has no other owner
        listening.close()
        raise
    return listening


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _pid_namespace() -> int:
    return os.stat("/proc/self/ns/pid").st_ino
