"""Ranks that have written a generation's start, and wait for its slots."""

from __future__ import annotations

from collections.abc import Iterable

from memckpt.memory.generation import Generation
from memckpt.processes.attempt import Attempt


class SlotsWanted:
    """The ranks of one group, and the generation for which they wait.

    Attributes:
        number: of the generation; None while nobody waits.
    """

    def __init__(self) -> None:
        self.number: int | None = None
        self._ranks: set[int] = set()

    def add(self, rank: int, number: int) -> None:
        """A rank has begun to wait."""
        if self.number != number:
            self.number, self._ranks = number, set()
        self._ranks.add(rank)

    def clear(self) -> None:
        """Nobody waits any more."""
        self.number = None

    def has_living(self, attempt: Attempt) -> bool:
        """Whether a rank waits that has not gone."""
        return self.number is not None and any(attempt.is_here(rank) for rank in self._ranks)

    def awaits_more(self, ranks: Iterable[int], generation: Generation, attempt: Attempt) -> bool:
        """Whether another of these ranks is about to wait, too. One that has gone, or is past the start, is not."""
        others = [rank for rank in ranks if rank not in self._ranks and attempt.is_here(rank)]
        begins = generation.begins or 0
        return any(generation.started_by(rank) or not attempt.is_through(rank, begins) for rank in others)
