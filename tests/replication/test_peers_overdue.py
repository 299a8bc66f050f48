"""Nodes that acknowledge nothing, or are not heard: when training does not wait for them, and when it does again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import msgspec
import pytest

from memckpt.memory.pages import LifePage, LifeWatch
from memckpt.protocol.replication import Deserted, Join, SendRecord, WatermarkAdvanced
from memckpt.replication.coding.blob import STATIC
from memckpt.replication.pacing.watermark import LOST_LIMITS, Absence, Overdue
from memckpt.replication.process.replicator import describe
from memckpt.replication.transport.messages import Acknowledged, NotStored, Stored, Watermark
from tests.support.cluster.replicator_node import Node


@pytest.mark.promise(
    "if the replicator or the agent of a node hangs, or both, training that waits for peers goes on without the "
    "node after a deadline, reports it, and is protected again when the node is back"
)
def test_time_counts_from_the_last_progress_and_only_while_somebody_looks() -> None:
    overdue, now = Overdue(10.0), 0.0

    def after(seconds: int, **owing: int) -> frozenset[str]:
        nonlocal now
        for _ in range(seconds):
            now += 1.0
            overdue.check_owing(owing, now)
        return overdue.nodes

    after(1, b=0, c=0)
    assert not after(9, b=0, c=1)
    assert after(1, b=0, c=1) == {"b"}
    assert after(1, b=1, c=1) == {"c"}
    assert not after(1, b=1), "c owes nothing any more"
    now += 3600.0  # the replicator was stopped itself
    assert not after(1, b=1)
    assert after(9, b=1) == {"b"}


@pytest.mark.promise("a silent node that may be lost")
def test_a_silent_node_is_not_waited_for_once_its_trainers_are_known_to_live() -> None:
    absence, now = Absence(10.0), 0.0

    def after(seconds: int, newest: int) -> frozenset[str]:
        nonlocal now
        for _ in range(seconds):
            now += 1.0
            absence.check_heard({"b": 0.0}, newest, 1, now)
        return absence.nodes

    after(1, 5)
    assert not after(11, 6), "the record may have been made before"
    assert after(1, 7) == {"b"}
    absence = Absence(10.0)
    after(1, 5)
    assert not after(10 * LOST_LIMITS - 1, 6)
    assert after(1, 6) == {"b"}, "not for ever"
    absence.check_heard({"b": now}, 6, 1, now)
    assert not absence.nodes


@pytest.fixture(params=["a", "b"], ids=["leads", "follows"])
def node(request: pytest.FixtureRequest) -> Iterator[Node]:
    with closing(Node(request.param)) as node:
        node.send_own()
        yield node


def works(node: Node, seconds: int = 1) -> Acknowledged:
    """Let time pass; what the node says of itself."""
    for _ in range(seconds):
        node.now += 1.0
        node.member.work(node.now)
    return node.member._told


def others(node: Node) -> list[str]:
    return [name for name in "abc" if name != node.name]


def store(node: Node, holder: str, *records: int) -> None:
    rank = ("abc".index(node.name),)
    node.says(holder, *(Stored(rank, "own", record) for record in records))


def passed(node: Node) -> WatermarkAdvanced:
    return next(one for one in reversed(node.wire.told) if isinstance(one, WatermarkAdvanced))


@pytest.mark.promise("acknowledgements of a node that sends none, or only refuses records")
def test_training_does_not_wait_for_a_holder_that_acknowledges_nothing(node: Node) -> None:
    limit = int(node.job.ack_timeout_seconds)
    one, other = others(node)
    records = sorted(record for record in node.records["abc".index(node.name)].held)
    store(node, other, STATIC, *records)
    assert not works(node, limit).lost
    assert works(node, 2).lost
    assert f"does not wait for {one}" in describe(node.member, "plain", "").problem
    store(node, one, STATIC, *records[:1])
    assert not works(node).lost, "it makes progress"
    assert works(node, limit + 1).lost
    store(node, one, *records[1:])
    assert not works(node, 2 * limit).lost, "it has all that there is"


@pytest.mark.promise("acknowledgements of a node that sends none, or only refuses records")
def test_a_holder_that_only_refuses_acknowledges_nothing(node: Node) -> None:
    one, other = others(node)
    records = sorted(record for record in node.records["abc".index(node.name)].held)
    store(node, other, STATIC, *records)
    rank = ("abc".index(node.name),)
    for _ in range(2 * int(node.job.ack_timeout_seconds)):
        node.line.taken[one] += 1  # the link acknowledges what is then refused
        node.says(one, NotStored(rank, "own", 2, "no memory", True))
        works(node)
    assert node.member._told.lost


def test_what_waits_here_for_its_turn_is_not_blamed_on_its_holder(node: Node) -> None:
    for peer in others(node):
        for owner in node.member.senders:
            owner.met(peer)  # all of it is to be sent, and nothing is on its way
    node.member.pacer.delay = lambda *_: 3600.0  # type: ignore[method-assign]
    assert not works(node, 3 * int(node.job.ack_timeout_seconds)).lost


def test_training_that_does_not_wait_for_peers_waits_for_none(node: Node) -> None:
    node.job = msgspec.structs.replace(node.job, wait=False)
    node.replicator._join(Join(node.job))
    node.send_own()
    assert not works(node, 3 * int(node.job.ack_timeout_seconds)).lost


@pytest.mark.promise("a silent node whose trainers are known to be alive")
def test_a_silent_node_is_given_up_by_the_leader_and_a_silent_leader_by_all(node: Node) -> None:
    limit, silent = int(node.job.ack_timeout_seconds), others(node)[0]
    store(node, others(node)[1], STATIC, *sorted(node.records["abc".index(node.name)].held))
    node.member.unheard = frozenset([silent])
    node.line.heard_at = {silent: 0.0}
    works(node)
    own = node.member.senders[0]
    newest = own.newest or 0
    for record in (newest + 1, newest + 2):
        own.committed(record)
    own.pump(1 << 30)
    store(node, others(node)[1], newest + 1, newest + 2)
    works(node, limit + 1)
    assert node.member.watermark.waits_suspended
    assert passed(node).waits_suspended
    assert not node.member.watermark.whole
    node.member.unheard = frozenset()
    node.line.heard_at = {silent: node.now}
    works(node)
    assert not node.member.watermark.waits_suspended


@pytest.mark.promise("a silent node whose trainers are known to be alive")
@pytest.mark.parametrize(
    ("said", "away"),
    [([()], True), ([(), ("c",)], False), ([("c",), ()], True), ([], False)],
    ids=["heard", "lost", "back", "nothing said"],
)
@pytest.mark.parametrize("led", [True, False], ids=["led", "alone"])
def test_a_silent_node_that_the_leader_hears_is_not_waited_for(
    said: list[tuple[str, ...]], away: bool, led: bool
) -> None:
    """No record follows: training here waits for that node."""
    with closing(Node("b")) as node:
        node.send_own()
        store(node, "a", STATIC, *sorted(node.records[1].held))
        node.member.unheard = frozenset({"c"} if led else {"c", "a"})
        node.line.heard_at = {"c": 0.0}
        for one in said:
            node.says("a", Watermark(0, False, unheard=one))
        assert not works(node, int(node.job.ack_timeout_seconds)).lost
        assert works(node, 2).lost == (away and led)
        assert works(node, int(node.job.ack_timeout_seconds * LOST_LIMITS)).lost


def test_a_leader_that_is_another_process_has_to_notice_first_who_is_silent() -> None:
    absence, now = Absence(10.0), 0.0
    absence.vouched = frozenset({"c"})

    def after(seconds: int) -> frozenset[str]:
        nonlocal now
        for _ in range(seconds):
            now += 1.0
            absence.check_heard({"c": 0.0}, 5, 1, now)
        return absence.nodes

    assert not after(10)
    absence.leader_met()
    assert not after(10)
    assert after(1) == {"c"}


def test_a_leader_says_whom_it_does_not_hear() -> None:
    with closing(Node("a")) as node:
        node.member.unheard = frozenset({"c"})
        works(node)
        assert node.line.sent["b"][-1] == Watermark(0, False, unheard=("c",))
        node.member.unheard = frozenset()
        works(node)
        assert node.line.sent["b"][-1] == Watermark(0, False, unheard=())


@pytest.mark.promise("a node whose agent hangs, or whose trainers have lost their agent")
def test_nobody_waits_for_a_node_whose_trainers_go_on_without_their_agent(node: Node) -> None:
    for peer in others(node):
        store(node, peer, STATIC, *sorted(node.records["abc".index(node.name)].held))
    assert not works(node).lost
    node.replicator._handle(Deserted(), [])
    assert works(node).lost
    rank = ("abc".index(node.name),)
    record = node.records[rank[0]].held[2]
    node.replicator._handle(SendRecord(rank, "own", 3, *record), [])
    assert not works(node).lost, "the agent has records again"


@pytest.mark.promise("a node whose agent hangs, or whose trainers have lost their agent")
def test_an_agent_that_stands_still_is_noticed_by_its_replicator() -> None:
    """Its page is moved by nobody, and there is no such process."""
    with closing(Node()) as node, closing(LifePage.create()) as page:
        node.replicator._agent = watch = LifeWatch(page, -1, 0.0, "all")
        watch.look_for_life()
        node.replicator._look_at_agent()
        assert "stands still" in node.member.deserted


def test_whoever_takes_part_again_has_strayed_as_far_as_it_knows() -> None:
    with closing(Node()) as node:
        node.replicator._join(Join(msgspec.structs.replace(node.job, record=None), rejoin=True))
        assert node.member._run_ahead.beyond
        assert works(node).lost
        node.says("a", Watermark(0, False))
        works(node)
        assert not node.member._run_ahead.beyond, "nothing is committed yet"
