"""Attempts of a training: processes that a supervisor has started, and waits for."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, Union

from memckpt.errors import ConfigurationError
from memckpt_run.kin import end_with_parent

#: Signals as Python gives them: some have no name.
Mask = set[Union[int, signal.Signals]]  # noqa: UP007


@dataclass(frozen=True)
class Given:
    """What an attempt is given.

    Attributes:
        environment: its variables.
        mask: its signal mask.
        farewell: signal that the kernel sends it when its parent has ended.
        streams: its standard streams, and it gets a session of its own; None: it shares both with its parent.
    """

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

    def look(self, attempt: Attempt) -> float | None:
        """Prepare the next start while this attempt runs; seconds until the next call, None if none is needed."""

    def close(self) -> None: ...


class Cold:
    """An attempt that is a new program, started as a shell starts it.

    Args:
        command: program and arguments.
        given: what it is given; no streams.
    """

    def __init__(self, command: Sequence[str], given: Given) -> None:
        parent = os.getpid()

        def prepare() -> None:
            end_with_parent(given.farewell, parent)
            signal.pthread_sigmask(signal.SIG_SETMASK, given.mask)

        self._process = subprocess.Popen(
            command,
            env=given.environment,
            close_fds=False,  # what the supervisor was given is the training's; its own descriptors close themselves
            preexec_fn=prepare,
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def poll(self) -> int | None:
        return self._process.poll()


class ColdStarter:
    """Starts a command each time.

    Raises:
        ConfigurationError: there is no such program, or it must not be executed.
    """

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
        return Cold(self._command, given)

    def look(self, attempt: Attempt) -> float | None:
        return None

    def close(self) -> None:
        """Nothing is owned."""
