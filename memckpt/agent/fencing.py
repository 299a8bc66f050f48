"""Waiting for the trainers of an earlier attempt to be dead, beside all else that the agent does.

A process that is killed may take long to end, and until then copies of its accelerator may still be written.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from memckpt.agent.connections import Connection, Connections
from memckpt.agent.lifetime import Lifetime
from memckpt.agent.observer import Observer
from memckpt.errors import RunBusyError
from memckpt.processes.attempt import Attempt, TrainerHandle
from memckpt.processes.event_loop import EventLoop
from memckpt.processes.handles import ProcessHandle
from memckpt.protocol.trainer import Fencing, Hello

_log = logging.getLogger("memckpt.agent")
_REPORT_SECONDS = 5.0
#: Longer that a trainer on an accelerator may take for each byte held: its driver unlocks that memory first, at 10 GB/s
#: alone, and slower where several do at the same time.
_UNLOCK_SECONDS = 0.25 / 2**30


class Fence:
    """Waits for trainers that must end within so many seconds. Owns duplicates of their handles; :meth:`close` it."""

    def __init__(self, trainers: Sequence[TrainerHandle], seconds: float, loop: EventLoop) -> None:
        self._loop = loop
        self._seconds = seconds
        self._began = loop.clock()
        self._report_at = self._began + _REPORT_SECONDS
        self._dying = [(trainer.rank, trainer.process.duplicate()) for trainer in trainers]
        #: Ranks of later attempts, each with its first message.
        self.waiting: list[tuple[Connection, Hello]] = []
        for _, process in self._dying:
            loop.attend(process, self._drop_ended)

    def _drop_ended(self) -> None:
        for rank, process in list(self._dying):
            if not process.alive():
                waited = self._loop.clock() - self._began
                _log.info("pid %d (rank %d) has ended after %.1f s", process.pid, rank, waited)
                self._dying.remove((rank, process))
                self._close_process(process)

    @property
    def done(self) -> bool:
        """Whether all have ended."""
        self._drop_ended()
        return not self._dying

    @property
    def deadline(self) -> float:
        """When to look again if nothing happens."""
        return min(self._report_at, self._began + self._seconds)

    def report(self) -> str | None:
        """Whom the new attempt waits for, if it is time to say so; RunBusyError: they have had all their time."""
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

    def _close_process(self, process: ProcessHandle) -> None:
        self._loop.unregister(process)
        process.close()

    def close(self) -> None:
        for _, process in self._dying:
            self._close_process(process)
        self._dying.clear()


class Gate:
    """Lets a new attempt in once no trainer of the last one lives. `held_bytes`: memory that may be page-locked."""

    def __init__(
        self,
        loop: EventLoop,
        connections: Connections,
        observer: Observer,
        lifetime: Lifetime,
        held_bytes: Callable[[], int],
    ) -> None:
        self._loop = loop
        self._held_bytes = held_bytes
        self._connections = connections
        self._observer = observer
        self._lifetime = lifetime
        self._fence: Fence | None = None
        loop.each_turn(self._admit_waiting, lambda: None if self._fence is None else self._fence.deadline)

    @property
    def shut(self) -> bool:
        """Whether an attempt waits."""
        return self._fence is not None

    def lets_in(self, connection: Connection, hello: Hello, present: Attempt | None) -> bool:
        """Whether no trainer of the present attempt lives on, so that this one may begin; if not, it waits."""
        if present is None:
            return True
        if self._fence is None:
            dying = present.fence(hello, connection.process.pid)
            if not dying:
                return True
            self._observer.fencing(dying)
            locked = self._held_bytes() if any(trainer.accelerated for trainer in dying) else 0
            self._fence = Fence(dying, hello.fence_seconds + locked * _UNLOCK_SECONDS, self._loop)
            self._lifetime.trainer_came()
        self._fence.waiting.append((connection, hello))
        return False

    def _admit_waiting(self) -> None:
        """Let the new attempt begin when the old one is dead; until then tell it what it waits for."""
        fence = self._fence
        if fence is None:
            return
        if fence.done:
            self._fence = None
            for connection, hello in fence.waiting:
                self._connections.handle(connection, hello)
            return
        try:
            report = fence.report()
        except RunBusyError as error:
            _log.error("%s", error)
            self.close()
            self._lifetime.trainers_left()
            for connection, _ in fence.waiting:
                self._connections.refuse(connection, error)
            return
        if report is not None:
            _log.warning("a new attempt waits for trainers of the last one, %s", report)
            for connection, _ in fence.waiting:
                self._connections.answer(connection, Fencing(report))

    def turn_away(self) -> None:
        """Send those that wait to another agent."""
        fence = self._fence
        if fence is not None:
            self.close()
            self._lifetime.trainers_left()
            for connection, _ in fence.waiting:
                self._connections.turn_away(connection)

    def close(self) -> None:
        fence, self._fence = self._fence, None
        if fence is not None:
            fence.close()
