"""The state that an attempt goes on from, as the ranks of one group are given it."""

from __future__ import annotations

from collections.abc import Iterator

from memckpt.errors import AgentError
from memckpt.memory.generation import Generation
from memckpt.protocol.trainer import Advanced, Before, Prepared


class ResumedState:
    """One record, the same for all ranks of a group.

    With `repeat` the replica stays one record behind it, if its step can be repeated from there.

    Args:
        generation: which can produce the record; belongs to the caller.
        record: to go back to.
        repeat: whether ranks repeat its step.
    """

    def __init__(self, generation: Generation, record: int, repeat: bool) -> None:
        self.record = record
        #: Rank states of the records after a captured one, by record and rank.
        self._following = generation.following(record)
        lazy = generation.replica is None and generation.spec.mode == "lazy"
        reason = generation.why_not_repeated(record) if repeat or lazy else ""
        before = _before(generation, record) if (repeat or lazy) and not reason else None
        #: Why its step is not repeated, in words; empty if it is.
        self._not_repeated = reason if repeat else ""
        self._before = before if repeat else None
        self._earlier = tuple(_earlier(generation, record)) if lazy else ()
        self._generation = generation
        self._advanced: set[int] = set()

    @property
    def behind(self) -> int:
        """By how many records the replica stays behind."""
        return int(self._before is not None)

    def prepared(self) -> Prepared:
        """What a rank needs to restore it."""
        held = self._generation
        missing: tuple[tuple[int, int, str], ...] = ()
        metas: tuple[bytes, ...] = ()
        plain = b""
        if held.replica is not None:
            held.replica.freeze()
            missing, plain = held.replica.describe_state()
            if self._before is None:
                held.replica.advance_to(self.record)
        else:
            metas = held.metas_for(self.record)
        return Prepared(
            generation=held.number,
            spec=held.spec,
            record=self.record,
            metas=metas,
            rank_states=held.ledger.rank_states(self.record),
            missing=missing,
            plain=plain,
            before=self._before,
            earlier=self._earlier,
            not_repeated=self._not_repeated,
            following=self._following,
            whole=held.whole,
        )

    def advance(self, rank: int, record: int) -> Advanced | None:
        """Note that a rank does not need the state before the record any more; the answer once no rank does.

        Raises:
            AgentError: it is not the record that was resumed.
        """
        if record != self.record:
            raise AgentError(f"expected to advance to record {self.record}, found {record}")
        self._advanced.add(rank)
        if self._advanced < set(self._generation.spec.local_ranks):
            return None
        replica = self._generation.replica
        if replica is None:
            return Advanced()
        replica.advance_to(record)
        replica.freeze()
        missing, plain = replica.describe_state()
        replica.advance_to(record)
        return Advanced(missing, plain)


def _earlier(generation: Generation, record: int) -> Iterator[Before]:
    """Windows of the records before it, newest first, as far back as the slots reach."""
    while not generation.why_not_repeated(record):
        yield _before(generation, record)
        record -= 1


def _before(generation: Generation, record: int) -> Before:
    ledger = generation.ledger
    metas = () if generation.replica is not None else generation.metas_for(record - 1)
    return Before(metas, ledger.meta_of(record), ledger.rank_states(record - 1), ledger.step_of(record - 1) or 0)
