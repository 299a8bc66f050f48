"""Attempts and their fencing: making sure that what an earlier attempt left behind can write no more.

An orphan's mapping stays writable when its socket is closed, so each process has to be dead.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from memckpt.errors import RunBusyError
from memckpt.processes.handles import ProcessHandle, start_ticks
from memckpt.protocol.trainer import Hello, Launcher
from memckpt.state.records import RankGroup

_log = logging.getLogger("memckpt.agent")


@dataclass
class TrainerHandle:
    """One trainer rank of the attempt, on an `accelerated` device or not; `unit`: the node's ranks with its shards."""

    rank: int
    unit: RankGroup
    process: ProcessHandle
    launcher: Launcher
    next_record: int
    accelerated: bool = False
    finished: bool = False
    left: bool = False
    #: When it left, by the monotonic clock.
    left_at: float = 0.0
    #: How often it has asked to drop what is held.
    discards: int = 0


@dataclass
class Attempt:
    """The trainers that may write: all with one nonce."""

    nonce: str
    world_size: int
    local_ranks: tuple[int, ...]
    trainers: dict[int, TrainerHandle] = field(default_factory=dict)
    #: How often what is held has been dropped.
    discards: int = 0

    def is_first_to_discard(self, trainer: TrainerHandle) -> bool:
        """Whether a rank's wish to drop what is held is new: all ranks ask, and others have begun anew since."""
        trainer.discards += 1
        is_first = trainer.discards > self.discards
        self.discards += is_first
        return is_first

    def living(self) -> list[TrainerHandle]:
        return [trainer for trainer in self.trainers.values() if trainer.process.alive() and not trainer.left]

    def deserters(self, before: float) -> list[TrainerHandle]:
        """Trainers that live, and went on without their agent before that time of the monotonic clock."""
        return [
            trainer
            for trainer in self.trainers.values()
            if trainer.left and not trainer.finished and trainer.left_at < before and trainer.process.alive()
        ]

    def is_here(self, rank: int) -> bool:
        """Whether a rank of this node has a connection."""
        trainer = self.trainers.get(rank)
        return trainer is not None and not trainer.left

    def is_through(self, rank: int, record: int) -> bool:
        """Whether a rank that has said hello has said what became of a record."""
        return self.trainers[rank].next_record > record

    @property
    def all_connected(self) -> bool:
        return all(self.is_here(rank) for rank in self.local_ranks)

    @property
    def all_here(self) -> bool:
        return set(self.trainers) == set(self.local_ranks)

    @property
    def units(self) -> set[RankGroup]:
        return {trainer.unit for trainer in self.trainers.values()}

    @property
    def newest_record(self) -> int:
        """The newest that a rank has committed; no rank is in a later one than the next."""
        return max(trainer.next_record for trainer in self.trainers.values()) - 1

    @property
    def all_finished(self) -> bool:
        return self.all_here and all(trainer.finished for trainer in self.trainers.values())

    def fence(self, newcomer: Hello, newcomer_pid: int) -> list[TrainerHandle]:
        """Make sure that no trainer of this attempt lives on; returns those whose end has to be waited for.

        Living ones are killed if their launcher is gone, or has started the newcomer as a later restart. Raises
        RunBusyError: another launcher still runs one.
        """
        here = [
            trainer
            for trainer in self.trainers.values()
            if trainer.process.alive() and trainer.process.pid != newcomer_pid
        ]
        dying = [trainer for trainer in here if trainer.process.dying()]
        living = [trainer for trainer in here if trainer not in dying and not trainer.left]
        if not all(_superseded(trainer.launcher, newcomer) for trainer in living):
            pids = ", ".join(str(trainer.process.pid) for trainer in living)
            raise RunBusyError(
                f"this run is held by a live trainer (pid {pids}); expected no other trainer on the same run "
                "directory. End that process first, or choose another run directory"
            )
        for trainer in living:
            pid = trainer.process.pid
            _log.warning("killing pid %d (rank %d), left over from an earlier attempt", pid, trainer.rank)
            trainer.process.kill()
        return dying + living


def _superseded(launcher: Launcher, newcomer: Hello) -> bool:
    """Whether a rank that this launcher started belongs to the past: its launcher is gone, or has restarted."""
    if launcher.pid == 0:
        return False  # started by hand: only a person restarts it
    if start_ticks(launcher.pid) != launcher.start_ticks:
        return True
    same = (launcher.pid, launcher.start_ticks) == (newcomer.launcher.pid, newcomer.launcher.start_ticks)
    return same and newcomer.launcher.restarts > launcher.restarts
