"""The papers' formulas, against counting and drawing."""

from __future__ import annotations

import math
import random

import pytest

from memckpt_tools.planning.scheme import beyond_memory_rate, monthly_probability
from memckpt_tools.planning.schemes import daly_interval, young_interval
from tests.support.planning.tiers import daly_wall_seconds

# Young, Daly


@pytest.mark.parametrize(("write", "mttf"), [(5, 10_000), (60, 86_400), (300, 3 * 3600)])
def test_young_makes_ettr_largest_and_daly_the_wall_time_least(write: float, mttf: float) -> None:
    young, daly = young_interval(write, mttf), daly_interval(write, mttf)

    def ettr(interval: float) -> float:
        """Of the post "ETTR, aka, how good is the training goodput"."""
        return 1 - (10 + mttf / interval * write + interval / 2) / mttf

    for factor in (0.8, 1.25):
        assert ettr(young) > ettr(factor * young)
        assert daly_wall_seconds(1e6, daly, write, 10, mttf) < daly_wall_seconds(1e6, factor * daly, write, 10, mttf)
    best = min(range(1, 200), key=lambda percent: daly_wall_seconds(1e6, young * percent / 100, write, 10, mttf))
    assert daly == pytest.approx(young * best / 100, rel=0.02)


def test_daly_takes_the_time_to_failure_where_writes_are_longer() -> None:
    """Daly (2006), equation 37, second case."""
    assert daly_interval(300, 100) == 100


# REFT


def test_losses_beyond_memory_are_those_of_drawn_failures() -> None:
    """REFT, equation 7, for a running job: nodes fail, and are replaced after a window."""
    rate, nodes, group, tolerates, window, horizon = 1 / 3000.0, 12, 4, 1, 100.0, 4e6
    numbers, beyond = random.Random(3), 0
    back = [0.0] * nodes
    now = 0.0
    while now < horizon:
        now += numbers.expovariate(rate * nodes)
        node = numbers.randrange(nodes)
        if back[node] > now:
            continue  # it is down already
        first = node - node % group
        beyond += sum(back[other] > now for other in range(first, first + group)) == tolerates
        back[node] = now + window
    assert beyond_memory_rate(rate, nodes, group, tolerates, window) == pytest.approx(beyond / horizon, rel=0.05)
    assert beyond_memory_rate(rate, nodes, group, group, window) == 0
    assert monthly_probability(1 / (30 * 86400)) == pytest.approx(1 - math.exp(-1))
