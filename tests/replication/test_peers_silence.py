"""Plans of a recovery whose sources are damaged or silent: made again without them, or with them once they answer."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

import pytest

from memckpt.errors import AgentError, NothingHeldError, PeerError
from memckpt.protocol.recovery import BadSourceSeen, FromFragments, Recover, Recovered
from memckpt.recovery.plan import Plan, RestoreRecord, RestoreStored, StartOver
from memckpt.recovery.sources import BadSource, Fetch
from memckpt.session.peers import PeerRecovery
from memckpt.state.records import Timeline
from tests.support.trainings.recovery_lab import SPEC

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
            return self._recovery.fetch_what_is_lacking(self.plan_without, SPEC, lambda plan: None, before, adopt=False)
        finally:
            assert not self.answers


# Damage


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


# Silence


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
