"""The complete generations of a group: the newest, and older ones for as long as a rank of the job may need them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

import msgspec

from memckpt.errors import AgentError
from memckpt.memory.generation import Generation
from memckpt.memory.slots import AGREEMENT_RECORDS
from memckpt.protocol.trainer import Drift
from memckpt.state.records import RankGroup

_log = logging.getLogger("memckpt.agent")
#: Generations before the newest one that are held at most, for as long as peers stand still.
_MOST_BEFORE = 5


class HeldGenerations:
    """Belongs to the agent's event loop. Owns the generations; iterating yields them, oldest first.

    `forget` is called with a generation that ceases to be the newest.
    """

    def __init__(self, ranks: RankGroup, forget: Callable[[Generation], None]) -> None:
        self._ranks = ranks
        self._forget = forget
        self.newest: Generation | None = None
        #: Those before it, oldest first, until every rank of the job is known to have got past them: a rank that is
        #: killed while it writes a generation leaves only what it had before, and all go back to that.
        self.before: list[Generation] = []
        #: The record up to which peers let redo go on; None: as far as it likes.
        self.redo_limit: int | None = None

    def __iter__(self) -> Iterator[Generation]:
        return (one for one in (*self.before, self.newest) if one is not None)

    @property
    def nbytes(self) -> int:
        """Shared memory of all of them."""
        return sum(one.nbytes for one in self)

    # What they can produce

    def standing_still(self) -> dict[int, Generation]:
        """The records that can be produced while no trainer runs, oldest first, each with the generation that can."""
        found: dict[int, Generation] = {}
        for generation in self:
            found |= dict.fromkeys(generation.standing_still(), generation)
        return found

    def can_go_back_to(self, record: int) -> bool:
        """Whether the state after a record can be produced now."""
        return any(record in one.reachable() for one in self)

    def able_to_produce(self, record: int) -> Generation:
        """The generation that produces a record. Raises AgentError if none does."""
        generation = self.standing_still().get(record)
        if generation is None:
            raise AgentError(f"record {record} was to be resumed, but it cannot be produced here")
        return generation

    def why_not_repeated(self, record: int) -> str:
        """Why the step of `record` cannot be repeated from the state before it, in words; empty if it can."""
        generation = self.standing_still().get(record)
        return generation.why_not_repeated(record) if generation is not None else f"record {record} is not held"

    def stand_at(self, record: int, behind: int = 0) -> Generation:
        """Go back to a record that can be produced, and drop later ones; the replica stays `behind` it."""
        generation = self.able_to_produce(record)
        if generation is not self.newest:
            _log.info("the generation after %d, which not every rank had completed, is dropped", generation.number)
            self.before.remove(generation)
            self.take_over(generation)
        self.drop_older()
        generation.settle(record, behind)
        return generation

    def drifted(self, drift: Drift, exact: bool) -> Drift:
        """Note what the audit has found in a generation, if redo is to be `exact` there; returns it with its steps."""
        for generation in self:
            if generation.number == drift.generation:
                drift = msgspec.structs.replace(drift, steps=generation.steps_of(drift.since, drift.record))
                if exact and generation.drift is None:
                    generation.drift = drift
        return drift

    # What comes and goes

    def follow_with(self, generation: Generation, record: int) -> None:
        """Hold a generation that is complete after a record, and those before it while they may be needed."""
        old, self.newest = self.newest, generation
        if old is not None:
            self._forget(old)
            self.before.append(old)
            self.drop_passed(record)
        if len(self.before) > _MOST_BEFORE:
            # The oldest has what peers have got to, and the last what a rank goes back to that dies in the newest.
            given_up = self.before.pop(1)
            _log.warning(
                "peers have not got past record %d, and %d generations begun since are held: that after record %d is "
                "given up here, and peers alone keep its records",
                self.redo_limit or 0,
                len(self.before) + 1,
                given_up.base or 0,
            )
            given_up.close()

    def take_over(self, generation: Generation) -> None:
        """Hold a generation in the place of all that is held."""
        self.drop_all()
        self.newest = generation

    def drop_all(self) -> None:
        """Hold nothing any more."""
        self.drop_older()
        newest, self.newest = self.newest, None
        if newest is not None:
            self._forget(newest)
            newest.close()

    def drop_older(self) -> None:
        """Hold the newest one only."""
        before, self.before = self.before, []
        for generation in before:
            generation.close()

    def raise_redo_limit(self, record: int | None) -> None:
        """Let redo go on up to a record (None: as far as it likes), and let go of what peers make needless."""
        self.redo_limit = record
        if self.newest is not None and self.newest.complete:
            self.newest.raise_redo_limit(record)
            self.drop_passed(self.newest.newest)

    def drop_passed(self, record: int) -> None:
        """Drop generations that no rank of the job can need any more, once the group's ranks have got to `record`.

        They took part in its backward, so that every rank is through the record before. Of that one a rank has nothing
        where it could not stage it and begins a generation with the next; then the job goes back to the one before.
        """
        if self.newest is None or not self.before:
            return
        spec = self.newest.spec
        if len(self._ranks) == spec.world_size:
            # No rank is elsewhere: once the generation is complete, all of the job have it.
            self.drop_older()
            return
        # Ranks elsewhere may find out that much later that they do not agree on what they hold once.
        later = AGREEMENT_RECORDS if spec.mode == "lazy" else 0
        limit = self.redo_limit
        bases = [one.base or 0 for one in (*self.before[1:], self.newest)]
        while self.before and record > bases[0] + 1 + later and (limit is None or limit >= bases[0]):
            bases.pop(0)
            self.before.pop(0).close()
