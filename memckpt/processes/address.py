"""Address of a run's agent on a node: a file in the run directory that names its sockets, and a lock for its start.

The file is the only source: a trainer may have another environment than the agent's starter. In a copy of the directory
it names another run's agent. One socket has a name in the abstract namespace; the other is reached from other network
namespaces, through a descriptor in ``/proc``. No path leads to them, and both go with the agent.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import os
import platform
import re
import secrets
import select
import socket
import struct
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from memckpt.errors import MALFORMED, AgentError, AgentGoneError, ConfigurationError
from memckpt.processes.handles import ProcessHandle, start_ticks
from memckpt.protocol.descriptors import readable
from memckpt.storage.owner import lies_elsewhere

_log = logging.getLogger("memckpt.agent")
NODE_VARIABLE = "MEMCKPT_NODE"
#: Length of the queue of connections that the agent has not accepted yet. A stopped agent accepts none.
BACKLOG = 64
#: The beginning of an agent's socket's name; 32 hexadecimal digits follow.
_SOCKET = "memckpt-"
#: Longest wait for room in the queue of an agent's connections, in seconds.
_CONNECT_SECONDS = 5.0
#: Longest time, in seconds, for which another process may start or end an agent.
_LOCK_SECONDS = 120.0
#: Longest time, in seconds, from when a killed process closes its sockets to its end.
_END_SECONDS = 10.0


def node_name() -> str:
    """This node's name: MEMCKPT_NODE, or the host name."""
    return os.environ.get(NODE_VARIABLE) or platform.node()


class ServingAgent(msgspec.Struct, frozen=True):
    """Content of the file: the agent's process, its directory and its two sockets."""

    pid: int
    start_ticks: int
    boot: str  #: id of the machine's boot; process ids of another boot mean nothing
    pid_namespace: int  #: inode of the PID namespace of `pid`
    socket: str  #: name in the abstract namespace
    descriptor: int  #: descriptor in the process that refers to the other socket's inode; -1: none
    directory: str = ""  #: path of the run directory when the agent started; empty: unknown
    device: int = 0  #: of that directory
    inode: int = 0
    #: descriptor in the process that refers to that directory, which may be moved; -1: none.
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
            process = ProcessHandle.of(self.pid, self.start_ticks)
        except ProcessLookupError:
            return True
        with contextlib.closing(process):
            return process.wait(within)


@dataclass(frozen=True)
class AgentAddress:
    """The agent of one run on one node."""

    run_dir: Path
    node: str

    @classmethod
    def of(cls, run_dir: str | os.PathLike[str], node: str | None = None) -> AgentAddress:
        """The address for a run directory, on this node or `node`. Raises ConfigurationError: the path is no text."""
        found = Path(run_dir).resolve()
        try:
            str(found).encode()
        except UnicodeEncodeError:
            raise ConfigurationError(
                f"expected a run directory whose path is text in UTF-8, found the bytes {os.fsencode(found)!r}; choose "
                "another run directory"
            ) from None
        return cls(found, node or node_name())

    @property
    def file_path(self) -> Path:
        """The file that names the agent; one per node, as nodes may share the run directory."""
        return self.run_dir / f"agent-{self.node}.json"

    def leaving_path(self, serving: ServingAgent) -> Path:
        """The file that names an agent which answers no more, until it has written what it holds."""
        return self.run_dir / f"leaving-{self.node}-{serving.pid}.json"

    @property
    def log_path(self) -> Path:
        return self.run_dir / f"agent-{self.node}.log"

    def serving(self) -> ServingAgent | None:
        """The agent that the run directory names, dead or alive, if any. Raises AgentError: the file cannot be read."""
        try:
            return msgspec.json.decode(self.file_path.read_bytes(), type=ServingAgent)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise AgentError(
                f"expected a run directory whose {self.file_path.name} this user, {os.getuid()}, can read, found "
                f"{error}; it names the run's agent: make it readable, or choose another run directory"
            ) from error
        except MALFORMED as error:
            # The file is written in full and renamed, but not synced: the machine has crashed, and the agent with it.
            _log.warning("%s names no agent (%s); it will be rewritten", self.file_path, error)
            return None

    def was_removed(self) -> bool:
        """Whether the file is gone, and what the run directory was in is there: it is not a disk that is not."""
        try:
            return not self.file_path.exists() and self.run_dir.parent.is_dir()
        except OSError:  # it may be there
            return False

    def original(self) -> str:
        """The directory whose agent the file names, if the run directory is a copy of it; else empty."""
        serving = self.serving()
        return "" if serving is None else serving.serves_elsewhere(self.run_dir)

    def say_if_copied(self, log: logging.Logger) -> None:
        """Warn that an agent is about to be started although the file names one."""
        if original := self.original():
            log.warning(
                "memckpt: %s is a copy of %s, and its %s was copied with it: the agent of that run is not used. The "
                "copy gets its own agent, which holds nothing yet, and resumes from its storage; `memckpt export "
                "ORIGINAL --from memory` exports the state that the original's agent holds",
                self.run_dir,
                original,
                self.file_path.name,
            )

    # The agent's side

    def listen(self) -> Listener:
        """Have the run directory name this process, under :meth:`starting`; returns its sockets. Raises AgentError."""
        listener = Listener(self.run_dir)
        written = self.file_path.with_name(f"{self.file_path.name}.{listener.serving.socket}")
        try:
            written.write_bytes(msgspec.json.encode(listener.serving))
            written.replace(self.file_path)
        except OSError as error:
            listener.close()
            with contextlib.suppress(OSError):
                written.unlink()
            raise AgentError(
                f"expected a run directory in which {self.file_path} can be written, found {error}; choose another "
                "run directory, or make this one writable"
            ) from error
        return listener

    def withdraw(self, serving: ServingAgent) -> None:
        """Make the file name this agent as one that leaves. The caller holds :meth:`starting`."""
        if self.serving() == serving:
            try:
                self.file_path.replace(self.leaving_path(serving))
            except FileNotFoundError:
                return  # a user has removed the run directory
            except OSError as error:
                _log.warning("a start will not know that this agent still writes to storage: %s", error)
                self.file_path.unlink(missing_ok=True)

    def remove_address(self, serving: ServingAgent) -> None:
        """Remove the file that names this agent as one that leaves: it has ended, or is about to."""
        try:
            self.leaving_path(serving).unlink(missing_ok=True)
        except OSError as error:
            _log.warning("a stale file, which does no harm, cannot be removed: %s", error)

    def leaving(self) -> list[ServingAgent]:
        """Agents of this node that answer no more, and may still write what they hold. Raises OSError."""
        name = re.compile(rf"leaving-{re.escape(self.node)}-\d+\.json")
        found = []
        for path in sorted(self.run_dir.iterdir()):
            if not name.fullmatch(path.name):
                continue
            try:
                serving = msgspec.json.decode(path.read_bytes(), type=ServingAgent)
            except FileNotFoundError:
                continue  # it has just ended
            except MALFORMED:
                path.unlink(missing_ok=True)  # the machine has crashed, and the agent with it
                continue
            if not serving.serves_elsewhere(self.run_dir):
                found.append(serving)
        return found

    @contextlib.contextmanager
    def starting(self, seconds: float = _LOCK_SECONDS) -> Iterator[None]:
        """Hold the lock for starting an agent, a name in the abstract namespace that goes with its holder.

        Raises AgentError: another process has held it for more than `seconds`.
        """
        text = f"{os.getuid()}\0{self.run_dir}\0{self.node}"
        name = f"\0memckpt-starting-{hashlib.blake2b(text.encode(), digest_size=16).hexdigest()}"
        deadline = time.monotonic() + seconds
        while True:
            try:
                lock = listen_at(name)
                break
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
            self._wait_for_starter(name, deadline, seconds)
        with lock:
            yield

    def _wait_for_starter(self, name: str, deadline: float, limit: float) -> None:
        """Wait until the lock's holder releases it; only briefly if it does not listen yet."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as waiting:
            waiting.setblocking(False)
            left = deadline - time.monotonic()
            holder = 0
            try:
                waiting.connect(name)
                holder, uid = peer(waiting)
                if uid != os.getuid():
                    raise AgentError(
                        f"the lock for starting agents of {self.run_dir} is held by uid {uid}, pid {holder}; expected "
                        f"this user, {os.getuid()}. End that process, or choose another run directory"
                    )
                # The holder never accepts; the connection ends with the lock.
                readable(waiting, left)
            except (ConnectionRefusedError, BlockingIOError):  # not listening yet, or no longer; or its queue is full
                select.select([], [], [], 0.01)
        if time.monotonic() > deadline:
            raise AgentError(
                f"pid {holder or '?'} has been starting or ending an agent of {self.run_dir} for more than "
                f"{limit:.0f} s; end it if it hangs"
            )

    # For trainers and commands

    def connect(self) -> socket.socket | None:
        """A connection to the agent; None: there is none, or it serves a directory of which this is a copy.

        Raises AgentGoneError: it accepts none. AgentError: it cannot be reached from here, or is another user's.
        """
        refused: ServingAgent | None = None
        while True:
            serving = self.serving()
            if serving is None or serving.serves_elsewhere(self.run_dir):
                return None
            try:
                return self._connect_to(serving)
            except ConnectionRefusedError:
                if serving != refused:
                    refused = serving  # another agent may have replaced it since the file was read
                elif serving.ends(within=_END_SECONDS):
                    return None
                elif self.serving() == serving:
                    raise AgentError(
                        f"agent pid {serving.pid} serves {self.run_dir} on node {self.node} and cannot be reached: "
                        "expected agent and trainer in one network namespace (container, pod). Start both in one, or "
                        "end the agent"
                    ) from None

    def await_leaving(self, seconds: float, log: logging.Logger) -> None:
        """Wait until agents of this node that leave have written to storage what they hold, `seconds` at most."""
        until = time.monotonic() + seconds
        try:
            agents = self.leaving()
        except OSError as error:  # no reason to end a start whose agent answers
            log.warning("memckpt: whether another agent of this node still writes is not known: %s", error)
            return
        for agent in agents:
            if not agent.ends(within=0.0):
                log.warning(
                    "memckpt: agent pid %d of this node was told to end, and still writes to storage what it holds; "
                    "the start waits for it, at most %.0f s",
                    agent.pid,
                    seconds,
                )
                if not agent.ends(within=max(0.0, until - time.monotonic())):
                    log.warning(
                        "memckpt: agent pid %d has not ended within %.0f s; the start goes on without what it has not "
                        "written yet",
                        agent.pid,
                        seconds,
                    )
                    continue
            self.remove_address(agent)

    def _connect_to(self, serving: ServingAgent) -> socket.socket:
        refusal: OSError = ConnectionRefusedError()
        for address in serving.addresses:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            try:
                seconds, microseconds = divmod(int(_CONNECT_SECONDS * 1e6), 1_000_000)
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", seconds, microseconds))
                sock.connect(address)
                _, uid = peer(sock)
                if uid != os.getuid():
                    raise AgentError(
                        f"the agent of {self.run_dir} runs as uid {uid}; expected this user, {os.getuid()}"
                    )
                return sock
            except BaseException as error:  # the socket has no other owner
                sock.close()
                if isinstance(error, BlockingIOError):
                    raise AgentGoneError(
                        f"agent pid {serving.pid} has accepted no connection for {_CONNECT_SECONDS:.0f} s (stopped or "
                        "overloaded?)"
                    ) from error
                if not isinstance(error, (ConnectionRefusedError, FileNotFoundError, PermissionError)):
                    raise
                refusal = error
        raise ConnectionRefusedError(str(refusal)) from refusal


class Listener:
    """An agent's two listening sockets in this process, closed by its owner; without `run_dir` only a test."""

    def __init__(self, run_dir: Path | None = None) -> None:
        name = f"{_SOCKET}{secrets.token_hex(16)}"
        self.sockets = [listen_at(f"\0{name}")]
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
                self.sockets.append(listen_at(path))
                self._descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
            finally:
                os.close(fd)

    def _open_directory(self, run_dir: Path) -> None:
        """Keep the directory open, to see where it is moved to, and to keep its inode from changing or being reused."""
        try:
            self._directory = fd = os.open(run_dir, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError:  # no directory: writing the file will raise
            return
        found = os.fstat(fd)
        self.serving = msgspec.structs.replace(
            self.serving, directory=str(run_dir), device=found.st_dev, inode=found.st_ino, directory_descriptor=fd
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
        for listening in self.sockets:
            listening.close()
        for fd in (self._descriptor, self._directory):
            if fd >= 0:
                os.close(fd)
        self._descriptor = self._directory = -1


def listen_at(address: str) -> socket.socket:
    """A socket that listens at an address, without blocking. Raises OSError: another process has it."""
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        listening.bind(address)
        listening.listen(BACKLOG)
        listening.setblocking(False)
    except BaseException:  # raised again; the socket has no other owner
        listening.close()
        raise
    return listening


def agent_sockets() -> list[str]:
    """Names of the sockets at which agents listen in this network namespace, of all run directories."""
    pattern = re.compile(rf"@({_SOCKET}[0-9a-f]{{32}})$", re.MULTILINE)
    return sorted(set(pattern.findall(Path("/proc/net/unix").read_text())))


def connect_to(name: str) -> socket.socket | None:
    """A connection to the agent that listens there; None: it has gone, takes no connection, or is another user's."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        sock.setblocking(False)
        sock.connect(f"\0{name}")
        sock.setblocking(True)
        if peer(sock)[1] == os.getuid():
            return sock
    except (ConnectionRefusedError, BlockingIOError, PermissionError) as error:
        _log.info("no agent answers at %s: %s", name, error)
    sock.close()
    return None


def peer(sock: socket.socket) -> tuple[int, int]:
    """Process id and user id of the other end."""
    pid, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return pid, uid


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _pid_namespace() -> int:
    return os.stat("/proc/self/ns/pid").st_ino
