"""The recovery plan with peers: what it chooses, who fetches what from where, and what it says where it cannot."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest

from memckpt.errors import ForeignStateError, NothingHeldError
from memckpt.protocol.replication import FromFragments, FromNode
from memckpt.recovery.plan import NewAttempt, RestoreStored, StartOver, Stored, make_plan, must_reshard
from memckpt.recovery.sources import BadSource, Fetch, newest_history, serves
from memckpt.state.records import Branch, HeldFragments, HeldRecords, Timeline
from memckpt.storage.catalog import Checkpoint
from tests.support.storage.stored_parts import part_of

FIRST = (Branch(Timeline(1, "a"), None),)
WORLD = 4
#: Four nodes with one rank each, its shards being its own.
PLACES = [("a", (0,)), ("b", (1,)), ("c", (2,)), ("d", (3,))]


def live(node: str, rank: int, records: range = range(5, 9), **settings: Any) -> HeldRecords:
    arguments: dict[str, Any] = {
        "node": node,
        "records": tuple(records),
        "ranks": (rank,),
        "history": FIRST,
        "world_size": WORLD,
    } | settings
    return HeldRecords(steps=tuple(10 * one for one in arguments["records"]), **arguments)


def fragments(node: str, rank: int, index: int, records: range = range(-1, 9), **settings: Any) -> HeldFragments:
    arguments: dict[str, Any] = {
        "node": node,
        "owner": (rank,),
        "index": index,
        "data": 2,
        "generation": "g",
        "base": 0,
        "period": 2,
        "private": False,
        "replicas": (rank,),
        "records": tuple(records),
        "history": FIRST,
        "world_size": WORLD,
    } | settings
    return HeldFragments(steps=tuple(10 * one for one in arguments["records"]), **arguments)


def attempt(units: Sequence[tuple[str, tuple[int, ...]]] = PLACES, shardings: Sequence[str] = ()) -> NewAttempt:
    return NewAttempt(WORLD, "n", shardings, units)


def plan(
    inventories: Iterable[HeldRecords],
    kept: Iterable[HeldFragments] = (),
    units: Sequence[tuple[str, tuple[int, ...]]] = PLACES,
    stored: Sequence[Any] = (),
    shardings: Sequence[str] = (),
    resume: Any = "auto",
    **settings: Any,
) -> Any:
    return make_plan(list(inventories), resume, attempt(units, shardings), Stored(stored), list(kept), **settings)


#: Rank 2 was on a node that is lost; node c is empty.
SURVIVORS = [live("a", 0), live("b", 1), HeldRecords(node="c"), live("d", 3)]
ITS_FRAGMENTS = [fragments("a", 2, 0), fragments("b", 2, 1), fragments("d", 2, 2)]


def node_of(fetch: Fetch) -> str | None:
    """The node that sends all; None: it is decoded."""
    return fetch.source.node if isinstance(fetch.source, FromNode) else None


def generation_of(fetch: Fetch) -> str | None:
    """The generation that is decoded; None: a node sends all."""
    return fetch.source.generation if isinstance(fetch.source, FromFragments) else None


def test_a_lost_unit_is_decoded_from_all_fragments_that_are_left() -> None:
    found = plan(SURVIVORS, ITS_FRAGMENTS)
    assert (found.record, found.step, found.tier, found.lost) == (8, 80, "peers", 0)
    left = (("a", 0), ("b", 1), ("d", 2))
    assert found.fetches == (Fetch((2,), "c", 8, FromFragments("g", left, 2, 2)),)
    assert all(serves(found.fetches, node) == () for node in "abcd")


@pytest.mark.parametrize(
    ("kept", "why"),
    [
        ([], r"ranks \[2\]: no node holds them or fragments of them"),
        (ITS_FRAGMENTS[:1], r"ranks \[2\]: 1 of 2 fragments needed are left\)"),
        ([fragments("a", 2, 0), fragments("b", 2, 0)], "1 of 2 fragments needed are left"),
        ([fragments("a", 2, 0), fragments("b", 2, 1, generation="h")], "1 of 2 fragments needed are left"),
        ([fragments("a", 2, 0), fragments("b", 2, 1, digest="x")], "1 of 2 fragments needed are left"),
        ([fragments("a", 2, 0), fragments("b", 2, 1, static=False)], "static tensors are left in 1 of 2 fragments"),
        (
            [fragments("a", 2, 0, range(8, 9)), fragments("b", 2, 1)],
            "1 of 2 fragments needed are left of the 2 records up to 8",
        ),
        (
            [fragments("a", 2, 0, range(-1, 3)), fragments("b", 2, 1)],
            r"no record in common \(ranks \[0\]: 5 to 8; .* 0 to 2",
        ),
    ],
)
def test_what_is_missing_is_said(kept: list[HeldFragments], why: str) -> None:
    with pytest.raises(NothingHeldError, match=why):
        plan(SURVIVORS, kept, resume="require")
    stored = checkpoint(8)
    found = plan(SURVIVORS, kept, stored=[stored])
    assert isinstance(found, RestoreStored)
    assert found.candidates == (stored,)
    assert isinstance(plan(SURVIVORS, kept), StartOver)


def checkpoint(record: int, number: int = 1) -> Any:
    timeline = Timeline(number, "a")
    part = part_of(record, timeline=timeline, step=10 * record, world_size=WORLD, ranks=tuple(range(WORLD)), node="n")
    return Checkpoint(timeline, record, {"n": part})


def test_a_node_that_has_only_what_is_static_is_read_too() -> None:
    kept = [fragments("a", 2, 0), fragments("b", 2, 1, static=False), fragments("d", 2, 2, range(0))]
    assert plan(SURVIVORS, kept).fetches[0].source.fragments == (("a", 0), ("b", 1), ("d", 2))


def test_a_step_that_only_fragments_have_is_found() -> None:
    found = plan(SURVIVORS, ITS_FRAGMENTS, resume=60)
    assert (found.record, found.lost) == (6, 2)
    with pytest.raises(NothingHeldError, match=r"expected step 40, found steps \[50, 60, 70, 80\] in memory"):
        plan(SURVIVORS, ITS_FRAGMENTS, resume=40)


def test_the_newest_generation_is_preferred_and_an_older_one_will_do() -> None:
    newer = [
        fragments("a", 2, 0, range(4, 9), generation="f", base=5),
        fragments("b", 2, 1, range(4, 9), generation="f", base=5),
    ]
    assert generation_of(plan(SURVIVORS, ITS_FRAGMENTS + newer).fetches[0]) == "f"
    assert generation_of(plan(SURVIVORS, ITS_FRAGMENTS + newer[:1]).fetches[0]) == "g"


# Replicated shards: fragments have only what is a rank's own


PRIVATE = [fragments(node, 2, index, private=True, replicas=(), period=8, data=1) for index, node in enumerate("ab")]


def fetched_before(survivors: list[HeldRecords], kept: list[HeldFragments]) -> list[bool]:
    found = plan(survivors, kept, before=True)
    assert found.record == 8
    assert [one.before for one in plan(survivors, kept).fetches] == [False] * len(found.fetches)
    return [one.before for one in found.fetches]


def test_the_record_before_is_fetched_where_all_units_can_get_it() -> None:
    assert fetched_before(SURVIVORS, ITS_FRAGMENTS) == [True]
    exact = [fragments(node, 2, index, range(7, 9)) for index, node in enumerate("abd")]
    assert fetched_before(SURVIVORS, exact) == [False]
    assert fetched_before(SURVIVORS, [fragments(node, 2, index, base=8) for index, node in enumerate("abd")]) == [False]
    # One that goes on with its own has no earlier one.
    survivors = [live("a", 0, range(8, 9)), *SURVIVORS[1:]]
    assert fetched_before(survivors, ITS_FRAGMENTS) == [False]
    # Another one is handed out where it is, by its own agent.
    assert fetched_before([live("x", 0), *SURVIVORS[1:]], ITS_FRAGMENTS) == [True, True]
    assert fetched_before([live("x", 0, range(8, 9)), *SURVIVORS[1:]], ITS_FRAGMENTS) == [False, False]


def test_the_record_before_decides_who_hands_out() -> None:
    """A replica that has gone past it is done without."""
    past, behind = live("b", 0, range(8, 9)), live("d", 0, range(7, 9))
    found = plan([past, behind, *SURVIVORS[1:]], ITS_FRAGMENTS, before=True)
    assert [(one.ranks, node_of(one), one.before) for one in found.fetches] == [((0,), "d", True), ((2,), None, True)]
    found = plan([past, *SURVIVORS[1:]], [*ITS_FRAGMENTS, fragments("b", 0, 0), fragments("d", 0, 1)], before=True)
    assert [(one.ranks, node_of(one), one.before) for one in found.fetches] == [((0,), None, True), ((2,), None, True)]


def test_the_record_before_of_private_fragments_comes_with_a_replica_that_has_it() -> None:
    both = [fragments("a", 2, 0, range(7, 9), private=True, replicas=(0, 1, 2, 3), period=8, data=1)]
    assert fetched_before(SURVIVORS, both) == [True]
    [found] = plan([live("a", 0, range(8, 9)), *SURVIVORS[1:], live("d", 0)], both, before=True).fetches
    assert (found.before, found.server) == (False, ("a", (0,)))  # rank 0 itself has none
    newest = [fragments("a", 2, 0, range(8, 9), private=True, replicas=(0, 1, 2, 3), period=8, data=1)]
    assert fetched_before(SURVIVORS, newest) == [False]


def test_replicas_take_turns_and_a_nodes_own_comes_first() -> None:
    units = [("a", (0,)), ("b", (1,)), ("x", (2,)), ("y", (3,))]
    kept = PRIVATE + [
        fragments(node, 3, index, private=True, replicas=(), period=8, data=1) for index, node in enumerate("ab")
    ]
    survivors = [live("a", 0), live("b", 1)]
    found = plan(survivors, kept, units=units)
    assert [one.server for one in found.fetches] == [("a", (0,)), ("b", (1,))]
    # Rank 2 is on b now, which has the shared part in what it held of rank 1.
    units = [("a", (0,)), ("y", (1,)), ("b", (2,)), ("x", (3,))]
    found = plan(survivors, kept, units=units)
    assert [(node_of(one), one.server) for one in found.fetches] == [
        ("b", ("b", (1,))),
        (None, ("b", (1,))),
        (None, ("a", (0,))),
    ]


def test_private_fragments_without_a_replica_are_of_no_use() -> None:
    others = [live("a", 0, replicas=(0, 1)), live("b", 1, replicas=(0, 1)), live("d", 3, replicas=(2, 3), sharding="s")]
    with pytest.raises(NothingHeldError, match=r"ranks \[2\]: no node holds the state that they share"):
        plan(others, PRIVATE, resume="require", shardings=["", "", "", "s"])


# Planning again


def test_a_bad_source_is_left_out() -> None:
    without = [BadSource("a", (2,), "g")]
    assert plan(SURVIVORS, ITS_FRAGMENTS, without=without).fetches[0].source.fragments == (("b", 1), ("d", 2))
    found = plan(SURVIVORS, ITS_FRAGMENTS, without=[*without, BadSource("d", (2,), "g")], resume="auto")
    assert isinstance(found, StartOver)
    assert "ranks [2]: 1 of 2 fragments needed are left" in found.reason


def test_what_a_node_itself_holds_is_decoded_if_it_is_damaged() -> None:
    everybody = [live("a", 0), live("b", 1), live("c", 2), live("d", 3)]
    assert plan(everybody, ITS_FRAGMENTS, without=[BadSource("c", (2,), damaged=False)]).tier == "local memory"
    found = plan(everybody, ITS_FRAGMENTS, without=[BadSource("c", (2,))])
    assert [(one.node, generation_of(one)) for one in found.fetches] == [("c", "g")]


def test_what_others_cannot_get_at_is_decoded() -> None:
    moved = [("a", (0,)), ("b", (1,)), ("d", (2,)), ("c", (3,))]
    everybody = [live("a", 0), live("b", 1), live("c", 2), live("d", 3)]
    found = plan(everybody, ITS_FRAGMENTS, units=moved, without=[BadSource("c", (2,), damaged=False)])
    assert [(one.ranks, node_of(one), generation_of(one)) for one in found.fetches] == [
        ((2,), None, "g"),
        ((3,), "d", None),
    ]
    found = plan(SURVIVORS, PRIVATE, without=[BadSource("a", (0,), damaged=False)])
    assert [one.server for one in found.fetches] == [("b", (1,))]
    assert found.fetches[0].node == "c"


# What cannot go straight back


def test_ranks_that_are_grouped_in_another_way_are_resumed_from_storage() -> None:
    together = [live("a", 0, ranks=(0, 1)), live("b", 2, ranks=(2, 3))]
    assert must_reshard(together, attempt())
    found = plan(together, stored=[checkpoint(8)])
    assert isinstance(found, RestoreStored)
    assert found.reason == "memory holds a run whose ranks were distributed over nodes in another way"
    for stored in ([], [checkpoint(7)]):
        with pytest.raises(ForeignStateError, match=r"distributed .* the same ranks together on a node as before"):
            plan(together, stored=stored)
    # What only fragments have cannot be saved first: what storage has is taken, if there is anything.
    coded = [fragments(node, 0, index, owner=(0, 1)) for index, node in enumerate("ab")]
    assert must_reshard(together[1:], attempt(), coded)
    assert isinstance(plan(together[1:], coded, stored=[checkpoint(7)]), RestoreStored)
    with pytest.raises(ForeignStateError, match="distributed over nodes in another way"):
        plan(together[1:], coded)


def test_fragments_of_other_shards_are_resumed_from_storage() -> None:
    assert not must_reshard(SURVIVORS, attempt(), ITS_FRAGMENTS)
    other = [fragments("a", 2, 0, world_size=3), fragments("a", 2, 0, sharding="s")]
    for each in other:
        assert must_reshard([], attempt(), [each])
        found = plan([], [each], stored=[checkpoint(2)])
        assert found.reason == "memory holds a run with another number of ranks, or other shards"


def test_another_model_in_fragments_is_refused() -> None:
    with pytest.raises(ForeignStateError, match="the state held on node b belongs to another model or optimizer"):
        plan(SURVIVORS, [*ITS_FRAGMENTS, fragments("b", 3, 0, range(0), problem="w [3]")])


def test_fragments_of_an_attempt_that_was_left_behind_are_not_used() -> None:
    later = (Branch(Timeline(1, "a"), 6), Branch(Timeline(2, "b"), None))
    found = plan([*SURVIVORS[1:], live("a", 0, history=later)], ITS_FRAGMENTS)
    assert (found.record, found.timeline) == (6, Timeline(3, "n"))
    assert found.history == later
    # A node that comes back with an old attempt decides nothing, not even how many ranks there are.
    stale = live("c", 0, range(20, 24), world_size=2, ranks=(0, 1))
    kept = fragments("c", 9, 0, range(20, 24), world_size=10)
    news = [live(node, rank, history=later) for rank, node in enumerate("abcd")]
    assert not must_reshard([*news, stale], attempt(), [kept])
    found = plan([*news, stale], [kept])
    assert (found.record, found.lost, found.tier) == (8, 0, "local memory")


def test_storage_that_has_seen_a_later_attempt_than_fragments_comes_first() -> None:
    found = plan([], ITS_FRAGMENTS, stored=[checkpoint(3, number=2)])
    assert isinstance(found, RestoreStored)
    assert found.reason == "memory holds an older attempt than storage"
    assert found.timeline == Timeline(3, "n")


def test_never_drops_fragments_too() -> None:
    found = plan([], ITS_FRAGMENTS, resume="never")
    assert found == StartOver(Timeline(2, "n"), "resume='never'", discard=True, asked=True)


def test_the_newest_history_is_that_of_the_latest_attempt() -> None:
    longer = (Branch(Timeline(1, "a"), 6), Branch(Timeline(2, "b"), None))
    short = (Branch(Timeline(2, "b"), None),)
    assert newest_history([live("a", 0), live("b", 1, history=short)], [fragments("c", 2, 0, history=longer)]) == longer
    assert newest_history([HeldRecords(node="a")], []) == ()
