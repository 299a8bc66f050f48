"""The recovery plan against a trivially correct model of what every node holds."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memckpt.errors import ForeignStateError, NothingHeldError
from memckpt.memory.generation import branch_off
from memckpt.recovery.plan import (
    NewAttempt,
    Plan,
    RestoreRecord,
    RestoreStored,
    StartOver,
    Stored,
    make_plan,
    must_reshard,
    record_to_reshard,
    timeline_of,
)
from memckpt.state.records import Branch, HeldRecords, Timeline
from memckpt.storage.catalog import Checkpoint
from tests.support.storage.stored_parts import part_of

RANKS = 4
FIRST = (Branch(Timeline(1, "a"), None),)


def held(
    node: str, records: range, history: tuple[Branch, ...] = FIRST, *, of: str = "", **settings: Any
) -> HeldRecords:
    """What a node of those named in `of` (itself alone, if none are) holds of its ranks."""
    nodes = of or node
    ranks = tuple(range(nodes.index(node), RANKS, len(nodes)))
    arguments: dict[str, Any] = {
        "ranks": ranks,
        "world_size": RANKS,
        "steps": tuple(10 * r for r in records),
    } | settings
    return HeldRecords(node=node, records=tuple(records), history=history, **arguments)


def planned(
    inventories: Sequence[HeldRecords],
    resume: Any,
    world_size: int,
    nonce: str,
    stored: Sequence[Checkpoint] = (),
    latest_attempt: int = 0,
    shardings: Sequence[str] = (),
) -> Plan:
    """The plan of an attempt without peers."""
    return make_plan(inventories, resume, NewAttempt(world_size, nonce, shardings), Stored(stored, latest_attempt))


@dataclass
class Node:
    """What a node holds: the contents of each record (the attempts that made the records up to it), and our account."""

    name: str
    ranks: tuple[int, ...]
    contents: dict[int, tuple[str, ...]] = field(default_factory=dict)
    history: tuple[Branch, ...] = ()

    def inventory(self) -> HeldRecords:
        records = tuple(sorted(self.contents))
        if not records:
            return HeldRecords(node=self.name, history=self.history)
        steps = tuple(10 * record for record in records)
        return HeldRecords(self.name, records, steps, self.ranks, self.history, RANKS)

    def follow(self, plan: RestoreRecord | StartOver) -> tuple[str, ...]:
        """Do what the plan says, as an agent does; returns the contents it goes on from."""
        if isinstance(plan, StartOver):
            self.contents, self.history = {}, (Branch(plan.timeline, None),)
            return ()
        start = self.contents[plan.record]
        self.contents = {record: each for record, each in self.contents.items() if record <= plan.record}
        self.history = branch_off(self.history, plan.record, plan.timeline)
        return start

    def train(self, start: tuple[str, ...], nonce: str, count: int, keep: int) -> None:
        for length in range(len(start) + 1, len(start) + count + 1):
            self.contents[length] = start + (nonce,) * (length - len(start))
        for record in sorted(self.contents)[:-keep]:
            del self.contents[record]


@pytest.mark.promise("all ranks make the same plan, and abandoned timelines are not part of it")
@given(st.data())
@settings(max_examples=150, deadline=None)
def test_the_plan_is_the_newest_record_with_the_same_contents_everywhere(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, RANKS))
    nodes = [Node(f"n{index}", tuple(range(index, RANKS, count))) for index in range(count)]
    nonces = (f"attempt{number}" for number in itertools.count())
    for _ in range(data.draw(st.integers(1, 6))):
        nonce = next(nonces)
        plan = planned([node.inventory() for node in nodes], "auto", RANKS, nonce)
        common = [
            record
            for record in nodes[0].contents
            if all(node.contents.get(record) == nodes[0].contents[record] for node in nodes)
        ]
        if common:
            assert isinstance(plan, RestoreRecord)
            assert plan.record == max(common)
            assert plan.step == 10 * plan.record
            assert plan.lost == max(max(node.contents) for node in nodes) - plan.record
        else:
            assert isinstance(plan, StartOver)
            assert plan.discard == any(node.contents for node in nodes)
        # Some nodes die before they hear of the plan, some train further than others, some lose everything.
        for node in nodes:
            fate = data.draw(st.sampled_from(["trains", "trains", "trains", "hears nothing", "is lost"]))
            if fate == "is lost":
                node.contents, node.history = {}, ()
            elif fate == "trains":
                node.train(node.follow(plan), nonce, data.draw(st.integers(0, 4)), data.draw(st.integers(1, 4)))


@given(st.permutations(range(3)), st.integers(0, 2))
def test_the_plan_depends_on_neither_order_nor_repetition(order: list[int], repeated: int) -> None:
    inventories = [held(*each, of="abc") for each in (("a", range(3, 8)), ("b", range(4, 9)), ("c", range(2, 7)))]
    expected = planned(inventories, "auto", RANKS, "n")
    shuffled = [inventories[index] for index in order] + [inventories[repeated]]
    assert planned(shuffled, "auto", RANKS, "n") == expected
    assert isinstance(expected, RestoreRecord)
    assert (expected.record, expected.step, expected.lost) == (6, 60, 2)
    assert expected.timeline == Timeline(2, "n")


@pytest.mark.promise("all ranks make the same plan, and abandoned timelines are not part of it")
def test_going_back_behind_an_earlier_branch_point_hides_what_was_between() -> None:
    """Left 1 at record 10, then 2 at record 4: records 5 to 10 of timeline 1 are off the history."""
    history: tuple[Branch, ...] = ()
    history = branch_off(history, 0, Timeline(1, "a"))
    history = branch_off(history, 10, Timeline(2, "b"))
    history = branch_off(history, 4, Timeline(3, "c"))
    found = [timeline_of(history, record) for record in (4, 5, 10, 11)]
    assert [each.number for each in found if each is not None] == [1, 3, 3, 3]


@pytest.mark.parametrize("resume", ["auto", "require", 50])
def test_another_model_is_refused(resume: Any) -> None:
    foreign = HeldRecords(node="b", problem="held: w [3]; this run: w [4]")
    with pytest.raises(ForeignStateError, match=r"node b .* First difference: held: w \[3\]; this run: w \[4\]"):
        planned([held("a", range(3, 8)), foreign], resume, RANKS, "n")


def test_never_drops_whatever_is_held() -> None:
    foreign = HeldRecords(node="b", problem="another model")
    assert planned([foreign], "never", RANKS, "n") == StartOver(
        Timeline(1, "n"), "resume='never'", discard=True, asked=True
    )
    nothing = planned([HeldRecords(node="a")], "never", RANKS, "n")
    assert isinstance(nothing, StartOver)
    assert not nothing.discard


@pytest.mark.promise("all ranks make the same plan, and abandoned timelines are not part of it")
def test_another_world_size_is_refused() -> None:
    with pytest.raises(ForeignStateError, match="holds a run of 4 ranks with other shards"):
        planned([held("a", range(3, 8))], "auto", 2, "n")


def test_a_step_names_the_newest_record_that_carries_it() -> None:
    inventory = held("a", range(3, 8), steps=(1, 1, 2, 2, 3))
    plan = planned([inventory], 2, RANKS, "n")
    assert isinstance(plan, RestoreRecord)
    assert (plan.record, plan.lost) == (6, 1)


@pytest.mark.parametrize(
    ("inventories", "resume", "message"),
    [
        ([HeldRecords(node="a")], "require", "nothing is held in local memory"),
        ([held("a", range(3, 5))], 7, r"expected step 7, found steps \[30, 40\]"),
        ([held("a", range(3, 5), of="ab"), HeldRecords(node="b")], "require", "nothing is held on node b"),
        ([held("a", range(3, 5), of="ab"), held("b", range(7, 9), of="ab")], "require", "no record in common"),
    ],
)
def test_a_demand_that_cannot_be_met_says_why(inventories: list[HeldRecords], resume: Any, message: str) -> None:
    with pytest.raises(NothingHeldError, match=message):
        planned(inventories, resume, RANKS, "n")
    if resume == "require":
        plan = planned(inventories, "auto", RANKS, "n")
        assert isinstance(plan, StartOver)


@pytest.mark.parametrize("missing", range(RANKS))
def test_shards_of_one_rank_that_nobody_holds_are_missed(missing: int) -> None:
    """With fully sharded training a node holds each of its ranks apart."""
    units = [held("a", range(3, 9), ranks=(rank,), sharding=f"s{rank}") for rank in range(RANKS)]
    shardings = [unit.sharding for unit in units]
    plan = planned(units, "auto", RANKS, "n", shardings=shardings)
    assert isinstance(plan, RestoreRecord)
    assert plan.record == 8
    del units[missing]
    with pytest.raises(NothingHeldError, match=f"nothing is held of rank {missing}, and the other ranks alone"):
        planned([*units, HeldRecords(node="a")], "require", RANKS, "n", shardings=shardings)


def test_other_shards_are_resumed_from_storage_after_the_newest_record_of_all_ranks() -> None:
    units = [held("a", range(3, 9), ranks=(0, 1), sharding="x"), held("b", range(2, 8), ranks=(2, 3), sharding="y")]
    same, other = ["x", "x", "y", "y"], ["x", "y", "x", "y"]
    assert not must_reshard(units, NewAttempt(RANKS, "n", same))
    assert isinstance(planned(units, "auto", RANKS, "n", [stored(1, 7)], shardings=same), RestoreRecord)
    for world_size, shardings in ((RANKS, other), (RANKS, []), (2, ["x", "y"])):
        assert must_reshard(units, NewAttempt(world_size, "n", shardings))
        plan = planned(units, "auto", world_size, "n", [stored(1, 7), stored(1, 5)], shardings=shardings)
        assert isinstance(plan, RestoreStored)
        with pytest.raises(ForeignStateError, match="which lacks the state in memory"):
            planned(units, "auto", world_size, "n", [stored(1, 6)], shardings=shardings)
    assert record_to_reshard(units, "auto") == 7
    assert record_to_reshard(units, 50) == 5
    assert record_to_reshard(units, "never") is None
    assert record_to_reshard(units[:1], "auto") is None


# Storage


def stored(number: int, record: int, *, nonce: str = "a", world_size: int = RANKS) -> Checkpoint:
    timeline = Timeline(number, nonce)
    ranks = tuple(range(world_size))
    part = part_of(record, timeline=timeline, step=10 * record, world_size=world_size, ranks=ranks, node="n")
    return Checkpoint(timeline, record, {"n": part})


def test_starting_over_says_what_storage_has_of_no_use() -> None:
    rest = Stored(stranded="records of steps 5 to 9, without a checkpoint to redo them on")
    plan = make_plan([HeldRecords(node="a")], "auto", NewAttempt(RANKS, "n"), rest)
    assert isinstance(plan, StartOver)
    assert plan.reason.endswith("; storage has records of steps 5 to 9, without a checkpoint to redo them on")
    used = Stored([stored(1, 6)], stranded=rest.stranded)
    assert "of steps 5" not in make_plan([HeldRecords(node="a")], "auto", NewAttempt(RANKS, "n"), used).reason


@pytest.mark.parametrize("resume", ["auto", "require"])
def test_storage_serves_where_memory_cannot(resume: Any) -> None:
    checkpoints = [stored(1, 6), stored(1, 5)]
    for inventories in ([HeldRecords(node="a")], [HeldRecords(node="a"), held("b", range(3, 9), of="ab")]):
        plan = planned(inventories, resume, RANKS, "c", checkpoints)
        assert isinstance(plan, RestoreStored)
        assert [one.record for one in plan.candidates] == [6, 5]
        assert plan.timeline == Timeline(2, "c")
        assert "nothing is held" in plan.reason
        assert plan.newest is None


def test_what_memory_knows_of_and_cannot_produce_says_what_is_lost() -> None:
    knows = msgspec.structs.replace(held("b", range(3, 9), of="ab"), newest=8)
    plan = planned([HeldRecords(node="a"), knows], "auto", RANKS, "c", [stored(1, 6)])
    assert isinstance(plan, RestoreStored)
    assert plan.newest == 8
    plan = planned([msgspec.structs.replace(held("a", range(3, 9)), newest=8)], "auto", RANKS, "c", [stored(2, 6)])
    assert isinstance(plan, RestoreStored)
    assert plan.newest is None, "of a later attempt"


def test_storage_serves_where_it_is_ahead_of_what_memory_holds_of_the_same_attempt() -> None:
    """Memory may hold each N-th record only."""
    inventories = [held("a", range(8, 9), newest=11, of="ab"), held("b", range(8, 9), newest=12, of="ab")]
    plan = planned(inventories, "auto", RANKS, "c", [stored(1, 10), stored(1, 9), stored(1, 5)])
    assert isinstance(plan, RestoreStored)
    assert ([one.record for one in plan.candidates], plan.newest, plan.older_held) == ([10, 9], 12, True)
    assert plan.reason == "what local memory has is older, of step 80"
    for there in ([stored(1, 8)], [stored(1, 10, nonce="other")], []):
        assert isinstance(planned(inventories, "auto", RANKS, "c", there), RestoreRecord)
    # Steps that the attempt before stored are not of this timeline, where memory went on before them.
    left = branch_off(FIRST, 8, Timeline(2, "b"))
    resumed = [held("a", range(8, 9), left, of="ab"), held("b", range(8, 9), left, of="ab")]
    assert isinstance(planned(resumed, "auto", RANKS, "c", [stored(1, 10)]), RestoreRecord)
    assert isinstance(planned(inventories, 80, RANKS, "c", [stored(1, 10)]), RestoreRecord), "it is asked for"


def test_a_step_is_looked_for_in_memory_and_then_in_storage() -> None:
    checkpoints = [stored(1, 8), stored(1, 5)]
    inventories = [held("a", range(6, 9))]
    assert isinstance(planned(inventories, 70, RANKS, "b", checkpoints), RestoreRecord)
    plan = planned(inventories, 50, RANKS, "b", checkpoints)
    assert isinstance(plan, RestoreStored)
    assert [one.step for one in plan.candidates] == [50]
    with pytest.raises(NothingHeldError, match=r"expected step 40, found steps .*; storage has steps \[50, 80\]"):
        planned(inventories, 40, RANKS, "b", checkpoints)


def test_memory_of_an_attempt_that_was_left_behind_is_not_used() -> None:
    """The job has trained on elsewhere, and is back where an old agent still lingers."""
    plan = planned([held("a", range(3, 9))], "auto", RANKS, "c", [stored(2, 6, nonce="b")])
    assert isinstance(plan, RestoreStored)
    assert plan.reason == "memory holds an older attempt than storage"


def test_another_number_of_ranks_is_resumed_from_storage_and_only_if_all_is_there() -> None:
    inventories = [held("a", range(3, 9))]
    plan = planned(inventories, "auto", 2, "b", [stored(1, 8), stored(1, 5)])
    assert isinstance(plan, RestoreStored)
    with pytest.raises(ForeignStateError, match="which lacks the state in memory"):
        planned(inventories, "auto", 2, "b", [stored(1, 5)])


def test_an_attempt_that_got_nowhere_in_storage_is_counted() -> None:
    """Or its half-written files could not be told from those of the attempt that follows it."""
    assert planned([HeldRecords(node="a")], "auto", 1, "n", latest_attempt=4).timeline == Timeline(5, "n")
    assert planned([held("a", range(3, 8))], "auto", RANKS, "n", latest_attempt=1).timeline.number == 2
    plan = planned([HeldRecords(node="a")], "never", RANKS, "c", [stored(4, 6, nonce="b")])
    assert isinstance(plan, StartOver)
    assert plan.timeline == Timeline(5, "c")
