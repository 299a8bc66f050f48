"""Waiting for the trainers of an earlier attempt to be dead, beside all else that the agent does.

A process that is killed may take long to end: the driver of an accelerator takes its contexts apart first, and until
then copies that are on their way may still be written. The ranks of the new attempt get their answers when the last one
has ended, and hear every few seconds whom they wait for.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from memckpt.agent.connections import Connection
from memckpt.errors import RunBusyError
from memckpt.node.attempt import TrainerHandle
from memckpt.processes.event_loop import EventLoop
from memckpt.processes.handles import ProcessHandle
from memckpt.protocol.trainer import Hello

_log = logging.getLogger("memckpt.agent")
_REPORT_SECONDS = 5.0


class Fence:
    """Owns duplicates of the processes' handles, registered with the loop so that it wakes up; :meth:`close` it.

    Args:
        trainers: that must end.
        seconds: how long they may take.
        loop: the agent's.
    """

    def __init__(
        self,
        trainers: Sequence[TrainerHandle],
        seconds: float,
        loop: EventLoop,
    ) -> None:
        self._loop = loop
        self._seconds = seconds
        self._began = loop.clock()
        self._report_at = self._began + _REPORT_SECONDS
        self._dying = [(trainer.rank, trainer.process.duplicate()) for trainer in trainers]
        #: Ranks of later attempts, each with its first message.
        self.waiting: list[tuple[Connection, Hello]] = []
        for _, process in self._dying:
            loop.attend(process, self._look)

    def _look(self) -> None:
        """Somebody has died."""
        for rank, process in list(self._dying):
            if not process.alive():
                waited = self._loop.clock() - self._began
                _log.info("pid %d (rank %d) has ended after %.1f s", process.pid, rank, waited)
                self._dying.remove((rank, process))
                self._let_go(process)

    @property
    def done(self) -> bool:
        """Whether all have ended."""
        self._look()
        return not self._dying

    @property
    def deadline(self) -> float:
        """When to look again if nothing happens."""
        return min(self._report_at, self._began + self._seconds)

    def report(self) -> str | None:
        """Whom the new attempt waits for, if it is time to say so.

        Raises:
            RunBusyError: they have had all their time.
        """
        now = self._loop.clock()
        waited = now - self._began
        those = "; ".join(f"pid {process.pid} (rank {rank}), state {process.state()}" for rank, process in self._dying)
        if waited >= self._seconds:
            raise RunBusyError(
                f"trainers of an earlier attempt were killed and have not ended within {waited:.0f} s: {those}. They "
                "could still write into the held state, so this attempt is refused. Start again when they have ended; "
                "agent.fence_seconds is how long to wait"
            )
        if now < self._report_at:
            return None
        self._report_at = now + _REPORT_SECONDS
        return f"killed and not ended since {waited:.0f} s (at most {self._seconds:.0f} s): {those}"

    def _let_go(self, process: ProcessHandle) -> None:
        self._loop.forget(process)
        process.close()

    def close(self) -> None:
        """Wait no more."""
        for _, process in self._dying:
            self._let_go(process)
        self._dying.clear()
