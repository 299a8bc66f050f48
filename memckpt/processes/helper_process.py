"""A helper process of an agent (a writer, the auditor, the replicator): the agent's end, and the process's own."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, TypeVar

from memckpt.errors import AgentError, AgentGoneError
from memckpt.memory.pages import LifePage, LifeWatch
from memckpt.processes.event_loop import EventLoop
from memckpt.processes.launch import helper_environment
from memckpt.protocol.audit import AgentToAuditor, AuditorToAgent
from memckpt.protocol.channel import AgentToReplicator, Channel, ReplicatorToAgent, encode
from memckpt.protocol.descriptors import writable
from memckpt.protocol.storing import AgentToWriter, WriterToAgent

_log = logging.getLogger("memckpt.agent")
#: Longest time, in seconds, for a killed process to end, and for one to read a message.
_END_SECONDS = 5.0
_TAKE_SECONDS = 5.0
#: The longest wait for an answer, however many other messages come before it.
_LONGEST_ANSWER_SECONDS = 120.0
#: Most bytes of messages that the process has not read yet.
_MOST_WAITING_BYTES = 64 << 20

T = TypeVar("T")
In = TypeVar("In")
Out = TypeVar("Out")


@contextlib.contextmanager
def _signals_held_back() -> Iterator[None]:
    """Block SIGINT and SIGTERM for a process started inside the block: schedulers signal all of a job."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class HelperProcess(Generic[In, Out]):
    """Owns the process and the connection to it; :meth:`close` ends both, as far as the kernel permits.

    The agent never blocks on it: messages are queued. It runs `module` (:mod:`memckpt.processes.helper`).
    `received` gets answers; its AgentError means that the process cannot be trusted. `ended` gets the reason of its
    end. `liveness_seconds`: it stands still after so long without a sign of life; None: not watched. Raises AgentError:
    it cannot be started.
    """

    def __init__(
        self,
        module: str,
        loop: EventLoop,
        received: Callable[[In], None],
        ended: Callable[[str], None],
        liveness_seconds: float | None = None,
    ) -> None:
        self._loop, self._received, self._ended = loop, received, ended
        #: The page that its loop moves, and the watch on it.
        self._life = LifePage.create() if liveness_seconds is not None else None
        self._watch: LifeWatch | None = None
        try:
            self._start(module)
        except BaseException:  # raised again; the page has no other owner
            self._close_life()
            raise
        if self._life is not None and liveness_seconds is not None:
            # Its other threads are the network's, which run on even if its loop hangs.
            self._watch = LifeWatch(self._life, self._process.pid, liveness_seconds, "main", loop.clock)

    def _start(self, module: str) -> None:
        pages = {"--life": self._life, "--agent-life": self._loop.life}
        given = {option: page.fd for option, page in pages.items() if self._life is not None and page is not None}
        with contextlib.ExitStack() as undo:
            try:
                ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                undo.callback(ours.close)
                with theirs, _signals_held_back():
                    connection = ["--fd", str(theirs.fileno()), "--agent", str(os.getpid())]
                    connection += [word for option, fd in given.items() for word in (option, str(fd))]
                    self._process = subprocess.Popen(
                        [sys.executable, "-m", "memckpt.processes.helper", module, *connection],
                        stdin=subprocess.DEVNULL,
                        pass_fds=[theirs.fileno(), *given.values()],
                        env=helper_environment(),
                    )
            except OSError as error:
                raise AgentError(
                    f"expected to start a process of {module}, found {error}; raise the limit on processes, open files "
                    "or memory that the error names"
                ) from error
            undo.pop_all()
        self._channel = Channel[In, Out](ours)
        #: Descriptors that came with the message being received.
        self._came: list[int] = []
        #: Queued messages, with our duplicates of their descriptors.
        self._waiting: deque[tuple[bytes, list[int]]] = deque()
        self._waiting_bytes = 0
        self._loop.attend(ours, self._attend)

    def _attend(self) -> None:
        try:
            self._send_waiting()
            answer = self._channel.poll()
            if answer is not None:
                self._receive(*answer)
        except AgentGoneError:
            self._ended("the process has ended")
        except AgentError as error:
            self._ended(str(error))

    def _receive(self, message: In, fds: list[int]) -> None:
        before, self._came = self._came, fds
        try:
            self._received(message)
        finally:
            self._came = before
            for fd in fds:
                os.close(fd)

    @property
    def look_at(self) -> float | None:
        """Time of the next call of :meth:`stands_still`, by the loop's clock; None: it is not watched."""
        return None if self._watch is None else self._watch.due

    def stands_still(self) -> bool:
        """Whether it has shown no sign of life for too long: it is stopped or deadlocked."""
        return self._watch is not None and self._watch.stands_still()

    def watch_for(self, liveness_seconds: float) -> None:
        """Set the seconds without a sign of life after which it counts as standing still."""
        if self._watch is not None:
            self._watch.limit = liveness_seconds

    def _wait(self, ready: Callable[[float], T | None], seconds: float) -> T | None:
        """Wait for what `ready(seconds)` finds, at most so long. Raises AgentGoneError: the process stands still."""
        until = time.monotonic() + seconds
        while True:
            left = max(0.0, until - time.monotonic())
            found = ready(left if self._watch is None else min(left, self._watch.pause))
            if self._loop.life is not None:
                self._loop.life.beat()  # our own watchers have to see that we only wait
            if found is not None or left == 0.0:
                return found
            if self._watch is not None and self._watch.stands_still():
                raise AgentGoneError(f"it has shown no sign of life for {self._watch.limit:g} s")

    def take_descriptors(self) -> list[int]:
        """Descriptors that came with the message being received; the caller owns them from now on."""
        taken = list(self._came)
        self._came.clear()
        return taken

    def send(self, message: Out, fds: Sequence[int]) -> None:
        """Send or queue a message. Raises AgentGoneError if the process is gone, or its queue is full."""
        body = encode(message)
        if not self._waiting and self._channel.offer(body, fds):
            return
        if self._waiting_bytes + len(body) > _MOST_WAITING_BYTES:
            raise AgentGoneError(f"the process reads nothing, and {self._waiting_bytes} bytes wait for it")
        self._waiting.append((body, [os.dup(fd) for fd in fds]))
        self._waiting_bytes += len(body)
        self._loop.attend(self._channel.sock, self._attend, to_write=True)

    def _send_waiting(self) -> None:
        while self._waiting and self._channel.offer(*self._waiting[0]):
            self._drop_first()
            if not self._waiting:
                self._loop.attend(self._channel.sock, self._attend)

    def _drop_first(self) -> None:
        body, fds = self._waiting.popleft()
        self._waiting_bytes -= len(body)
        for fd in fds:
            os.close(fd)

    def ask(self, message: Out, expected: type[T], timeout: float, patience: float | None = None) -> T:
        """Send a message and wait for its answer; messages before it are received as usual.

        `timeout`: longest wait in seconds for each message; up to `patience` while the process lives. Raises
        AgentGoneError: it is gone, stands still, has not answered in time, or an earlier message has ended the
        connection.
        """
        deadline = time.monotonic() + (patience or _TAKE_SECONDS)
        self.send(message, ())
        self._send_waiting()
        while self._waiting:
            if not self._wait(lambda left: writable(self._channel.sock, left) or None, deadline - time.monotonic()):
                raise AgentGoneError("the process reads no messages (stopped or overloaded?)")
            self._send_waiting()
        longer, latest = 0.0, time.monotonic() + _LONGEST_ANSWER_SECONDS
        while True:
            received = self._wait(self._channel.poll, longer or timeout)
            if received is None:
                if patience is None or longer or self._process.poll() is not None:
                    raise AgentGoneError(f"no answer within {timeout + longer:.0f} s")
                longer = max(0.1, patience - timeout)
                _log.warning(
                    "pid %d has not answered for %.0f s; it is alive, and gets %.0f s more",
                    self._process.pid,
                    timeout,
                    longer,
                )
                continue
            (answer, fds), longer = received, 0.0
            if isinstance(answer, expected):
                return answer
            self._receive(answer, fds)
            if self._channel.fileno() < 0:
                raise AgentGoneError("one of its messages led to its end")
            if time.monotonic() >= latest:
                raise AgentGoneError(
                    f"no answer within {_LONGEST_ANSWER_SECONDS:.0f} s, though it sends other messages"
                )

    def close(self, last: Callable[[In], None] | None = None) -> None:
        """Kill it, wait a while for its end, and close the connection. Idempotent.

        It ignores SIGTERM, and may hang in a system call. `last` gets each message that was not received yet.
        """
        if self._channel.fileno() < 0:
            return
        self._loop.unregister(self._channel.sock)
        self._process.kill()
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            # In a system call that storage does not let end. It dies when that returns, and does nothing more.
            _log.warning("pid %d was killed but hangs in the kernel", self._process.pid)
        if last is not None:
            self._receive_last(last)
        self._channel.close()
        self._close_life()
        while self._waiting:
            self._drop_first()

    def _close_life(self) -> None:
        self._watch = None
        if self._life is not None:
            self._life.close()

    def _receive_last(self, last: Callable[[In], None]) -> None:
        self._received = last
        try:
            while (received := self._channel.poll()) is not None:
                self._receive(*received)
        except AgentGoneError:
            return  # its end comes after all of its messages
        except AgentError as error:
            _log.error("the final messages of pid %d cannot be decoded: %s", self._process.pid, error)


WriterProcess = HelperProcess[WriterToAgent, AgentToWriter]
AuditorProcess = HelperProcess[AuditorToAgent, AgentToAuditor]
ReplicatorProcess = HelperProcess[ReplicatorToAgent, AgentToReplicator]
