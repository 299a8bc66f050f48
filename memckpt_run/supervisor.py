"""The supervisor: start, wait, pass signals on, judge, start again. :class:`Policy` decides what follows an end."""

from __future__ import annotations

import logging
import math
import os
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Union

from memckpt.config.arguments import RESTART_COUNT
from memckpt.errors import AgentError
from memckpt.processes.backoff import Backoff
from memckpt.processes.control import ask_status
from memckpt_run.attempts import ENDING, Attempt, Given, Inbox, Starter, has_it_already
from memckpt_run.notes import Notes

#: Ends in a row at the same step, by a signal from outside, after which the cause is taken to stay. An attempt that has
#: lived longer may have got further, and its agent have died with it.
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
class NoRestart:
    """No attempt follows. `reason`: why another one would not help; None: it has finished, or its end was asked for."""

    reason: str | None = None


Verdict = Union[Restart, NoRestart]  # noqa: UP007


@dataclass(frozen=True)
class End:
    """How an attempt has ended: exit status or negative signal; `step`: the newest that is held; None: none is.

    `known`: whether the agent has said so in time; else this end counts as like no other.
    """

    code: int
    step: int | None
    known: bool = True

    @property
    def by_itself(self) -> bool:
        """Whether it ended with its own error, and not from outside (SIGKILL)."""
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
    """Decides after each end of an attempt, with at most so many restarts in all."""

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
        self._backoff.started()
        self._tries.reset()

    def not_started(self) -> float:
        """A restart could not be made; returns the seconds until it is tried again."""
        return self._tries.died()

    def ended(self, end: End, stopped: bool) -> Verdict:
        """What follows this end; `stopped`: a signal has asked for it."""
        last, self._last = self._last, end
        alike = end == last and end.known
        self._alike = self._alike + 1 if alike and not self._backoff.steady else 1
        if end.code == 0 or stopped:
            return NoRestart()
        if alike and end.by_itself:
            return NoRestart(
                f"it has ended with {_how(end)} {_where(end)} twice in a row, so another restart would end there, too"
            )
        if self._alike >= _MOST_ALIKE:
            return NoRestart(
                f"it has ended with {_how(end)} {_where(end)} {self._alike} times in a row; where that is SIGKILL, "
                "look for an end by the kernel (out of memory) or by the job's scheduler"
            )
        if self.restarts >= self._most:
            return NoRestart(f"it was restarted {self.restarts} times, as often as --restarts allows")
        if last is not None and (end.step or 0) > (last.step or 0):
            self._backoff.reset()  # it got somewhere: not a start that fails
        self.restarts += 1
        return Restart(self._backoff.died())


def _how(end: End) -> str:
    return str(End(end.code, None))


def _where(end: End) -> str:
    return "before its first step" if end.step is None else f"at step {end.step}"


_log = logging.getLogger("memckpt.run")
#: Longest wait, in seconds, for the agent's word on the newest step. It only decides about pauses, and about giving up.
_STATUS_SECONDS = 2.0
#: Longest time, in seconds, that a command for failures may go on once the next failure, or the end, has come.
_COMMAND_SECONDS = 10
#: Tries of a restart that cannot be made, before the error ends the run.
_MOST_TRIES = 20
#: Has torchrun, behind `memckpt run`, make a store of its own for each restart: in a shared one Gloo finds the dead.
_NO_SHARED_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"


class FailureCommand:
    """A shell command of the user's that is started at each failure, beside the training. Owns its newest process."""

    def __init__(self, command: str | None) -> None:
        self._command = command
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, end: str, follows: str, given: Given) -> None:
        """Start it with words for an end and for what follows, and with what a next attempt is given."""
        self.close()
        if self._command is None:
            return
        words = {"MEMCKPT_FAILURE": end, "MEMCKPT_FOLLOWS": follows}
        try:
            self._process = subprocess.Popen(
                ["/bin/sh", "-c", self._command],
                env={**given.environment, **words},
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                preexec_fn=partial(signal.pthread_sigmask, signal.SIG_SETMASK, given.mask),
            )
        except OSError as error:
            _log.warning("--on-failure cannot be started: %s", error)

    def close(self) -> None:
        """Wait for its end, and end it with all that it has started where that takes too long."""
        process, self._process = self._process, None
        if process is None:
            return
        try:
            code = process.wait(_COMMAND_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # it is not reaped: no other group has its id
            process.wait()
            _log.warning("--on-failure took more than %d s, and was ended", _COMMAND_SECONDS)
            return
        if code:
            _log.warning("--on-failure ended with %s", _how(End(code, None)))


class Supervisor:
    """Runs a training, and runs it again when it fails. Owns all that it is given; :meth:`close` it."""

    def __init__(self, starter: Starter, restarts: int, notes: Notes, on_failure: str | None = None) -> None:
        self._starter = starter
        self._on_failure = FailureCommand(on_failure)
        self._policy = Policy(restarts)
        self._notes = notes
        self._inbox = Inbox()
        #: Whether a signal has asked for the end.
        self._stopped = False

    def run(self) -> int:
        """The exit status of the last attempt; the negative number of a signal if one has killed it."""
        code = 0
        while True:
            attempt = self._start()
            if attempt is None:
                return code
            self._policy.started()
            code = self._wait(attempt)
            end = self._end_of(code) if code and not self._stopped else End(code, None)
            verdict = self._policy.ended(end, self._stopped)
            if isinstance(verdict, NoRestart):
                if verdict.reason is not None:
                    _log.error("%s; no restart: %s", end, verdict.reason)
                    self._on_failure.start(str(end), f"no restart: {verdict.reason}", self._given())
                return code
            pause = f" in {verdict.pause:.0f} s" if verdict.pause else ""
            follows = f"restart {self._policy.restarts}{pause}"
            _log.warning("%s; %s, %s", end, follows, self._starter.how)
            self._on_failure.start(str(end), follows, self._given())
            if not self._pause(verdict.pause):
                return code

    def _start(self) -> Attempt | None:
        """The next attempt; None: a signal asks for the end. Raises OSError: it cannot be started for long."""
        given = self._given()
        for _ in range(_MOST_TRIES):
            try:
                return self._starter.start(given)
            except OSError as error:  # such as: no process is left
                if not self._policy.restarts:
                    raise
                pause = self._policy.not_started()
                _log.warning("the restart cannot be made: %s; once more in %.0f s", error, pause)
                if not self._pause(pause):
                    return None
        return self._starter.start(given)

    def _given(self) -> Given:
        added = {**self._notes.environment(), RESTART_COUNT: str(self._policy.restarts)}
        return Given({_NO_SHARED_STORE: "1", **os.environ, **added}, self._inbox.before)

    def _wait(self, attempt: Attempt) -> int:
        """Pass signals on until the attempt has ended."""
        while (code := attempt.poll()) is None:
            received = self._inbox.next_signal(self._starter.prepare_next(attempt))
            if received is not None and received.si_signo != signal.SIGCHLD:
                self._stopped = self._stopped or received.si_signo in ENDING
                if not has_it_already(received):
                    os.kill(attempt.pid, received.si_signo)  # it is not reaped: no other process has its id
        return code

    def _pause(self, seconds: float) -> bool:
        """Wait before a restart; False if a signal asks for the end meanwhile."""
        until = time.monotonic() + seconds
        while True:
            received = self._inbox.next_signal(until - time.monotonic())
            if received is None:
                return True
            if received.si_signo in ENDING:
                _log.warning("%s; no restart", signal.Signals(received.si_signo).name)
                return False

    def _end_of(self, code: int) -> End:
        """How an attempt has failed, with the newest step that this node's agent holds."""
        address = self._notes.run()
        if address is None:
            return End(code, None)
        try:
            status = ask_status(address, _STATUS_SECONDS)
        except AgentError as error:
            _log.debug("no word from the agent: %s", error)
            return End(code, None, known=False)
        return End(code, None if status is None else status.step)

    def close(self) -> None:
        self._on_failure.close()
        self._starter.close()
        self._inbox.close()
        self._notes.close()
