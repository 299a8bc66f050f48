"""Generations of a node's units: which are held, and when the slots of a new one are made.

That is once nobody can need the old one, and at the latest when asked twice.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memckpt.agent.units import Units as AgentUnits
from memckpt.errors import AgentError, MemckptError, MemoryBudgetError
from memckpt.memory import region
from memckpt.memory.generation import Generation
from memckpt.processes.attempt import Attempt, TrainerHandle
from memckpt.protocol.channel import Message
from memckpt.protocol.trainer import (
    Commit,
    Gap,
    GenerationCommit,
    Hello,
    Launcher,
    NeedSlots,
    Prepare,
    Resume,
    SlotsMade,
)
from memckpt.recovery.plan import common_records
from memckpt.state.layout import Layout
from memckpt.state.records import Branch, RecordMeta, SubStep, Timeline, encode_meta
from memckpt.state.spec import ParamSpec, StateSpec, TensorSpec
from tests.support.cluster.host import QuietHost
from tests.support.cluster.storage_node import spec_of
from tests.support.faults.full_memory import refuse_slots

Units = list[tuple[int, ...]]
T1, T2 = Timeline(1, "a"), Timeline(2, "b")


class Node(QuietHost):
    """The agent of a node in which ranks begin generations and commit records, and wait where they have to.

    Attributes:
        waiting: ranks that have written a start and do not go on before its slots are there.
        heard: what each unit has been told, oldest first.
    """

    def __init__(self, units: Units, world_size: int | None = None, budget: int | None = None) -> None:
        super().__init__()
        ranks = tuple(rank for unit in units for rank in unit)
        self.units = {rank: unit for unit in units for rank in unit}
        self.world_size = world_size or len(ranks)
        self.budget = budget
        self.waiting: set[int] = set()
        self.heard: dict[tuple[int, ...], list[Message]] = {unit: [] for unit in units}
        self.groups = AgentUnits("n", self)
        self.attempt = Attempt("a", self.world_size, ranks)
        for rank, unit in self.units.items():
            hello = Hello(1, "a", rank, self.world_size, ranks, unit, Launcher(0, 0, 0), ())
            self.groups.introduce(hello)
            trainer = TrainerHandle(rank, unit, None, Launcher(0, 0, 0), 1)  # type: ignore[arg-type]
            self.attempt.trainers[rank] = trainer

    def tell_ranks(
        self, ranks: tuple[int, ...], message: Message, *, besides: int | None = None, fd: int | None = None
    ) -> None:
        self.heard[ranks].append(message)
        if isinstance(message, SlotsMade):
            self.waiting -= set(ranks)

    def spec(self, rank: int) -> StateSpec:
        unit = self.units[rank]
        # Large enough that slots are worth more than their headers.
        param = ParamSpec(TensorSpec("w", (5_000,), "float32"), (), True, 0)
        owned = msgspec.structs.replace(spec_of(unit).params[0], tensor=param.tensor)
        return msgspec.structs.replace(
            spec_of(unit, self.world_size), params=(owned,), replicas=unit, by_value_slots=0, shared=()
        )

    def prepares(self, rank: int, record: int) -> Generation:
        """A rank asks for a generation and is through the record."""
        group = self.groups[self.units[rank]]
        return group.prepare(rank, Prepare(self.spec(rank), T1, 1, self.budget, False, record))

    def begins(self, rank: int, record: int) -> None:
        """A rank writes its part of a generation that begins after a record, and asks for the slots."""
        unit, spec = self.units[rank], self.spec(rank)
        generation = self.prepares(rank, record)
        virtual = range(record - spec.period + 1, record + 1)
        for number in virtual:
            generation.ring.seal(number, rank)
        metas = tuple(encode_meta(RecordMeta(number, record, True)) for number in virtual)
        start = GenerationCommit(generation.number, record, record, b"state", metas if rank == unit[0] else ())
        self.attempt.trainers[rank].next_record = record + 1
        self.groups[unit].generation_committed(rank, start)
        self.groups.make_slots(self.attempt)
        self.waiting.add(rank)
        self.asks(rank, generation.number)

    def all_begin(self, record: int) -> None:
        for rank in self.units:
            self.begins(rank, record)

    def asks(self, rank: int, generation: int, now: bool = False) -> None:
        unit = self.units[rank]
        self.groups[unit].want_slots(rank, NeedSlots(generation, now))
        self.groups.make_slots(self.attempt, now=unit if now else ())

    def commits(self, rank: int, record: int) -> None:
        unit = self.units[rank]
        group = self.groups[unit]
        building = group._pending.generation
        held = building if building is not None and building.started_by(rank) else group.held
        assert held.regions.whole, "a record is staged in slots that are not there"
        meta = encode_meta(RecordMeta(record, record - 1, False, (SubStep(0, 0, b""),)))
        held.ring.seal(record, rank)
        message = Commit(held.number, record, record, b"state", meta if rank == unit[0] else b"")
        self.attempt.trainers[rank].next_record = record + 1
        group.commit(rank, message, self.attempt)
        self.groups.make_slots(self.attempt)

    def goes_through(self, rank: int, record: int) -> None:
        """A rank could not stage a record."""
        self.attempt.trainers[rank].next_record = record + 1
        self.groups.make_slots(self.attempt)

    def leaves(self, rank: int) -> None:
        self.attempt.trainers[rank].left = True
        self.groups.make_slots(self.attempt)

    def held(self, rank: int) -> list[int]:
        """Records that its unit can produce."""
        return list(self.groups[self.units[rank]].generations.producible_at_rest())

    def generations(self, rank: int) -> int:
        group = self.groups[self.units[rank]]
        return len(group.generations.before) + (group.held is not None)


@pytest.fixture
def node() -> Iterator[Callable[..., Node]]:
    made: list[Node] = []

    def make(*arguments: Any, **settings: Any) -> Node:
        made.append(Node(*arguments, **settings))
        return made[-1]

    yield make
    for one in made:
        one.groups.close()


def test_the_old_one_goes_when_the_other_ranks_of_the_node_are_through_the_record(node: Callable[..., Node]) -> None:
    one = node([(0,), (1,)])
    one.all_begin(1)
    one.begins(0, 2)
    assert one.waiting == {0}
    assert one.held(0) == [1, 2]
    size = Layout(one.spec(0)).total_bytes
    state = sum(length for _, length in Layout(one.spec(0)).start_ranges(2))
    assert one.groups[(0,)].nbytes == size + state < 2 * size
    one.commits(1, 2)
    assert not one.waiting
    assert (one.held(0), one.generations(0)) == ([2], 1)
    assert one.groups[(0,)].nbytes == size


@pytest.mark.parametrize("fate", ["stands still", "has gone", "is through"])
def test_a_rank_that_does_not_come_holds_nobody_up_for_ever(node: Callable[..., Node], fate: str) -> None:
    """Nor does one that had lost its agent for a moment, and has not heard of the generation."""
    one = node([(0, 1)])
    one.all_begin(1)
    one.begins(0, 2)
    assert one.waiting == {0}
    match fate:
        case "stands still":
            one.asks(0, 2, now=True)
        case "has gone":
            one.leaves(1)
        case _:
            one.goes_through(1, 2)
    assert not one.waiting
    assert one.held(0) == [1]
    assert one.groups[(0, 1)].nbytes == 2 * Layout(one.spec(0)).total_bytes


def test_a_job_that_dies_keeps_the_old_one_though_both_do_not_fit(node: Callable[..., Node]) -> None:
    size = Layout(Node([(0,)]).spec(0)).total_bytes
    one = node([(0,), (1,)], budget=size * 5 // 2)
    one.all_begin(1)
    one.begins(0, 2)
    assert one.waiting == {0}
    one.leaves(1)
    assert "agent.memory_budget_bytes" in one.heard[0,][-1].problem  # type: ignore[union-attr]
    assert one.held(0) == [1, 2]
    assert one.held(1) == [1]


def test_ranks_of_other_nodes_are_not_waited_for(node: Callable[..., Node]) -> None:
    """It takes records to know that they are past the old one, and until then both are held."""
    one = node([(0,)], world_size=2)
    one.begins(0, 1)
    one.begins(0, 2)
    assert not one.waiting
    assert one.held(0) == [1, 2]
    assert one.groups[(0,)].nbytes == 2 * Layout(one.spec(0)).total_bytes


def test_where_both_do_not_fit_the_old_one_goes_and_that_is_said(node: Callable[..., Node]) -> None:
    size = Layout(Node([(0,)], world_size=2).spec(0)).total_bytes
    one = node([(0,)], world_size=2, budget=size * 3 // 2)
    one.begins(0, 1)
    one.begins(0, 2)
    assert not one.waiting
    assert one.held(0) == [2]
    gaps = [message for message in one.heard[0,] if isinstance(message, Gap)]
    assert ["agent.memory_budget_bytes" in gap.reason for gap in gaps] == [True]


def test_a_generation_that_does_not_fit_alone_leaves_the_old_one(node: Callable[..., Node]) -> None:
    size = Layout(Node([(0,)]).spec(0)).total_bytes
    one = node([(0,)], budget=size)
    one.begins(0, 1)
    one.budget = size - 1
    with pytest.raises(MemoryBudgetError, match="expected room for"):
        one.prepares(0, 2)
    assert one.held(0) == [1]


def test_no_memory_for_slots_is_said_to_all_and_the_start_stays(
    node: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = node([(0, 1)])
    refuse_slots(monkeypatch, 1)
    one.all_begin(1)
    told = one.heard[0, 1][-1]
    assert isinstance(told, SlotsMade)
    assert "found less (a test's)" in told.problem
    assert one.held(0) == [1]
    one.all_begin(3)
    assert one.heard[0, 1][-1] == SlotsMade(2)
    assert one.held(0) == [3]


# What is held beside the newest


def test_the_generation_before_goes_once_a_record_shows_that_all_have_the_newer_one(node: Callable[..., Node]) -> None:
    one = node([(0,)], world_size=2)
    one.begins(0, 1)
    one.commits(0, 2)
    one.begins(0, 3)
    assert one.held(0) == [1, 2, 3]
    both = one.groups[(0,)].nbytes
    # Other ranks may find two records later that they have not agreed on the start of theirs.
    for record in (4, 5, 6):
        one.commits(0, record)
        assert one.held(0) == list(range(1, record + 1))
    one.commits(0, 7)
    assert one.held(0) == [4, 5, 6, 7]
    assert one.groups[(0,)].nbytes == both // 2


def test_ranks_that_drop_what_is_held_leave_what_others_have_begun(node: Callable[..., Node]) -> None:
    """Each rank asks, as a run goes on from storage: what the first ones have prepared is of the new timeline."""
    one = node([(0,), (1,)])
    for record, timeline in ((3, T1), (1, T2)):  # the newest state may be damaged
        for rank, trainer in one.attempt.trainers.items():
            if one.attempt.is_first_to_discard(trainer):
                for group in one.groups:
                    group.discard()
            one.groups[(rank,)].prepare(rank, Prepare(one.spec(rank), timeline, 1, None, True, record))
        assert [group.history for group in one.groups] == [(Branch(timeline, None),)] * 2


def test_generations_are_few_while_peers_stand_still(
    node: Callable[..., Node], caplog: pytest.LogCaptureFixture
) -> None:
    """What peers have got to stays, and what a rank may go back to that dies in the newest; then peers go on."""
    one = node([(0,)], world_size=2)
    held = one.groups[(0,)].generations
    held.raise_redo_limit(1)
    for record in range(1, 21):
        one.begins(0, record)
    assert [each.base for each in held] == [1, 16, 17, 18, 19, 20]
    assert "peers have not got past record 1" in caplog.text
    held.raise_redo_limit(18)
    assert [each.base for each in held] == [16, 17, 18, 19, 20]


def test_going_back_behind_the_newer_generation_drops_it(node: Callable[..., Node]) -> None:
    one = node([(0,)], world_size=2)
    one.begins(0, 1)
    one.commits(0, 2)
    one.begins(0, 3)
    group = one.groups[(0,)]
    (before,) = group.generations.before
    group.begin_attempt()
    generation, prepared = group.resume(Resume(2, T2))
    assert generation is before is group.held
    assert prepared.generation == 1
    found = group.inventory(None)
    assert (found.records, found.history) == ((1, 2), (Branch(T1, 2), Branch(T2, None)))
    group.resume(Resume(1, T2))  # the ranks have found that record 2 is not what it says
    assert group.inventory(None).history == (Branch(T1, 1), Branch(T2, None))
    with pytest.raises(AgentError, match="different records: 1 and 2"):
        group.resume(Resume(2, T2))


def test_what_an_attempt_that_got_nowhere_leaves_is_no_part_of_what_is_held(node: Callable[..., Node]) -> None:
    """It had other units; all ranks of the one before are still there, one of them a record ahead."""
    one = node([(0,), (1,)])
    one.groups.introduce(Hello(1, "a", 0, 2, (0, 1), (0, 1), Launcher(0, 0, 0), ()))
    one.all_begin(1)
    for rank, record in ((0, 2), (0, 3), (1, 2)):
        one.commits(rank, record)
    assert one.groups.common() == 2
    one.groups.save_held(as_checkpoint=False)
    one.groups.save_asked()
    one.groups.begin_attempt()
    assert sorted(group.ranks for group in one.groups) == [(0,), (1,)]


def test_all_are_told_as_early_as_the_one_that_was_told_too_late(node: Callable[..., Node]) -> None:
    groups = node([(0,), (1,)]).groups
    leads = {one.ranks: one.saver.state_copies.lead for one in groups}
    groups[(0,)].saver.state_copies.hurry()
    assert [one.saver.state_copies.lead for one in groups] == [2 * leads[0,]] * 2


# Much memory, which a thread reserves


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Memory is reserved in threads, as soon as this is set."""
    there = threading.Event()

    def fallocate(fd: int, start: int, nbytes: int) -> None:
        assert there.wait(60)
        os.posix_fallocate(fd, start, nbytes)

    monkeypatch.setattr(region, "AT_ONCE_BYTES", 0)
    monkeypatch.setattr(region, "_fallocate", fallocate)
    yield there
    there.set()


def test_ranks_get_a_generation_and_its_slots_once_they_are_reserved(
    node: Callable[..., Node], slow: threading.Event
) -> None:
    one = node([(0, 1)])
    group = one.groups[0, 1]
    said: list[MemckptError | None] = []
    for rank in (0, 1):
        group.when_reserved(one.prepares(rank, 1), said.append)
    assert said == []
    slow.set()
    group.memory_reserved(1)
    assert said == [None, None]
    slow.clear()
    one.all_begin(1)
    group.make_slots(one.attempt, lambda record: True)
    assert one.waiting == {0, 1}
    slow.set()
    group.memory_reserved(1)
    assert one.heard[0, 1][-1] == SlotsMade(1)
    assert group.held.regions.whole


def test_a_rank_that_waits_for_memory_has_its_answer_before_another_generation_takes_its_place(
    node: Callable[..., Node], slow: threading.Event
) -> None:
    one = node([(0, 1)])
    said: list[MemckptError | None] = []
    one.groups[0, 1].when_reserved(one.prepares(0, 1), said.append)
    threading.Timer(0.1, slow.set).start()
    one.prepares(1, 2)
    assert said == [None]
    one.groups[0, 1].memory_reserved(1)  # late news
    assert said == [None]


def test_all_ranks_that_wait_for_memory_hear_that_there_is_none(
    node: Callable[..., Node], monkeypatch: pytest.MonkeyPatch, slow: threading.Event
) -> None:
    def refuse(fd: int, start: int, nbytes: int) -> None:
        raise OSError(errno.ENOMEM, "a test's")

    with monkeypatch.context() as patch:
        patch.setattr(region, "_fallocate", refuse)
        one = node([(0, 1)])
        said: list[MemckptError | None] = []
        for rank in (0, 1):
            one.groups[0, 1].when_reserved(one.prepares(rank, 1), said.append)
        one.groups[0, 1].memory_reserved(1)
    assert [str(each).count("found less (a test's)") for each in said] == [1, 1]
    slow.set()
    assert one.prepares(0, 1).number == 2  # a new one, if they ask again


def test_slots_of_a_generation_that_was_dropped_are_asked_for_in_vain(node: Callable[..., Node]) -> None:
    one = node([(0, 1)])
    one.asks(0, 7)
    assert one.heard[0, 1] == [SlotsMade(7, dropped=True)]


@pytest.mark.promise(
    "a kill in any phase of a new base, from its reservation to the slots of its log, falls back to the newest "
    "usable one"
)
@pytest.mark.promise("a rank that dies while it writes a generation costs no other rank its state")
@pytest.mark.parametrize("units", [[(0,), (1,), (2,)], [(0, 1), (2,)], [(0, 1, 2)]], ids=["alone", "two", "all-share"])
@given(data=st.data())
@settings(max_examples=120, deadline=None)
def test_whenever_a_node_s_job_dies_all_ranks_can_go_back_to_the_newest_record_of_all(
    units: Units, data: st.DataObject
) -> None:
    """They resume there, and nobody waits for ever. A rank enters a record when all are through the one before."""
    world = sum(len(unit) for unit in units)
    one = Node(units)
    length = data.draw(st.integers(1, 9))
    fates: dict[tuple[int, ...], list[str]] = {unit: ["begins"] for unit in units}
    last_void = -3
    for record in range(2, length + 1):
        for fate in fates.values():
            choices = ["commits", "commits", "begins", *(["void"] if record - last_void > 4 else [])]
            fate.append("begins" if fate[-1] == "void" else data.draw(st.sampled_from(choices)))
            if fate[-1] == "void":
                last_void = record
    done = dict.fromkeys(range(world), 0)
    kept: dict[int, set[int]] = {rank: set() for rank in range(world)}
    try:
        for _ in range(data.draw(st.integers(0, length * world))):
            slowest = min(done.values())
            if slowest == length:
                break
            ready = [rank for rank in done if done[rank] == slowest and rank not in one.waiting]
            assert ready, "everybody waits"
            rank = data.draw(st.sampled_from(ready))
            record = done[rank] + 1
            match fates[one.units[rank]][record - 1]:
                case "begins":
                    one.begins(rank, record)
                    kept[rank].add(record)
                case "commits":
                    one.commits(rank, record)
                    kept[rank].add(record)
                case _:
                    one.goes_through(rank, record)
            done[rank] = record
        if min(done.values()) == max(done.values()):
            assert not one.waiting
        expected = max(set.intersection(*kept.values()), default=None)
        found = common_records([group.inventory(None) for group in one.groups])
        assert max(found, default=None) == expected, (fates, done)
        for group in one.groups if expected is not None else ():
            group.begin_attempt()
            _, prepared = group.resume(Resume(expected, T2))
            assert prepared.record == expected
            assert len(prepared.metas) == one.spec(group.ranks[0]).period
            assert list(group.generations.producible_at_rest())[-1] == expected
            assert not group.generations.before
    finally:
        one.groups.close()
