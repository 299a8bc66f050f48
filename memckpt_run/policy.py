"""What follows the end of an attempt. Pure, but for the clock."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Union

from memckpt.processes.backoff import Backoff

#: Ends in a row at the same step, by a signal from outside, after which the cause is taken to stay. An attempt that has
#: lived longer may have got further, and its agent have died with it, so that nobody knows.
_MOST_ALIKE = 20
#: Seconds after which a restart that could not be made is tried again for the first time.
_LEAST_PAUSE = 1.0
#: Signals by which a program ends itself, as it does with an error.
_OWN_FAULTS = frozenset({signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSEGV, signal.SIGTRAP})


@dataclass(frozen=True)
class Restart:
    """Start it again after a pause, in seconds."""

    pause: float


@dataclass(frozen=True)
class Finished:
    """The training has done what it was started for."""


@dataclass(frozen=True)
class GiveUp:
    """Another attempt would not help, or is not wanted; `reason` is None where a person has asked for the end."""

    reason: str | None


Verdict = Union[Restart, Finished, GiveUp]  # noqa: UP007


@dataclass(frozen=True)
class End:
    """How an attempt has ended.

    Attributes:
        code: its exit status; the negative number of the signal that has killed it.
        step: newest step that is held; None where nothing is, or nobody knows.
    """

    code: int
    step: int | None

    @property
    def by_itself(self) -> bool:
        """Whether it ended with an error of its own, and not from outside (SIGKILL)."""
        return self.code > 0 or -self.code in _OWN_FAULTS

    def __str__(self) -> str:
        where = "" if self.step is None else f" at step {self.step}"
        if self.code >= 0:
            return f"exit status {self.code}{where}"
        try:
            name = signal.Signals(-self.code).name
        except ValueError:
            name = f"signal {-self.code}"
        return f"{name}{where}"


class Policy:
    """Decides after each end of an attempt.

    Args:
        restarts: most restarts in all.
        clock: monotonic, in seconds.
    """

    def __init__(self, restarts: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._most = restarts
        self._backoff = Backoff(clock)
        #: Pauses between tries of one restart, however long they have gone on.
        self._tries = Backoff(clock, at_once=0, first=_LEAST_PAUSE, steady=math.inf)
        self._last: End | None = None
        self._alike = 0
        #: Restarts so far.
        self.restarts = 0

    def started(self) -> None:
        """An attempt has been started."""
        self._backoff.started()
        self._tries.reset()

    def not_started(self) -> float:
        """A restart could not be made; returns the seconds until it is tried again."""
        return self._tries.died()

    def ended(self, end: End, stopped: bool) -> Verdict:
        """What follows this end; `stopped`: somebody has sent a signal that asks for it."""
        last, self._last = self._last, end
        self._alike = self._alike + 1 if end == last and not self._backoff.steady else 1
        if end.code == 0:
            return Finished()
        if stopped:
            return GiveUp(None)
        if last == end and end.by_itself:
            return GiveUp(
                f"it has ended with {_how(end)} {_where(end)} twice in a row, so another restart would end there, too"
            )
        if self._alike >= _MOST_ALIKE:
            return GiveUp(
                f"it has ended with {_how(end)} {_where(end)} {self._alike} times in a row; where that is SIGKILL, "
                "look for an end by the kernel (out of memory) or by the job's scheduler"
            )
        if self.restarts >= self._most:
            return GiveUp(f"it was restarted {self.restarts} times, as often as --restarts allows")
        if last is not None and (end.step or 0) > (last.step or 0):
            self._backoff.reset()  # it got somewhere: not a start that fails
        self.restarts += 1
        return Restart(self._backoff.died())


def _how(end: End) -> str:
    return str(End(end.code, None))


def _where(end: End) -> str:
    return "before its first step" if end.step is None else f"at step {end.step}"
