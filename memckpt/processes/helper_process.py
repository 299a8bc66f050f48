"""The agent's end of a process that works for it: one that writes, or one that speaks with peers."""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from memckpt.errors import AgentError, AgentGoneError
from memckpt.memory.life import LifePage, LifeWatch
from memckpt.protocol.channel import Channel, encode
from memckpt.protocol.descriptors import writable
from memckpt.protocol.trainer import Message

_log = logging.getLogger("memckpt.agent")
_END_SECONDS = 5.0
_TAKE_SECONDS = 5.0
#: Limit on messages that the process has not read yet.
_MOST_WAITING_BYTES = 64 << 20

T = TypeVar("T")


@contextlib.contextmanager
def _signals_held_back() -> Iterator[None]:
    """A process that is started in here holds SIGINT and SIGTERM back until it has said that it ignores them.

    Schedulers signal every process of a job at once, and the first of them makes the agent start this one.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _cannot_start(module: str, error: OSError) -> AgentError:
    return AgentError(
        f"expected to start a process of {module}, found {error}; raise the limit on processes, open files or memory "
        "that this speaks of"
    )


class HelperProcess:
    """Owns the process and the connection to it; :meth:`close` ends both at once, as far as the kernel lets it.

    The agent never waits for it: what it does not take at once, as it is busy or stands still, is sent when it does.

    Args:
        module: that it runs, with these arguments and those for the connection.
        selector: of the agent's loop, which reads its answers.
        received: called with each of them; an AgentError from it says that the process is not in its right mind.
        ended: called with the reason once it is gone, or not to be trusted.
        liveness_seconds: without a sign of life after which it stands still; None: it is not watched.
        life: the page that our own loop moves, which the process may watch in turn; belongs to the caller.

    Raises:
        AgentError: it cannot be started.
    """

    def __init__(
        self,
        module: str,
        arguments: Sequence[str],
        selector: selectors.BaseSelector,
        received: Callable[[Message], None],
        ended: Callable[[str], None],
        liveness_seconds: float | None = None,
        life: LifePage | None = None,
    ) -> None:
        self._selector = selector
        self._received = received
        self._ended = ended
        self._own_life = life
        #: The page that its loop moves, and who looks at it.
        self._life = LifePage.create() if liveness_seconds is not None else None
        self._watch: LifeWatch | None = None
        try:
            self._start(module, arguments)
        except BaseException:  # raised again: nobody else knows of the page
            self._close_life()
            raise
        if self._life is not None and liveness_seconds is not None:
            # Its other threads are those of the network, which live on whatever becomes of its loop.
            self._watch = LifeWatch(self._life, self._process.pid, liveness_seconds, "main")

    def _start(self, module: str, arguments: Sequence[str]) -> None:
        pages = {"--life": self._life, "--agent-life": self._own_life}
        given = {option: page.fd for option, page in pages.items() if self._life is not None and page is not None}
        try:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        except OSError as error:
            raise _cannot_start(module, error) from error
        package_root = str(Path(__file__).resolve().parents[2])
        path = os.pathsep.join(filter(None, [package_root, os.environ.get("PYTHONPATH", "")]))
        try:
            connection = ["--fd", str(theirs.fileno()), "--agent", str(os.getpid())]
            connection += [word for option, fd in given.items() for word in (option, str(fd))]
            with _signals_held_back():
                self._process = subprocess.Popen(
                    [sys.executable, "-m", module, *connection, *arguments],
                    stdin=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno(), *given.values()],
                    env={**os.environ, "PYTHONPATH": path},
                )
        except OSError as error:
            ours.close()
            raise _cannot_start(module, error) from error
        except BaseException:  # raised again: nobody else knows of our end of the pair
            ours.close()
            raise
        finally:
            theirs.close()
        self._channel = Channel(ours)
        #: Descriptors that came with the message that is being received.
        self._came: list[int] = []
        #: Messages that wait to be taken, with descriptors that are ours.
        self._waiting: deque[tuple[bytes, list[int]]] = deque()
        self._waiting_bytes = 0
        self._selector.register(ours, selectors.EVENT_READ, self._attend)

    def _attend(self) -> None:
        if self._channel.fileno() < 0:
            return  # closed while this event was on its way
        try:
            self._send_waiting()
            answer = self._channel.poll()
            if answer is not None:
                self._receive(*answer)
        except AgentGoneError:
            self._ended("the process has ended")
        except AgentError as error:
            self._ended(str(error))

    def _receive(self, message: Message, fds: list[int]) -> None:
        before, self._came = self._came, fds
        try:
            self._received(message)
        finally:
            self._came = before
            for fd in fds:
                os.close(fd)

    @property
    def look_at(self) -> float | None:
        """When :meth:`stands_still` is to be asked again, by the monotonic clock; None: it is not watched."""
        return None if self._watch is None else self._watch.due

    def stands_still(self) -> bool:
        """Whether it has shown no sign of life for too long: it is stopped, or dead-locked."""
        return self._watch is not None and self._watch.stands_still()

    def watch_for(self, liveness_seconds: float) -> None:
        """It stands still after so many seconds without a sign of life, from now on."""
        if self._watch is not None:
            self._watch.limit = liveness_seconds

    def _wait(self, ready: Callable[[float], T | None], seconds: float) -> T | None:
        """Wait for something, and look meanwhile whether the process lives; None after so many seconds.

        Args:
            ready: waits at most so many seconds for it; None: it has not come.
            seconds: for all of that.

        Raises:
            AgentGoneError: it stands still.
        """
        until = time.monotonic() + seconds
        while True:
            left = max(0.0, until - time.monotonic())
            found = ready(left if self._watch is None else min(left, self._watch.pause))
            if self._own_life is not None:
                self._own_life.beat()  # who watches us is to see that we only wait
            if found is not None or left == 0.0:
                return found
            if self._watch is not None and self._watch.stands_still():
                raise AgentGoneError(f"it has shown no sign of life for {self._watch.limit:g} s")

    def take_descriptors(self) -> list[int]:
        """Those that came with the message that is being received; the caller's from now on."""
        taken = list(self._came)
        self._came.clear()
        return taken

    def send(self, message: Message, fds: Sequence[int]) -> None:
        """Hand over a job. Raises AgentGoneError if the process is gone, or has not taken anything for too long."""
        body = encode(message)
        if not self._waiting and self._channel.offer(body, fds):
            return
        if self._waiting_bytes + len(body) > _MOST_WAITING_BYTES:
            raise AgentGoneError(f"the process takes nothing, and {self._waiting_bytes} bytes wait for it")
        self._waiting.append((body, [os.dup(fd) for fd in fds]))
        self._waiting_bytes += len(body)
        self._selector.modify(self._channel.sock, selectors.EVENT_READ | selectors.EVENT_WRITE, self._attend)

    def _send_waiting(self) -> None:
        while self._waiting and self._channel.offer(*self._waiting[0]):
            self._drop_first()
            if not self._waiting:
                self._selector.modify(self._channel.sock, selectors.EVENT_READ, self._attend)

    def _drop_first(self) -> None:
        body, fds = self._waiting.popleft()
        self._waiting_bytes -= len(body)
        for fd in fds:
            os.close(fd)

    def ask(self, message: Message, expected: type[T], timeout: float, patience: float | None = None) -> T:
        """Hand over a job that is done at once, and wait for its answer; what comes before that is received as ever.

        Args:
            message: the job.
            expected: the type of its answer.
            timeout: in seconds, for each message of the process.
            patience: how long to wait instead while it lives, and the log says that it does not answer.

        Raises:
            AgentGoneError: the process is gone, stands still, or has not answered in time; or what it has said
                meanwhile has led to its end.
        """
        deadline = time.monotonic() + (patience or _TAKE_SECONDS)
        self.send(message, ())
        self._send_waiting()
        while self._waiting:
            if not self._wait(self._writable, deadline - time.monotonic()):
                raise AgentGoneError("the process takes no message (stopped or overloaded?)")
            self._send_waiting()
        longer = 0.0
        while True:
            received = self._wait(self._channel.poll, longer or timeout)
            if received is None:
                if patience is None or longer or self._process.poll() is not None:
                    raise AgentGoneError(f"no answer within {timeout + longer:.0f} s")
                longer = max(0.1, patience - timeout)
                _log.warning(
                    "pid %d has not answered for %.0f s; it lives, and gets %.0f s more",
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
                raise AgentGoneError("what it said has led to its end")

    def _writable(self, seconds: float) -> bool | None:
        return writable(self._channel.sock, seconds) or None

    def close(self, last: Callable[[Message], None] | None = None) -> None:
        """Kill it, wait for its end a while, and close the connection. Idempotent.

        Args:
            last: called with each message that it has sent and that was not received before.
        """
        if self._channel.fileno() < 0:
            return
        self._selector.unregister(self._channel.sock)
        self._process.kill()
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            # In a system call that the storage does not let end. It dies when that does, and does nothing more.
            _log.warning("pid %d is killed but hangs in the kernel", self._process.pid)
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

    def _receive_last(self, last: Callable[[Message], None]) -> None:
        self._received = last
        try:
            while (received := self._channel.poll()) is not None:
                self._receive(*received)
        except AgentGoneError:
            return  # its end, behind all that it has sent
        except AgentError as error:
            _log.error("the final messages of pid %d cannot be decoded: %s", self._process.pid, error)
