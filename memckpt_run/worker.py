"""``memckpt worker``: what a launcher starts for each local rank, so that restarts are forked from a warm process.

The worker asks the keeper of its local rank for an attempt, and stands for it before the launcher: it passes signals
on, and ends as the attempt does. Where the attempt has to be cold the worker becomes it. The keeper outlives workers:
it owns the warm process, adopts attempts that are forked from it, and ends with the launcher.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from typing import NoReturn

from memckpt.config.arguments import LAUNCHER
from memckpt.errors import MALFORMED, ConfigurationError
from memckpt.processes.address import listen_at, peer
from memckpt.processes.event_loop import EventLoop
from memckpt.processes.handles import ProcessHandle, start_ticks
from memckpt_run import messages
from memckpt_run.attempts import PASSED_ON, Attempt, Given, PythonCommand, python_command
from memckpt_run.notes import Notes
from memckpt_run.warm import WarmStarter

_log = logging.getLogger("memckpt.run")
#: Longest wait, in seconds, for what a worker sends at once, and for the end of a killed process.
_SOON_SECONDS = 10.0


def keeper_address(launcher: ProcessHandle, ticks: int, local_rank: str) -> str:
    """The abstract name of the socket of a local rank's keeper; `ticks`: start of the launcher since boot."""
    # Name spaces of processes and of sockets need not be the same.
    namespace = os.stat("/proc/self/ns/pid").st_ino
    text = "\0".join(map(str, (os.getuid(), namespace, launcher.pid, ticks, local_rank)))
    return f"\0memckpt-keeper-{hashlib.blake2b(text.encode(), digest_size=16).hexdigest()}"


class Handed:
    """An attempt that a worker has become; the launcher's child."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def poll(self) -> int | None:
        """Never known here."""
        return None


class Worker:
    """A worker and its attempt. Owned by the keeper; :meth:`close` it."""

    def __init__(self, link: socket.socket, pid: int) -> None:
        self.link = link
        self.process = ProcessHandle.of_peer(link, pid)
        #: The attempt, where it is another process than the worker.
        self.attempt: ProcessHandle | None = None

    def signal_attempt(self, number: int) -> None:
        """Send a signal to the attempt and what it has started. It is not reaped: no other process has its id."""
        if self.attempt is None:
            return
        try:
            os.killpg(self.attempt.pid, number)
        except ProcessLookupError:  # it has not begun its session yet
            os.kill(self.attempt.pid, number)

    def close(self) -> None:
        self.link.close()
        self.process.close()
        if self.attempt is not None:
            self.attempt.close()


class Keeper:
    """Serves the workers of one local rank until their launcher ends. `also`: the user's modules to import ahead."""

    def __init__(
        self, listening: socket.socket, launcher: ProcessHandle, command: PythonCommand, also: Sequence[str]
    ) -> None:
        self._listening, self._launcher = listening, launcher
        self._words = [os.fsencode(word) for word in command.words]
        self._directory = os.getcwdb()
        self._notes = Notes()
        self._asking = 0  # process id of the worker that asks, which becomes a cold attempt
        self._starter = WarmStarter(command, lambda given: Handed(self._asking), self._notes, also)
        self._worker: Worker | None = None
        self._attempt: Attempt | None = None
        self._look_at: float | None = None
        self._leaving = False
        self._loop = EventLoop()
        self._loop.attend(listening, self._accept)
        self._loop.attend(launcher, self._launcher_has_ended)
        self._loop.each_turn(self._advance_warm, lambda: self._look_at)

    def run(self) -> None:
        """Returns when the launcher has ended, and the attempt with it."""
        while not self._leaving or (self._worker is not None and self._worker.attempt is not None):
            self._loop.turn()

    def _advance_warm(self) -> None:
        if self._attempt is not None and not self._leaving:
            seconds = self._starter.prepare_next(self._attempt)
            self._look_at = None if seconds is None else time.monotonic() + seconds

    # Workers

    def _accept(self) -> None:
        link, _ = self._listening.accept()
        link.settimeout(_SOON_SECONDS)
        pid, uid = peer(link)
        streams: list[int] = []
        try:
            if uid != os.getuid():
                raise PermissionError(f"uid {uid}")
            request, streams = messages.receive_request(link)
            if not isinstance(request, messages.Begin) or len(streams) != 3:
                raise ValueError(f"expected Begin with three descriptors, found {type(request).__name__}")
            self._start_attempt(Worker(link, pid), request, (streams[0], streams[1], streams[2]))
        except (*MALFORMED, OSError) as error:
            _log.warning("pid %d is no worker of this local rank: %s", pid, error)
            link.close()
        finally:
            for fd in streams:
                os.close(fd)

    def _start_attempt(self, worker: Worker, request: messages.Begin, streams: tuple[int, int, int]) -> None:
        before = self._worker
        if before is not None and before.process.alive():
            self._refuse(worker, f"pid {before.process.pid} is a living worker of the same local rank")
            return
        if (request.command, request.directory) != (self._words, self._directory):
            self._refuse(worker, "command or working directory are others than those of the first start")
            return
        self._drop()
        environment = {**messages.unpacked(request.environment), **self._notes.environment()}
        self._asking = worker.process.pid
        self._worker = worker
        self._attempt = attempt = self._starter.start(Given(environment, set(request.mask), signal.SIGKILL, streams))
        if isinstance(attempt, Handed):
            self._answer_worker(worker, messages.Become(self._notes.environment()))
            worker.link.close()
        else:
            worker.attempt = ProcessHandle(attempt.pid, os.pidfd_open(attempt.pid))
            self._answer_worker(worker, messages.Started(attempt.pid))
            self._loop.attend(worker.link, self._hear)
            self._loop.attend(worker.attempt, self._attempt_has_ended)

    def _refuse(self, worker: Worker, reason: str) -> None:
        _log.warning("this start is cold: %s", reason)
        self._answer_worker(worker, messages.Become({}))
        worker.close()

    def _answer_worker(self, worker: Worker, message: messages.Become | messages.Started | messages.Ended) -> None:
        with contextlib.suppress(OSError):  # it was killed meanwhile, which its link's end says, too
            messages.send(worker.link, message)

    def _hear(self) -> None:
        """Pass on what a worker asks for, or end its attempt if it has ended."""
        worker = self._worker
        assert worker is not None
        try:
            request, streams = messages.receive_request(worker.link)
        except (*MALFORMED, OSError) as error:
            _log.warning("the worker pid %d says what cannot be read: %s", worker.process.pid, error)
            request, streams = None, []
        for fd in streams:
            os.close(fd)
        if request is None:
            self._loop.unregister(worker.link)
            worker.signal_attempt(signal.SIGKILL)
        elif not isinstance(request, messages.Begin):
            worker.signal_attempt(request.number)

    def _attempt_has_ended(self) -> None:
        worker, attempt = self._worker, self._attempt
        assert worker is not None
        assert attempt is not None
        code = attempt.poll()
        assert code is not None
        self._answer_worker(worker, messages.Ended(code))
        self._forget(worker)

    def _drop(self) -> None:
        """End the attempt of a worker that has ended."""
        worker = self._worker
        if worker is None:
            return
        if worker.attempt is not None:
            worker.signal_attempt(signal.SIGKILL)
            if worker.attempt.wait(_SOON_SECONDS):
                self._attempt_has_ended()
                return
            _log.warning("pid %d was killed, and does not end", worker.attempt.pid)
        self._forget(worker)

    def _forget(self, worker: Worker) -> None:
        if worker.attempt is not None:
            self._loop.unregister(worker.attempt)
            if worker.link.fileno() >= 0:
                self._loop.unregister(worker.link)
        worker.close()
        self._worker = None

    # The end

    def _launcher_has_ended(self) -> None:
        """No restart will follow. What a killed launcher has left behind ends, too."""
        self._loop.unregister(self._launcher)
        self._loop.unregister(self._listening)
        self._leaving = True
        self._starter.close()
        worker = self._worker
        if worker is not None and worker.attempt is None:
            worker.process.terminate()  # it has become the attempt
        elif worker is not None:
            worker.signal_attempt(signal.SIGTERM)

    def close(self) -> None:
        if self._worker is not None:
            self._worker.signal_attempt(signal.SIGKILL)
            self._forget(self._worker)
        self._starter.close()
        self._notes.close()
        self._listening.close()
        self._launcher.close()
        self._loop.close()


#: Longest wait for the keeper's answer, in seconds: it may be starting a warm process, or ending a killed attempt.
_ANSWER_SECONDS = 30.0


def command_of_worker(words: Sequence[str]) -> list[str]:
    """The command of a worker: a Python's as it is; a script, or `-m` and a module, as torchrun would run it."""
    if isinstance(python_command(words), PythonCommand):
        return list(words)
    return [sys.executable, "-u", *words]


def work(words: Sequence[str], also: Sequence[str]) -> int:
    """Run an attempt, or become it; returns exit status or negative signal. Raises ConfigurationError: no launcher."""
    local_rank = os.environ.get("LOCAL_RANK")
    if local_rank is None:
        raise ConfigurationError(
            "memckpt worker: expected a launcher that sets LOCAL_RANK, found none: start it as `torchrun --no-python "
            "... memckpt worker -- train.py`; for a single process there is `memckpt run -- python train.py`"
        )
    command = command_of_worker(words)
    python = python_command(command)
    parent = os.getppid()
    os.environ[LAUNCHER] = str(parent)
    if isinstance(python, str):
        _log.info("restarts will be cold: %s", python)
        _become(command, {})
    try:
        launcher = ProcessHandle.of(parent, start_ticks(parent))
    except ProcessLookupError:
        raise ConfigurationError(
            f"memckpt worker: expected a living launcher, found that pid {parent} is gone"
        ) from None
    address = keeper_address(launcher, start_ticks(parent), local_rank)
    link = _connect(address)
    if link is None:
        _start_keeper(address, launcher, python, also)
        link = _connect(address)
    launcher.close()
    if link is None:
        _log.warning("this start is cold: the keeper of local rank %s is not there", local_rank)
        _become(command, {})
    return _attend(link, command)


def _connect(address: str) -> socket.socket | None:
    """A connection to the keeper; None if there is none of this user."""
    link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    link.settimeout(_ANSWER_SECONDS)
    try:
        link.connect(address)
        if peer(link)[1] == os.getuid():
            return link
    except (ConnectionRefusedError, BlockingIOError, TimeoutError):
        pass  # none yet, or one that hangs
    link.close()
    return None


def _start_keeper(address: str, launcher: ProcessHandle, command: PythonCommand, also: Sequence[str]) -> None:
    """Start the keeper, which is no child of this process, and wait until it listens."""
    listens, listening = os.pipe2(os.O_CLOEXEC)
    between = os.fork()
    if between == 0:
        os.setsid()
        if os.fork() == 0:
            os.close(listens)
            _keep(address, launcher, command, also, listening)
        os._exit(0)
    os.close(listening)
    os.waitpid(between, 0)
    os.read(listens, 1)  # it listens, or has ended
    os.close(listens)


def _keep(
    address: str, launcher: ProcessHandle, command: PythonCommand, also: Sequence[str], listening: int
) -> NoReturn:
    status = 70
    try:
        keeper = Keeper(listen_at(address), launcher, command, also)
        os.close(listening)
        keeper.run()
        keeper.close()
        status = 0
    except BaseException:  # told in full and fatal: this is no worker any more
        traceback.print_exc()
    finally:
        os._exit(status)


def _attend(link: socket.socket, command: Sequence[str]) -> int:
    """Have the keeper start an attempt, and see its end."""
    words = [os.fsencode(word) for word in command]
    # Until they can be passed on: one that comes as the attempt begins would end this process alone.
    mask = [int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)]
    answer = None
    try:
        messages.send(link, messages.Begin(words, os.getcwdb(), messages.packed(os.environ), mask), (0, 1, 2))
        answer, _ = messages.receive_reply(link)
    except (*MALFORMED, OSError) as error:  # an environment that is too large, a keeper that hangs
        _log.warning("this start is cold: the keeper does not answer: %s", error)
    if isinstance(answer, messages.Started):
        return _stand_for_attempt(link, mask)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    link.close()
    _become(command, answer.variables if isinstance(answer, messages.Become) else {})


def _stand_for_attempt(link: socket.socket, mask: Sequence[int]) -> int:
    """Pass signals on until the attempt has ended; its exit status."""
    received, receiving = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    for passed_on in PASSED_ON:
        signal.signal(passed_on, lambda *_: None)
    signal.set_wakeup_fd(receiving)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    sources = select.poll()
    sources.register(received, select.POLLIN)
    sources.register(link, select.POLLIN)
    while True:
        for source, _ in sources.poll():
            if source == received:
                with contextlib.suppress(OSError):  # the keeper's end is seen in the next turn
                    for number in os.read(received, 64):
                        messages.send(link, messages.Signal(number))
                continue
            reply, _ = messages.receive_reply(link)
            if isinstance(reply, messages.Ended):
                return reply.code
            if reply is None:
                _log.error("the keeper of this local rank has died, and the attempt with it")
                return 1


def _become(command: Sequence[str], variables: Mapping[str, str]) -> NoReturn:
    """Be the attempt, as if the launcher had started it."""
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)  # Python ignores them
    try:
        os.execvpe(command[0], list(command), {**os.environ, **variables})
    except OSError as error:
        raise ConfigurationError(
            f"COMMAND: expected a program, found {command[0]!r}: {error.strerror}; put the whole command behind `--`"
        ) from error
