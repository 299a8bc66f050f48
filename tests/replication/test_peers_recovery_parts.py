"""Recoveries that are given up, cut off or slow, seen by agent, trainer and replicator; sources damaged or silent."""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from memckpt.agent.replication.peer_tier import Recovery
from memckpt.config import AgentConfig, StorageConfig
from memckpt.errors import AgentError, AgentGoneError, NothingHeldError, PeerError
from memckpt.protocol.channel import Channel
from memckpt.protocol.replication import (
    BadSourceSeen,
    Describe,
    Described,
    Fill,
    Filled,
    FromFragments,
    FromNode,
    Join,
    Recover,
    Recovered,
    RecoveryProgress,
    WantedState,
)
from memckpt.recovery.plan import Plan, RestoreRecord, RestoreStored, StartOver
from memckpt.recovery.sources import BadSource, Fetch
from memckpt.replication.process.questions import Asking
from memckpt.replication.process.reader import LIVE_ALL, LIVE_SHARED, PATIENCE_SECONDS
from memckpt.replication.transport import messages
from memckpt.session.link import AgentLink
from memckpt.session.peers import PeerRecovery
from memckpt.session.resume.storage_tier import Resharding
from memckpt.state.records import Branch, HeldFragments, HeldRecords, RankGroup, Timeline
from tests.support.cluster.peers_records import layout_spec
from tests.support.cluster.replicator_node import Node
from tests.support.linked import link_over
from tests.support.trainings.recovery_lab import SPEC, Place, wanted


class Fetching:
    """A recovery of two units, and what it says to the replicator and the trainer."""

    def __init__(self, number: int) -> None:
        self.places = {(0,): Place(), (1,): Place()}
        self.sent: list[Any] = []
        self.done: list[Any] = []
        message = Recover(5, (), (wanted(0), wanted(1)), None)
        places: Any = self.places.get
        self.recovery = Recovery(
            number, message, places, lambda message, fds: self.sent.append(message), self.done.append
        )
        self.recovery.start()


# The agent's side


def test_what_a_replicator_answers_to_a_recovery_that_was_given_up_is_ignored() -> None:
    now = Fetching(2)
    assert [(one.wanted.ranks, one.recovery) for one in now.sent] == [((0,), 2), ((1,), 2)]
    now.recovery.answered(Described((0,), SPEC, recovery=1))
    now.recovery.answered(Described((0,), None, "nobody says", recovery=1))
    assert not now.places[(0,)].rooms
    assert not now.done
    now.recovery.answered(Described((0,), SPEC, recovery=2))
    now.recovery.answered(Filled((0,), recovery=1))
    [room] = now.places[(0,)].rooms
    assert not room.filled
    now.recovery.answered(Filled((0,), recovery=2))
    assert now.places[(0,)].held is room
    assert room.filled


@pytest.mark.parametrize(
    "said", [Filled((7,), recovery=1), Described((7,), SPEC, recovery=1), Filled((1,), recovery=1)]
)
def test_an_answer_to_what_was_not_asked_is_ignored(said: Described | Filled) -> None:
    now = Fetching(1)
    now.recovery.answered(said)
    assert not now.done
    for ranks in ((0,), (1,)):
        now.recovery.answered(Described(ranks, SPEC, recovery=1))
        now.recovery.answered(Described(ranks, SPEC, recovery=1))
        now.recovery.answered(Filled(ranks, recovery=1))
        now.recovery.answered(Filled(ranks, recovery=1))
    assert [len(place.rooms) for place in now.places.values()] == [1, 1]
    assert [type(one) for one in now.done] == [Recovered]
    assert not now.done[0].problem


def test_a_replicator_that_dies_as_it_is_asked_fails_the_recovery_once() -> None:
    done: list[Any] = []

    def send(message: object, fds: object) -> None:
        recovery.fail("the replicator is gone")

    recovery = Recovery(1, Recover(5, (), (wanted(0), wanted(1)), None), lambda ranks: None, send, done.append)
    recovery.start()
    assert [one.problem for one in done] == ["the replicator is gone"]


def test_what_fails_for_a_reason_of_the_node_itself_is_blamed_on_nobody() -> None:
    now = Fetching(1)
    bad = BadSourceSeen("c", (0,), "g")
    now.recovery.answered(Described((0,), SPEC, "", (bad,), recovery=1))
    now.recovery.fail("no room")
    assert now.done[-1].bad == ()
    now = Fetching(1)
    now.recovery.answered(Described((0,), SPEC, "", (bad,), recovery=1))
    now.recovery.answered(Described((1,), None, "too few", (bad,), recovery=1))
    assert now.done[-1].bad == (bad, bad)


# The trainer's side


@pytest.fixture
def client() -> Iterator[tuple[AgentLink, Channel]]:
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    # Of one message: a recovery is not bound to it.
    client, channel = link_over(Channel(ends[0]), AgentConfig(start_seconds=0.01)), Channel(ends[1])
    with closing(channel):
        yield client, channel
        client.abandon()


def test_a_trainer_waits_for_a_recovery_as_long_as_its_agent_lives(
    client: tuple[AgentLink, Channel], monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, agent = client
    answers = deque([None, None, RecoveryProgress(5), None, Recovered(nbytes=7)])
    limits: list[float | None] = []

    def poll(timeout: float | None) -> tuple[Any, list[int]] | None:
        limits.append(timeout)
        answer = answers.popleft()
        return None if answer is None else (answer, [])

    heard: list[RecoveryProgress] = []
    with monkeypatch.context() as context:
        context.setattr(trainer.connection.channel, "poll", poll)
        assert trainer.recover(Recover(5, (), (), None), heard.append) == Recovered(nbytes=7)
    assert heard == [RecoveryProgress(5)]
    assert not answers
    agent.send(RecoveryProgress(6))
    agent.shut_down()
    with pytest.raises(AgentGoneError):
        trainer.recover(Recover(5, (), (), None), heard.append)


# The replicator's side


@pytest.fixture
def node() -> Iterator[Node]:
    with closing(Node()) as node:
        yield node


def read_two(node: Node, recovery: int) -> list[Any]:
    """Have the replicator ask of one unit, and fill another; the regions that it fills."""
    regions = node.records[0].duplicates()
    node.replicator._handle(Describe(wanted(2), recovery), [])
    node.replicator._fill(Fill(wanted(0), node.records[0].spec, recovery), regions)
    return regions


def test_a_new_recovery_ends_what_is_read_for_the_one_before(node: Node) -> None:
    first = read_two(node, 1)
    [former] = node.replicator._fetching._asking
    second = read_two(node, 2)
    assert {region.fd for region in first} == {-1}
    assert all(region.fd >= 0 for region in second)
    assert len(node.replicator._fetching._readers) == len(node.replicator._fetching._asking) == 1
    [asking] = node.replicator._fetching._asking
    spec = msgspec.msgpack.encode(node.records[2].spec)
    for one in (former, asking):
        for peer in ("a", "c"):
            node.says(peer, messages.WindowIs(one._request, (2,), spec))
    for news in node.replicator._fetching.take_news():
        node.wire.send(news)
    assert [(type(one), one.recovery) for one in node.wire.told] == [(Described, 2)]


def test_a_plan_that_is_made_once_more_ends_what_is_read_by_the_former_code(node: Node) -> None:
    regions = read_two(node, 1)
    node.replicator._join(Join(node.job))
    assert {region.fd for region in regions} == {-1}
    assert not node.replicator._fetching._readers
    assert not node.replicator._fetching._asking
    assert not [one for one in node.wire.told if isinstance(one, (Filled, RecoveryProgress))]


class Question:
    """Of a state of which two nodes have fragments, or with another's for what all replicas have."""

    def __init__(self, node: str = "", replica: tuple[str, RankGroup] | None = None) -> None:
        source: FromNode | FromFragments = FromNode(node)
        if not node:
            period = 2 if replica is None else 1
            source = FromFragments("g", (("a", 0), ("b", 1), ("c", 2)), 2, period, replica)
        self.asked: list[tuple[str, messages.WireMessage]] = []
        numbers = iter(range(1, 9))
        self.asking = Asking(
            WantedState((0,), 5, source), lambda *one: self.asked.append(one), lambda: next(numbers), 0.0
        )

    def says(self, peer: str, spec: Any, generation: str = "g", **other: Any) -> None:
        question = next(
            one for _, one in self.asked if isinstance(one, messages.AskWindow) and (one.generation == generation)
        )
        body = spec if isinstance(spec, bytes) else msgspec.msgpack.encode(spec)
        answer: Any = messages.WindowIs(question.request, question.owner, body) if spec is not None else None
        self.asking.take_answer(peer, answer or messages.GotNone(question.request, "no"))

    @property
    def result(self) -> Described:
        assert self.asking.result is not None
        return self.asking.result


LAYOUT = layout_spec((0,), elements=64)
OTHER = msgspec.structs.replace(LAYOUT, period=3)


def silent(*nodes: str) -> tuple[BadSourceSeen, ...]:
    return tuple(msgspec.structs.replace(one, silent=True) for one in bad(*nodes))


def bad(*nodes: str, ranks: tuple[int, ...] = (0,), generation: str = "g") -> tuple[BadSourceSeen, ...]:
    return tuple(BadSourceSeen(node, ranks, generation) for node in nodes)


def test_what_most_say_of_a_layout_counts() -> None:
    question = Question()
    question.says("stranger", OTHER)
    question.says("a", LAYOUT)
    question.says("a", OTHER)
    question.says("b", OTHER)
    assert question.asking.result is None
    question.says("c", LAYOUT)
    assert question.result == Described((0,), LAYOUT, "", bad("b"))
    question.says("b", None)
    assert question.result.spec == LAYOUT


@pytest.mark.parametrize(
    "said", [(LAYOUT, OTHER, None), (None, None, None), (b"", b"", LAYOUT), (b"x", b"x", b"x")], ids=range(4)
)
def test_where_no_layout_is_certain_all_are_named(said: tuple[Any, ...]) -> None:
    question = Question()
    for peer, spec in zip("abc", said, strict=True):
        question.says(peer, spec)
    assert question.result.spec is None
    assert "ranks [0]" in question.result.problem
    assert question.result.bad == bad(*"abc")


def test_a_layout_that_cannot_be_is_not_handed_on() -> None:
    question = Question()
    for peer in "abc":
        question.says(peer, msgspec.structs.replace(LAYOUT, period=-1))
    assert "period=-1" in question.result.problem
    assert question.result.bad == bad("a", "b", "c")


def test_those_that_are_silent_do_not_hold_it_up_for_ever() -> None:
    question = Question()
    question.says("a", LAYOUT)
    question.asking.tend(PATIENCE_SECONDS)
    assert question.asking.result is None
    question.asking.tend(PATIENCE_SECONDS + 1)
    assert question.result == Described((0,), LAYOUT, "", silent("b", "c"))
    question = Question()
    question.asking.tend(PATIENCE_SECONDS + 1)
    assert question.result == Described((0,), None, question.result.problem, silent("a", "b", "c"))


@pytest.mark.parametrize("first", ["fragments", "replica"])
def test_a_replica_has_to_be_of_the_same_layout(first: str) -> None:
    for said, fits in ((LAYOUT, True), (OTHER, False), (None, False), (b"x", False)):
        question = Question(replica=("a", (2,)))
        if first == "replica":
            question.says("a", said, LIVE_SHARED)
        for peer in "abc":
            question.says(peer, LAYOUT)
        if first == "fragments":
            question.says("a", said, LIVE_SHARED)
        assert (question.result.spec == LAYOUT) == fits
        if not fits:
            assert question.result.bad == bad("a", ranks=(2,), generation="")


def test_a_live_state_has_one_source() -> None:
    question = Question(node="b")
    assert [(peer, type(one)) for peer, one in question.asked] == [("b", messages.AskWindow)]
    question.says("b", LAYOUT, LIVE_ALL)
    assert question.result == Described((0,), LAYOUT)
    question = Question(node="b")
    question.says("b", None, LIVE_ALL)
    assert question.result.bad == bad("b", generation="")


# Plans, made again without sources that are damaged, or with silent ones once they answer

NEXT = Timeline(2, "n")
FETCH = Fetch((0,), "a", 5, FromFragments("g", (("c", 0), ("d", 1)), 1, 2))
RESTORE = RestoreRecord(NEXT, 5, 50, "peers", 0, (FETCH,), ())
STORED, OVER = RestoreStored(NEXT, (), "lost"), StartOver(NEXT, "lost", discard=True)
C, D = BadSource("c", (0,), "g"), BadSource("d", (0,), "g")

FETCHED, NO_ROOM = Recovered(), Recovered("no room")


def fails(damaged: str = "", silent: str = "") -> Recovered:
    """The answer of an agent that cannot fetch, as some nodes' fragments are damaged, and others do not answer."""
    seen = [BadSourceSeen(node, (0,), "g") for node in damaged]
    return Recovered("too few", (*seen, *(BadSourceSeen(node, (0,), "g", silent=True) for node in silent)))


class Alone:
    """Stands for the ranks of a job of which this is the only one."""

    rank, node, nonce, groups, local_ranks, leads = 0, "a", "a1", ((0,),), (0,), True

    def together(self, work: Callable[[], Any]) -> list[Any]:
        return [work()]


class Start:
    """A start with an agent whose answers are known before; each takes `seconds`.

    Args:
        needed: nodes that the newest state cannot be had without.
        without: the plan without one of them, or why there is none.
    """

    def __init__(
        self,
        *answers: Recovered,
        needed: str = "c",
        without: Plan | NothingHeldError = STORED,
        patience: float = 300.0,
        seconds: float = 100.0,
    ) -> None:
        self.client = self
        self.answers = list(answers)
        self.asked: list[set[BadSource]] = []
        self._needed, self._without, self._seconds = needed, without, seconds
        self._now = 0.0
        ranks: Any = Alone()
        ours: Any = self
        self._recovery = PeerRecovery(ranks, ours, patience, None, clock=lambda: self._now)

    def recover(self, message: Recover, progress: object) -> Recovered:
        self._now += self._seconds
        return self.answers.pop(0)

    def plan_without(self, avoided: Collection[BadSource], before: bool) -> Plan:
        self.asked.append(set(avoided))
        if not {one.node for one in avoided} & set(self._needed):
            return replace(RESTORE, fetches=(replace(FETCH, before=before),))
        if isinstance(self._without, NothingHeldError):
            raise self._without
        return self._without

    def plan(self, before: bool = False) -> Plan:
        """The plan that is carried out in the end."""
        try:
            return self._recovery.plan_with_peers(self.plan_without, SPEC, lambda plan: None, before, adopt=False)
        finally:
            assert not self.answers


def test_a_node_that_cannot_fetch_for_a_reason_of_its_own_ends_the_start_and_drops_nothing() -> None:
    start = Start(NO_ROOM, FETCHED)
    assert start.plan() == RESTORE
    assert start.asked == [set(), set()]
    with pytest.raises(AgentError, match="no room"):
        Start(NO_ROOM, NO_ROOM).plan()


def test_sources_that_prove_to_be_bad_are_left_out_of_the_next_plan() -> None:
    start = Start(NO_ROOM, fails(damaged="c"), without=OVER)
    assert start.plan() is OVER
    assert start.asked == [set(), set(), {C}]


def test_where_damage_leaves_nothing_to_resume_that_is_said() -> None:
    with pytest.raises(NothingHeldError, match="resume='require'"):
        Start(fails(damaged="c"), without=NothingHeldError("resume='require'")).plan()


def test_the_record_before_costs_no_source_that_is_of_use_without_it() -> None:
    start = Start(fails(damaged="c"), FETCHED)
    plan = start.plan(before=True)
    assert isinstance(plan, RestoreRecord)
    assert [fetch.before for fetch in plan.fetches] == [False]
    assert start.asked == [set(), set()]


@pytest.mark.promise(
    "a silent node is asked again if a resume would go back further without it, and its fragments are not dropped "
    "before a new attempt is protected"
)
def test_a_source_that_does_not_answer_is_asked_again_where_it_is_needed(caplog: pytest.LogCaptureFixture) -> None:
    start = Start(fails(silent="c"), fails(silent="c"), FETCHED)
    assert start.plan() == RESTORE
    assert start.asked[-1] == set()
    assert "c did not answer, and step 50 cannot be had without: asked again, for up to 300 s more" in caplog.text
    assert "for up to 200 s more" in caplog.text
    assert "to go on without, from storage, start again with peers.recovery_patience_seconds=0" in caplog.text


def test_patience_ends_where_another_state_serves(caplog: pytest.LogCaptureFixture) -> None:
    assert Start(*[fails(silent="c")] * 4).plan() is STORED
    assert "c did not answer for 300 s: training goes on from storage" in caplog.text


@pytest.mark.promise(
    "a start that can resume nothing without a silent node ends with an error after its patience, and drops nothing"
)
@pytest.mark.parametrize("without", [OVER, NothingHeldError("resume='require'")], ids=["auto", "require"])
def test_silence_ends_the_start_and_drops_nothing_where_nothing_else_can_be_resumed(
    caplog: pytest.LogCaptureFixture, without: StartOver | NothingHeldError
) -> None:
    found = "expected an answer of c, found none for 300 s; step 50 cannot be had without, .* nothing is dropped"
    with pytest.raises(PeerError, match=found):
        Start(*[fails(silent="c")] * 4, without=without).plan()
    assert "to start over without, start again with resume='never'" in caplog.text


@pytest.mark.parametrize("without", [OVER, NothingHeldError("resume='require'")], ids=["auto", "require"])
def test_without_patience_silence_is_no_loss_either(without: StartOver | NothingHeldError) -> None:
    with pytest.raises(PeerError, match=r"answer of c, found none for 0 s; step 50 .* resume='never' starts over"):
        Start(fails(silent="c"), without=without, patience=0.0).plan()
    assert Start(fails(silent="c"), patience=0.0).plan() is STORED


@pytest.mark.promise(
    "a start that can resume nothing without a silent node ends with an error after its patience, and drops nothing"
)
@pytest.mark.parametrize("stores", [False, True], ids=["without storage", "with storage"])
def test_silence_ends_a_start_with_other_ranks_where_no_storage_can_serve(tmp_path: Path, stores: bool) -> None:
    """Of two former nodes one has its state; of the other one fragments are left on two nodes, one of them silent."""
    said = {"history": (Branch(Timeline(1, "a"), None),), "world_size": 2, "records": (4, 5), "steps": (40, 50)}
    coded = {"data": 2, "generation": "g", "base": 3, "period": 1, "private": False, "replicas": (1,)}
    held = [HeldRecords("a", ranks=(0,), **said)]
    kept = [HeldFragments(node, (1,), index, **coded, **said) for index, node in enumerate("cd")]
    start = Start(*[Recovered("too few", (BadSourceSeen("c", (1,), "g", silent=True),))] * 4)
    peers: Any = SimpleNamespace(active=True, node_names=["a", "c", "d"])
    peers.plan_with_peers = lambda make, spec, adopt: start._recovery.plan_with_peers(
        make, spec, lambda plan: None, False, adopt
    )
    config: Any = SimpleNamespace(storage=StorageConfig() if stores else None)
    training: Any = SimpleNamespace(ranks=Alone(), config=config)
    link: Any = None
    resharding = Resharding(training, link, peers, tmp_path)
    if stores:
        assert resharding._bring_together(held, kept, "auto", SPEC) is None
    else:
        with pytest.raises(PeerError, match="expected an answer of c, found none for 300 s; step 50 cannot be had"):
            resharding._bring_together(held, kept, "auto", SPEC)
    assert not start.answers


def test_who_is_silent_is_not_waited_for_where_a_damaged_one_is_needed_as_well() -> None:
    start = Start(fails(silent="c", damaged="d"), needed="cd", without=OVER)
    assert start.plan() is OVER
    assert start.asked == [set(), {C, D}, {D}]


def test_who_is_silent_is_not_waited_for_where_others_have_the_same_state(caplog: pytest.LogCaptureFixture) -> None:
    start = Start(fails(silent="c"), FETCHED, without=RESTORE)
    assert start.plan() is RESTORE
    assert start.asked == [set(), {C}, set()]
    assert "did not answer" not in caplog.text


@pytest.mark.promise(
    "a silent node is asked again if a resume would go back further without it, and its fragments are not dropped "
    "before a new attempt is protected"
)
def test_who_was_silent_is_asked_again_once_those_that_have_the_same_state_prove_damaged() -> None:
    class One(Start):
        """Either of two nodes suffices."""

        def plan_without(self, avoided: Collection[BadSource], before: bool) -> Plan:
            self.asked.append(set(avoided))
            return OVER if {C, D} <= set(avoided) else RESTORE

    start = One(fails(silent="c"), fails(damaged="d"), FETCHED)
    assert start.plan() is RESTORE
    assert start.asked[-2:] == [{C, D}, {D}]


def test_sources_of_a_fetch_that_blames_none_of_them_are_silent_where_those_it_blames_are() -> None:
    class Other(Start):
        """A node that serves no longer is blamed again."""

        def plan_without(self, avoided: Collection[BadSource], before: bool) -> Plan:
            self.asked.append(set(avoided))
            return OVER if D in avoided else RESTORE

    start = Other(fails(silent="c"), fails(silent="c"), FETCHED)
    assert start.plan() is RESTORE
    assert start.asked[-2:] == [{C, D}, set()]
