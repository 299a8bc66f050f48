"""States read back from peers: right whatever damage the code bears, and beyond it an error that names the sources."""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Iterator
from contextlib import closing

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memckpt.memory.region import Region
from memckpt.replication.coding.code import STRIPE_BYTES
from memckpt.replication.process.reader import Reader
from memckpt.replication.transport.wire import Got, GotNone, Manifest, WireMessage
from tests.support.cluster.peers_records import RANKS, Answers, Bytes, Network, Node
from tests.support.cluster.reader_lab import (
    CODES,
    DAMAGES,
    FRAGMENT_DAMAGES,
    LIES,
    Job,
    at,
    check_right,
    closing_all,
    flip,
    named,
)


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
        assert kept is not None
        kept.abandon(4)
        kept = other.fragment_store.window(RANKS, "g")
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
