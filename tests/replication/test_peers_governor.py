"""The governor: the rate at which steps take no longer than is allowed, found in any noise."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from memckpt.replication.pacing.governor import Baseline, Governor


@dataclass
class Course:
    """What a governor did with a job."""

    seconds: list[float] = field(default_factory=list)
    limits: list[float] = field(default_factory=list)
    probes: list[bool] = field(default_factory=list)


def govern(
    governor: Governor,
    seconds: Callable[[int, float], float],
    steps: range,
    *,
    network: float = 1000.0,
    floor: float = 10.0,
    settled: Callable[[int], bool] = lambda step: True,
) -> Course:
    """A job whose step takes `seconds(step, rate)`, while it sends as fast as it may."""
    course = Course()
    for step in steps:
        rate = 0.0 if governor.probing else min(network, max(governor.limit or network, floor))
        took = seconds(step, rate)
        course.seconds.append(took)
        course.limits.append(min(network, governor.limit or network))
        course.probes.append(governor.probing)
        binding = governor.limit is not None and governor.limit < network
        governor.step_ended(
            step + 1,
            took,
            sent=round(rate * took * 1e6),
            settled=settled(step),
            rate=rate or network,
            floor=floor,
            binding=binding,
        )
    return course


@pytest.mark.parametrize("overhead", [0.01, 0.03, 0.1])
@pytest.mark.parametrize("base", [0.02, 1.0, 20.0])
def test_it_finds_the_rate_that_costs_what_is_allowed(overhead: float, base: float) -> None:
    """Steps that would be half as long again: sending goes down to what costs the allowed share, and no further."""
    course = govern(Governor(overhead), lambda step, rate: base * (1 + 0.5 * rate / 1000), range(1, 2000))
    late = [took for took, probe in zip(course.seconds, course.probes, strict=True) if not probe][-500:]
    assert statistics.mean(late) <= base * (1 + 1.3 * overhead)
    assert statistics.mean(course.limits[-500:]) >= 0.5 * 1000 * overhead / 0.5


def noise(kind: str, seed: int) -> Callable[[], float]:
    draw = random.Random(seed)
    kinds = {
        "even": lambda: draw.uniform(0.9, 1.1),
        "normal": lambda: draw.gauss(1, 0.05),
        "pauses": lambda: 1 + 0.02 * abs(draw.gauss(0, 1)) + (draw.random() < 0.03) * draw.uniform(0, 3),
    }
    return kinds[kind]


@pytest.mark.parametrize("kind", ["even", "normal", "pauses"])
def test_noise_alone_slows_hardly_anything_down(kind: str) -> None:
    ends, limits = [], []
    for seed in range(6):
        factor = noise(kind, seed)
        course = govern(Governor(0.03), lambda step, rate: 0.3 * factor(), range(1, 1500))  # noqa: B023
        ends.append(statistics.mean(course.limits[-500:]))
        limits += course.limits
    assert statistics.median(ends) >= 990
    assert min(ends) >= 400
    assert min(limits) > 10


@pytest.mark.parametrize("kind", ["even", "normal", "pauses"])
def test_noise_does_not_hide_what_traffic_costs(kind: str) -> None:
    shares = []
    for seed in range(4):
        factor = noise(kind, seed)
        course = govern(Governor(0.03), lambda step, rate: factor() * (1 + 0.5 * rate / 1000), range(1, 2500))  # noqa: B023
        shares.append(0.5 * statistics.mean(course.limits[-1000:]) / 1000)
    assert 0.01 <= statistics.median(shares) <= 0.05
    assert max(shares) <= 0.08


def test_training_that_becomes_slower_by_itself_is_not_blamed_on_traffic() -> None:
    governor = Governor(0.03)
    job = lambda step, rate: 1.0 if step < 435 else 1.5  # noqa: E731
    course = govern(governor, job, range(1, 900))
    assert governor.baseline.seconds == pytest.approx(1.5)
    assert statistics.mean(course.limits[600:]) >= 990
    assert min(course.limits[430:]) >= 500


def test_training_that_becomes_faster_by_itself_is_timed_anew_soon() -> None:
    governor = Governor(0.03)
    govern(governor, lambda step, rate: 1.0 if step < 435 else 0.5, range(1, 490))
    assert governor.baseline.seconds == pytest.approx(0.5)


def test_a_limit_that_is_not_needed_any_more_goes() -> None:
    governor = Governor(0.03)
    govern(governor, lambda step, rate: 1 + rate / 1000, range(1, 300))
    assert governor.limit is not None
    govern(governor, lambda step, rate: 1.0, range(300, 700))
    assert governor.limit is None


def test_what_is_still_on_its_way_and_a_slow_start_are_not_the_baseline() -> None:
    governor = Governor(0.03)
    late = set(range(11, 500, 22))  # every other probe
    for step in (1, 2, 3):  # before the first record is sent
        governor.step_ended(step, 60.0, sent=0, settled=True, rate=1.0, floor=0.0, binding=False)
    assert not governor.baseline.samples
    seconds = lambda step, rate: 1.4 if rate or step in late else 1.0  # noqa: E731
    govern(governor, seconds, range(4, 500), settled=lambda step: step not in late)
    assert set(governor.baseline.samples) == {1.0}


def test_records_get_what_they_need() -> None:
    course = govern(Governor(0.03), lambda step, rate: 1 + rate / 1000, range(1, 600), floor=400.0)
    assert min(course.limits) == 400


def test_it_begins_near_what_records_need_and_doubles_that_while_it_costs_nothing() -> None:
    course = govern(Governor(0.03), lambda step, rate: 1.0, range(1, 300))
    limits = [limit for limit, before in zip(course.limits[1:], course.limits, strict=False) if limit != before]
    assert limits == [20, 40, 80, 160, 320, 640, 1000]
    assert course.limits[-1] == 1000


def test_a_link_that_takes_little_is_never_filled() -> None:
    """A step that waits for all that is sent; handed over, it seems to go ten times as fast."""
    base = 1.0
    course = govern(Governor(0.03), lambda step, rate: base * (1 + min(rate, 100) / 100), range(5, 400), floor=1.0)
    assert max(course.limits[6:]) <= 4
    assert statistics.mean(course.limits[-100:]) >= 1.5


def test_a_limit_that_became_needed_begins_where_nothing_was_held_up() -> None:
    governor = Governor(0.03)
    govern(governor, lambda step, rate: 1.0, range(1, 300), network=100.0)
    assert governor.limit is None
    late = govern(governor, lambda step, rate: 1.0 + min(rate, 100) / 100, range(300, 600), network=1000.0)
    limited = [limit for limit in late.limits if limit < 1000]
    assert limited[0] <= 100


def test_more_is_left_to_arrive_before_a_probe_where_something_was_still_on_its_way() -> None:
    governor, leads = Governor(0.03), []
    for step in range(1, 60):
        sent = 0 if governor.probing else 1000
        governor.step_ended(step + 1, 1.0, sent=sent, settled=step > 30, rate=1e3, floor=0.0, binding=False)
        leads.append(governor.lead)
    assert sorted(set(leads)) == [0.25, 0.5, 0.75]
    assert list(governor.baseline.samples) == [1.0] * 3


def test_probes_begin_at_the_same_steps_everywhere_and_are_rare() -> None:
    begins = []
    for first in (1, 13):
        course = govern(Governor(0.03), lambda step, rate: 1.0, range(first, 2001))
        probes = [False] * (first - 1) + course.probes
        begins.append([n + 1 for n in range(1, 2000) if probes[n] and not probes[n - 1]])
    assert [step for step in begins[0] if step > 150] == [step for step in begins[1] if step > 150]
    assert {step % 11 for step in begins[0]} == {0}
    assert sum(course.probes) <= 50
    late = [step for step in begins[0] if step > 200]
    assert late == list(range(209, 2001, 209))


def test_where_training_waits_the_limit_goes_up_and_nothing_is_judged() -> None:
    governor = Governor(0.03)
    govern(governor, lambda step, rate: 1 + rate / 1000, range(1, 300))
    before = governor.limit
    assert before is not None
    share = governor.share
    governor.overrule("training waits", 8)
    assert governor.limit is not None
    assert governor.limit > before
    course = govern(governor, lambda step, rate: 5.0, range(301, 308))
    assert not any(course.probes)
    assert course.limits == [governor.limit] * 7
    govern(governor, lambda step, rate: 1 + rate / 1000, range(308, 312))
    assert governor.share == share


def test_a_baseline_follows_small_changes() -> None:
    baseline = Baseline(0.0075)
    for seconds in [1.0] * 40 + [1.02] * 12:
        baseline.add(seconds)
    assert baseline.seconds == 1.02


def test_a_baseline_is_begun_anew_by_two_steps_that_are_far_off() -> None:
    baseline = Baseline(0.0075)
    for seconds, doubtful in [(1.0, False)] * 8 + [(1.5, True), (1.0, False), (0.5, True), (1.5, True)]:
        baseline.add(seconds)
        assert (baseline.seconds or 1.0, baseline.doubtful) == (1.0, doubtful)
    baseline.add(1.4)
    assert (baseline.seconds, baseline.doubtful) == (1.45, False)
