"""``memckpt worker``: what a launcher starts for each local rank, so that restarts are forked from a warm process.

The worker asks the keeper of its local rank for an attempt, and stands for it before the launcher: it passes signals
on, and ends as the attempt does. Where the attempt has to be cold the worker becomes it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import socket
import sys
import traceback
from collections.abc import Mapping, Sequence
from typing import NoReturn

from memckpt.config.arguments import LAUNCHER
from memckpt.errors import MALFORMED, ConfigurationError
from memckpt.processes.address import peer
from memckpt.processes.handles import ProcessHandle, start_ticks
from memckpt_run.attempts import PASSED_ON, PythonCommand, python_command
from memckpt_run.keeper import Keeper, keeper_address, listen
from memckpt_run.messages import Become, Begin, Ended, Signal, Started, packed, receive_reply, send

_log = logging.getLogger("memckpt.run")
#: Longest wait for the keeper's answer, in seconds: it may be starting a warm process, or ending a killed attempt.
_ANSWER_SECONDS = 30.0


def command_of_worker(words: Sequence[str]) -> list[str]:
    """The command of a worker: a Python's as it is; a script, or `-m` and a module, as torchrun would run it."""
    if isinstance(python_command(words), PythonCommand):
        return list(words)
    return [sys.executable, "-u", *words]


def work(words: Sequence[str], also: Sequence[str]) -> int:
    """Run an attempt, and return its exit status or, negative, its signal; where it is cold this process becomes it.

    Raises:
        ConfigurationError: no launcher has started this process.
    """
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
        _say_what_gloo_needs()
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


def _say_what_gloo_needs() -> None:
    """torchrun reads the variable itself, so that it is too late to set it here."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" or os.environ.get("LOCAL_RANK") != "0":
        return
    remedy = "export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 before torchrun (`memckpt run -- torchrun` does)"
    if os.environ.get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE") == "1":  # a static rendezvous does not read it
        remedy = "start torchrun with --standalone or --rdzv-backend=c10d in place of --master-port"
    _log.warning("restarts share a store, in which Gloo finds the addresses of the dead: %s", remedy)


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
    """Be the keeper."""
    status = 70
    try:
        keeper = Keeper(listen(address), launcher, command, also)
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
    mask = [int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, ())]
    answer = None
    try:
        send(link, Begin(words, os.getcwdb(), packed(os.environ), mask), (0, 1, 2))
        answer, _ = receive_reply(link)
    except (*MALFORMED, OSError) as error:  # an environment that is too large, a keeper that hangs
        _log.warning("this start is cold: the keeper does not answer: %s", error)
    if isinstance(answer, Started):
        return _stand_for_attempt(link)
    link.close()
    _become(command, answer.variables if isinstance(answer, Become) else {})


def _stand_for_attempt(link: socket.socket) -> int:
    """Pass signals on until the attempt has ended; its exit status."""
    received, receiving = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    for passed_on in PASSED_ON:
        signal.signal(passed_on, lambda *_: None)
    signal.set_wakeup_fd(receiving)
    sources = select.poll()
    sources.register(received, select.POLLIN)
    sources.register(link, select.POLLIN)
    while True:
        for source, _ in sources.poll():
            if source == received:
                with contextlib.suppress(OSError):  # the keeper's end is seen in the next turn
                    for number in os.read(received, 64):
                        send(link, Signal(number))
                continue
            reply, _ = receive_reply(link)
            if isinstance(reply, Ended):
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
