"""States read back from nodes that have them themselves, and from these and fragments together."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import closing

import msgspec
import pytest
import xxhash

from memckpt.protocol.recovery import BadSourceSeen, Filled, FromFragments, FromNode, WantedState
from memckpt.replication.coding.code import Code
from memckpt.replication.transport.wire import GotNone, WireMessage
from tests.support.cluster.peers_records import RANKS, Answers, Bend, Bytes, Network, Node, Records, layout_spec, spread
from tests.support.cluster.reader_lab import (
    DAMAGES,
    NEWEST,
    at,
    check_right,
    closing_all,
    flip,
    fragments,
    lost_in_the_middle,
    manifest_of,
    named,
    silent,
)


class Live:
    """A node that has a unit's state itself."""

    def __init__(self) -> None:
        self.code = Code(1, 1)
        self.records = Records(layout_spec(), seed=3)
        self.node = Node("live")
        self.node.serving.add(self.records.serve(NEWEST), self.records.duplicates())
        self.wanted = WantedState(RANKS, NEWEST, FromNode("live"))

    def close(self) -> None:
        self.node.close()
        self.records.close()
        self.code.close()


@pytest.fixture
def live() -> Iterator[Live]:
    with closing(Live()) as live:
        yield live


@pytest.mark.promise(
    "damaged fragments, and peers that send wrong data, are named and left out, as far as the code tolerates"
)
def test_a_live_state_is_right(live: Live) -> None:
    result, regions = Network([live.node], order=random.Random(1)).read(live.wanted, live.records.spec, live.code)
    with closing_all(regions):
        assert (result.problem, result.bad) == ("", ())
        check_right(live.records, result, regions)


def test_another_state_is_handed_out_where_the_plan_is_made_again(live: Live) -> None:
    network = Network([live.node])
    _, regions = network.read(live.wanted, live.records.spec, live.code)
    with closing_all(regions):
        live.node.serving.add(live.records.serve(4), live.records.duplicates())
    earlier = msgspec.structs.replace(live.wanted, record=4)
    result, regions = network.read(earlier, live.records.spec, live.code)
    with closing_all(regions):
        assert result.problem == ""
        check_right(live.records, result, regions, record=4)


def test_the_state_before_is_read_as_well(live: Live) -> None:
    live.node.serving.add(live.records.serve(NEWEST, before=True), live.records.duplicates())
    wanted = msgspec.structs.replace(live.wanted, before=True)
    result, regions = Network([live.node], order=random.Random(1)).read(wanted, live.records.spec, live.code)
    with closing_all(regions):
        assert (result.problem, result.bad) == ("", ())
        check_right(live.records, result, regions, before=True)


LIVE_DAMAGES: dict[str, Bend] = {
    "a bit": fragments(lambda _, got, payload: (got, flip(payload))),
    "truncated": fragments(
        lambda _, got, payload: (
            msgspec.structs.replace(got, digest=xxhash.xxh3_128_digest(bytes(payload)[:-1])),
            bytes(payload)[:-1],
        )
    ),
    "a stripe of nothing": fragments(
        lambda _, got, payload: (msgspec.structs.replace(got, digest=xxhash.xxh3_128_digest(b"")), b"")
    ),
    "no record": fragments(
        lambda _, got, payload: (
            msgspec.structs.replace(got, digest=xxhash.xxh3_128_digest(bytes(len(payload)))),
            bytes(len(payload)),
        )
    ),
    "got none": fragments(lambda _, got, payload: (GotNone(got.request, "gone"), b"")),
    "nothing": lambda node, question, answer, payload: [
        (node.name, GotNone(getattr(question, "request", 0), "no"), b"")
    ],
    "silent": silent,
    "lost in the middle": lost_in_the_middle,
    "an absurd size": DAMAGES["an absurd size"],
    "a large size": manifest_of(lambda one: msgspec.structs.replace(one, nbytes=one.nbytes + (1 << 29))),
    "another size": DAMAGES["another size"],
    "no size": DAMAGES["no size"],
    "digests": DAMAGES["more digests"],
}


SAYS_NOTHING = {"silent", "lost in the middle"}


@pytest.mark.parametrize("damage", LIVE_DAMAGES)
def test_a_live_state_that_is_not_right_is_given_up(live: Live, damage: str) -> None:
    network = Network([live.node], LIVE_DAMAGES[damage])
    result, regions = network.read(live.wanted, live.records.spec, live.code)
    with closing_all(regions):
        assert "of ranks [0, 1] cannot be had" in result.problem
        assert result.bad == (BadSourceSeen("live", RANKS, "", damage in SAYS_NOTHING),)


class Private:
    """A unit whose own state lies in fragments, and another one that has the rest, on a node with fragments, too."""

    def __init__(self) -> None:
        self.code = Code(2, 2)
        self.records = Records(layout_spec(), seed=4)
        self.replica = Records(layout_spec((2,)), seed=4)
        # What all replicas have is the same; what is by value is not.
        for ours, theirs in ((1, 1), (2, 2), (3, 3), (4, 4), (5, 5)):
            start, nbytes = self.replica.layout.by_value_base(theirs), self.replica.layout.by_value_bytes
            self.replica.regions[0].map[start : start + nbytes] = bytes(nbytes)
            self._copy(ours)
        self.replica.regions[1].map[:] = self.records.regions[1].map[:]
        self.nodes = [Node(f"n{index}") for index in range(self.code.fragments)]
        spread(self.records, self.code, self.nodes, private=True)
        self.nodes[1].serving.add(self.replica.serve(NEWEST), self.replica.duplicates())
        fragments = tuple((node.name, index) for index, node in enumerate(self.nodes))
        self.wanted = WantedState(RANKS, NEWEST, FromFragments("g", fragments, 2, 1, ("n1", (2,))))

    def _copy(self, record: int) -> None:
        ours, theirs = self.records.layout, self.replica.layout
        for offset, nbytes in (ours.gradient_area(0, 0), ours.anchor_area(record)):
            start, there = ours.slot_offset(record) + offset, theirs.slot_offset(record) + offset
            self.replica.regions[0].map[there : there + nbytes] = self.records.regions[0].map[start : start + nbytes]

    def read(self, bend: Bend, before: bool = False) -> Filled:
        network = Network(self.nodes, bend, random.Random(2))
        wanted = msgspec.structs.replace(self.wanted, before=before)
        result, regions = network.read(wanted, self.records.spec, self.code)
        with closing_all(regions):
            if not result.problem:
                check_right(self.records, result, regions, before=before)
        return result

    def close(self) -> None:
        self.records.close()
        self.replica.close()
        for node in self.nodes:
            node.close()
        self.code.close()


@pytest.fixture
def private() -> Iterator[Private]:
    with closing(Private()) as private:
        yield private


def of_fragments(question: WireMessage) -> bool:
    return getattr(question, "generation", "") == "g"


def when(condition: Callable[[WireMessage], bool], bend: Bend) -> Bend:
    def some(node: Node, question: WireMessage, answer: WireMessage, payload: Bytes) -> Answers:
        return bend(node, question, answer, payload) if condition(question) else [(node.name, answer, payload)]

    return some


def test_what_is_its_own_and_what_all_have_are_put_together(private: Private) -> None:
    result = private.read(lambda node, question, answer, payload: [(node.name, answer, payload)])
    assert (result.problem, result.bad) == ("", ())


def test_both_of_the_state_before_are_put_together_as_well(private: Private) -> None:
    private.nodes[1].serving.add(private.replica.serve(NEWEST, before=True), private.replica.duplicates())
    result = private.read(lambda node, question, answer, payload: [(node.name, answer, payload)], before=True)
    assert (result.problem, result.bad) == ("", ())


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_fragment_does_not_spoil_what_its_node_has_live(private: Private, damage: str) -> None:
    result = private.read(when(of_fragments, at(["n1"], DAMAGES[damage])))
    assert result.problem == ""
    assert {one.generation for one in result.bad} <= {"g"}
    assert named(result) <= {"n1"}


@pytest.mark.parametrize("damage", LIVE_DAMAGES)
def test_a_damaged_replica_is_named_and_not_the_fragments(private: Private, damage: str) -> None:
    result = private.read(when(lambda question: not of_fragments(question), at(["n1"], LIVE_DAMAGES[damage])))
    assert "of ranks [2] cannot be had" in result.problem
    assert BadSourceSeen("n1", (2,), "", damage in SAYS_NOTHING) in result.bad
    # A node that says nothing has no fragments either.
    assert len(result.bad) == (2 if damage in SAYS_NOTHING else 1)
