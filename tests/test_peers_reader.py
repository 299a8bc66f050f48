"""States read back from peers: right whatever damage the code bears, and beyond it an error that names the sources."""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing

import msgspec
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from memckpt.agent.peer_messages import BadSourceSeen, Filled, UnitSource
from memckpt.courier.reader import Reader
from memckpt.memory.region import Region
from memckpt.peers.blob import STATIC
from memckpt.peers.code import STRIPE_BYTES, Code
from memckpt.peers.fragments import _checksum
from memckpt.peers.wire import AskManifest, Get, Got, GotNone, Manifest, WireMessage
from tests.peers_records import RANKS, Answers, Bend, Bytes, Network, Node, Records, deliver, layout_spec, spread

CODES = [(1, 1), (1, 3), (3, 1), (2, 2), (4, 2), (2, 3)]
NEWEST = 5


class Job:
    """A unit's records at the holders of their pieces. The unit's own node is gone."""

    def __init__(self, data: int, tolerate: int) -> None:
        self.code = Code(data, tolerate)
        self.records = Records(layout_spec())
        self.nodes = [Node(f"n{index}") for index in range(self.code.pieces)]
        spread(self.records, self.code, self.nodes)

    @property
    def names(self) -> list[str]:
        return [node.name for node in self.nodes]

    def source(self, record: int = NEWEST, nodes: Sequence[Node] | None = None) -> UnitSource:
        pieces = tuple((node.name, index) for index, node in enumerate(self.nodes) if nodes is None or node in nodes)
        return UnitSource(RANKS, record, "g", None, pieces, False, None, 2, self.code.data)

    def read(self, bend: Bend, order: random.Random | None = None) -> Filled:
        """What becomes of it; where it is said to be right, it is."""
        result, regions = Network(self.nodes, bend, order).read(self.source(), self.records.spec, self.code)
        with closing_all(regions):
            if not result.problem:
                check_right(self.records, result, regions)
        return result

    def close(self) -> None:
        self.records.close()
        for node in self.nodes:
            node.close()
        self.code.close()


@contextlib.contextmanager
def closing_all(regions: Sequence[Region]) -> Iterator[None]:
    try:
        yield
    finally:
        for region in regions:
            region.close()


def check_right(records: Records, result: Filled, regions: Sequence[Region], record: int = NEWEST) -> None:
    window = range(record - records.spec.period + 1, record + 1)
    for number in window:
        assert records.shared_bytes(number, regions) == records.shared_bytes(number, records.regions)
    assert records.own_bytes(record, regions) == records.own_bytes(record, records.regions)
    assert regions[1].map[:] == records.regions[1].map[:]
    assert result.metas == {number: records.held[number][1] for number in window}
    assert (result.step, result.rank_states) == (records.held[record][0], records.held[record][2])


@pytest.fixture(scope="module", params=CODES, ids=lambda code: f"k{code[0]}m{code[1]}")
def job(request: pytest.FixtureRequest) -> Iterator[Job]:
    with closing(Job(*request.param)) as job:
        yield job


def flip(payload: Bytes, at: int = 0) -> bytes:
    changed = bytearray(payload)
    changed[at] ^= 1
    return bytes(changed)


def lie(got: Got, payload: Bytes, **other: object) -> Got:
    """The same with another payload or fields, and a checksum that says that it is well."""
    assert got.fragment is not None
    bare = msgspec.structs.replace(got.fragment, **other)
    return msgspec.structs.replace(got, fragment=msgspec.structs.replace(bare, checksum=_checksum(bare, payload)))


def claim(got: Got, **other: object) -> Got:
    """The same with other fields of the fragment, which its checksum does not fit."""
    assert got.fragment is not None
    return msgspec.structs.replace(got, fragment=msgspec.structs.replace(got.fragment, **other))


def instead(node: Node, got: Got, payload: Bytes, **other: object) -> tuple[WireMessage, Bytes]:
    """What the node has of another record or stripe, said to be what was asked for."""
    question = msgspec.structs.replace(Get(got.request, RANKS, "g", got.record, None, got.stripe), **other)
    found, bytes_found = node.answer(question)
    if not isinstance(found, Got):
        return got, b""
    return msgspec.structs.replace(found, record=got.record, stripe=got.stripe), bytes_found


def false_stripe(node: Node, got: Got, payload: Bytes) -> tuple[WireMessage, Bytes]:
    data = flip(payload)
    return lie(got, data, digest=xxhash.xxh3_128_digest(data)), data


#: What becomes of a fragment on its way.
Damage = Callable[[Node, Got, Bytes], tuple[WireMessage, Bytes]]
FRAGMENT_DAMAGES: dict[str, Damage] = {
    "a bit of the payload": lambda _, got, payload: (got, flip(payload, len(payload) // 2)),
    "truncated": lambda _, got, payload: (got, bytes(payload)[:-1]),
    "longer": lambda _, got, payload: (got, bytes(payload) + b"\0"),
    "empty": lambda _, got, payload: (got, b""),
    "no fragment": lambda _, got, payload: (msgspec.structs.replace(got, fragment=None), payload),
    "a whole stripe": lambda _, got, payload: (
        msgspec.structs.replace(got, fragment=None, digest=xxhash.xxh3_128_digest(payload)),
        payload,
    ),
    "another stripe": lambda node, got, payload: instead(node, got, payload, stripe=0 if got.stripe else 1),
    "another record": lambda node, got, payload: instead(node, got, payload, record=3),
    "what is sent once": lambda node, got, payload: instead(node, got, payload, record=STATIC if got.record > 0 else 4),
    "a header of another record": lambda _, got, payload: (claim(got, record=got.record + 1), payload),
    "a header of another length": lambda _, got, payload: (claim(got, length=1), payload),
    "a header of another digest": lambda _, got, payload: (claim(got, digest=bytes(16)), payload),
    "a checksum of nothing": lambda _, got, payload: (claim(got, checksum=b""), payload),
    "another payload, with a checksum": lambda _, got, payload: (lie(got, flip(payload)), flip(payload)),
    "another digest, with a checksum": lambda _, got, payload: (lie(got, payload, digest=bytes(16)), payload),
    "a false stripe": false_stripe,
    "another piece, with a checksum": lambda _, got, payload: (
        lie(got, payload, piece=(got.fragment.piece if got.fragment else 0) + 1),
        payload,
    ),
    "more stripes, with a checksum": lambda _, got, payload: (lie(got, payload, stripes=1 << 60), payload),
    "got none": lambda _, got, payload: (GotNone(got.request, "it is gone"), b""),
}


def manifest_of(change: Callable[[Manifest], Manifest]) -> Bend:
    def bend(node: Node, question: WireMessage, answer: WireMessage, payload: Bytes) -> Answers:
        return [(node.name, change(answer) if isinstance(answer, Manifest) else answer, payload)]

    return bend


def fragments(damage: Damage) -> Bend:
    def bend(node: Node, question: WireMessage, answer: WireMessage, payload: Bytes) -> Answers:
        return (
            [(node.name, *damage(node, answer, payload))] if isinstance(answer, Got) else [(node.name, answer, payload)]
        )

    return bend


def silent(node: Node, question: WireMessage, answer: WireMessage, payload: Bytes) -> Answers:
    return []


def lost_in_the_middle(node: Node, question: WireMessage, answer: WireMessage, payload: Bytes) -> Answers:
    gone = isinstance(question, Get) and (question.record, question.stripe) >= (4, 1)
    return [] if gone else [(node.name, answer, payload)]


def without_a_record(node: Node, question: WireMessage, answer: WireMessage, payload: Bytes) -> Answers:
    if isinstance(question, AskManifest | Get) and question.record == 5:
        return [(node.name, GotNone(question.request, "it is not complete here"), b"")]
    return [(node.name, answer, payload)]


def chatters_on(node: Node, question: WireMessage, answer: WireMessage, payload: Bytes) -> Answers:
    """Says over and over what a record consists of, and never has any of it."""
    said = node.answer(AskManifest(getattr(question, "request", 0), RANKS, "g", 5))
    return [(node.name, *said)] if isinstance(question, Get) else [(node.name, answer, payload)]


DAMAGES: dict[str, Bend] = {name: fragments(damage) for name, damage in FRAGMENT_DAMAGES.items()} | {
    "silent": silent,
    "lost in the middle": lost_in_the_middle,
    "without a record": without_a_record,
    "chatters on": chatters_on,
    "another size": manifest_of(lambda one: msgspec.structs.replace(one, nbytes=one.nbytes - 1)),
    "an absurd size": manifest_of(lambda one: msgspec.structs.replace(one, nbytes=1 << 62)),
    "a size below nothing": manifest_of(lambda one: msgspec.structs.replace(one, nbytes=-STRIPE_BYTES)),
    "no size": manifest_of(lambda one: msgspec.structs.replace(one, nbytes=0, digests=b"")),
    "more digests": manifest_of(lambda one: msgspec.structs.replace(one, digests=one.digests + bytes(16))),
    "no digests": manifest_of(lambda one: msgspec.structs.replace(one, digests=b"")),
    "other digests": manifest_of(lambda one: msgspec.structs.replace(one, digests=flip(one.digests))),
}
#: Where one that is alone cannot be told from one that is right, or several are in league.
LIES = {"another size", "other digests"}


def at(nodes: Sequence[str], bend: Bend) -> Bend:
    """What only some nodes do."""

    def some(node: Node, question: WireMessage, answer: WireMessage, payload: Bytes) -> Answers:
        if node.name in nodes:
            return bend(node, question, answer, payload)
        return [(node.name, answer, payload)]

    return some


def named(result: Filled) -> set[str]:
    assert {(one.ranks, one.generation) for one in result.bad} <= {(RANKS, "g")}
    return {one.node for one in result.bad}


def test_a_whole_state_is_right(job: Job) -> None:
    network = Network(job.nodes)
    result, regions = network.read(job.source(), job.records.spec, job.code)
    with closing_all(regions):
        assert result.problem == ""
        check_right(job.records, result, regions)
    assert result.bad == ()
    assert network.progress > 2 * STRIPE_BYTES
    if job.code.data == 1:
        assert result.nbytes == network.progress


def test_progress_is_reported_within_a_record(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memckpt.courier.reader.PROGRESS_BYTES", STRIPE_BYTES)
    network = Network(job.nodes)
    steps: list[int] = []
    monkeypatch.setattr(network, "advance", steps.append)
    result, regions = network.read(job.source(), job.records.spec, job.code)
    with closing_all(regions):
        assert result.problem == ""
    assert max(steps) == STRIPE_BYTES
    if job.code.data == 1:
        assert result.nbytes == sum(steps)


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_the_code_bears_is_read_around(job: Job, damage: str) -> None:
    bears = job.code.tolerate - 1
    if damage in LIES:
        bears = min(bears, (job.code.pieces - 1) // 2)
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
    if damage != "another payload, with a checksum":  # pieces of which one lies, and nothing shows which
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
    """A stripe is whole as long as k pieces of it are, whatever has become of others."""

    def bend(node: Node, question: WireMessage, answer: WireMessage, payload: Bytes) -> Answers:
        if isinstance(answer, Got):
            first = answer.stripe + answer.record
            hit = {job.names[(first + index) % job.code.pieces] for index in range(job.code.tolerate - 1)}
            if node.name in hit:
                damage = list(FRAGMENT_DAMAGES)[(first * 7 + len(node.name)) % (len(FRAGMENT_DAMAGES) - 1)]
                return [(node.name, *FRAGMENT_DAMAGES[damage](node, answer, payload))]
        return [(node.name, answer, payload)]

    assert job.read(bend).problem == ""


def test_records_may_be_left_in_different_places() -> None:
    """The plan names all that have some of what is needed."""
    with closing(Job(2, 2)) as job:
        one, other, _ = job.nodes
        kept = one.holder.window(RANKS, "g")
        assert kept is not None
        kept.abandon(4)
        kept = other.holder.window(RANKS, "g")
        assert kept is not None
        kept.abandon(5)
        result = job.read(lambda node, question, answer, payload: [(node.name, answer, payload)])
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
        reader = Reader(
            job.source(), job.records.spec, regions, job.code, network.send, network.number, network.advance, 0.0
        )
        for peer, answer, payload in network.answers():
            deliver(reader, peer, answer, bytes(payload), 0.0)
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
    count = data.draw(st.integers(0, job.code.pieces), label="damaged")
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


# What a node hands out live


class Live:
    """A node that has a unit's state itself."""

    def __init__(self) -> None:
        self.code = Code(1, 1)
        self.records = Records(layout_spec(), seed=3)
        self.node = Node("live")
        self.node.serving.add(self.records.serve(NEWEST), self.records.duplicates())
        self.source = UnitSource(RANKS, NEWEST, "", "live", (), False, None, 0, 0)

    def close(self) -> None:
        self.node.close()
        self.records.close()
        self.code.close()


@pytest.fixture
def live() -> Iterator[Live]:
    with closing(Live()) as live:
        yield live


def test_a_live_state_is_right(live: Live) -> None:
    result, regions = Network([live.node], order=random.Random(1)).read(live.source, live.records.spec, live.code)
    with closing_all(regions):
        assert (result.problem, result.bad) == ("", ())
        check_right(live.records, result, regions)


def test_another_state_is_handed_out_where_the_plan_is_made_again(live: Live) -> None:
    network = Network([live.node])
    _, regions = network.read(live.source, live.records.spec, live.code)
    with closing_all(regions):
        live.node.serving.add(live.records.serve(4), live.records.duplicates())
    earlier = msgspec.structs.replace(live.source, record=4)
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


@pytest.mark.parametrize("damage", LIVE_DAMAGES)
def test_a_live_state_that_is_not_right_is_given_up(live: Live, damage: str) -> None:
    network = Network([live.node], LIVE_DAMAGES[damage])
    result, regions = network.read(live.source, live.records.spec, live.code)
    with closing_all(regions):
        assert "of ranks [0, 1] cannot be had" in result.problem
        assert result.bad == (BadSourceSeen("live", RANKS, ""),)


class Private:
    """A unit of whom pieces have what is its own, and another one that has the rest, on a node that has pieces, too."""

    def __init__(self) -> None:
        self.code = Code(2, 2)
        self.records = Records(layout_spec(), seed=4)
        self.replica = Records(layout_spec((2,)), seed=4)
        # What all replicas have is the same; what is by value is not.
        for ours, theirs in ((1, 1), (2, 2), (3, 3), (4, 4), (5, 5)):
            for offset, nbytes in (self.replica.layout.by_value_area(),):
                start = self.replica.layout.slot_offset(theirs) + offset
                self.replica.regions[0].map[start : start + nbytes] = bytes(nbytes)
            self._copy(ours)
        self.replica.regions[1].map[:] = self.records.regions[1].map[:]
        self.nodes = [Node(f"n{index}") for index in range(self.code.pieces)]
        spread(self.records, self.code, self.nodes, private=True)
        self.nodes[1].serving.add(self.replica.serve(NEWEST), self.replica.duplicates())
        pieces = tuple((node.name, index) for index, node in enumerate(self.nodes))
        self.source = UnitSource(RANKS, NEWEST, "g", None, pieces, True, ("n1", (2,)), 1, 2)

    def _copy(self, record: int) -> None:
        ours, theirs = self.records.layout, self.replica.layout
        for offset, nbytes in (ours.gradient_area(0, 0), ours.anchor_area(record)):
            start, there = ours.slot_offset(record) + offset, theirs.slot_offset(record) + offset
            self.replica.regions[0].map[there : there + nbytes] = self.records.regions[0].map[start : start + nbytes]

    def read(self, bend: Bend) -> Filled:
        network = Network(self.nodes, bend, random.Random(2))
        result, regions = network.read(self.source, self.records.spec, self.code)
        with closing_all(regions):
            if not result.problem:
                check_right(self.records, result, regions)
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


def of_pieces(question: WireMessage) -> bool:
    return getattr(question, "generation", "") == "g"


def when(condition: Callable[[WireMessage], bool], bend: Bend) -> Bend:
    def some(node: Node, question: WireMessage, answer: WireMessage, payload: Bytes) -> Answers:
        return bend(node, question, answer, payload) if condition(question) else [(node.name, answer, payload)]

    return some


def test_what_is_its_own_and_what_all_have_are_put_together(private: Private) -> None:
    result = private.read(lambda node, question, answer, payload: [(node.name, answer, payload)])
    assert (result.problem, result.bad) == ("", ())


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_piece_does_not_spoil_what_its_node_has_live(private: Private, damage: str) -> None:
    result = private.read(when(of_pieces, at(["n1"], DAMAGES[damage])))
    assert result.problem == ""
    assert {one.generation for one in result.bad} <= {"g"}
    assert named(result) <= {"n1"}


@pytest.mark.parametrize("damage", LIVE_DAMAGES)
def test_a_damaged_replica_is_named_and_not_the_pieces(private: Private, damage: str) -> None:
    result = private.read(when(lambda question: not of_pieces(question), at(["n1"], LIVE_DAMAGES[damage])))
    assert "of ranks [2] cannot be had" in result.problem
    assert BadSourceSeen("n1", (2,), "") in result.bad
    dead = {"silent", "lost in the middle"}  # a node that says nothing has no pieces either
    assert len(result.bad) == (2 if damage in dead else 1)
