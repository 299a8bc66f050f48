"""Address of a run's agent on a node: a file in the run directory that names its socket, and a lock for its start.

The file is the only source. The environment of a later trainer may differ from that of the one that started the agent,
and directories such as XDG_RUNTIME_DIR go when the user logs out.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import os
import platform
import re
import select
import socket
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from memckpt.errors import MALFORMED, AgentError, AgentGoneError, ConfigurationError
from memckpt.processes.listener import BACKLOG, Listener, ServingAgent
from memckpt.protocol.descriptors import readable

_log = logging.getLogger("memckpt.agent")
NODE_VARIABLE = "MEMCKPT_NODE"
#: Longest wait for room in the queue of an agent's connections, in seconds.
_CONNECT_SECONDS = 5.0
#: Longest time, in seconds, for which another process may start or end an agent.
_LOCK_SECONDS = 120.0
#: Longest time, in seconds, from when a killed process closes its sockets to its end.
_END_SECONDS = 10.0


def node_name() -> str:
    """This node's name: MEMCKPT_NODE, or the host name."""
    return os.environ.get(NODE_VARIABLE) or platform.node()


@dataclass(frozen=True)
class AgentAddress:
    """The agent of one run on one node."""

    run_dir: Path
    node: str

    @classmethod
    def of(cls, run_dir: str | os.PathLike[str], node: str | None = None) -> AgentAddress:
        """The address for a run directory; `node`: name of the node, None for this one's.

        Raises ConfigurationError: the path is no text, which files and messages name it by.
        """
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
        """The agent that the run directory names, dead or alive; None if it names none.

        Raises AgentError: the file is there, and cannot be read.
        """
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
        """Listening sockets, after the run directory was made to name this process.

        The caller holds :meth:`starting`, has seen that no other agent answers, and closes the sockets. Raises
        AgentError: the file cannot be written.
        """
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
        """Make the file name this agent as one that leaves. The caller holds :meth:`starting`, and :meth:`forget`."""
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
        """Agents of this node that answer no more, and may still write to storage what they hold.

        Raises OSError: the run directory cannot be read.
        """
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
        """Hold the lock for starting an agent: one starter at a time, and none while an agent withdraws.

        Raises AgentError: another process has held the lock for too long.

        Args:
            seconds: longest wait for it.

        The lock is a name in the abstract namespace. It goes with its holder, needs no file system with locks, and
        belongs to this node, which may share the run directory with others.
        """
        text = f"{os.getuid()}\0{self.run_dir}\0{self.node}"
        name = f"\0memckpt-starting-{hashlib.blake2b(text.encode(), digest_size=16).hexdigest()}"
        deadline = time.monotonic() + seconds
        while True:
            lock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            try:
                lock.bind(name)
                lock.listen(BACKLOG)
                break
            except OSError as error:
                lock.close()
                if error.errno != errno.EADDRINUSE:
                    raise
            self._wait_for_starter(name, deadline, seconds)
        try:
            yield
        finally:
            lock.close()

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
        """A connection to the agent; None if there is none, or it serves another directory, of which this is a copy.

        Raises AgentGoneError: it accepts no connections: it is stopped, or overloaded. Raises AgentError: it is alive
        and cannot be reached from here, or belongs to another user.
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
            except BlockingIOError as error:
                sock.close()
                raise AgentGoneError(
                    f"agent pid {serving.pid} has accepted no connection for {_CONNECT_SECONDS:.0f} s (stopped or "
                    "overloaded?)"
                ) from error
            except (ConnectionRefusedError, FileNotFoundError, PermissionError) as error:
                sock.close()
                refusal = error
            except BaseException:  # raised again; the socket has no other owner
                sock.close()
                raise
            else:
                return sock
        raise ConnectionRefusedError(str(refusal)) from refusal


def peer(sock: socket.socket) -> tuple[int, int]:
    """Process id and user id of the other end."""
    pid, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return pid, uid
