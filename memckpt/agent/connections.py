"""Who is connected to the agent: accepts, reads, answers, and notices death. Belongs to the agent's event loop."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import os
import socket
from collections.abc import Callable, Iterator

from memckpt.errors import AgentError, AgentGoneError, MemckptError
from memckpt.processes.address import AgentAddress, Listener, ServingAgent, peer
from memckpt.processes.attempt import TrainerHandle
from memckpt.processes.event_loop import EventLoop
from memckpt.processes.handles import ProcessHandle
from memckpt.protocol.channel import AgentChannel, AgentToTrainer, TrainerToAgent
from memckpt.protocol.trainer import Leaving, Refused

_log = logging.getLogger("memckpt.agent")
#: Longest wait, in seconds, for one who holds the address's starting lock, where this agent ends.
_LOCK_SECONDS = 2.0
#: Seconds after which it is tried again to accept a connection, where no descriptor was left for it.
_DEAF_SECONDS = 1.0


@dataclasses.dataclass(eq=False)
class Connection:
    """An accepted connection: a trainer rank once it has said Hello, before that and otherwise a visitor."""

    channel: AgentChannel
    process: ProcessHandle
    trainer: TrainerHandle | None = None
    nonce: str = ""


class Connections:
    """All connections of an agent. `handle` gets messages, and its errors go back; `left` gets trainers that end."""

    def __init__(
        self,
        address: AgentAddress,
        loop: EventLoop,
        handle: Callable[[Connection, TrainerToAgent], None],
        left: Callable[[Connection], None],
    ) -> None:
        self._address, self._loop = address, loop
        self._handle, self._left = handle, left
        self._open: dict[int, Connection] = {}
        self._listener: Listener | None = None
        #: Why the last connection could not be accepted; empty if it could.
        self._refusal = ""
        #: Until when none is accepted, by the loop's clock; None: they are.
        self._deaf_until: float | None = None
        loop.each_turn(self._hear_again, lambda: self._deaf_until)
        #: Address whose file names this agent as one that leaves; None before it leaves.
        self._withdrawn: tuple[AgentAddress, ServingAgent] | None = None

    def listen(self) -> None:
        """Begin to answer. The caller holds the address's starting lock."""
        self._listener = self._address.listen()
        self._attend_listener()

    def _attend_listener(self) -> None:
        assert self._listener is not None
        for listening in self._listener.sockets:
            self._loop.attend(listening, functools.partial(self._accept, listening))

    def _hear_again(self) -> None:
        if self._deaf_until is not None and self._loop.clock() >= self._deaf_until:
            self._deaf_until = None
            if self._listener is not None:
                self._attend_listener()

    @property
    def address(self) -> AgentAddress:
        """Where the agent is found: its run directory may have been moved."""
        moved_to = self._listener.moved_to if self._listener is not None else None
        return self._address if moved_to is None else dataclasses.replace(self._address, run_dir=moved_to)

    @property
    def listening(self) -> bool:
        """Whether trainers can find this agent."""
        return self._listener is not None

    def stop_listening(self) -> None:
        """Answer no more: from here on a trainer that looks for an agent starts another one."""
        if self._listener is None:
            return
        address, serving = self.address, self._listener.serving
        # The file goes first: as long as it names this process, its readers get through.
        try:
            with contextlib.ExitStack() as stack:
                try:
                    stack.enter_context(address.starting(_LOCK_SECONDS))
                except AgentError as error:  # it hangs: nobody who could be starting another agent does
                    _log.warning("it ends all the same: %s", error)
                address.withdraw(serving)
                self._withdrawn = address, serving
        except (AgentError, OSError) as error:  # what it holds still has to be saved
            _log.error("the run directory still names this agent, which answers no more: %s", error)
        finally:
            self._forget_listener()
            self._listener.close()
            self._listener = None

    def _forget_listener(self) -> None:
        if self._listener is not None:
            for listening in self._listener.sockets:
                self._loop.unregister(listening)

    def close(self, last_words: AgentToTrainer) -> None:
        self.stop_listening()
        for connection in list(self._open.values()):
            self.answer(connection, last_words)
            self.drop(connection)
        if self._withdrawn is not None:
            address, serving = self._withdrawn
            address.remove_address(serving)

    def of_attempt(self, nonce: str) -> Iterator[Connection]:
        """The trainers of an attempt; they may be dropped meanwhile."""
        for connection in list(self._open.values()):
            if connection.trainer is not None and connection.nonce == nonce:
                yield connection

    def _accept(self, listening: socket.socket) -> None:
        try:
            sock, _ = listening.accept()
        except BlockingIOError:
            return
        except OSError as error:  # no descriptor or memory is left: who asks waits, and what is held stays
            self._note_refusal(error)
            self._forget_listener()  # it stays readable, and the loop would do nothing else
            self._deaf_until = self._loop.clock() + _DEAF_SECONDS
            return
        pid, uid = peer(sock)
        if uid != os.getuid() or pid == 0:
            expected = "expected this user's process, in this PID namespace"
            _log.warning("refused a connection of uid %d, pid %d: %s", uid, pid, expected)
            sock.close()
            return
        try:
            process = ProcessHandle.of_peer(sock, pid)
        except ProcessLookupError:
            sock.close()
            return
        except OSError as error:
            self._note_refusal(error)
            sock.close()
            return
        self._refusal = ""
        connection = Connection(AgentChannel(sock), process)
        self._open[sock.fileno()] = connection
        self._loop.attend(sock, lambda: self.read(connection))
        # Forked loader workers may keep a dead trainer's socket open: only the pidfd tells that it is dead.
        self._loop.attend(process, lambda: self._died(connection))

    def _note_refusal(self, error: OSError) -> None:
        """Log why no connection is accepted, once in a row: the loop may come here again at once."""
        if str(error) != self._refusal:
            self._refusal = str(error)
            _log.error("a connection cannot be accepted: %s", error)

    def drop(self, connection: Connection) -> None:
        """End one of them, if it has not ended yet."""
        if self._open.pop(connection.channel.fileno(), None) is None:
            return
        for source in (connection.channel.sock, connection.process):
            self._loop.unregister(source)
        connection.channel.close()
        if connection.trainer is None:
            connection.process.close()
        else:
            self._left(connection)

    def _died(self, connection: Connection) -> None:
        """Read what a dead trainer had sent (no end of file may come), then drop it."""
        self.read(connection)
        self.drop(connection)

    def read(self, connection: Connection) -> None:
        """Handle everything that has arrived on a connection."""
        while connection.channel.fileno() in self._open:
            try:
                received = connection.channel.poll()
                if received is None:
                    return
                message, fds = received
            except AgentGoneError:
                self.drop(connection)
                return
            except AgentError as error:
                self.refuse(connection, error)
                return
            for fd in fds:
                os.close(fd)
            self.handle(connection, message)

    def handle(self, connection: Connection, message: TrainerToAgent) -> None:
        """Handle a message, now or again; nothing happens where its sender is gone."""
        if connection.channel.fileno() not in self._open:
            return
        try:
            self._handle(connection, message)
        except AgentGoneError:
            self.drop(connection)
        except MemckptError as error:
            self.refuse(connection, error)

    def refuse(self, connection: Connection, error: MemckptError) -> None:
        """Tell why it cannot be; a sender that breaks the protocol is dropped."""
        self.answer(connection, Refused(type(error).__name__, str(error)))
        if isinstance(error, AgentError):
            self.drop(connection)

    def turn_away(self, connection: Connection) -> None:
        """Send a trainer to another agent."""
        self.answer(connection, Leaving())
        self.drop(connection)

    def answer(self, connection: Connection, message: AgentToTrainer, fds: list[int] | None = None) -> None:
        """Send a message. A receiver that is gone or reads nothing is dropped once what it has sent was read."""
        if connection.channel.fileno() not in self._open:
            return
        try:
            connection.channel.send(message, fds or (), timeout=5.0)
        except AgentGoneError as error:
            _log.info("pid %d: %s", connection.process.pid, error)
            connection.channel.shut_down()
