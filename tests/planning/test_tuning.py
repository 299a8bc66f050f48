"""The rules of the tuner: steady under noise, within the budget, and about as good as the best fixed settings."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memckpt.errors import ConfigurationError
from memckpt.planning.tuning import (
    MOST_SLOTS,
    FailureRate,
    Follower,
    Free,
    LayoutSettings,
    LayoutTuner,
    Measured,
    best_period,
    checkpoint_interval,
    period_cost,
)

LAZY, EAGER = LayoutSettings("lazy", 8, 3), LayoutSettings("eager", 32, 3)
ALL_FREE = Free(mode=True, period=True, slots=True, lazy_period=8, lazy_slots=3)
#: A job in which nothing needs to change.
CALM = Measured(
    step_seconds=1.0,
    stall_seconds=0.01,
    anchor_seconds=0.001,
    wait_seconds=0.0,
    redo_seconds=0.1,
    failures_per_second=1e-5,
)
NOISE = st.lists(st.floats(0.9, 1.1), min_size=24, max_size=32)


# Rates and values


def test_rates_of_failures() -> None:
    guessed, told = FailureRate(), FailureRate(mtbf_seconds=1000.0)
    assert guessed.per_second == pytest.approx(1 / 86400)
    assert told.per_second == pytest.approx(1 / 1000)
    for rate in (guessed, told):
        for _ in range(40):
            rate.passed(500.0)
            rate.failed()
    assert told.per_second == pytest.approx(1 / 500, rel=0.15)
    assert guessed.per_second < told.per_second < 1.3 * 1 / 500
    before = told.per_second
    told.passed(50_000.0)
    assert told.per_second < before / 4, "a long time without failures lowers the rate"


@given(st.floats(1e-3, 1e6), st.floats(1e-3, 1e6), NOISE)
def test_a_follower_goes_one_way_and_comes_to_rest(start: float, target: float, noise: list[float]) -> None:
    follower, values = Follower(start), [start]
    for factor in noise:
        follower.follow(target * factor)
        assert follower.value is not None
        values.append(follower.value)
    steps = [later / earlier for earlier, later in pairwise(values) if later != earlier]
    assert all(step > 1 for step in steps) or all(step < 1 for step in steps)
    moves = 2 + math.ceil(abs(math.log(target / start, 4)))
    assert len(steps) <= moves
    assert len(values) <= 2 * moves or values[-1] == pytest.approx(target, rel=0.4)


def test_a_follower_ignores_what_is_seen_once() -> None:
    follower = Follower(10.0)
    assert not any(follower.follow(value) for value in (100.0, 10.0, 1.0, 10.0, 100.0, 1.0, 100.0))
    assert not follower.follow(10.0)
    assert [follower.follow(100.0), follower.follow(100.0)] == [False, True]
    assert follower.value == 40.0, "by a factor of four at most"


def test_the_interval_is_young_s_within_its_budget() -> None:
    assert checkpoint_interval(2.0, 1 / 3600, 1.0, 60.0) == pytest.approx(math.sqrt(2 * 2 * 3600))
    assert checkpoint_interval(2.0, 1 / 3600, 0.01, 60.0) == pytest.approx(math.sqrt(2 * 2 * 3600 / 0.01))
    assert checkpoint_interval(2.0, 1 / 600, 1.0, 200.0) == 200.0
    assert checkpoint_interval(2.0, 1 / 3.2e9, 0.01, 60.0) < 3.2e9, "a century is the longest time"
    with pytest.raises(ConfigurationError, match="failures_per_second"):
        checkpoint_interval(2.0, 0.0, 1.0, 60.0)


# The layout


def decisions(tuner: LayoutTuner, settings: LayoutSettings, looks: Sequence[Measured]) -> list[LayoutSettings]:
    """Settings after each decision. Stall and waits of `looks` are those under the first settings."""
    found = []
    now = settings
    for measured in looks:
        anchors = measured.anchor_seconds * settings.period / now.period
        seen = replace(
            measured,
            anchor_seconds=anchors,
            stall_seconds=measured.stall_seconds - measured.anchor_seconds + anchors,
            wait_seconds=measured.wait_seconds if now.mode == "eager" else 0.0,
        )
        change = tuner.decide(now, seen)
        if change is not None:
            now = change.settings
            found.append(now)
    return found


def test_a_calm_job_is_left_alone() -> None:
    assert decisions(LayoutTuner(ALL_FREE, 0.03), LAZY, [CALM] * 20) == []
    assert decisions(LayoutTuner(ALL_FREE, 0.03), EAGER, [CALM] * 20) == []


def test_eager_redo_that_is_too_slow_gets_slots_and_then_becomes_lazy_once() -> None:
    waiting = replace(CALM, anchor_seconds=1e-4, wait_seconds=0.2)
    changed = decisions(LayoutTuner(ALL_FREE, 0.03), EAGER, [waiting] * 20)
    assert changed == [replace(EAGER, slots=MOST_SLOTS), LAZY], "with D as lazy redo begins with it"
    fixed = replace(ALL_FREE, slots=False)
    assert decisions(LayoutTuner(fixed, 0.03), EAGER, [waiting] * 20) == [LayoutSettings("lazy", 8, 3)]
    assert decisions(LayoutTuner(replace(fixed, mode=False), 0.03), EAGER, [waiting] * 20) == []
    assert decisions(LayoutTuner(ALL_FREE, 0.3), EAGER, [waiting] * 20) == [], "within the budget"


def test_no_room_is_not_asked_for_again_soon() -> None:
    tuner, waiting = LayoutTuner(ALL_FREE, 0.03), replace(CALM, wait_seconds=0.2)
    assert [tuner.decide(EAGER, waiting) is None for _ in range(2)] == [True, False]
    tuner.no_room(EAGER, replace(EAGER, slots=MOST_SLOTS))
    assert [tuner.decide(EAGER, waiting) is None for _ in range(22)] == [True] * 21 + [False]


def test_a_period_for_which_there_was_no_room_is_not_asked_for_again() -> None:
    costly = replace(CALM, stall_seconds=0.06, anchor_seconds=0.045)
    tuner = LayoutTuner(ALL_FREE, 0.03)
    [first, *_] = decisions(tuner, LAZY, [costly] * 3)
    assert first.period == 32
    tuner.no_room(LAZY, first)
    [second, *later] = decisions(tuner, LAZY, [costly] * 60)
    assert second.period == 16, "what there may be room for"
    assert later == []


def test_looks_count_in_a_row_only() -> None:
    tuner, waiting = LayoutTuner(ALL_FREE, 0.03), replace(CALM, wait_seconds=0.2)
    assert tuner.decide(EAGER, waiting) is None
    tuner.look_away()
    assert tuner.decide(EAGER, waiting) is None
    assert tuner.decide(EAGER, waiting) is not None


def test_a_stall_over_the_budget_lengthens_the_period() -> None:
    costly = replace(CALM, stall_seconds=0.06, anchor_seconds=0.045)
    [*_, last] = decisions(LayoutTuner(ALL_FREE, 0.03), LAZY, [costly] * 20)
    share = 0.015 + 0.045 * LAZY.period / last.period
    assert share <= 0.03
    fixed = replace(ALL_FREE, period=False)
    assert decisions(LayoutTuner(fixed, 0.03), LAZY, [costly] * 20) == []


def test_a_stall_that_nothing_helps_against_is_said_once() -> None:
    tuner = LayoutTuner(Free(False, False, False, 8, 3), 0.05)
    over = replace(CALM, stall_seconds=0.1 * CALM.step_seconds)
    within = replace(CALM, stall_seconds=0.06 * CALM.step_seconds)
    assert [tuner.cannot_help(one) for one in (over, over, over, within, over, over, over)] == [False] * 7
    assert [tuner.cannot_help(over) for _ in range(20)] == [True] + [False] * 19
    assert not any(tuner.cannot_help(one) for one in [within] + [over] * 20)


def test_nothing_is_said_while_a_change_is_considered_or_has_just_helped() -> None:
    tuner, waiting = LayoutTuner(ALL_FREE, 0.03), replace(CALM, wait_seconds=0.2)
    now, said = EAGER, []
    for _ in range(6):  # more slots, then lazy redo, each in the second look that wants it, behind a rest
        change = tuner.decide(now, waiting)
        now = now if change is None else change.settings
        said.append(change is None and tuner.cannot_help(waiting))
    assert now.mode == "lazy"
    assert not any(said)


def test_a_longer_period_has_to_be_worth_its_memory() -> None:
    """On a real job T went from 8 to 512 for a quarter of a percent; the first use of 8 GB took a third of a step."""
    worth = replace(CALM, stall_seconds=0.006, anchor_seconds=0.005)
    [change] = decisions(LayoutTuner(ALL_FREE, 0.03), LAZY, [worth] * 40)
    assert change.period == 32
    floor = replace(worth, anchor_seconds=0.0025)
    now, tuner = change, LayoutTuner(ALL_FREE, 0.03)
    assert [tuner.decide(now, floor) for _ in range(20)] == [None] * 20


def test_frequent_failures_shorten_the_period() -> None:
    failing = replace(CALM, anchor_seconds=0.0005, redo_seconds=2.0, failures_per_second=1e-3)
    assert decisions(LayoutTuner(ALL_FREE, 0.03), replace(LAZY, period=64), [failing] * 20)[-1].period < 16


MEASURED = st.builds(
    lambda step, others, anchors, redo, failures: Measured(
        step_seconds=step,
        stall_seconds=step * (others + anchors),
        anchor_seconds=step * anchors,
        wait_seconds=0.0,
        redo_seconds=redo,
        failures_per_second=failures,
    ),
    st.floats(0.01, 10),
    st.floats(0, 0.1),
    st.floats(0, 0.2),
    st.floats(1e-4, 20),
    st.floats(1e-7, 1e-2),
)


@settings(max_examples=60)
@given(MEASURED, st.sampled_from([4, 8, 32, 512]), st.sampled_from([0.01, 0.03, 0.1]), NOISE)
def test_the_period_never_oscillates(measured: Measured, period: int, budget: float, noise: list[float]) -> None:
    """Under noise of 10% of every figure the period goes one way, and comes to rest."""
    start = replace(LAZY, period=period)

    def noisy(factor: float, other: float) -> Measured:
        return replace(
            measured,
            stall_seconds=measured.stall_seconds * factor,
            anchor_seconds=measured.anchor_seconds * factor,
            redo_seconds=measured.redo_seconds * other,
            failures_per_second=min(1.0, measured.failures_per_second * other),
        )

    looks = [noisy(one, other) for one, other in zip(noise, reversed(noise), strict=True)]
    periods = [period, *(one.period for one in decisions(LayoutTuner(ALL_FREE, budget), start, looks))]
    steps = [later - earlier for earlier, later in pairwise(periods)]
    assert all(step > 0 for step in steps) or all(step < 0 for step in steps)
    assert len(steps) <= 4


@given(MEASURED, st.sampled_from([4, 8, 32, 512]))
def test_the_best_period_is_the_best_of_all_powers_of_two(measured: Measured, period: int) -> None:
    now = replace(LAZY, period=period)
    best = period_cost(now, measured, best_period(now, measured, math.inf))
    assert best <= min(period_cost(now, measured, 2**power) for power in range(2, 10))


# A whole job, simulated


@dataclass(frozen=True)
class Phase:
    """Conditions of a part of a job.

    Attributes:
        seconds: duration.
        mtbf: mean time between failures, each of which falls back on storage, in seconds.
        checkpoint: training time that a checkpoint costs, in seconds.
        anchors: seconds for the anchors of a step with T=8.
        redo: seconds for the redo of a record.
    """

    seconds: float
    mtbf: float
    checkpoint: float
    anchors: float
    redo: float


STEP, LOOK = 1.0, 120.0


def wasted(phases: Sequence[Phase], seed: int, look: Callable[[Phase, float, bool], tuple[float, int]]) -> float:
    """Seconds that checkpoints, anchors, repeated training and redo take.

    Args:
        look: called each two minutes with the phase, the seconds since the last call, and whether the job has failed
            since; returns the interval of checkpoints in seconds, and T.
    """
    draw = random.Random(seed)
    waste, left = 0.0, draw.expovariate(1)
    for phase in phases:
        now = 0.0
        while now < phase.seconds:
            left -= LOOK / phase.mtbf
            failed = left <= 0
            if failed:
                left = draw.expovariate(1)
            interval, period = look(phase, LOOK, failed)
            waste += LOOK / interval * phase.checkpoint + LOOK / STEP * phase.anchors * 8 / period
            if failed:
                waste += interval / 2 + (period + 1) / 2 * phase.redo
            now += LOOK
    return waste


def tuned_waste(phases: Sequence[Phase], seed: int) -> float:
    """The waste of a job with the product's rules, from noisy measurements."""
    draw = random.Random(-seed)
    rate, follower, tuner = FailureRate(), Follower(), LayoutTuner(ALL_FREE, 1.0)
    now = LAZY

    def look(phase: Phase, passed: float, failed: bool) -> tuple[float, int]:
        nonlocal now

        def noisy(value: float) -> float:
            return value * draw.uniform(0.9, 1.1)

        rate.passed(passed)
        if failed:
            rate.failed()
        anchors = noisy(phase.anchors * 8 / now.period)
        follower.follow(checkpoint_interval(noisy(phase.checkpoint), rate.per_second, 1.0, 1.0))
        change = tuner.decide(now, Measured(STEP, anchors, anchors, 0.0, noisy(phase.redo), rate.per_second))
        now = now if change is None else change.settings
        assert follower.value is not None
        return follower.value, now.period

    return wasted(phases, seed, look)


def best_fixed_waste(phases: Sequence[Phase], seed: int) -> float:
    """The least waste of settings that stay the same, in hindsight: the failures do not depend on them."""
    failures = dict.fromkeys(phases, 0)

    def count(phase: Phase, passed: float, failed: bool) -> tuple[float, int]:
        failures[phase] += failed
        return 1.0, 8

    wasted(phases, seed, count)

    def waste(interval: float, period: int) -> float:
        running = sum(
            phase.seconds * (phase.checkpoint / interval + phase.anchors * 8 / period / STEP) for phase in phases
        )
        lost = sum(count * (interval / 2 + (period + 1) / 2 * phase.redo) for phase, count in failures.items())
        return running + lost

    intervals = [10 * 1.05**power for power in range(150)]
    return min(waste(interval, period) for interval in intervals for period in (8, 16, 32, 64, 128, 256))


DAY = 86400.0
CHANGING = [
    Phase(10 * DAY, mtbf=20_000, checkpoint=2.0, anchors=0.002, redo=0.5),
    Phase(10 * DAY, mtbf=1_500, checkpoint=2.0, anchors=0.002, redo=0.5),
    Phase(10 * DAY, mtbf=20_000, checkpoint=30.0, anchors=0.02, redo=0.5),
]
STEADY = [Phase(30 * DAY, mtbf=5_000, checkpoint=4.0, anchors=0.004, redo=0.5)]


@pytest.mark.parametrize("phases", [CHANGING, STEADY], ids=["changing", "steady"])
def test_a_tuned_job_wastes_about_as_little_as_with_the_best_fixed_settings(phases: list[Phase]) -> None:
    """Within 5%, over four draws of failures; where conditions change, better than any fixed settings."""
    tuned = sum(tuned_waste(phases, seed) for seed in range(1, 5))
    fixed = sum(best_fixed_waste(phases, seed) for seed in range(1, 5))
    assert tuned <= 1.05 * fixed, f"{tuned / fixed:.3f}"
    if phases is CHANGING:
        assert tuned < fixed, f"{tuned / fixed:.3f}"
