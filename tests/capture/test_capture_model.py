"""Two slots that are filled in turns, against a model that remembers everything: what is promised is what is there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from memckpt.memory.generation import Generation, make_generation
from memckpt.memory.region import Allowance
from memckpt.protocol.channel import Message
from memckpt.protocol.trainer import Commit, GenerationCommit
from memckpt.state.records import RecordMeta, encode_meta
from memckpt.state.redo import tensor_at
from memckpt.state.spec import StateSpec
from tests.support.trainings.specs import ring_spec


def spec_of(ranks: int, every: int) -> StateSpec:
    return ring_spec(ranks, 1, 3, mode="snapshot", every=every, by_value=(), by_value_slots=0)


def meta_of(record: int) -> bytes:
    return encode_meta(RecordMeta(record, record, True))


class Ring(RuleBasedStateMachine):
    """Ranks of one node that write captures and commit, and die in the middle of both.

    A rank may be one record ahead of another, never two: no rank gets through a backward alone.
    """

    generation: Generation

    @initialize(ranks=st.integers(1, 3), every=st.integers(1, 4), base=st.integers(1, 9))
    def begin(self, ranks: int, every: int, base: int) -> None:
        self.spec = spec_of(ranks, every)
        self.make(base)

    def make(self, base: int) -> None:
        notify: Callable[[Message], None] = lambda message: None  # noqa: E731
        self.generation = make_generation(1, self.spec, Allowance(), threads=1, notify=notify)
        self.base = base
        ranks = self.spec.local_ranks
        self.done = dict.fromkeys(ranks, base)
        self.writing: dict[int, int] = {}
        for rank in ranks:
            self.write(rank, base)
            self.seal(rank, base)
            state = b"%d" % base
            self.generation.start(rank, GenerationCommit(1, base, base, state, (meta_of(base),) if rank == 0 else ()))

    def teardown(self) -> None:
        if hasattr(self, "generation"):
            self.generation.close()

    def value(self, record: int) -> Any:
        offset = self.generation.layout.slot_offset(record)
        piece = self.generation.layout.due(record)[0]
        return tensor_at(self.generation.regions.slots.map, offset + piece.offset, (4,), "float32")

    def write(self, rank: int, record: int) -> None:
        self.generation.ring.open_for_writing(record, rank)
        if rank == 0:
            self.value(record).fill_(record)

    def seal(self, rank: int, record: int) -> None:
        self.generation.ring.seal(record, rank)

    def may_go_on(self, rank: int) -> bool:
        return self.done[rank] == min(self.done.values())

    def captured(self, record: int) -> bool:
        return record % self.spec.every == 0

    @precondition(lambda self: hasattr(self, "generation"))
    @rule(data=st.data(), interrupted=st.sampled_from(["", "", "", "write", "seal"]))
    def commit(self, data: st.DataObject, interrupted: str) -> None:
        """A rank ends a record; with `interrupted` all die when it has written, or sealed, and not committed."""
        rank = data.draw(st.sampled_from([rank for rank in self.spec.local_ranks if self.may_go_on(rank)]))
        record = self.done[rank] + 1
        if self.captured(record):
            self.write(rank, record)
            if interrupted != "write":
                self.seal(rank, record)
        if interrupted:
            self.resume()
            return
        meta = meta_of(record) if rank == 0 and self.captured(record) else b""
        self.generation.commit(rank, Commit(1, record, record, b"%d" % record, meta))
        self.done[rank] = record

    def resume(self) -> None:
        """A new attempt goes on from the newest record."""
        record = max(self.generation.producible())
        self.generation.settle(record)
        self.done = dict.fromkeys(self.spec.local_ranks, record)

    @invariant()
    def what_is_promised_is_there(self) -> None:
        if not hasattr(self, "generation"):
            return
        held = self.generation.producible()
        assert held, "something is always held"
        for record in held:
            assert record == self.base or self.captured(record)
            assert self.value(record).tolist() == [float(record)] * 4
            states = self.generation.ledger.rank_states(record)
            assert states == dict.fromkeys(self.spec.local_ranks, b"%d" % record)
            assert self.generation.metas_for(record) == (meta_of(record),)

    @invariant()
    def no_more_is_lost_than_one_interval(self) -> None:
        if not hasattr(self, "generation"):
            return
        common = min(self.done.values())
        newest = max([self.base, common // self.spec.every * self.spec.every])
        assert newest in self.generation.producible()


Ring.TestCase.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestRing = Ring.TestCase
