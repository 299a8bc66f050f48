"""A courier and peers of which one is broken: what cannot be is refused and counted, and all else goes on."""

from __future__ import annotations

import os
from collections import Counter, defaultdict, deque
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from memckpt.agent.mirror_messages import MirrorRefused, OpenMirror
from memckpt.agent.peer_messages import (
    BadSourceSeen,
    Describe,
    Described,
    Fill,
    Filled,
    Join,
    PeerJob,
    PeerNode,
    PeerUnit,
    SendGeneration,
    UnitSource,
)
from memckpt.courier.asking import Asking
from memckpt.courier.courier import Courier
from memckpt.courier.member import Member
from memckpt.courier.mirroring import Mirroring
from memckpt.courier.reader import LIVE_ALL, LIVE_SHARED, PATIENCE_SECONDS
from memckpt.peers.blob import STATIC
from memckpt.peers.code import STRIPE_BYTES, Code
from memckpt.peers.fragments import Fragment, seal_stripe
from memckpt.peers.holder import Holder
from memckpt.peers.transport import Delivery, Met
from memckpt.peers.wire import (
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
    WindowIs,
    WireMessage,
    decode,
    encode,
)
from tests.peers_records import MemoryRoom, Records, layout_spec

NODES = ("a", "b", "c")
FAR = 1 << 62


class Line:
    """Stands for a transport: what has come, and what was sent to whom."""

    def __init__(self) -> None:
        self.come: deque[Delivery | Met] = deque()
        self.sent: dict[str, list[WireMessage]] = defaultdict(list)
        self.forgotten: list[str] = []
        self.refused: Counter[str] = Counter()
        self.bytes_sent = 0

    def receive(self) -> Delivery | Met | None:
        return self.come.popleft() if self.come else None

    def send(self, peer: str, body: bytes, payload: bytes | memoryview = b"") -> None:
        assert peer in NODES, "nobody knows how to reach it"
        self.sent[peer].append(decode(body))

    def room(self, peer: str) -> int:
        return 1

    def connect(self, peer: str, address: str) -> None:
        pass

    def forget(self, peer: str) -> None:
        self.forgotten.append(peer)

    def peers(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        pass

    def register(self, poller: object) -> None:
        pass

    def unregister(self, poller: object) -> None:
        pass


class Wire:
    """Stands for the channel to the agent."""

    def __init__(self) -> None:
        self._ends = os.pipe()
        self.told: list[Any] = []

    def fileno(self) -> int:
        return self._ends[0]

    def send(self, message: Any) -> None:
        self.told.append(message)

    def close(self) -> None:
        for end in self._ends:
            os.close(end)


def refuse_mirror(message: OpenMirror) -> MirrorRefused:
    raise AssertionError("no mirror was planned")


class Node:
    """The courier of one of three nodes, one rank on each, with k = 2 and m = 1: each keeps a piece of both others."""

    def __init__(self, name: str = "b") -> None:
        self.name = name
        self.line, self.wire = Line(), Wire()
        self.courier = Courier(self.wire)  # type: ignore[arg-type]
        self.holder = Holder(name, MemoryRoom)
        self.courier._holder = Mirroring(self.holder, refuse_mirror, self.wire.send)
        self.courier._node = name
        self.courier._transport = self.line  # type: ignore[assignment]
        self.job = PeerJob(
            attempt="a1",
            nodes=tuple(PeerNode(one, "tcp://127.0.0.1:1", (one,)) for one in NODES),
            units=tuple(PeerUnit(index, (index,), False) for index in range(3)),
            scheme="erasure",
            data=2,
            tolerate=1,
            backend="",
            wait=True,
            rate_bytes_per_second=None,
            overhead=0.01,
            record=0,
        )
        self.courier._join(Join(self.job))
        self.records = {rank: Records(layout_spec((rank,), elements=64), seed=rank) for rank in range(3)}
        self.code = Code(2, 1)

    @property
    def member(self) -> Member:
        assert self.courier._member is not None
        return self.courier._member

    @property
    def refused(self) -> int:
        return sum(self.member.refused.values())

    def says(self, peer: str, *messages: WireMessage, payload: bytes = b"") -> list[WireMessage]:
        """A peer says something; what it is told."""
        before = len(self.line.sent[peer])
        for message in messages:
            self.line.come.append(Delivery(peer, encode(message), payload))
        while self.line.come or self.member.loopback:
            self.courier._take_deliveries()
        return self.line.sent[peer][before:]

    def piece(self, owner: str) -> int:
        kept = dict(self.member.placement.kept_by(NODES.index(self.name)))
        return kept[NODES.index(owner)]

    def window(self, owner: str, /, **other: Any) -> Any:
        told = self.records[NODES.index(owner)].window("g" + owner, self.code, node=owner)
        return msgspec.structs.replace(told, **{"piece": self.piece(owner), **other})

    def put(self, owner: str, record: int, **other: Any) -> tuple[Put, bytes]:
        rank = other.pop("rank", NODES.index(owner))
        sealed = seal_stripe(
            self.code,
            b"data of " + owner.encode(),
            generation="g" + owner,
            owner=(rank,),
            record=record,
            stripe=0,
            stripes=1,
        )
        fragment, payload = sealed[self.piece(owner)]
        return Put(msgspec.structs.replace(fragment, **other), 100), bytes(payload)

    def keep(self, owner: str, record: int) -> list[WireMessage]:
        put, payload = self.put(owner, record)
        return self.says(owner, put, payload=payload)

    def send_own(self) -> None:
        """This node's own rank writes a generation, and all of it goes out."""
        records = self.records[NODES.index(self.name)]
        message = SendGeneration(
            ranks=records.spec.local_ranks, generation="own", number=1, spec=records.spec, base=2,
            records=records.held, missing=(), plain=b"", history=(),
        )  # fmt: skip
        self.member.begin(message, records.duplicates())
        for owner in self.member.owners:
            for peer in NODES:
                owner.met(peer)
            while owner.pump(1 << 30):
                pass

    def all_store(self, *records: int) -> None:
        rank = (NODES.index(self.name),)
        for peer in NODES:
            if peer != self.name:
                self.says(peer, *(Stored(rank, "own", record) for record in (STATIC, *records)))
        self.member.work(0.0)

    def close(self) -> None:
        self.courier._leave()
        self.courier.close()
        self.wire.close()
        for records in self.records.values():
            records.close()
        self.code.close()


@pytest.fixture
def node() -> Iterator[Node]:
    with closing(Node()) as node:
        yield node


def test_what_a_peer_may_say_is_done(node: Node) -> None:
    assert node.says("a", Open(node.window("a"))) == []
    assert node.keep("a", 3) == [Stored((0,), "ga", 3)]
    assert node.says("a", AskManifest(1, (0,), "ga", 3))[0] == Manifest(1, 3, 9, node.put("a", 3)[0].fragment.digest)
    node.send_own()
    node.all_store(1, 2, 3, 4, 5)
    told = [one for one in node.line.sent["a"] if isinstance(one, Acknowledged)]
    assert (told[-1].node, told[-1].record, told[-1].whole) == ("b", 5, True)
    node.says("a", Watermark(4, True))
    assert node.member.watermark == Watermark(4, True)
    assert node.refused == 0


WRONG_WINDOWS: dict[str, dict[str, Any]] = {
    "of another node's ranks": {"owner": (2,)},
    "of this node's ranks": {"owner": (1,)},
    "of no ranks": {"owner": ()},
    "of another node": {"node": "c"},
    "a piece for somebody else": {"piece": 5},
    "a piece below": {"piece": -1},
    "no data": {"data": 0},
    "much data": {"data": FAR},
    "no tolerance": {"tolerate": 0},
    "much tolerance": {"tolerate": FAR},
    "private": {"private": True},
    "for a mirror": {"mirror": True},
}


@pytest.mark.parametrize("wrong", WRONG_WINDOWS)
def test_a_window_that_is_not_as_planned_is_refused(node: Node, wrong: str) -> None:
    assert node.says("a", Open(node.window("a", **WRONG_WINDOWS[wrong]))) == []
    assert (node.holder.windows(), node.refused) == ([], 1)
    assert node.says("a", Open(node.window("a"))) == []
    assert len(node.holder.windows()) == 1


def test_a_peer_does_nothing_to_what_is_kept_of_another(node: Node) -> None:
    node.says("a", Open(node.window("a")))
    node.keep("a", 3)
    put, payload = node.put("a", 4)
    node.says("c", put, payload=payload)
    node.says("c", Abandon((0,), "ga", 3), Open(node.window("a")), Open(node.window("a", node="c")))
    assert node.refused == 4
    window = node.holder.window((0,), "ga")
    assert window is not None
    assert window.records() == [3]


def test_what_nobody_has_sent_nobody_has_stored(node: Node) -> None:
    node.send_own()
    node.says("a", Stored((1,), "own", FAR), Stored((1,), "other", 3), NotStored((1,), "other", 3, "no"))
    node.says("c", Stored((0,), "own", 3), NotStored((7,), "own", 3, "no"))
    node.member.work(0.0)
    [owner] = node.member.owners
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
    assert node.holder.windows()[0].records() == [2, 3, 4, 5]
    node.says("a", Watermark(-FAR, True))
    assert node.member.watermark.record == 3
    node.says("a", Acknowledged("a", 9, 0, True))
    assert node.refused == 2


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
        node.courier._take_deliveries()
    assert node.refused == 6


def test_questions_for_what_is_not_here_have_an_answer(node: Node) -> None:
    node.says("a", Open(node.window("a")))
    node.keep("a", 3)
    [live] = [node.records[1]]
    bare = msgspec.structs.replace(live.spec, static=())
    with closing(Records(bare)) as records:
        serving = records.serve(5)
        node.courier._send_generation(serving, records.duplicates())
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


def test_a_recovery_that_is_cut_off_leaves_no_memory_behind(node: Node) -> None:
    source = UnitSource((0,), 5, "ga", None, (("a", 0), ("c", 1)), False, None, 2, 2)
    regions = node.records[0].duplicates()
    node.courier._handle(Describe(source), [])
    node.courier._fill(Fill(source, node.records[0].spec), regions)
    serving = node.records[1].duplicates()
    again = node.records[1].duplicates()
    node.courier._send_generation(node.records[1].serve(5), serving)
    node.courier._send_generation(node.records[1].serve(4), again)
    assert {region.fd for region in serving} == {-1}
    node.courier._leave()
    assert {region.fd for region in (*regions, *again)} == {-1}


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
    st.builds(Put, FRAGMENTS, NUMBERS),
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
)
CHANGES = st.dictionaries(
    st.sampled_from(
        ["owner", "node", "piece", "data", "tolerate", "base", "period", "kept", "every", "record_bytes", "mirror"]
    ),
    NUMBERS,
    min_size=1,
    max_size=2,
)


@given(st.lists(MESSAGES | CHANGES, max_size=30), st.binary(max_size=20))
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
def test_whatever_a_broken_peer_says_the_others_do_not_notice(messages: list[Any], payload: bytes) -> None:
    """The courier of b goes on; what it keeps of a, what it has sent, and what it reads from a are as they were."""
    with closing(Node()) as node:
        node.says("a", Open(node.window("a")))
        node.keep("a", 3)
        node.send_own()
        node.courier._send_generation(node.records[1].serve(5), node.records[1].duplicates())
        source = UnitSource((0,), 5, "ga", None, (("a", 0),), False, None, 2, 2)
        node.courier._describe(Describe(source))
        node.courier._fill(Fill(source, node.records[0].spec), node.records[0].duplicates())
        for message in messages:
            if isinstance(message, dict):
                if isinstance(message.get("owner"), int):
                    message["owner"] = (message["owner"],)
                if "mirror" in message:
                    message["mirror"] = True
                if "node" in message:
                    message["node"] = str(message["node"])
                message = Open(node.window("c", **message))
            node.says("c", message, payload=payload)
            node.member.work(0.0)
            node.courier._finish_readers()
        window = node.holder.window((0,), "ga")
        assert window is not None
        assert window.records() == [3]
        assert node.member.watermark == Watermark(0, False)
        assert node.member.owners[0].acknowledged == 0
        assert len(node.courier._readers) == len(node.courier._asking) == 1
        node.all_store(1, 2, 3, 4, 5)
        assert node.keep("a", 4) == [Stored((0,), "ga", 4)]


# Of which layout a state is


class Question:
    """Of a state of which two nodes have pieces, or with another's for what all replicas have."""

    def __init__(self, **other: Any) -> None:
        source = UnitSource((0,), 5, "g", None, (("a", 0), ("b", 1), ("c", 2)), False, None, 2, 2)
        self.source = msgspec.structs.replace(source, **other)
        self.asked: list[tuple[str, WireMessage]] = []
        numbers = iter(range(1, 9))
        self.asking = Asking(self.source, lambda: next(numbers), lambda *one: self.asked.append(one), 0.0)

    def says(self, peer: str, spec: Any, generation: str = "g", **other: Any) -> None:
        question = next(one for _, one in self.asked if isinstance(one, AskWindow) and (one.generation == generation))
        body = spec if isinstance(spec, bytes) else msgspec.msgpack.encode(spec)
        answer: Any = WindowIs(question.request, question.owner, body) if spec is not None else None
        self.asking.answered(peer, answer or GotNone(question.request, "no"), 1.0)

    @property
    def result(self) -> Described:
        assert self.asking.result is not None
        return self.asking.result


SPEC = layout_spec((0,), elements=64)
OTHER = msgspec.structs.replace(SPEC, period=3)


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
    assert question.result == Described((0,), SPEC, "", bad("b", "c"))
    question = Question()
    question.asking.tend(PATIENCE_SECONDS + 1)
    assert question.result == Described((0,), None, question.result.problem, bad("a", "b", "c"))


@pytest.mark.parametrize("first", ["pieces", "replica"])
def test_a_replica_has_to_be_of_the_same_layout(first: str) -> None:
    for said, fits in ((SPEC, True), (OTHER, False), (None, False), (b"x", False)):
        question = Question(private=True, replica=("a", (2,)))
        if first == "replica":
            question.says("a", said, LIVE_SHARED)
        for peer in "abc":
            question.says(peer, SPEC)
        if first == "pieces":
            question.says("a", said, LIVE_SHARED)
        assert (question.result.spec == SPEC) == fits
        if not fits:
            assert question.result.bad == bad("a", ranks=(2,), generation="")


def test_a_live_state_has_one_source() -> None:
    question = Question(live="b", pieces=(), generation="")
    assert [(peer, type(one)) for peer, one in question.asked] == [("b", AskWindow)]
    question.says("b", SPEC, LIVE_ALL)
    assert question.result == Described((0,), SPEC)
    question = Question(live="b", pieces=(), generation="")
    question.says("b", None, LIVE_ALL)
    assert question.result.bad == bad("b", generation="")


def test_an_answer_says_what_became_of_a_state(node: Node) -> None:
    source = UnitSource((0,), 5, "ga", None, (("a", 0), ("c", 1)), False, None, 2, 2)
    node.courier._fill(Fill(source, node.records[0].spec), node.records[0].duplicates())
    asked = [one for one in node.line.sent["a"] if isinstance(one, AskManifest)]
    assert len(asked) == 3
    node.says("a", *(GotNone(one.request, "gone") for one in asked))
    node.says("c", *(GotNone(one.request, "gone") for one in asked))
    node.courier._finish_readers()
    [filled] = [one for one in node.wire.told if isinstance(one, Filled)]
    assert "of ranks [0] cannot be had" in filled.problem
    assert set(filled.bad) == set(bad("a", "c", generation="ga"))
    assert node.courier._readers == []
