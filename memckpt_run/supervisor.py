"""The supervisor's loop: start, wait, pass signals on, judge, start again."""

from __future__ import annotations

import logging
import os
import signal
import time

from memckpt.config.arguments import RESTART_COUNT
from memckpt.errors import AgentError
from memckpt.processes.control import ask_status
from memckpt_run.attempts import Attempt, Given, Starter
from memckpt_run.notes import Notes
from memckpt_run.policy import End, Finished, GiveUp, Policy
from memckpt_run.signals import ENDING, Inbox, has_it_already

_log = logging.getLogger("memckpt.run")
#: Longest wait, in seconds, for the agent's word on the newest step. It only decides about pauses, and about giving up.
_STATUS_SECONDS = 2.0
#: Tries of a restart that cannot be made, before the error ends the run.
_MOST_TRIES = 20
#: Has torchrun, behind `memckpt run`, make a store of its own for each restart: in a shared one Gloo finds the dead.
_NO_SHARED_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"


class Supervisor:
    """Runs a training, and runs it again when it fails. Owns starter and notes; :meth:`close` it.

    Args:
        starter: starts attempts.
        restarts: most restarts.
        notes: what attempts tell.
    """

    def __init__(self, starter: Starter, restarts: int, notes: Notes) -> None:
        self._starter = starter
        self._policy = Policy(restarts)
        self._notes = notes
        self._inbox = Inbox()
        #: Whether somebody has asked for the end.
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
            end = End(code, self._newest_step() if code and not self._stopped else None)
            verdict = self._policy.ended(end, self._stopped)
            if isinstance(verdict, Finished):
                return code
            if isinstance(verdict, GiveUp):
                if verdict.reason is not None:
                    _log.error("%s; no restart: %s", end, verdict.reason)
                return code
            pause = f" in {verdict.pause:.0f} s" if verdict.pause else ""
            _log.warning("%s; restart %d%s, %s", end, self._policy.restarts, pause, self._starter.how)
            if not self._pause(verdict.pause):
                return code

    def _start(self) -> Attempt | None:
        """The next attempt; None if somebody asks for the end before it can be started.

        Raises:
            OSError: it cannot be started: the first one at all, others for long.
        """
        added = {**self._notes.environment(), RESTART_COUNT: str(self._policy.restarts)}
        given = Given({_NO_SHARED_STORE: "1", **os.environ, **added}, self._inbox.before)
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

    def _wait(self, attempt: Attempt) -> int:
        """Pass signals on until the attempt has ended."""
        while (code := attempt.poll()) is None:
            received = self._inbox.next_signal(self._starter.prepare_next(attempt))
            if received is not None and received.si_signo != signal.SIGCHLD:
                self._stopped = self._stopped or received.si_signo in ENDING
                if not has_it_already(received):
                    os.kill(attempt.pid, received.si_signo)  # it is not reaped: nobody else has its id
        return code

    def _pause(self, seconds: float) -> bool:
        """Wait before a restart; False if somebody asks for the end meanwhile."""
        until = time.monotonic() + seconds
        while True:
            received = self._inbox.next_signal(until - time.monotonic())
            if received is None:
                return True
            if received.si_signo in ENDING:
                _log.warning("%s; no restart", signal.Signals(received.si_signo).name)
                return False

    def _newest_step(self) -> int | None:
        """The newest step that this node's agent holds; None where it does not say."""
        address = self._notes.run()
        if address is None:
            return None
        try:
            status = ask_status(address, _STATUS_SECONDS)
        except AgentError as error:
            _log.debug("no word from the agent: %s", error)
            return None
        return None if status is None else status.step

    def close(self) -> None:
        self._starter.close()
        self._inbox.close()
        self._notes.close()
