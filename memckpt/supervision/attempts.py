"""Attempts of a training: processes that a supervisor has started, and waits for."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from typing import Protocol, Union

from memckpt.errors import ConfigurationError

#: Signals as Python gives them: some have no name.
Mask = set[Union[int, signal.Signals]]  # noqa: UP007


class Attempt(Protocol):
    """A child of the supervisor."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None:
        """Its exit status, negative for a signal; None while it lives."""


class Starter(Protocol):
    """A way to start attempts."""

    def start(self, environment: Mapping[str, str], mask: Mask) -> Attempt:
        """Start one.

        Args:
            environment: its variables.
            mask: its signal mask.
        """

    def look(self, attempt: Attempt) -> float | None:
        """Prepare the next start while this attempt runs; seconds until the next call, None if none is needed."""

    def close(self) -> None: ...


class Cold:
    """An attempt that is a new program, started as a shell starts it.

    Args:
        command: program and arguments.
        environment: variables of the attempt.
        mask: its signal mask.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], mask: Mask) -> None:
        self._process = subprocess.Popen(
            command,
            env=environment,
            close_fds=False,  # what the supervisor was given is the training's; its own descriptors close themselves
            preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_SETMASK, mask),
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
            raise ConfigurationError(
                f"COMMAND: expected a program, found {program!r}: {found}; put the whole command behind `--`"
            )
        self._command = command

    def start(self, environment: Mapping[str, str], mask: Mask) -> Attempt:
        return Cold(self._command, environment, mask)

    def look(self, attempt: Attempt) -> float | None:
        return None

    def close(self) -> None:
        """Nothing is owned."""
