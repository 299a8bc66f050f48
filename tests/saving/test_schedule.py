"""When a checkpoint is due and after which record; how many steps it is said that may be lost."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memckpt.agent.saving import schedule as schedule_module
from memckpt.agent.saving.schedule import Schedule
from memckpt.config import StorageConfig
from memckpt.journal.events import Decision
from memckpt.memory.generation import Generation
from memckpt.protocol.storing import Saved
from memckpt.protocol.trainer import Observed
from memckpt.state.spec import StateSpec
from tests.support.cluster.storage_node import Clock, Steps, spec_of

LONE, FIRST, SECOND = spec_of((0,)), spec_of((0,), world_size=2), spec_of((1,), world_size=2)
LEADS = st.sampled_from([2, 4, 16, 512])


class Run:
    """A schedule, the clock that it looks at, and a training that commits a record at a time.

    Attributes:
        announced: what the schedule has written down for other nodes.
        looks: how often it has looked for what another one has.
        first: whether none of its checkpoints has begun before.
    """

    def __init__(
        self,
        clock: Clock,
        spec: StateSpec = LONE,
        offset: int | None = 0,
        newest: int = 0,
        first: bool = False,
        **config: object,
    ) -> None:
        self.clock, self.spec, self.offset, self.newest = clock, spec, offset, newest
        self.announced: list[int] = []
        self.looks = 0
        self.schedule = Schedule(lambda record, elsewhere: self.announced.append(record), self._look)
        self.schedule.configure(StorageConfig(**config))  # type: ignore[arg-type]
        self.schedule.restart()
        if not first:
            self.schedule.began()

    def _look(self) -> None:
        self.looks += 1

    def train(self, count: int = 1, seconds: float = 1.0) -> None:
        for _ in range(count):
            self.clock.passes(seconds)
            self.newest += 1
            self.schedule.pace.add_record(self.newest, self.clock.now)

    def due(self, lead: int = 2, unbased: bool = False) -> int | None:
        ledger = SimpleNamespace(steps={} if self.offset is None else {self.newest: self.newest + self.offset})
        held = SimpleNamespace(spec=self.spec, newest=self.newest, ledger=ledger)
        attempt = Steps("n", self.spec.world_size, self.spec.local_ranks, at=self.newest)
        return self.schedule.due_record(cast(Generation, held), attempt, lead, unbased)

    def wrote(self, cpu_seconds: float, copy_seconds: float = 0.0, seconds: float = 1.0, record: int = 0) -> Saved:
        saved = Saved(record, record, 1, seconds, cpu_seconds)
        self.schedule.copied(copy_seconds)
        self.schedule.wrote(saved)
        return saved


@contextmanager
def patched_clock() -> Iterator[Clock]:
    """For properties, which have no fixtures of their own for each example."""
    clock = Clock()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(schedule_module, "time", clock)
        patch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
        yield clock


@pytest.fixture
def clock() -> Iterator[Clock]:
    with patched_clock() as clock:
        yield clock


# By steps


@given(st.integers(1, 10_000), st.none() | st.integers(-50, 5_000), st.integers(1, 700), LEADS, st.booleans())
def test_by_steps_the_framework_s_step_decides_not_the_record_s_number(
    newest: int, offset: int | None, every: int, lead: int, first: bool
) -> None:
    """It is the next one that every rank can still learn of, and not ordered long before."""
    with patched_clock() as clock:
        record = Run(clock, offset=offset, newest=newest, first=first, every_steps=every).due(lead)
    ahead = newest + lead
    following = next(number for number in range(ahead, ahead + every) if (number + (offset or 0)) % every == 0)
    near = following - ahead <= schedule_module._ORDER_RECORDS + lead
    assert record == (following if near else None)


@given(st.integers(-20, 200), st.integers(1, 90), st.sampled_from([2, 4, 16]), st.sampled_from([LONE, FIRST, SECOND]))
@settings(max_examples=30)
def test_by_steps_no_checkpoint_is_forgotten_on_any_node(offset: int, every: int, lead: int, spec: StateSpec) -> None:
    with patched_clock() as clock:
        run = Run(clock, spec, offset=offset, every_steps=every)
        ordered = set()
        for _ in range(300):
            run.train()
            ordered.add(run.due(lead))
        assert run.announced == []
        assert run.looks == 0
    wanted = {record for record in range(1 + lead, 300 + lead) if (record + offset) % every == 0}
    assert wanted <= ordered


@given(st.sampled_from([1, 3, 7]), *[st.floats(0.1, 6)] * 2, st.integers(0, 4), st.integers(-20, 200))
@settings(max_examples=60)
def test_by_steps_nodes_whose_writers_are_slow_take_whole_checkpoints(
    every: int, first: float, second: float, late: int, offset: int
) -> None:
    """Each skips those that come while it writes, and the second node begins later."""
    with patched_clock() as clock:
        nodes = [Run(clock, spec, offset=offset, every_steps=every) for spec in (FIRST, SECOND)]
        taken: list[set[int]] = [set(), set()]
        free = [0.0, late * every]
        for record in range(100 * every):
            for node, (run, intervals) in enumerate(zip(nodes, (first, second), strict=True)):
                run.newest = record
                due = run.due() if record >= free[node] else None
                if due is not None:
                    run.schedule.began()
                    taken[node].add(due)
                    free[node] = due + intervals * every
    assert len(taken[0] & taken[1]) >= 5


@pytest.mark.parametrize("spec", [FIRST, SECOND])
def test_by_steps_nodes_stay_in_step_whatever_one_of_them_is_in_a_hurry_for(clock: Clock, spec: StateSpec) -> None:
    run = Run(clock, spec, newest=3, every_steps=10)
    run.schedule.preempt(25.0)
    assert run.due(unbased=True) == 10


@pytest.mark.parametrize("every", [None, 10])
def test_a_lone_node_takes_one_at_once_where_it_is_wanted(clock: Clock, every: int | None) -> None:
    run = Run(clock, newest=3, every_steps=every)
    run.schedule.preempt(25.0)
    assert run.due(lead=4) == 7
    run.schedule.began()
    assert run.due(lead=4) == (10 if every else None)


# By time


@given(st.floats(0, 500), st.floats(0.001, 1.0), st.floats(0, 50), st.floats(0, 50))
def test_what_a_checkpoint_costs_stays_below_the_configured_share(
    min_seconds: float, overhead: float, copy: float, cpu: float
) -> None:
    with patched_clock() as clock:
        run = Run(clock, min_seconds=min_seconds, overhead=overhead)
        assert run.schedule.interval_seconds() == min_seconds
        run.wrote(cpu, copy)
        interval = run.schedule.interval_seconds()
        assert interval >= min_seconds
        # The writer has one of the two cores; what trainers copy they lose.
        assert copy + cpu / 2 <= interval * overhead * (1 + 1e-9)
        assert interval == min_seconds or math.isclose(interval * overhead, copy + cpu / 2)


def test_by_time_the_first_one_is_due_at_once(clock: Clock) -> None:
    run = Run(clock, first=True, min_seconds=60)
    run.train()
    assert run.due() == 3
    run.schedule.began()
    assert run.due() is None, "also if it fails"
    run.schedule.restart()
    run.train()
    assert run.due() is None, "an attempt that follows has what the one before has stored"


def test_by_time_the_first_one_is_announced_as_soon_as_the_pace_is_known(clock: Clock) -> None:
    run = Run(clock, FIRST, first=True, min_seconds=60)
    run.train(8)
    assert run.due() is None
    run.train()
    assert run.due() == 9 + 2 + schedule_module._ANNOUNCE_SECONDS
    assert run.announced == [19]


def test_by_time_one_is_due_as_soon_as_the_interval_is_over(clock: Clock) -> None:
    run = Run(clock, min_seconds=60)
    run.train(59)
    assert run.due() is None
    run.train()
    assert run.due() == 62
    run.schedule.began()
    assert run.due() is None
    run.wrote(cpu_seconds=2.0, copy_seconds=1.0)  # 2 s at 1%
    run.train(199)
    assert run.due() is None
    run.train()
    assert run.due(lead=8) == 268


def test_one_that_came_to_nothing_is_due_again_at_once(clock: Clock) -> None:
    run = Run(clock, min_seconds=60)
    run.train(60)
    run.schedule.began()
    run.schedule.again()
    run.train()
    assert run.due() == 63


@pytest.mark.parametrize("every", [None, 1000])
def test_a_log_without_a_checkpoint_gets_one_as_soon_as_the_share_allows(clock: Clock, every: int | None) -> None:
    run = Run(clock, every_steps=every, min_seconds=60)
    run.train()
    assert run.due() is None
    assert run.due(unbased=True) == 3
    run.schedule.began()
    run.wrote(cpu_seconds=0.6)  # 30 s at 1%
    run.train(29)
    assert run.due(unbased=True) is None
    run.train()
    assert run.due(unbased=True) == 33


def test_an_attempt_begins_with_nothing_that_was_wanted_of_the_one_before(clock: Clock) -> None:
    run = Run(clock, min_seconds=60)
    run.train(100)
    run.schedule.preempt(25.0)
    run.schedule.announced(500)
    run.schedule.restart()
    assert not run.schedule.preempted
    assert run.due() is None
    assert run.schedule.interval_steps() is None
    run.spec = SECOND
    assert run.due() is None


def test_without_storage_nothing_is_due_and_writing_for_others_has_a_limit_too(clock: Clock) -> None:
    run = Run(clock)
    run.schedule.configure(None)
    assert run.schedule.limit_seconds() == StorageConfig().timeout_seconds
    run.schedule.preempt(25.0)
    assert run.due() is None


# Several nodes


@given(st.floats(1e-3, 100.0), LEADS)
@settings(max_examples=30)
def test_the_first_rank_s_node_announces_what_it_takes_so_long_before_that_others_learn_of_it(
    seconds: float, lead: int
) -> None:
    with patched_clock() as clock:
        run = Run(clock, FIRST, min_seconds=0)
        run.train(8, seconds)
        assert run.due(lead) is None, "how long a step takes is not known yet"
        run.train(12, seconds)
        record = run.due(lead)
    assert record is not None
    assert run.announced == [record]
    assert run.looks == 0
    assert (record - run.newest - lead) * seconds >= schedule_module._ANNOUNCE_SECONDS * (1 - 1e-9)
    assert (record - run.newest - lead - 1) * seconds <= schedule_module._ANNOUNCE_SECONDS * (1 + 1e-9)


def test_other_nodes_take_what_is_announced_if_they_still_can(clock: Clock) -> None:
    run = Run(clock, SECOND, newest=10, min_seconds=0)
    run.schedule.announced(12)
    assert run.due(lead=2) == 12
    run.schedule.announced(12)
    assert run.due(lead=3) is None
    run.schedule.announced(None)
    assert run.due() is None
    assert run.announced == []


def test_other_nodes_look_now_and_then_and_decide_nothing_by_themselves(clock: Clock) -> None:
    run = Run(clock, SECOND, min_seconds=0)
    run.schedule.preempt(1000.0)
    for _ in range(100):
        run.train(seconds=schedule_module._LOOK_SECONDS / 10)
        assert run.due() is None
    assert run.looks == 10


# Grace


def test_in_a_grace_period_writing_may_take_no_longer_than_that(clock: Clock) -> None:
    run = Run(clock, timeout_seconds=1800.0, grace_seconds=25.0)
    assert run.schedule.limit_seconds() == 1800.0
    run.schedule.preempt(25.0)
    until = clock.now + 25.0
    assert run.schedule.preempted
    assert run.schedule.preempted_until == until
    assert run.schedule.limit_seconds() == 25.0
    clock.passes(24.0)
    assert run.schedule.limit_seconds() <= 25.0
    clock.passes(1.0)
    assert not run.schedule.preempted
    assert run.schedule.limit_seconds() == 1800.0, "it was an ordinary restart"


# What is said of it


class Life:
    """A run with its checkpoints: one is ordered, copied when its record comes, and in storage so much later."""

    def __init__(self, run: Run, lead: int, step: float, copy: float, writing: float, cpu: float) -> None:
        self.run, self.lead, self.step, self.copy, self.writing, self.cpu = run, lead, step, copy, writing, cpu
        self.last: Saved | None = None
        self._ordered: int | None = None
        self._written_at: float | None = None
        self._record = 0

    def goes_on(self) -> None:
        run = self.run
        run.train(1, self.step)
        if self._ordered is not None and run.newest >= self._ordered:
            self._record, self._ordered = run.newest, None
            run.clock.passes(self.copy)
            self._written_at = run.clock.now + self.writing
        if self._written_at is not None and run.clock.now >= self._written_at:
            self.last = run.wrote(self.cpu, self.copy, self.writing, self._record)
            self._written_at = None
        if self._ordered is None and self._written_at is None:
            self._ordered = run.due(self.lead)
            if self._ordered is not None:
                run.schedule.began()


@given(
    st.sampled_from([LONE, FIRST]),
    st.none() | st.integers(1, 60),
    st.floats(0, 30),
    st.sampled_from([2, 4]),
    st.floats(0.05, 1.0),
    st.floats(0, 0.05),
    st.floats(0.01, 20.0),
    st.floats(0.01, 1.0),
)
@settings(max_examples=150, deadline=None)
def test_no_more_is_lost_than_was_said_while_steps_and_storage_are_as_fast_as_before(
    spec: StateSpec,
    every: int | None,
    min_seconds: float,
    lead: int,
    step: float,
    copy: float,
    writing: float,
    cpu: float,
) -> None:
    with patched_clock() as clock:
        run = Run(clock, spec, every_steps=every, min_seconds=min_seconds, overhead=0.1)
        life = Life(run, lead, step, copy, writing, cpu)
        assert run.schedule.loses_at_most(None, lead) is None
        said = 0
        for _ in range(600):
            life.goes_on()
            at_most = run.schedule.loses_at_most(life.last, lead)
            if life.last is not None and at_most is not None:
                said += 1
                assert run.newest - life.last.record <= at_most
    assert said or life.last is None


# Tuned


def test_the_interval_follows_failures_and_costs_within_its_budget(clock: Clock) -> None:
    decisions: list[Decision] = []
    run = Run(clock)
    run.schedule._decided = decisions.append
    run.train(20)
    run.wrote(cpu_seconds=4.0)
    assert run.schedule.interval_seconds() == pytest.approx(200.0), "by the budget alone"
    seldom, often = Observed(1 / 40_000, 0.02), Observed(1 / 1_000, 0.02)
    for _ in range(9):
        run.schedule.observe(seldom)
    assert run.schedule.interval_seconds() == pytest.approx(200.0), "it follows checkpoints, not news"
    for _ in range(2):
        run.wrote(cpu_seconds=4.0)
    assert run.schedule.interval_seconds() == pytest.approx(math.sqrt(2 * 2.0 * 40_000))
    run.schedule.observe(often)
    for _ in range(2):
        run.wrote(cpu_seconds=4.0)
    assert run.schedule.interval_seconds() == pytest.approx(200.0), "never more often than the budget allows"
    assert [(one.name, one.old, one.new) for one in decisions] == [
        ("storage interval", 200, 400),
        ("storage interval", 400, 200),
    ]
    run.schedule.restart()
    assert run.schedule._tuned.value is None


def test_with_a_log_a_failure_costs_redo_only(clock: Clock) -> None:
    run = Run(clock)
    run.train(20)
    run.wrote(cpu_seconds=4.0)
    run.schedule.logged = True
    run.schedule.observe(Observed(1 / 10_000, 0.1))
    for _ in range(2):
        run.wrote(cpu_seconds=4.0)
    assert run.schedule.interval_seconds() == pytest.approx(math.sqrt(2 * 2.0 * 10_000 / 0.1))


@pytest.mark.parametrize("config", [{"min_seconds": 5.0}, {"overhead": 0.5}, {"every_steps": 10}])
def test_limits_of_the_user_s_are_left_alone(clock: Clock, config: dict[str, float]) -> None:
    run = Run(clock, **config)
    run.train(20)
    run.wrote(cpu_seconds=4.0)
    before = run.schedule.interval_steps()
    run.schedule.observe(Observed(1 / 40_000, 0.02))
    for _ in range(3):
        run.wrote(cpu_seconds=4.0)
    assert run.schedule.interval_steps() == before


def test_what_an_agent_that_ends_begins_late_has_only_the_rest_of_the_grace_period(clock: Clock) -> None:
    run = Run(clock, timeout_seconds=1800.0, grace_seconds=25.0)
    run.schedule.preempt(25.0, ending=True)
    clock.now += 20.0
    assert run.schedule.limit_seconds() == pytest.approx(5.0)
    run.schedule.preempt(25.0)  # trainers get the signal, too, and say so
    assert run.schedule.limit_seconds() == pytest.approx(5.0)
    clock.now += 6.0
    assert run.schedule.limit_seconds() == 0.0
