"""Where a run's agent is found on a node, and who may talk to it."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import platform
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from memckpt.errors import AgentError

NODE_VARIABLE = "MEMCKPT_NODE"
RUNTIME_VARIABLE = "MEMCKPT_RUNTIME_DIR"


def node_name() -> str:
    """This node's name: MEMCKPT_NODE, or the host's name."""
    return os.environ.get(NODE_VARIABLE) or platform.node()


def runtime_directory() -> Path:
    """The 0700 directory with the sockets of this user's agents; made if need be.

    Raises:
        AgentError: it belongs to somebody else or others may enter it.
    """
    configured = os.environ.get(RUNTIME_VARIABLE)
    base = os.environ.get("XDG_RUNTIME_DIR")
    if configured:
        directory = Path(configured)
    elif base and os.access(base, os.W_OK):
        directory = Path(base) / "memckpt"
    else:
        directory = Path("/tmp") / f"memckpt-{os.getuid()}"
    with contextlib.suppress(FileExistsError):
        directory.mkdir(mode=0o700, parents=bool(configured))
    found = directory.lstat()
    if not directory.is_dir() or directory.is_symlink() or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise AgentError(
            f"runtime directory {directory}: expected a directory of uid {os.getuid()} with mode 0700, found uid "
            f"{found.st_uid} and mode {found.st_mode & 0o7777:04o}; remove it or set {RUNTIME_VARIABLE}"
        )
    return directory


@dataclass(frozen=True)
class AgentAddress:
    """The agent of one run on one node."""

    run_dir: Path
    node: str

    @classmethod
    def of(cls, run_dir: str | os.PathLike[str], node: str | None = None) -> AgentAddress:
        return cls(Path(run_dir).resolve(), node or node_name())

    @property
    def key(self) -> str:
        """What tells this run and node apart from all others of the same user."""
        return hashlib.blake2b(f"{self.run_dir}\0{self.node}".encode(), digest_size=10).hexdigest()

    @property
    def socket_path(self) -> Path:
        return runtime_directory() / f"{self.key}.sock"

    @property
    def log_path(self) -> Path:
        return self.run_dir / f"agent-{self.node}.log"

    @contextlib.contextmanager
    def starting(self) -> Iterator[None]:
        """Hold the lock under which an agent is started: one starter at a time, none while an agent unlinks."""
        while True:
            path = runtime_directory() / f"{self.key}.lock"
            try:
                fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            except FileNotFoundError:
                continue  # the last agent of this user has just removed the directory
            fcntl.flock(fd, fcntl.LOCK_EX)
            # The holder before us may have removed the file: then lock the one that is there now.
            with contextlib.suppress(FileNotFoundError):
                if path.stat().st_ino == os.fstat(fd).st_ino:
                    break
            os.close(fd)
        try:
            yield
        finally:
            path.unlink(missing_ok=True)
            os.close(fd)
            with contextlib.suppress(OSError):
                path.parent.rmdir()  # not empty while any agent lives

    def connect(self) -> socket.socket | None:
        """A connection to the agent, or None if none answers."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            sock.connect(str(self.socket_path))
        except (FileNotFoundError, ConnectionRefusedError):
            sock.close()
            return None
        if peer(sock)[1] != os.getuid():
            sock.close()
            raise AgentError(f"the agent at {self.socket_path} runs as uid {peer(sock)[1]}, not as {os.getuid()}")
        return sock


def peer(sock: socket.socket) -> tuple[int, int]:
    """Process and user id of the other end."""
    pid, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return pid, uid
