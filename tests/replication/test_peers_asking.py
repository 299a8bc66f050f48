"""Of which layout a state is that is to be fetched: what peers say, and what becomes of it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from memckpt.protocol.recovery import BadSourceSeen, Described, FromFragments, FromNode, WantedState
from memckpt.replication.process.questions import Asking
from memckpt.replication.process.reader import LIVE_ALL, LIVE_SHARED, PATIENCE_SECONDS
from memckpt.replication.transport.wire import (
    AskWindow,
    GotNone,
    WindowIs,
    WireMessage,
)
from memckpt.state.records import RankGroup
from tests.support.cluster.peers_records import layout_spec


class Question:
    """Of a state of which two nodes have fragments, or with another's for what all replicas have."""

    def __init__(self, node: str = "", replica: tuple[str, RankGroup] | None = None) -> None:
        source: FromNode | FromFragments = FromNode(node)
        if not node:
            period = 2 if replica is None else 1
            source = FromFragments("g", (("a", 0), ("b", 1), ("c", 2)), 2, period, replica)
        self.asked: list[tuple[str, WireMessage]] = []
        numbers = iter(range(1, 9))
        self.asking = Asking(
            WantedState((0,), 5, source), lambda *one: self.asked.append(one), lambda: next(numbers), 0.0
        )

    def says(self, peer: str, spec: Any, generation: str = "g", **other: Any) -> None:
        question = next(one for _, one in self.asked if isinstance(one, AskWindow) and (one.generation == generation))
        body = spec if isinstance(spec, bytes) else msgspec.msgpack.encode(spec)
        answer: Any = WindowIs(question.request, question.owner, body) if spec is not None else None
        self.asking.take_answer(peer, answer or GotNone(question.request, "no"))

    @property
    def result(self) -> Described:
        assert self.asking.result is not None
        return self.asking.result


SPEC = layout_spec((0,), elements=64)
OTHER = msgspec.structs.replace(SPEC, period=3)


def silent(*nodes: str) -> tuple[BadSourceSeen, ...]:
    return tuple(msgspec.structs.replace(one, silent=True) for one in bad(*nodes))


def bad(*nodes: str, ranks: tuple[int, ...] = (0,), generation: str = "g") -> tuple[BadSourceSeen, ...]:
    return tuple(BadSourceSeen(node, ranks, generation) for node in nodes)


def test_what_most_say_of_a_layout_counts() -> None:
    question = Question()
    question.says("stranger", OTHER)
    question.says("a", SPEC)
    question.says("a", OTHER)
    question.says("b", OTHER)
    assert question.asking.result is None
    question.says("c", SPEC)
    assert question.result == Described((0,), SPEC, "", bad("b"))
    question.says("b", None)
    assert question.result.spec == SPEC


@pytest.mark.parametrize(
    ("said", "named"),
    [((SPEC, OTHER, None), "abc"), ((None, None, None), "abc"), ((b"", b"", SPEC), "abc"), ((b"x", b"x", b"x"), "abc")],
)
def test_where_no_layout_is_certain_all_are_named(said: tuple[Any, ...], named: str) -> None:
    question = Question()
    for peer, spec in zip("abc", said, strict=True):
        question.says(peer, spec)
    assert question.result.spec is None
    assert "ranks [0]" in question.result.problem
    assert question.result.bad == bad(*named)


def test_a_layout_that_cannot_be_is_not_handed_on() -> None:
    question = Question()
    for peer in "abc":
        question.says(peer, msgspec.structs.replace(SPEC, period=-1))
    assert "period=-1" in question.result.problem
    assert question.result.bad == bad("a", "b", "c")


def test_those_that_are_silent_do_not_hold_it_up_for_ever() -> None:
    question = Question()
    question.says("a", SPEC)
    question.asking.tend(PATIENCE_SECONDS)
    assert question.asking.result is None
    question.asking.tend(PATIENCE_SECONDS + 1)
    assert question.result == Described((0,), SPEC, "", silent("b", "c"))
    question = Question()
    question.asking.tend(PATIENCE_SECONDS + 1)
    assert question.result == Described((0,), None, question.result.problem, silent("a", "b", "c"))


@pytest.mark.parametrize("first", ["fragments", "replica"])
def test_a_replica_has_to_be_of_the_same_layout(first: str) -> None:
    for said, fits in ((SPEC, True), (OTHER, False), (None, False), (b"x", False)):
        question = Question(replica=("a", (2,)))
        if first == "replica":
            question.says("a", said, LIVE_SHARED)
        for peer in "abc":
            question.says(peer, SPEC)
        if first == "fragments":
            question.says("a", said, LIVE_SHARED)
        assert (question.result.spec == SPEC) == fits
        if not fits:
            assert question.result.bad == bad("a", ranks=(2,), generation="")


def test_a_live_state_has_one_source() -> None:
    question = Question(node="b")
    assert [(peer, type(one)) for peer, one in question.asked] == [("b", AskWindow)]
    question.says("b", SPEC, LIVE_ALL)
    assert question.result == Described((0,), SPEC)
    question = Question(node="b")
    question.says("b", None, LIVE_ALL)
    assert question.result.bad == bad("b", generation="")
