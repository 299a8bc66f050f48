"""Metadata of one generation's records: everything that belongs to them beside their tensors."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from memckpt.errors import DamagedStateError
from memckpt.protocol.storing import LogRecord
from memckpt.state.records import RankGroup


class RankStates(NamedTuple):
    """Encoded rank states after a record, by rank, and the record's step."""

    step: int
    by_rank: dict[int, bytes]


class Ledger:
    """Scalars, steps and rank states of the local ranks' records, as far as they may still be needed.

    `committed`: the newest record of each rank that has committed one. `pinned`: a record whose rank states are kept,
    for a copy of the state; None: no record.
    """

    def __init__(self, ranks: RankGroup) -> None:
        self._ranks = ranks
        self.committed: dict[int, int] = {}
        self.pinned: int | None = None
        #: Encoded scalars, and the framework's step, of each record of which they are still known.
        self.metas: dict[int, bytes] = {}
        self.steps: dict[int, int] = {}
        self._rank_states: dict[int, dict[int, bytes]] = {}

    # What ranks commit

    def add_rank_state(self, rank: int, record: int, step: int, state: bytes) -> None:
        """Keep a rank's state after a record, and the record's step."""
        self.committed[rank] = record
        self._rank_states.setdefault(record, {})[rank] = state
        self.steps[record] = step

    def amend(self, rank: int, record: int, rank_state: bytes) -> None:
        """Replace a rank's state after a record: it has captured more of it than its commit had."""
        if rank in self._rank_states.get(record, {}):
            self._rank_states[record][rank] = rank_state

    def drop_before(self, oldest_state: int, oldest_meta: int, kept: Collection[int | None]) -> None:
        """Drop rank states and scalars of records before the given ones, but for those in `kept` and the pinned one."""
        for old in [n for n in self._rank_states if n < oldest_state and n not in kept and n != self.pinned]:
            del self._rank_states[old]
            self.steps.pop(old, None)
        for old in [n for n in self.metas if n < oldest_meta and n not in kept and n != self.pinned]:
            del self.metas[old]

    def drop_beyond(self, record: int) -> None:
        """Make `record` the newest of all ranks."""
        for numbers in (self.metas, self._rank_states, self.steps):
            for number in [n for n in numbers if n > record]:
                del numbers[number]
        self.committed = dict.fromkeys(self._ranks, record)

    def replace(self, metas: dict[int, bytes], states: Mapping[int, RankStates]) -> None:
        """Hold these records and no others; the newest is that of all ranks."""
        self.metas = metas
        self._rank_states = {
            number: {rank: one.by_rank[rank] for rank in self._ranks} for number, one in states.items()
        }
        self.steps = {number: one.step for number, one in states.items()}
        self.committed = dict.fromkeys(self._ranks, max(metas))

    # What is known

    @property
    def records_with_states(self) -> Iterable[int]:
        """Records after which the state of at least one rank is known."""
        return self._rank_states.keys()

    def metas_of(self, records: Iterable[int]) -> tuple[bytes, ...]:
        """Encoded scalars of records. Raises DamagedStateError: one of them is not known any more."""
        wanted = tuple(records)
        missing = [number for number in wanted if number not in self.metas]
        if missing:
            raise DamagedStateError(
                f"expected the scalars of records {wanted[0]} to {wanted[-1]}, found none of records {missing}, which "
                "training has gone past"
            )
        return tuple(self.metas[number] for number in wanted)

    def knows(self, record: int) -> bool:
        """Whether the states of all local ranks after a record are still here."""
        return set(self._rank_states.get(record, ())) >= set(self._ranks)

    def rank_states(self, record: int) -> dict[int, bytes]:
        """Encoded rank states after a record, by rank. Raises DamagedStateError: they are not known any more."""
        if record not in self._rank_states:
            raise DamagedStateError(f"expected the rank states of record {record}, which training has gone past")
        return dict(self._rank_states[record])

    def rank_states_after(self, record: int) -> dict[int, dict[int, bytes]]:
        """Encoded rank states after all later records, by record and rank."""
        return {number: dict(states) for number, states in sorted(self._rank_states.items()) if number > record}

    def log_record(self, record: int) -> LogRecord | None:
        """Everything but the tensors of a record, if all of it is still known."""
        if record not in self.metas or not self.knows(record):
            return None
        return LogRecord(record, self.steps[record], self.metas[record], self.rank_states(record))

    def sendable(self, record: int) -> tuple[int, bytes, dict[int, bytes]]:
        """Step, scalars and rank states of a record, as far as they are known."""
        return self.steps.get(record, 0), self.metas.get(record, b""), dict(self._rank_states.get(record, {}))

    @property
    def newest_step(self) -> int | None:
        """The highest step number that is known."""
        return max(self.steps.values(), default=None)
