"""A replicator and peers of which one is broken: what cannot be is refused and counted, and all else goes on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from memckpt.errors import MemoryBudgetError
from memckpt.protocol import replication
from memckpt.replication.coding.blob import STATIC
from memckpt.replication.coding.code import STRIPE_BYTES, Fragment
from memckpt.replication.keeping.sender import Sender
from memckpt.replication.pacing.pace import Pacer
from memckpt.replication.process import questions
from memckpt.replication.process.reader import LIVE_ALL, LIVE_SHARED
from memckpt.replication.process.send import PUMP_BYTES, Mail, Pump
from memckpt.replication.process.states_by_value import StatesByValue
from memckpt.replication.transport.messages import (
    Abandon,
    Acknowledged,
    AskManifest,
    AskWindow,
    Get,
    Got,
    GotNone,
    Manifest,
    NotStored,
    Open,
    Put,
    Stored,
    Watermark,
    Whereabouts,
    WindowIs,
    WireMessage,
    decode,
    encode,
)
from memckpt.replication.transport.transport import Delivery, Met
from tests.support.cluster.peers_records import Records
from tests.support.cluster.replicator_node import FAR, Node

#: A state of which two peers have fragments.
WANTED = replication.WantedState((0,), 5, replication.FromFragments("ga", (("a", 0), ("c", 1)), 2, 2))


@pytest.fixture
def node() -> Iterator[Node]:
    with closing(Node()) as node:
        yield node


@pytest.mark.parametrize("finished", [True, False])
def test_a_replicator_that_leaves_gives_up_its_place_and_its_port(node: Node, finished: bool) -> None:
    """Only where training is over is nobody to wait for this node: else another replicator takes its place."""
    node.send_own()
    before = len(node.line.sent["a"])
    node.replicator._handle(replication.Drain(finished), [])
    node.replicator._work()
    said = [one for one in node.line.sent["a"][before:] if isinstance(one, Acknowledged)]
    assert [one.lost for one in said] == [True] * finished
    assert node.replicator._transport is None
    assert node.wire.told[-1] == replication.Drained()


WRONG_WINDOWS: dict[str, dict[str, Any]] = {
    "of another node's ranks": {"owner": (2,)},
    "of this node's ranks": {"owner": (1,)},
    "of no ranks": {"owner": ()},
    "of another node": {"node": "c"},
    "a fragment for somebody else": {"index": 5},
    "a fragment below": {"index": -1},
    "no data": {"data": 0},
    "much data": {"data": FAR},
    "no tolerance": {"tolerate": 0},
    "much tolerance": {"tolerate": FAR},
    "private": {"private": True},
}


@pytest.mark.parametrize("wrong", WRONG_WINDOWS)
def test_a_window_that_is_not_as_planned_is_refused(node: Node, wrong: str) -> None:
    assert node.says("a", Open(node.window("a", **WRONG_WINDOWS[wrong]))) == []
    assert (node.fragment_store.windows(), node.refused) == ([], 1)
    assert node.says("a", Open(node.window("a"))) == []
    assert len(node.fragment_store.windows()) == 1


def test_a_peer_does_nothing_to_what_is_kept_of_another(node: Node) -> None:
    node.says("a", Open(node.window("a")))
    node.keep("a", 3)
    put, payload = node.put("a", 4)
    node.says("c", put, payload=payload)
    node.says("c", Abandon((0,), "ga", 3), Open(node.window("a")), Open(node.window("a", node="c")))
    assert node.refused == 4
    window = node.fragment_store.window((0,), "ga")
    assert window.records() == [3]


def test_what_nobody_has_sent_nobody_has_stored(node: Node) -> None:
    node.send_own()
    node.says("a", Stored((1,), "own", FAR), Stored((1,), "other", 3), NotStored((1,), "other", 3, "no"))
    node.says("c", Stored((0,), "own", 3), NotStored((7,), "own", 3, "no"))
    node.member.work(0.0)
    [owner] = node.member.senders
    assert (owner.acknowledged, owner.problems, node.refused) == (0, {}, 2)


def test_the_watermark_is_the_leaders_and_not_beyond_what_this_node_has(node: Node) -> None:
    for owner in ("a", "c"):
        node.says(owner, Open(node.window(owner)))
        for record in (1, 2, 3, 4, 5):
            node.keep(owner, record)
    node.send_own()
    node.all_store(1, 2, 3)
    node.says("c", Watermark(FAR, True))
    assert (node.refused, node.member.watermark.record) == (1, 0)
    node.says("a", Watermark(FAR, False))
    assert (node.refused, node.member.watermark.record) == (1, 3)
    assert node.fragment_store.windows()[0].records() == [1, 2, 3, 4, 5]
    node.says("a", Watermark(-FAR, True))
    assert node.member.watermark.record == 3
    node.says("a", Acknowledged("a", 9, 0, True))
    assert node.refused == 2


def test_the_watermark_may_come_before_the_records_that_it_speaks_of(node: Node) -> None:
    """To a replicator that is new here. The leader says it once, and trainers that wait would wait for ever."""
    node.says("a", Watermark(5, False))
    assert (node.refused, node.member.watermark.record) == (0, 0)
    node.send_own()
    node.all_store(1, 2, 3)
    node.member.work(1.0)
    assert node.member.watermark.record == 3
    node.all_store(4, 5)
    node.member.work(2.0)
    assert node.member.watermark.record == 5


def test_a_node_speaks_for_itself_to_the_leader() -> None:
    with closing(Node("a")) as node:
        node.send_own()
        node.all_store(1, 2, 3, 4, 5)
        node.says(
            "b", Acknowledged("c", 9, 0, True), Acknowledged("b", 9, 0, True), Acknowledged("stranger", 9, 0, True)
        )
        assert (node.refused, node.member.watermark.record) == (2, 0)
        node.says("b", Watermark(4, True))
        node.says("c", Acknowledged("c", 4, 0, True))
        assert (node.refused, node.member.watermark) == (3, Watermark(4, True))
        assert node.line.sent["b"][-1] == Watermark(4, True)


def test_strangers_are_not_spoken_with(node: Node) -> None:
    node.line.come.append(Met("stranger", "1"))
    put, payload = node.put("a", 4)
    node.says("stranger", put, Open(node.window("a")), Get(1, (0,), "ga", 3, 0, 0), Watermark(5, True), payload=payload)
    assert (node.refused, node.line.sent.get("stranger", [])) == (5, [])
    assert set(node.line.forgotten) == {"stranger"}


def test_what_is_no_message_is_counted(node: Node) -> None:
    for body in (b"", b"\xff", b"\x81\xa4type\xa3put", encode(Watermark(1, True))[:-1], b"\xd9\xff", bytes(1000)):
        node.line.come.append(Delivery("a", body, b""))
        node.replicator._take_deliveries()
    assert node.refused == 6


def test_questions_for_what_is_not_here_have_an_answer(node: Node) -> None:
    node.says("a", Open(node.window("a")))
    node.keep("a", 3)
    [live] = [node.records[1]]
    bare = msgspec.structs.replace(live.spec, static=())
    with closing(Records(bare)) as records:
        serving = records.serve(5)
        node.replicator._send_generation(serving, records.duplicates())
        for owner, generation in (((0,), "ga"), ((1,), LIVE_ALL), ((1,), LIVE_SHARED), ((9,), "x"), ((), LIVE_ALL)):
            for record in (3, 5, STATIC, 0, -FAR, FAR):
                for number in (0, -1, 1, FAR, -FAR):
                    told = node.says("c", Get(7, owner, generation, record, number, number))
                    assert [type(one) for one in told] in ([Got], [GotNone])
                told = node.says("c", AskManifest(7, owner, generation, record))
                assert [type(one) for one in told] in ([Manifest], [GotNone])
            told = node.says("c", AskWindow(7, owner, generation))
            assert [type(one) for one in told] in ([WindowIs], [GotNone])
    assert node.refused == 0


@pytest.mark.promise("a peer that asks and does not read gets answers only as it has room for them")
def test_answers_wait_for_room_and_questions_are_bounded(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(questions, "MOST_QUESTIONS", 3)
    node.line.rooms["c"] = 0
    asked = [AskManifest(number, (0,), "ga", 3) for number in range(5)]
    assert node.says("c", *asked) == []
    assert node.refused == 2
    assert len(node.says("a", asked[0])) == 1, "others are answered"
    node.line.rooms["c"] = 1
    node.replicator._answering.answer_all(node.member.mail, node.fragment_store)
    assert [one.request for one in node.line.sent["c"]] == [0, 1, 2]  # type: ignore[union-attr]
    node.line.rooms["c"] = 0
    node.says("c", asked[0])
    node.line.come.append(Met("c", "anew"))
    node.replicator._take_deliveries()
    assert node.replicator._answering._waiting == {}


def test_a_recovery_that_is_cut_off_leaves_no_memory_behind(node: Node) -> None:
    regions = node.records[0].duplicates()
    node.replicator._handle(replication.Describe(WANTED), [])
    node.replicator._fill(replication.Fill(WANTED, node.records[0].spec), regions)
    serving = node.records[1].duplicates()
    again = node.records[1].duplicates()
    node.replicator._send_generation(node.records[1].serve(5), serving)
    node.replicator._send_generation(node.records[1].serve(4), again)
    assert {region.fd for region in serving} == {-1}
    node.replicator._leave_attempt()
    assert {region.fd for region in (*regions, *again)} == {-1}


def test_what_the_agent_holds_counts_where_memory_for_others_is_reserved(node: Node) -> None:
    memory = node.replicator._memory
    memory.budget = 1 << 20
    with closing(memory._reserve(1 << 19)) as kept:
        memory._rooms.append(kept)
        node.replicator._handle(replication.Holds((1 << 19) - 4096), [])
        with pytest.raises(MemoryBudgetError):
            memory._reserve(8192)
        node.replicator._handle(replication.Holds(0), [])
        memory._reserve(8192).close()


# Whatever is said

NUMBERS = st.sampled_from([0, 1, -1, 2, 3, 5, STATIC, FAR, -FAR, (1 << 63) - 1, -(1 << 63), STRIPE_BYTES])
OWNERS = st.sampled_from([(0,), (1,), (2,), (), (0, 1, 2), (-1,), (FAR,)])
GENERATIONS = st.sampled_from(["ga", "gc", "own", "", LIVE_ALL, LIVE_SHARED, "x" * 70_000])
DIGESTS = st.sampled_from([b"", bytes(16), bytes(8), bytes(17)])
PEERS = st.sampled_from(["a", "b", "c", "stranger", ""])
FRAGMENTS = st.builds(
    Fragment, GENERATIONS, OWNERS, NUMBERS, NUMBERS, NUMBERS, NUMBERS, NUMBERS, NUMBERS, NUMBERS, DIGESTS, DIGESTS
)
MESSAGES: st.SearchStrategy[Any] = st.one_of(
    st.builds(Put, st.lists(FRAGMENTS, max_size=3).map(tuple), NUMBERS),
    st.builds(Abandon, OWNERS, GENERATIONS, NUMBERS),
    st.builds(Stored, OWNERS, GENERATIONS, NUMBERS),
    st.builds(NotStored, OWNERS, GENERATIONS, NUMBERS, st.just("because"), st.booleans()),
    st.builds(Acknowledged, PEERS, NUMBERS, NUMBERS, st.booleans()),
    st.builds(Watermark, NUMBERS, st.booleans()),
    st.builds(AskManifest, NUMBERS, OWNERS, GENERATIONS, NUMBERS),
    st.builds(Manifest, NUMBERS, NUMBERS, NUMBERS, DIGESTS),
    st.builds(Get, NUMBERS, OWNERS, GENERATIONS, NUMBERS, st.none() | NUMBERS, NUMBERS),
    st.builds(Got, NUMBERS, NUMBERS, NUMBERS, st.none() | FRAGMENTS, DIGESTS),
    st.builds(AskWindow, NUMBERS, OWNERS, GENERATIONS),
    st.builds(WindowIs, NUMBERS, OWNERS, DIGESTS),
    st.builds(GotNone, NUMBERS, st.just("because")),
    st.builds(Whereabouts, PEERS, st.just("tcp://elsewhere:1")),
)
CHANGES = st.dictionaries(
    st.sampled_from(["owner", "node", "index", "data", "tolerate", "base"]), NUMBERS, min_size=1, max_size=2
)


@given(st.lists(MESSAGES | CHANGES, max_size=30), st.binary(max_size=20))
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
def test_whatever_a_broken_peer_says_the_others_do_not_notice(messages: list[Any], payload: bytes) -> None:
    """The replicator of b goes on; what it keeps of a, what it has sent, and what it reads from a are as they were."""
    with closing(Node()) as node:
        node.says("a", Open(node.window("a")))
        node.keep("a", 3)
        node.send_own()
        node.replicator._send_generation(node.records[1].serve(5), node.records[1].duplicates())
        wanted = replication.WantedState((0,), 5, replication.FromFragments("ga", (("a", 0),), 2, 2))
        node.replicator._handle(replication.Describe(wanted), [])
        node.replicator._fill(replication.Fill(wanted, node.records[0].spec), node.records[0].duplicates())
        for message in messages:
            if isinstance(message, dict):
                if isinstance(message.get("owner"), int):
                    message["owner"] = (message["owner"],)
                if "node" in message:
                    message["node"] = str(message["node"])
                message = Open(node.window("c", **message))
            node.says("c", message, payload=payload)
            node.member.work(0.0)
            node.replicator._fetching.take_news()
        window = node.fragment_store.window((0,), "ga")
        assert window.records() == [3]
        assert node.member.watermark == Watermark(0, False)
        assert node.member.senders[0].acknowledged == 0
        assert node.line.hinted <= {"a", "c"}
        assert len(node.replicator._fetching._readers) == len(node.replicator._fetching._asking) == 1
        node.all_store(1, 2, 3, 4, 5)
        assert node.keep("a", 4) == [Stored((0,), "ga", 4)]


@pytest.mark.parametrize("records", [False, True])
def test_a_leader_that_rejoins_has_nobody_wait_for_records_that_are_lost(records: bool) -> None:
    """They would wait for a generation, for which all have to get on. Records that follow are worth waiting for."""
    with closing(Node("a")) as node:
        node.replicator._join(replication.Join(node.job, rejoin=True, records=records))
        told = [one.waits_suspended for one in node.wire.told if isinstance(one, replication.WatermarkAdvanced)]
        assert told == [True][records:]
        node.member.work(0.0)
        assert node.member._told.lost == (not records)


def test_owners_send_in_turns() -> None:
    turns: list[str] = []

    class Sender:
        def __init__(self, name: str) -> None:
            self.name = name

        def pump(self, limit: int) -> int:
            turns.append(self.name)
            return limit

    pump = Pump([Sender("first"), Sender("second")], Pacer())  # type: ignore[list-item]
    assert [pump.send(PUMP_BYTES) for _ in range(3)] == [PUMP_BYTES] * 3
    assert turns == ["first", "second", "first"]


@pytest.mark.parametrize(("every", "held", "since"), [(1, False, 5), (1, True, 7), (3, False, 7), (3, True, 7)])
def test_beside_states_records_count_from_the_first_whose_state_can_be_made(
    node: Node, every: int, held: bool, since: int
) -> None:
    """A gap before them has no window; without a state by value, what was there before the gap has one."""
    node.replicator._join(replication.Join(msgspec.structs.replace(node.job, every_steps=None)))
    node.member.watermark = Watermark(4, True, every=every)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"acknowledged": 9, "since": 5, "reaches_from": 7, "whole": True}.items():
            patch.setattr(Sender, name, value)
        patch.setattr(StatesByValue, "hold_state", lambda states, record: held)
        said = node.member._how_far()
    assert (said.record, said.since, said.whole) == (9, since, True)


def test_records_of_every_tenth_step_need_a_tenth(node: Node) -> None:
    node.send_own()
    [owner] = node.member.senders
    assert owner.bytes_per_step == owner.record_bytes > 0
    outgoing = owner._generations[-1]
    outgoing.sizes = outgoing.sizes._replace(every=10)
    assert owner.bytes_per_step == owner.record_bytes / 10


def test_status_says_what_is_fetched_and_how_far_that_is(node: Node) -> None:
    node.replicator._fill(replication.Fill(WANTED, node.records[0].spec), node.records[0].duplicates())
    [reader] = node.replicator._fetching._readers
    reader.taken_bytes = reader.expected_bytes // 4
    megabytes = f"{reader.expected_bytes / 1e6:.1f} MB"
    assert str(node.replicator._fetching) == f"ranks 0 from peers after record 5, 25% of {megabytes}"


def test_an_answer_says_what_became_of_a_state(node: Node) -> None:
    node.replicator._fill(replication.Fill(WANTED, node.records[0].spec), node.records[0].duplicates())
    asked = [one for one in node.line.sent["a"] if isinstance(one, AskManifest)]
    assert len(asked) == 3
    node.says("a", *(GotNone(one.request, "gone") for one in asked))
    node.says("c", *(GotNone(one.request, "gone") for one in asked))
    [filled] = node.replicator._fetching.take_news()
    assert isinstance(filled, replication.Filled)
    assert "of ranks [0] cannot be had" in filled.problem
    assert set(filled.bad) == {replication.BadSourceSeen(peer, (0,), "ga") for peer in ("a", "c")}
    assert node.replicator._fetching._readers == []


PLAN = {name: f"tcp://{name}:1" for name in "abcd"}


class Wire:
    """A transport of node a."""

    def __init__(self, moved: dict[str, str]) -> None:
        self.addresses = PLAN | moved
        self.sent: list[tuple[str, WireMessage]] = []

    def address_of(self, peer: str) -> str | None:
        return self.addresses.get(peer)

    def connect(self, peer: str, address: str) -> None:
        assert address == PLAN[peer]

    def send(self, peer: str, body: bytes, *payload: bytes) -> None:
        self.sent.append((peer, decode(body)))


@pytest.mark.parametrize(
    ("moved", "met", "told"),
    [
        ({}, "b", []),
        ({"b": "tcp://b:2"}, "b", [("c", "b"), ("d", "b")]),
        ({"b": "tcp://b:2"}, "c", [("c", "b")]),
        ({"b": "tcp://b:2", "c": "tcp://c:2"}, "c", [("b", "c"), ("d", "c"), ("c", "b")]),
    ],
)
def test_who_is_met_is_told_where_others_have_moved_and_they_where_it_has(
    moved: dict[str, str], met: str, told: list[tuple[str, str]]
) -> None:
    wire: Any = Wire(moved)
    Mail("a", PLAN, wire).met(met, sorted(PLAN))
    assert wire.sent == [(to, Whereabouts(node, wire.addresses[node])) for to, node in told]
