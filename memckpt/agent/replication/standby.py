"""One standby replica: a generation of another node's ranks that is redone here."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import msgspec

from memckpt.memory.generation import Generation, describe
from memckpt.protocol.standby import OpenStandby, StandbyRecord
from memckpt.protocol.trainer import Commit, GenerationCommit
from memckpt.state.records import HeldRecords, RankGroup, RecordMeta, decode_meta
from memckpt.state.spec import StateSpec

#: Slots beside those that an owner has: so many records are stored and not yet applied when one is acknowledged. One
#: more is there where the replica stays a record behind.
EXTRA_SLOTS = 2


class StandbyReplica:
    """One generation of an owner's records. Owns the generation that it is redone in; :meth:`close` it."""

    def __init__(self, opened: OpenStandby, generation: Generation) -> None:
        self.opened = opened
        self.generation = generation
        self._virtual: dict[int, RecordMeta] = {}
        #: The first of the records that have come without a gap up to the newest.
        self._first = 0
        self._newest: int | None = None
        #: Records beyond it belong to an abandoned timeline.
        self._last: int | None = None

    @property
    def nbytes(self) -> int:
        return self.generation.nbytes

    @property
    def exact_from(self) -> int:
        """The first record from which on its state is that of the owner, bit for bit."""
        return max(self.opened.base, self._first + self.opened.spec.period - 1)

    def close(self) -> None:
        self.generation.close()

    # Records

    def take(self, message: StandbyRecord) -> None:
        """Take a record; what lies between it and the one before does not come any more."""
        record, base = message.record, self.opened.base
        if self._newest is not None and record <= self._newest:
            return
        gap = self._newest is None or record != self._newest + 1
        if gap:
            self._first = record
            self._virtual.clear()
        self._newest = record
        if record <= base:
            self._virtual[record] = decode_meta(message.meta)
            if record == base:
                self._begin(base, message.step, message.rank_states)
            return
        if not self.generation.complete:
            self._begin(record - 1, 0, {})
        elif gap:
            assert self.generation.replica is not None
            self.generation.replica.skip_to(record - 1)
        first = self.opened.ranks[0]
        for rank in self.opened.ranks:
            meta = message.meta if rank == first else b""
            commit = Commit(self.generation.number, record, message.step, message.rank_states[rank], meta)
            self.generation.commit(rank, commit)

    def skip(self, record: int) -> None:
        """Skip the records up to one: they do not come any more."""
        if self.generation.complete and (self._newest is None or record > self._newest):
            assert self.generation.replica is not None
            self._newest, self._first = record, record + 1
            self.generation.replica.skip_to(record)

    def _begin(self, record: int, step: int, rank_states: dict[int, bytes]) -> None:
        """The replica is that after `record`, as far as virtual records have come."""
        missing, plain = self._describe_state()
        number = self.generation.number
        for rank in self.opened.ranks:
            state = rank_states.get(rank, b"")
            self.generation.start(rank, GenerationCommit(number, record, step, state, (), missing, plain))
        self._virtual.clear()

    def _describe_state(self) -> tuple[tuple[tuple[int, int, str], ...], bytes]:
        """What of the optimizer state is not there, and what of it is no tensor, as for a replica.

        Nothing is there of parameters of which no virtual record has come: their optimizer begins as at its first step.
        """
        from memckpt.state import codec  # imports torch

        layout = self.generation.layout
        there = {piece.param for record in self._virtual for piece in layout.due(record)}
        missing = {one for meta in self._virtual.values() for one in meta.missing}
        missing |= {
            (index, owner.optimizer, state.key)
            for index, param in enumerate(layout.spec.params)
            if index not in there
            for owner in param.owners
            for state in owner.state
        }
        plain: dict[int, dict[int, dict[str, object]]] = defaultdict(lambda: defaultdict(dict))
        for _, meta in sorted(self._virtual.items()):
            for param, by_optimizer in (codec.decode(meta.plain) if meta.plain else {}).items():
                for optimizer, values in by_optimizer.items():
                    if param in there:
                        plain[param][optimizer] |= values
        encoded = codec.encode({param: dict(values) for param, values in plain.items()}) if plain else b""
        return tuple(sorted(missing)), encoded

    def let_go_on(self, redo_limit: int) -> None:
        """Let redo go on up to `redo_limit`."""
        if self.generation.redo_limit is None or redo_limit > self.generation.redo_limit:
            self.generation.raise_redo_limit(redo_limit)

    # What it can produce

    def forget_beyond(self, record: int) -> None:
        """An attempt goes on behind `record`."""
        self._last = record if self._last is None else min(self._last, record)

    def standing_still(self) -> list[int]:
        """Records whose state it can produce while nothing comes, ascending."""
        if not self.generation.complete:
            return []
        assert self.generation.replica is not None
        self.generation.replica.freeze()
        found = self.generation.reachable()
        return [one for one in found if one >= self.exact_from and (self._last is None or one <= self._last)]

    def stand_at(self, record: int, behind: int = 0) -> Generation:
        """Go to a record that it can produce, and stay there.

        Args:
            behind: number of records by which the replica stays behind it.

        Raises:
            AgentError: redo failed on the way.
        """
        assert self.generation.replica is not None
        self.forget_beyond(record)
        self.generation.settle(record, behind)
        self.generation.replica.freeze()
        return self.generation

    def held(self, node: str, fingerprint: Sequence[str] | None) -> HeldRecords | None:
        """Description of what it can produce, for the plan; None: nothing."""
        opened, records = self.opened, self.standing_still()
        if not records:
            return None
        spec = opened.spec
        difference = spec.difference(fingerprint) if fingerprint is not None else None
        if difference is not None:
            return HeldRecords(node=node, ranks=opened.ranks, problem=difference, standby=True)
        steps = {record: self.generation.ledger.step_of(record) or 0 for record in records}
        return describe(spec, node, opened.ranks, opened.history, steps, records[-1], standby=True)


def as_standby(spec: StateSpec, ranks: RankGroup) -> StateSpec:
    """The spec of an owner's state as a standby replica holds it: eager, with slots of its own."""
    slots = spec.slots + EXTRA_SLOTS + spec.trails
    return msgspec.structs.replace(spec, mode="eager", local_ranks=ranks, slots=slots, by_value_slots=0)
