"""States read back from peers: right whatever damage the code bears, and beyond it an error that names the sources."""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Callable, Iterator
from contextlib import closing

import msgspec
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from memckpt.memory.region import Region
from memckpt.protocol.replication import BadSourceSeen, Filled, FromFragments, FromNode, WantedState
from memckpt.replication.coding.code import STRIPE_BYTES, Code
from memckpt.replication.process.reader import Reader
from memckpt.replication.transport.messages import Got, GotNone, Manifest, WireMessage
from tests.support.cluster.peers_records import RANKS, Answers, Bend, Bytes, Network, Node, Records, layout_spec, spread
from tests.support.cluster.reader_lab import (
    CODES,
    DAMAGES,
    FRAGMENT_DAMAGES,
    LIES,
    NEWEST,
    Job,
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


def as_it_is(node: Node, question: WireMessage, answer: WireMessage, payload: Bytes) -> Answers:
    """Nothing is wrong."""
    return [(node.name, answer, payload)]


@pytest.fixture(scope="module", params=CODES, ids=lambda code: f"k{code[0]}m{code[1]}")
def job(request: pytest.FixtureRequest) -> Iterator[Job]:
    with closing(Job(*request.param)) as job:
        yield job


@pytest.mark.promise(
    "damaged fragments, and peers that send wrong data, are named and left out, as far as the code tolerates"
)
def test_a_whole_state_is_right(job: Job) -> None:
    network = Network(job.nodes)
    result, regions = network.read(job.wanted(), job.records.spec, job.code)
    with closing_all(regions):
        assert result.problem == ""
        check_right(job.records, result, regions)
    assert result.bad == ()
    taken, expected = zip(*network.fetched, strict=True)
    assert list(taken) == sorted(taken)
    assert 0 < sorted(set(taken))[1] < taken[-1] == expected[-1] == network.progress
    assert network.progress > 2 * STRIPE_BYTES
    if job.code.data == 1:
        assert result.nbytes == network.progress


def test_progress_is_reported_within_a_record(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memckpt.replication.process.reader.PROGRESS_BYTES", STRIPE_BYTES)
    network = Network(job.nodes)
    result, regions = network.read(job.wanted(), job.records.spec, job.code)
    with closing_all(regions):
        assert result.problem == ""
    assert max(network.steps) == STRIPE_BYTES
    if job.code.data == 1:
        assert result.nbytes == network.progress


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_the_code_bears_is_read_around(job: Job, damage: str) -> None:
    bears = job.code.tolerate - 1
    if damage in LIES:
        bears = min(bears, (job.code.fragments - 1) // 2)
    for choice in itertools.islice(itertools.combinations(job.names, bears), 3):
        result = job.read(at(choice, DAMAGES[damage]))
        assert result.problem == "", damage
        # Who has less than others is not damaged.
        assert named(result) == (set() if damage == "without a record" else set(choice)), damage


@pytest.mark.parametrize("damage", sorted(set(DAMAGES) - LIES))
def test_beyond_that_the_ranks_and_the_sources_are_named(job: Job, damage: str) -> None:
    choice = job.names[-job.code.tolerate :]
    result = job.read(at(choice, DAMAGES[damage]))
    assert "of ranks [0, 1] cannot be had" in result.problem
    assert named(result) >= set(choice)
    if damage != "another payload, with a checksum":  # fragments of which one lies, and nothing shows which
        assert named(result) == set(choice)
    assert (result.metas, result.rank_states) == ({}, {})


@pytest.mark.parametrize("damage", sorted(LIES))
@pytest.mark.parametrize("size", [(1, 1), (3, 1), (2, 2), (4, 2)], ids=lambda code: f"k{code[0]}m{code[1]}")
def test_what_a_source_makes_up_of_a_record_is_not_believed(
    jobs: dict[tuple[int, int], Job], size: tuple[int, int], damage: str
) -> None:
    """Those that say so are few, or what they have does not fit it."""
    job = jobs[size]
    result = job.read(at(job.names[:1], DAMAGES[damage]))
    assert bool(result.problem) == (job.code.tolerate == 1)
    assert named(result) == {"n0"}


def test_damage_in_other_places_at_each_node_is_read_around(job: Job) -> None:
    """A stripe is whole as long as k fragments of it are, whatever has become of others."""

    def bend(node: Node, question: WireMessage, answer: WireMessage, payload: Bytes) -> Answers:
        if isinstance(answer, Got):
            first = answer.stripe + answer.record
            hit = {job.names[(first + index) % job.code.fragments] for index in range(job.code.tolerate - 1)}
            if node.name in hit:
                damage = list(FRAGMENT_DAMAGES)[(first * 7 + len(node.name)) % (len(FRAGMENT_DAMAGES) - 1)]
                return [(node.name, *FRAGMENT_DAMAGES[damage](node, answer, payload))]
        return [(node.name, answer, payload)]

    assert job.read(bend).problem == ""


def test_records_may_be_left_in_different_places() -> None:
    """The plan names all that have some of what is needed."""
    with closing(Job(2, 2)) as job:
        one, other, _ = job.nodes
        kept = one.fragment_store.window(RANKS, "g")
        kept.abandon(4)
        kept = other.fragment_store.window(RANKS, "g")
        kept.abandon(5)
        result = job.read(as_it_is)
        assert (result.problem, result.bad) == ("", ())


def test_what_was_not_asked_does_not_count(job: Job) -> None:
    """Answers twice, answers to what nobody asked, and those of strangers."""

    def bend(node: Node, question: WireMessage, answer: WireMessage, payload: Bytes) -> Answers:
        said: Answers = []
        request = getattr(question, "request", 0)
        if isinstance(answer, Manifest):
            said += [("stranger", msgspec.structs.replace(answer, nbytes=7), b""), ("stranger", answer, b"")]
            said.append((node.name, Got(request, answer.record, 0, None, b""), b"early"))
        if isinstance(answer, Got):
            said.append(("stranger", answer, payload))
            said.append((node.name, msgspec.structs.replace(answer, stripe=answer.stripe + 10_000), payload))
            said.append((node.name, msgspec.structs.replace(answer, stripe=-1 - answer.stripe), payload))
            said.append((node.name, Manifest(request, answer.record, 1, bytes(16)), b""))
        said.append(("stranger", GotNone(request, "no"), b""))
        said.append((node.name, GotNone(request + 1_000, "no"), b""))
        said.append((node.name, answer, payload))
        said.append((node.name, answer, flip(payload) if payload else b""))
        return said

    result = job.read(bend)
    assert (result.problem, result.bad) == ("", ())


def test_a_spare_that_is_asked_late_has_time_to_answer() -> None:
    """Only who is waited for can be too late."""
    with closing(Job(1, 3)) as job:
        network = Network(job.nodes)
        regions = [Region.create("test", region.nbytes) for region in job.records.regions]
        reader = Reader(job.wanted(), job.records.spec, regions, job.code, network.send, network.number, 0.0)
        for peer, answer, payload in network.answers():
            reader.take_answer(peer, answer, payload, 0.0)  # type: ignore[arg-type]
        # Long after, those that were asked are given up; others are asked now, and are not late.
        asked = network.answers()
        reader.tend(11.0)
        first = {one.node for one in reader._bad}
        assert first
        assert first == {peer for peer, _, _ in asked}
        reader.tend(12.0)
        assert {one.node for one in reader._bad} == first
        reader.close()


ORDERS = st.integers(0, 1 << 30).map(random.Random)


@pytest.mark.parametrize("size", CODES, ids=lambda code: f"k{code[0]}m{code[1]}")
@given(data=st.data())
@settings(max_examples=12, deadline=None)
def test_any_damage_is_borne_or_named(
    jobs: dict[tuple[int, int], Job], size: tuple[int, int], data: st.DataObject
) -> None:
    """Fewer than m nodes do whatever they like, answer by answer and in any order; or more, and it is never wrong."""
    job = jobs[size]
    count = data.draw(st.integers(0, job.code.fragments), label="damaged")
    damaged = data.draw(st.permutations(job.names))[:count]
    seed = data.draw(st.integers(0, 1 << 30))
    numbers = random.Random(seed)
    kinds = sorted(set(DAMAGES) - LIES)

    def bend(node: Node, question: WireMessage, answer: WireMessage, payload: Bytes) -> Answers:
        if node.name not in damaged or numbers.random() < 0.3:
            return [(node.name, answer, payload)]
        return DAMAGES[numbers.choice(kinds)](node, question, answer, payload)

    result = job.read(bend, order=data.draw(ORDERS))
    if count < job.code.tolerate:
        assert result.problem == ""
    if result.problem:
        assert "ranks [0, 1]" in result.problem
        assert named(result) & set(damaged)
    else:
        assert named(result) <= set(damaged)


@pytest.fixture(scope="module")
def jobs() -> Iterator[dict[tuple[int, int], Job]]:
    with contextlib.ExitStack() as stack:
        yield {size: stack.enter_context(closing(Job(*size))) for size in CODES}


class Live:
    """A node that has a unit's state itself."""

    def __init__(self) -> None:
        self.code = Code(1, 1)
        self.records = Records(layout_spec(), seed=3)
        self.node = Node("live")
        self.node.answering.hand_out(self.records.serve(NEWEST), self.records.duplicates())
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
@pytest.mark.parametrize("before", [False, True], ids=["newest", "the one before"])
def test_a_live_state_is_right(live: Live, before: bool) -> None:
    live.node.answering.hand_out(live.records.serve(NEWEST, before=before), live.records.duplicates())
    wanted = msgspec.structs.replace(live.wanted, before=before)
    result, regions = Network([live.node], order=random.Random(1)).read(wanted, live.records.spec, live.code)
    with closing_all(regions):
        assert (result.problem, result.bad) == ("", ())
        check_right(live.records, result, regions, before=before)


def test_another_state_is_handed_out_where_the_plan_is_made_again(live: Live) -> None:
    network = Network([live.node])
    _, regions = network.read(live.wanted, live.records.spec, live.code)
    with closing_all(regions):
        live.node.answering.hand_out(live.records.serve(4), live.records.duplicates())
    earlier = msgspec.structs.replace(live.wanted, record=4)
    result, regions = network.read(earlier, live.records.spec, live.code)
    with closing_all(regions):
        assert result.problem == ""
        check_right(live.records, result, regions, record=4)


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
        self.nodes[1].answering.hand_out(self.replica.serve(NEWEST), self.replica.duplicates())
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


@pytest.mark.parametrize("before", [False, True], ids=["newest", "the one before"])
def test_what_is_its_own_and_what_all_have_are_put_together(private: Private, before: bool) -> None:
    private.nodes[1].answering.hand_out(private.replica.serve(NEWEST, before=before), private.replica.duplicates())
    result = private.read(as_it_is, before=before)
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
