"""Attempts of a training: the command, processes that a supervisor has started, their ties to it, and signals."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import resource
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, Union

from memckpt.errors import ConfigurationError

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True)


def end_with_parent(number: int, parent: int) -> None:
    """Have the kernel send a signal to this process when its parent ends, however that ends, or has ended already."""
    _prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os.kill(os.getpid(), number)


@contextlib.contextmanager
def adopting_orphans() -> Iterator[None]:
    """Processes below this one become its children meanwhile when their own parents end."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        _prctl(_PR_SET_CHILD_SUBREAPER, 0)


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value})")


_INTERPRETER = re.compile(r"python(\d(\.\d+)?)?")
#: Options that take a value, attached or as the next argument.
_WITH_VALUE = ("-W", "-X", "--check-hash-based-pycs")
#: Letters of options with which Python does not begin as a warm process needs it, and why not.
_UNSUITED = {
    "I": "-I makes it ignore PYTHONPATH",
    "E": "-E makes it ignore PYTHONPATH",
    "S": "-S leaves site out",
    "i": "-i makes it interactive",
    "h": "-h shows its help",
    "?": "-? shows its help",
    "V": "-V shows its version",
}


@dataclass(frozen=True)
class PythonCommand:
    """A command whose program is a Python interpreter; `interpreter`: program and options, without what it runs."""

    words: tuple[str, ...]
    interpreter: tuple[str, ...]


def python_command(words: Sequence[str]) -> PythonCommand | str:
    """Take a command apart; a reason in words if it is no Python program that can be started warm."""
    program = words[0]
    if not _INTERPRETER.fullmatch(program.rpartition("/")[2]) or shutil.which(program) is None:
        return f"{program} is not Python: expected python, python3 or a path to one"
    index = 1
    while index < len(words):
        word = words[index]
        if word in ("-", "--help", "--version", "--help-all", "--help-env", "--help-xoptions"):
            return f"{program} {word} runs no script"
        if word.startswith(("-c", "-m")) or not word.startswith("-"):
            return PythonCommand(tuple(words), tuple(words[:index]))
        if word in _WITH_VALUE:
            index += 2
            continue
        if not word.startswith(("--", "-W", "-X")):
            letters = word[1:]
            for position, letter in enumerate(letters):
                if letter in _UNSUITED:
                    return _UNSUITED[letter]
                if letter in "cm":  # -uc: the rest is what it runs
                    return PythonCommand(
                        tuple(words), (*words[:index], *([f"-{letters[:position]}"] if position else []))
                    )
                if letter in "WX":
                    index += position == len(letters) - 1  # its value is the next word
                    break
        index += 1
    return f"{program} runs no script"


#: Signals as Python gives them: some have no name.
Mask = set[Union[int, signal.Signals]]  # noqa: UP007


@dataclass(frozen=True)
class Given:
    """What an attempt is given. `farewell`: signal at its parent's end. `streams`: also a session; None: shared."""

    environment: Mapping[str, str]
    mask: Mask
    farewell: int = signal.SIGTERM
    streams: tuple[int, int, int] | None = None


class Attempt(Protocol):
    """A child of the supervisor."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None:
        """Its exit status, negative for a signal; None while it lives."""


class Starter(Protocol):
    """A way to start attempts."""

    @property
    def how(self) -> str:
        """How the next attempt is started, in words: warm, or cold and why."""

    def start(self, given: Given) -> Attempt:
        """Start one."""

    def prepare_next(self, attempt: Attempt) -> float | None:
        """Prepare the next start while this attempt runs; seconds until the next call, None if none is needed."""

    def close(self) -> None: ...


class ColdStarter:
    """Starts a command each time. Raises ConfigurationError if there is no such program, or it must not be executed."""

    def __init__(self, command: Sequence[str]) -> None:
        program = command[0]
        if shutil.which(program) is None:
            found = "a file that must not be executed" if os.path.isfile(program) else "no such program"
            remedy = "put the whole command behind `--`"
            if program.endswith(".py"):
                remedy = f"put its interpreter before it: -- python {program}"
            raise ConfigurationError(f"COMMAND: expected a program, found {program!r}: {found}; {remedy}")
        self._command = command

    @property
    def how(self) -> str:
        return "cold"

    def start(self, given: Given) -> Attempt:
        """Start a new program, as a shell does; it is given no streams."""
        parent = os.getpid()

        def prepare() -> None:
            end_with_parent(given.farewell, parent)
            signal.pthread_sigmask(signal.SIG_SETMASK, given.mask)

        # What the supervisor was given is the training's; its own descriptors close themselves.
        return subprocess.Popen(self._command, env=given.environment, close_fds=False, preexec_fn=prepare)

    def prepare_next(self, attempt: Attempt) -> float | None:
        return None

    def close(self) -> None:
        """Nothing is owned."""


#: Passed on to the training.
PASSED_ON = frozenset(
    {signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2}
)  # fmt: skip
#: Those of them behind which no restart is wanted.
ENDING = frozenset({signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM})
#: `si_code` of a signal that the kernel has sent: that of a terminal, to all processes in the foreground.
_BY_KERNEL = 0x80


class Inbox:
    """Signals to this process, taken one at a time and blocked until :meth:`close`. `before`: the mask for children."""

    def __init__(self) -> None:
        self._taken = PASSED_ON | {signal.SIGCHLD}
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # ignored, it would reap children before they are asked for
        self.before = signal.pthread_sigmask(signal.SIG_BLOCK, self._taken)

    def next_signal(self, seconds: float | None) -> signal.struct_siginfo | None:
        """The next signal; None if none comes within so many seconds (None: no limit)."""
        if seconds is None:
            return signal.sigwaitinfo(self._taken)
        return signal.sigtimedwait(self._taken, max(0.0, seconds))

    def close(self) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self.before)


def has_it_already(received: signal.struct_siginfo) -> bool:
    """Whether the training has got the signal, too: Ctrl-C reaches all processes in a terminal's foreground."""
    return received.si_code == _BY_KERNEL and received.si_signo in (signal.SIGINT, signal.SIGQUIT)


def end_like(code: int) -> int:
    """End this process as another one has, by the same signal; returns the exit status where `code` is one."""
    if code >= 0:
        return code
    resource.setrlimit(
        resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1])
    )  # one core dump is enough
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {-code})
    if -code not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
    return 128 - code  # the first process of a container does not die of its own signals
