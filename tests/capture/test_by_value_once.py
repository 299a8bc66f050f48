"""By-value tensors that ranks of a node hold once, as long as they agree: what that takes, and what is promised."""

from __future__ import annotations

import collections
import itertools
import os
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from memckpt.agent.saving.state_copies import Run, StateCopies, StateCopy, carry_on
from memckpt.agent.unit import Unit as AgentUnit
from memckpt.capture import by_value
from memckpt.errors import DamagedStateError, MemoryBudgetError
from memckpt.memory.generation import make_generation
from memckpt.memory.region import Allowance, Region
from memckpt.memory.slots import SlotRing
from memckpt.processes.attempt import Attempt
from memckpt.protocol.storing import RankPartCopied
from memckpt.protocol.trainer import Commit, GenerationCommit, Prepare
from memckpt.recovery.plan import common_records
from memckpt.state.layout import DIGEST_BYTES, Layout
from memckpt.state.records import RecordMeta, Timeline, encode_meta
from memckpt.state.redo import tensor_at
from memckpt.state.spec import StateSpec, read_spec
from tests.support.cluster.host import QuietHost
from tests.support.trainings.specs import averaged, averaged_spec, ring_spec

# Who shares, and what that takes


@pytest.mark.parametrize(
    "request_of",
    [{"mode": "eager"}, {"mode": "snapshot", "period": 1, "every": 5}, {"reads_late": True}, {"local_ranks": (0,)}],
)
def test_elsewhere_each_rank_has_its_own(request_of: dict[str, Any]) -> None:
    assert averaged_spec(2, **request_of).shared == ()


def test_what_is_known_to_differ_is_each_rank_s_own_for_ever() -> None:
    live = averaged()
    live.growth.apart = {"average.weight"}
    spec = averaged_spec(2, live)
    assert (spec.shared, spec.apart) == ((), ("average.weight",))
    resumed = averaged()
    resumed.growth.take_over(spec)
    assert averaged_spec(2, resumed) == spec


@pytest.mark.parametrize(
    ("request_of", "slots"),
    [
        ({}, 3),
        ({"asynchronous": True}, 3),
        ({"world_size": 4}, 3),
        ({"world_size": 4, "asynchronous": True}, 5),
        ({"world_size": 4, "asynchronous": True, "slots": 7}, 7),
        ({"world_size": 3, "asynchronous": True, "local_ranks": (2,)}, 5),  # others share, and may disagree
        ({"world_size": 4, "asynchronous": True, "reads_late": True}, 3),
    ],
)
def test_units_that_are_ahead_keep_what_another_goes_back_to(request_of: dict[str, Any], slots: int) -> None:
    assert averaged_spec(2, **request_of).slots == slots


def test_a_budget_that_is_too_small_says_how_often_averages_are_held() -> None:
    for spec, words in [
        (averaged_spec(2), "after 4 records, 1 tensors by each of 2 ranks, 1 tensors once for them"),
        (averaged_spec(2, shares=False), "after 4 records, 2 tensors by each of 2 ranks"),
    ]:
        with pytest.raises(MemoryBudgetError, match=words):
            make_generation(1, spec, Allowance(budget=1 << 20), threads=1, notify=lambda message: None)


# Digests


def changed(tensor: torch.Tensor, places: Sequence[int], bit: int) -> torch.Tensor:
    """A copy in which one bit of some bytes is another."""
    copy = tensor.clone()
    words = copy.view(-1).view(torch.uint8)
    for place in places:
        words[place] ^= 1 << bit
    return copy


DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int8, torch.bool, torch.complex64]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("numel", [0, 1, 3, 4, 1023])
def test_equal_tensors_have_equal_digests_and_others_have_not(dtype: torch.dtype, numel: int) -> None:
    tensor = torch.arange(numel).to(dtype)
    for of in (by_value.digest, lambda one: by_value.sums(one).numpy().tobytes()):
        assert len(of(tensor)) == DIGEST_BYTES
        assert of(tensor.clone()) == of(tensor)
        nbytes = numel * tensor.element_size()
        found = {of(changed(tensor, [place], bit)) for place in (0, nbytes // 2, nbytes - 1) for bit in (0, 7) if numel}
        assert of(tensor) not in found


def test_a_sum_sees_what_would_cancel_out_without_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Signs of two elements, elements that change places, and the same in different pieces of a tensor."""
    monkeypatch.setattr(by_value, "_CHUNK", 16)
    monkeypatch.setattr(by_value, "_keys", {})
    tensor = torch.randn(100)
    sums = lambda one: tuple(by_value.sums(one).tolist())  # noqa: E731
    variants = [tensor] + [changed(tensor, [4 * a + 3, 4 * b + 3], 7) for a, b in itertools.combinations(range(100), 2)]
    for a, b in [(0, 1), (3, 19), (50, 66), (15, 16)]:
        swapped = tensor.clone()
        swapped[[a, b]] = tensor[[b, a]]
        variants.append(swapped)
    assert len({sums(one) for one in variants}) == len(variants)


def test_views_are_read_in_row_major_order() -> None:
    tensor = torch.randn(6, 5)
    assert by_value.digest(tensor.t()) == by_value.digest(tensor.t().contiguous())
    assert by_value.sums(tensor[1:]).equal(by_value.sums(tensor[1:].clone()))
    halves = torch.arange(9, dtype=torch.int8)[1:]  # begins within a word
    assert by_value.sums(halves).equal(by_value.sums(halves.clone()))


# Stamps


@pytest.fixture
def ring() -> Iterator[SlotRing]:
    layout = Layout(ring_spec(3, 2, 3, ("average", "second")))
    region = Region.create("slots", layout.slots_bytes)
    with closing(region):
        ring = SlotRing(region, layout, 1)
        yield ring
        del ring


@pytest.mark.promise(
    "averages that a node holds once are equal on all its ranks in every promised record; a rank that differs costs"
    " no restorable record, and gets its own values back"
)
def test_a_generation_at_whose_start_ranks_disagree_replaces_none() -> None:
    unit = Unit(ring_spec(2, 1, 3, ("average",)))
    with closing(unit.group):
        for number, base, values in [(1, 4, (7, 7)), (2, 5, (7, 8)), (3, 6, (9, 9))]:
            for rank in (0, 1):
                held = unit.group.prepare(rank, Prepare(unit.spec, Timeline(1, "a"), 1, None, False, base))
                held.ring.note_digests(base, rank, bytes([values[rank]]) * DIGEST_BYTES)
                held.ring.seal(base, rank)
                metas = () if rank else (encode_meta(RecordMeta(base, base, True)),)
                unit.group.generation_committed(rank, GenerationCommit(number, base, base, b"", metas))
            assert unit.group.held is not None
            assert unit.group.held.number == (1 if number == 2 else number)
            assert list(unit.group.generations.producible_at_rest()) == ([4] if number < 3 else [6])


@pytest.mark.parametrize("agree", [True, False])
def test_a_start_that_is_read_when_its_by_value_tensors_are_written_over(agree: bool) -> None:
    """Nobody waits for the agent with lazy redo: what the ranks have committed since counts, if they agree on it."""
    spec = ring_spec(2, 1, 3, ("average",))
    unit = Unit(spec)
    base, last = 4, 4 + spec.by_value_slots
    meta = encode_meta(RecordMeta(base, base, True))
    with closing(unit.group):
        for rank in (0, 1):
            prepare = Prepare(spec, Timeline(1, "a"), 1, None, False, base, whole=True)
            held = unit.group.prepare(rank, prepare)
            for record in range(base, last + 1):
                held.ring.note_digests(record, rank, bytes([record if agree else rank]) * DIGEST_BYTES)
                held.ring.seal(record, rank)
        for rank in (0, 1):
            metas = () if rank else (meta,)
            unit.group.generation_committed(rank, GenerationCommit(1, base, base, b"", metas))
        for record in range(base + 1, last + 1):
            for rank in (0, 1):
                unit.group.commit(rank, Commit(1, record, record, b"", b"" if rank else meta), unit.attempt)
        assert list(unit.group.generations.producible_at_rest())[-1:] == ([last] if agree else [])


def note(ring: SlotRing, rank: int, *found: int) -> None:
    ring.note_digests(5, rank, b"".join(bytes([one]) * DIGEST_BYTES for one in found))
    ring.seal(5, rank)


def test_a_record_counts_when_all_ranks_have_said_the_same(ring: SlotRing) -> None:
    for rank in (0, 1):
        note(ring, rank, 1, 2)
        assert ring.disagreed(5) == []
        # Whoever restores one rank's needs what another one may have staged.
        with pytest.raises(DamagedStateError, match=f"the part of rank {rank + 1}"):
            ring.check_by_value(5, [0])
    note(ring, 2, 1, 2)
    ring.check_by_value(5, [0])


def test_what_differs_is_named_and_the_record_is_refused(ring: SlotRing) -> None:
    for rank in range(3):
        note(ring, rank, 1, 2 + (rank == 1))
    assert ring.disagreed(5) == ["second"]
    with pytest.raises(DamagedStateError, match=r"expected all of the ranks \[0, 1, 2\] to have the same second"):
        ring.check_by_value(5, [0])
    ring.open_by_value(5, 2)
    assert ring.disagreed(5) == []


def test_a_layout_from_elsewhere_shares_by_value_tensors_only() -> None:
    for shared, found in [(("average",), ""), (("average", "weight"), r"shared=\('average', 'weight'\)")]:
        data = msgspec.msgpack.encode(ring_spec(2, 2, 3, shared))
        if not found:
            assert read_spec(data).shared == shared
            continue
        with pytest.raises(ValueError, match=found):
            read_spec(data)


@pytest.mark.promise(
    "averages that a node holds once are equal on all its ranks in every promised record; a rank that differs costs"
    " no restorable record, and gets its own values back"
)
@pytest.mark.parametrize("differs", [False, True])
def test_a_copy_after_a_record_on_which_ranks_disagree_is_made_again(differs: bool) -> None:
    outcomes: list[Any] = []
    held = make_generation(1, ring_spec(2, 2, 3, ("average",)), Allowance(), threads=1, notify=lambda _: None)
    with closing(held):
        for rank in (0, 1):
            held.ring.note_digests(5, rank, bytes([differs and rank]) * DIGEST_BYTES)
            held.ring.seal(5, rank)
            held.commit(rank, Commit(1, 5, 5, b""))
        orders: list[Any] = []
        copies = StateCopies(lambda message, fd: orders.append(message), lambda reserved: None)

        async def take() -> None:
            outcomes.append(await copies.copy_state(Run(""), held, 5))

        carry_on(take())
        for rank in (0, 1):
            assert not outcomes
            copies.add_part(rank, RankPartCopied(5, orders[-1].order, 0.0))
        (outcome,) = outcomes
        assert isinstance(outcome, StateCopy) != differs
        if isinstance(outcome, StateCopy):
            outcome.region.close()


# Ranks that begin, stage, commit, disagree and die


@dataclass
class Unit:
    """Ranks that share slots, as their agent sees them."""

    spec: StateSpec
    group: AgentUnit = field(init=False)
    attempt: Attempt = field(init=False)

    def __post_init__(self) -> None:
        self.attempt = Attempt("n", self.spec.world_size, tuple(range(self.spec.world_size)))
        self.group = AgentUnit("n", self.spec.local_ranks, "n", QuietHost(), QuietHost())


class Trainer:
    """One rank: `ended` is the record that its training thread is through, `sent` that of its last commit.

    They differ where commits are sent later: by one at most, since the one before is sent before the next reduction.
    Its mapping of a generation is its own, whatever the agent lets go of.
    """

    def __init__(self, rank: int, unit: Unit, late: bool) -> None:
        self.rank, self.unit, self.late = rank, unit, late
        self.leads = rank == unit.spec.local_ranks[0]
        #: By tensor, from which record on this rank's is another one, and up to which.
        self.strays: dict[str, list[tuple[int, int]]] = collections.defaultdict(list)
        self.apart: set[str] = set()
        self.ended = self.sent = self.number = 0
        self.region: Region | None = None
        self.ring: SlotRing
        self.digests = b""

    def close(self) -> None:
        if self.region is not None:
            del self.ring
            self.region.close()

    def value(self, name: str, record: int) -> float:
        strays = any(first <= record < last for first, last in self.strays[name])
        return 100.0 * record + (self.rank + 1 if strays or name == "count" else 0)

    def held(self, region: Region, layout: Layout, name: str, record: int) -> torch.Tensor:
        position = [one.name for one in layout.spec.by_value].index(name)
        place = layout.by_value_base(record) + layout.by_value_offsets(self.rank)[position]
        return tensor_at(region.map, place, layout.spec.by_value[position].shape, "float32")

    def stage(self, record: int) -> None:
        assert self.region is not None
        self.ring.open_by_value(record, self.rank)
        spec = self.layout.spec
        for position, tensor in enumerate(spec.by_value):
            if self.layout.shared_stagers.get(position, self.rank) == self.rank:
                self.held(self.region, self.layout, tensor.name, record).fill_(self.value(tensor.name, record))
        found = [torch.tensor(self.value(spec.by_value[position].name, record)) for position in self.layout.shared]
        self.digests = b"".join(by_value.digest(one) for one in found)

    def seal(self, record: int, first: int) -> None:
        self.ring.note_digests(record, self.rank, self.digests)
        for number in range(first, record + 1):
            self.ring.seal(number, self.rank, by_value=number == record)

    def begin_generation(self, record: int) -> None:
        spec = self.unit.spec
        names = tuple(one.name for one in spec.by_value if one.name not in {"count", *self.apart})
        shared = names if len(spec.local_ranks) > 1 else ()
        spec = msgspec.structs.replace(spec, shared=shared, apart=tuple(sorted(self.apart)))
        generation = self.unit.group.prepare(self.rank, Prepare(spec, Timeline(1, "a"), 1, None, False, record))
        self.close()
        self.region, self.layout, self.number = (
            Region.open(os.dup(generation.regions.slots.fd)),
            Layout(spec),
            generation.number,
        )
        self.ring = SlotRing(self.region, self.layout, self.number)
        window = range(record - spec.period + 1, record + 1)
        for number in window:
            self.ring.open_for_writing(number, self.rank)
        self.stage(record)
        self.seal(record, window[0])
        metas = tuple(encode_meta(RecordMeta(number, record, True)) for number in window) if self.leads else ()
        self.unit.group.generation_committed(self.rank, GenerationCommit(self.number, record, record, b"", metas))
        self.ended = self.sent = record
        self.ring.open_for_writing(record + 1, self.rank)

    @property
    def disagreed(self) -> list[str]:
        """What shows at the end of the next record."""
        return self.ring.disagreed(self.ended + 1 - (2 if self.late else 1))

    def end(self) -> None:
        """The training thread comes to the end of a record."""
        self.ended += 1
        self.stage(self.ended)
        self.ring.open_for_writing(self.ended + 1, self.rank)
        if not self.late:
            self.send()

    def send(self) -> None:
        record = self.sent = self.ended
        self.seal(record, record)
        meta = encode_meta(RecordMeta(record, record - 1, False)) if self.leads else b""
        self.unit.group.commit(self.rank, Commit(self.number, record, record, b"", meta), self.unit.attempt)


class Job:
    """Units of ranks, whose moves come in any order that reductions allow."""

    def __init__(self, units: Sequence[int], period: int, slots: int, late: bool) -> None:
        first = 0
        self.units: list[Unit] = []
        self.trainers: list[Trainer] = []
        for size in units:
            ranks = tuple(range(first, first + size))
            spec = msgspec.structs.replace(
                ring_spec(size, period, slots), local_ranks=ranks, world_size=sum(units), replicas=ranks
            )
            unit = Unit(spec)
            self.units.append(unit)
            self.trainers += [Trainer(rank, unit, late) for rank in ranks]
            first += size
        self.late = late
        #: Records after which all units begin a generation for another reason.
        self.due: set[int] = set()
        self.best = 0
        for trainer in self.trainers:
            trainer.begin_generation(period)
        self.best = period

    def close(self) -> None:
        for trainer in self.trainers:
            trainer.close()
        for unit in self.units:
            unit.group.close()

    def through(self, record: int) -> bool:
        """Whether the reduction of a record is done: every rank has entered it behind its commit of the one before."""
        return min(one.sent for one in self.trainers) >= record - 1

    def move(self, trainer: Trainer, sends: bool) -> None:
        """Let a rank go on, if it can."""
        if trainer.sent < trainer.ended and self.through(trainer.ended):
            trainer.send()
        # The next reduction is entered when the last commit has been sent.
        if trainer.sent < trainer.ended or sends or not (self.late or self.through(trainer.ended + 1)):
            return
        differing = trainer.disagreed
        if not differing and trainer.ended + 1 not in self.due:
            trainer.end()
        elif self.through(trainer.ended + 1):  # a generation is written when the device is done
            trainer.apart |= {*differing}
            trainer.begin_generation(trainer.ended + 1)

    def check(self) -> dict[int, int]:
        """What all can go back to is what they had, and goes as far as it ever went."""
        found = common_records([unit.group.inventory(None) for unit in self.units])
        for record in found:
            for trainer in self.trainers:
                held = trainer.unit.group.generations.producible_at_rest()[record]
                for number in range(record - held.spec.period + 1, record + 1):
                    held.ring.check(number, held.spec.local_ranks)
                for tensor in held.spec.by_value:
                    values = set(trainer.held(held.regions.slots, held.layout, tensor.name, record).tolist())
                    assert values == {trainer.value(tensor.name, record)}, (record, trainer.rank, tensor.name)
        assert max(found, default=-1) >= self.best, (found, [(one.ended, one.sent) for one in self.trainers])
        self.best = max(found)
        return found


@pytest.mark.promise(
    "averages that a node holds once are equal on all its ranks in every promised record; a rank that differs costs"
    " no restorable record, and gets its own values back"
)
@pytest.mark.promise(
    "all ranks of a node, just after ranks that share an average or a large buffer began to differ in it"
)
@pytest.mark.parametrize("late", [False, True], ids=["host", "device"])
@pytest.mark.parametrize("units", [(2,), (3,), (2, 1), (2, 2)], ids=str)
@pytest.mark.parametrize("examples", [8, pytest.param(300, marks=pytest.mark.slow)])
def test_ranks_that_disagree_cost_nothing_that_could_be_restored(
    units: tuple[int, ...], late: bool, examples: int
) -> None:
    """Whenever the job dies, all can go back as far as they could at any time before, each to what it had."""

    @given(data=st.data())
    @settings(max_examples=examples, deadline=None)
    def holds(data: st.DataObject) -> None:
        disagree(units, late, data)

    holds()


def disagree(units: tuple[int, ...], late: bool, data: st.DataObject) -> None:
    period = data.draw(st.integers(1, 4))
    job = Job(units, period, 5 if late and len(units) > 1 else 3, late)
    strayed = begun = 0
    try:
        for _ in range(data.draw(st.integers(0, 120))):
            trainer = data.draw(st.sampled_from(job.trainers))
            now = max(one.ended for one in job.trainers) + 1
            # With several units another one has no time to begin with what it parts ways about before.
            rarely = len(units) > 1 and now - strayed < 8
            if not rarely and data.draw(st.integers(0, 5)) == 0 and now > trainer.ended:
                strayed = now
                until = now + data.draw(st.sampled_from([1, 2, 1000]))
                trainer.strays[data.draw(st.sampled_from(["average", "second"]))].append((now, until))
            if now - begun > 7 and data.draw(st.integers(0, 5)) == 0:
                begun = now
                job.due.add(now)
            job.move(trainer, data.draw(st.booleans()))
            job.check()
        for trainer in job.trainers:
            for spans in trainer.strays.values():
                spans[:] = [(first, last) for first, last in spans if first <= job.best or first <= trainer.ended]
        # Once nobody strays any more, the newest record of all can be had again.
        for _ in range(12):
            for trainer in job.trainers:
                job.move(trainer, False)
                job.check()
        assert job.best == min(one.sent for one in job.trainers)
    finally:
        job.close()
