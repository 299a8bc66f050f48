"""The plan where standby replicas hold what nodes have lost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from memckpt.protocol.recovery import FromNode
from memckpt.recovery.peers import BadSource
from memckpt.recovery.plan import NewAttempt, RestoreRecord, RestoreStored, StartOver, make_plan
from memckpt.state.records import HeldRecords
from tests.support.cluster.standby_pair import HISTORY

PLACES = [("a", (0,)), ("b", (1,))]


def live(node: str, rank: int, records: range, standby: bool = False) -> HeldRecords:
    return HeldRecords(
        node=node,
        records=tuple(records),
        steps=tuple(records),
        ranks=(rank,),
        history=HISTORY,
        world_size=2,
        replicas=(rank,),
        newest=records[-1],
        standby=standby,
    )


def plan(*inventories: HeldRecords, units: Sequence[tuple[str, tuple[int, ...]]] = PLACES, **others: Any) -> Any:
    return make_plan(inventories, "auto", NewAttempt(2, "n", units=units), **others)


def test_a_lost_nodes_state_comes_from_its_standby() -> None:
    found = plan(live("a", 0, range(5, 8)), live("a", 1, range(4, 7), standby=True))
    assert isinstance(found, RestoreRecord)
    assert found.record == 6
    [fetch] = found.fetches
    assert (fetch.ranks, fetch.node, fetch.source) == ((1,), "b", FromNode("a"))


def test_a_standby_on_the_ranks_own_node_is_fetched_from_too() -> None:
    """Ranks have moved to where they were kept as standby replicas: their agent does not hold them as its own."""
    moved = [("a", (1,)), ("b", (0,))]
    found = plan(live("a", 0, range(5, 8)), live("a", 1, range(4, 7), standby=True), units=moved)
    fetches = [(fetch.ranks, fetch.node, fetch.source) for fetch in found.fetches]
    assert fetches == [((0,), "b", FromNode("a")), ((1,), "a", FromNode("a"))]


def test_what_a_node_has_itself_and_on_a_standby() -> None:
    found = plan(live("a", 0, range(5, 8)), live("b", 1, range(5, 7)), live("b", 1, range(7, 8), standby=True))
    assert (found.record, [fetch.ranks for fetch in found.fetches]) == (7, [(1,)])
    found = plan(live("a", 0, range(5, 7)), live("b", 1, range(5, 7)), live("b", 1, range(4, 6), standby=True))
    assert (found.record, found.fetches) == (6, ())


def test_a_standby_that_cannot_be_read_is_done_without() -> None:
    bad = {BadSource("a", (1,), damaged=False)}
    moved = [("a", (1,)), ("b", (0,))]
    held = [live("a", 0, range(5, 8)), live("a", 1, range(4, 7), standby=True)]
    assert isinstance(plan(*held, without=bad, units=moved), StartOver)


def test_without_peers_standbys_are_of_no_use() -> None:
    found = make_plan([live("a", 0, range(5, 8)), live("a", 1, range(4, 7), standby=True)], "auto", NewAttempt(2, "n"))
    assert isinstance(found, StartOver)
    assert not isinstance(found, RestoreStored)
