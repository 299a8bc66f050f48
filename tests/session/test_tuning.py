"""The interval of checkpoints and the advice: steady under noise, and about as good as the best fixed interval."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memckpt.agent.saving.schedule import Follower, checkpoint_interval
from memckpt.session.mode import LayoutSettings
from memckpt.session.tuning import MOST_SLOTS, Adviser, FailureRate, Measured, best_period, period_cost

LAZY, EAGER = LayoutSettings("lazy", 8, 3), LayoutSettings("eager", 32, 3)
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


# The layout


def anything_fits(layout: LayoutSettings) -> bool:
    return True


def advise(
    settings: LayoutSettings,
    looks: Sequence[Measured],
    budget: float = 0.03,
    fits: Callable[[LayoutSettings], bool] = anything_fits,
    advises_period: bool = True,
) -> list[str]:
    """Lines of advice, in the order in which they were given; an empty one where advice was taken back."""
    adviser, found = Adviser(budget, LAZY, fits, advises_period), []
    for measured in looks:
        if adviser.look_at(settings, measured):
            found.append("" if adviser.advice is None else adviser.advice.line)
    return found


def test_a_calm_job_gets_no_advice() -> None:
    assert advise(LAZY, [CALM] * 20) == []
    assert advise(EAGER, [CALM] * 20) == []


def test_eager_redo_that_is_too_slow_should_get_slots_or_become_lazy() -> None:
    waiting = replace(CALM, wait_seconds=0.2)
    assert advise(EAGER, [waiting] * 20) == [f"slots={MOST_SLOTS}"]
    assert advise(replace(EAGER, slots=MOST_SLOTS), [waiting] * 20) == ['redo="lazy"']
    assert advise(EAGER, [waiting] * 20, budget=0.3) == [], "within the budget"


def test_what_does_not_fit_is_not_advised() -> None:
    waiting, costly = replace(CALM, wait_seconds=0.2), replace(CALM, stall_seconds=0.06, anchor_seconds=0.045)
    assert advise(EAGER, [waiting] * 20, fits=lambda layout: layout.mode == "lazy") == ['redo="lazy"']
    assert advise(EAGER, [waiting] * 20, fits=lambda layout: False) == []
    [first] = advise(LAZY, [costly] * 20)
    [second] = advise(LAZY, [costly] * 20, fits=lambda layout: layout.period <= 32)
    assert (first, second) == ("anchor_period_steps=512", "anchor_period_steps=32")


def test_looks_count_in_a_row_only() -> None:
    adviser, waiting = Adviser(0.03, LAZY, anything_fits), replace(CALM, wait_seconds=0.2)
    assert not adviser.look_at(EAGER, waiting)
    adviser.skip_look()
    assert [adviser.look_at(EAGER, waiting) for _ in range(2)] == [False, True]


def test_advice_is_given_once_and_taken_back_once() -> None:
    waiting = replace(CALM, wait_seconds=0.2)
    looks = [waiting] * 5 + [CALM] + [waiting] * 5 + [CALM] * 5
    assert advise(EAGER, looks) == [f"slots={MOST_SLOTS}", ""]


def test_a_stall_over_the_budget_advises_a_longer_period() -> None:
    costly = replace(CALM, stall_seconds=0.06, anchor_seconds=0.045)
    adviser = Adviser(0.03, LAZY, anything_fits)
    assert [adviser.look_at(LAZY, costly) for _ in range(20)].count(True) == 1
    assert adviser.advice is not None
    assert 0.015 + 0.045 * LAZY.period / adviser.advice.layout.period <= 0.03
    assert "the stall of 6.0% is over the budget of 3.0%" in adviser.advice.reason
    assert advise(LAZY, [costly] * 20, advises_period=False) == []


def test_a_stall_that_nothing_helps_against_is_said_once() -> None:
    adviser = Adviser(0.05, LAZY, anything_fits)
    over = replace(CALM, stall_seconds=0.1 * CALM.step_seconds)
    within = replace(CALM, stall_seconds=0.06 * CALM.step_seconds)
    assert [adviser.cannot_help(one) for one in (over, over, over, within, over, over, over)] == [False] * 7
    assert [adviser.cannot_help(over) for _ in range(20)] == [True] + [False] * 19
    assert not any(adviser.cannot_help(one) for one in [within] + [over] * 20)
    adviser, waiting = Adviser(0.03, LAZY, anything_fits), replace(CALM, wait_seconds=0.2)
    for _ in range(10):
        adviser.look_at(EAGER, waiting)
        assert not adviser.cannot_help(waiting), "there is advice"


def test_another_period_has_to_be_worth_a_restart() -> None:
    worth = replace(CALM, stall_seconds=0.011, anchor_seconds=0.01)
    assert advise(LAZY, [worth] * 40) != []
    assert advise(LAZY, [replace(worth, anchor_seconds=0.005)] * 40) == []


def test_frequent_failures_advise_a_shorter_period() -> None:
    failing = replace(CALM, anchor_seconds=0.0005, redo_seconds=2.0, failures_per_second=1e-3)
    assert advise(replace(LAZY, period=64), [failing] * 20) == ["anchor_period_steps=8"]


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
def test_advice_comes_to_rest_under_noise(measured: Measured, period: int, budget: float, noise: list[float]) -> None:
    """Under noise of 10% of every figure advice changes a few times at most, though each look has other figures."""

    def noisy(factor: float, other: float) -> Measured:
        return replace(
            measured,
            stall_seconds=measured.stall_seconds * factor,
            anchor_seconds=measured.anchor_seconds * factor,
            redo_seconds=measured.redo_seconds * other,
            failures_per_second=min(1.0, measured.failures_per_second * other),
        )

    looks = [noisy(one, other) for one, other in zip(noise, reversed(noise), strict=True)]
    assert len(advise(replace(LAZY, period=period), looks, budget)) <= 4


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
    """

    seconds: float
    mtbf: float
    checkpoint: float


LOOK = 120.0


def wasted(phases: Sequence[Phase], seed: int, look: Callable[[Phase, float, bool], float]) -> float:
    """Seconds that checkpoints and repeated training take.

    Args:
        look: called each two minutes with the phase, the seconds since the last call, and whether the job has failed
            since; returns the interval of checkpoints in seconds.
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
            interval = look(phase, LOOK, failed)
            waste += LOOK / interval * phase.checkpoint
            if failed:
                waste += interval / 2
            now += LOOK
    return waste


def tuned_waste(phases: Sequence[Phase], seed: int) -> float:
    """The waste of a job with the product's rules, from noisy measurements."""
    draw = random.Random(-seed)
    rate, follower = FailureRate(), Follower()

    def look(phase: Phase, passed: float, failed: bool) -> float:
        rate.passed(passed)
        if failed:
            rate.failed()
        cost = phase.checkpoint * draw.uniform(0.9, 1.1)
        follower.follow(checkpoint_interval(cost, rate.per_second, 1.0, 1.0))
        assert follower.value is not None
        return follower.value

    return wasted(phases, seed, look)


def best_fixed_waste(phases: Sequence[Phase], seed: int) -> float:
    """The least waste of settings that stay the same, in hindsight: the failures do not depend on them."""
    failures = dict.fromkeys(phases, 0)

    def count(phase: Phase, passed: float, failed: bool) -> float:
        failures[phase] += failed
        return 1.0

    wasted(phases, seed, count)

    def waste(interval: float) -> float:
        running = sum(phase.seconds * phase.checkpoint / interval for phase in phases)
        return running + sum(failures.values()) * interval / 2

    return min(waste(10 * 1.05**power) for power in range(150))


DAY = 86400.0
CHANGING = [
    Phase(10 * DAY, mtbf=20_000, checkpoint=2.0),
    Phase(10 * DAY, mtbf=1_500, checkpoint=2.0),
    Phase(10 * DAY, mtbf=20_000, checkpoint=30.0),
]
STEADY = [Phase(30 * DAY, mtbf=5_000, checkpoint=4.0)]


@pytest.mark.parametrize("phases", [CHANGING, STEADY], ids=["changing", "steady"])
def test_a_tuned_job_wastes_about_as_little_as_with_the_best_fixed_interval(phases: list[Phase]) -> None:
    """Within 5%, over four draws of failures; where conditions change, better than any fixed interval."""
    tuned = sum(tuned_waste(phases, seed) for seed in range(1, 5))
    fixed = sum(best_fixed_waste(phases, seed) for seed in range(1, 5))
    assert tuned <= 1.05 * fixed, f"{tuned / fixed:.3f}"
    if phases is CHANGING:
        assert tuned < fixed, f"{tuned / fixed:.3f}"
