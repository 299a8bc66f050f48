"""The papers' formulas, against the papers' own numbers, and against counting and drawing."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from memckpt_tools.planning.papers import (
    coded_group_recovery,
    gemini_recovery,
    lowdiff_optimum,
    lowdiff_wasted_share,
    replicated_group_recovery,
)
from memckpt_tools.planning.planned import beyond_memory_rate, monthly_probability
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


# Gemini


@pytest.mark.parametrize(("failed", "recovered"), [(1, 1.0), (2, 0.933), (3, 0.800)])
def test_gemini_with_16_machines_and_two_copies(failed: int, recovered: float) -> None:
    """Groups of two: 1 - 8/120 with two lost machines of 16, 1 - 8 x 14/560 with three."""
    assert gemini_recovery(16, 2, failed) == pytest.approx(recovered, abs=5e-4)


@pytest.mark.parametrize(("nodes", "copies"), [(6, 2), (8, 2), (9, 3), (8, 4)])
def test_gemini_is_what_counting_all_sets_of_lost_machines_gives(nodes: int, copies: int) -> None:
    for failed in range(nodes + 1):
        sets = list(itertools.combinations(range(nodes), failed))
        groups = [set(range(first, first + copies)) for first in range(0, nodes, copies)]
        held = sum(not any(group <= set(lost) for group in groups) for lost in sets)
        if failed < 2 * copies:
            assert gemini_recovery(nodes, copies, failed) == pytest.approx(held / len(sets))
        assert gemini_recovery(nodes, copies, failed) <= held / len(sets) + 1e-12


# ECCheck


def test_eccheck_2000_nodes_by_lost_nodes() -> None:
    """At p = 1% two copies hold with 90.5%, the code of the same redundancy with 99.8% (the curves of figure 3)."""
    assert replicated_group_recovery(0.01, 4, 2) ** 500 == pytest.approx(0.905, abs=5e-4)
    assert coded_group_recovery(0.01, 4, 2) ** 500 == pytest.approx(0.998, abs=5e-4)


@pytest.mark.parametrize("nodes", [4, 8, 16])
def test_eccheck_half_of_the_nodes(nodes: int) -> None:
    """Section V-G and figure 15: k = m = n/2 against pairs, of which any i lost nodes are in distinct ones."""
    p, half = 0.1, nodes // 2
    coded = sum(math.comb(nodes, i) * p**i * (1 - p) ** (nodes - i) for i in range(half + 1))
    pairs = sum(math.comb(half, i) * 2**i * p**i * (1 - p) ** (nodes - i) for i in range(half + 1))
    assert coded_group_recovery(p, nodes, half) == pytest.approx(coded)
    assert replicated_group_recovery(p, nodes, 2) == pytest.approx(pairs)


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


# LowDiff

#: Table I: wasted time by full checkpoint interval and batch size (iterations), over the least.
TABLE_I = {
    10: (1.258, 1.226, 1.279, 1.330, 1.408, 1.513),
    20: (1.052, 1.000, 1.031, 1.085, 1.149, 1.202),
    50: (1.394, 1.290, 1.255, 1.312, 1.387, 1.481),
    100: (1.916, 1.783, 1.712, 1.752, 1.869, 1.952),
}
#: A state of GPT2-L (762M parameters), and rates for which the optimum is the table's; an iteration is a second.
LOWDIFF = {"state_bytes": 9.1e9, "write_bytes_per_second": 9.1e11, "mtbf_seconds": 2000.0, "merge_seconds": 0.21}


def test_the_optimum_is_where_the_wasted_time_is_least() -> None:
    """Equation 5 against equation 3."""
    cost = {"state_bytes": 9e9, "write_bytes_per_second": 1e9, "mtbf_seconds": 3600.0, "merge_seconds": 0.5}
    best = lowdiff_optimum(**cost)

    def wasted(interval: float, batch: float) -> float:
        return lowdiff_wasted_share(full_interval_seconds=interval, batch_seconds=batch, load_seconds=4.0, **cost)

    least = wasted(*best)
    for interval, batch in itertools.product((0.9, 1.0, 1.1), repeat=2):
        if (interval, batch) != (1.0, 1.0):
            assert wasted(best.full_interval_seconds * interval, best.batch_seconds * batch) > least
    assert best.batch_seconds**2 == pytest.approx(0.5 * best.full_interval_seconds)


def test_the_wasted_time_has_the_shape_of_table_i() -> None:
    """LowDiff, table I: least at an interval of 20 and batches of 2; the best batch grows with the interval."""
    wasted = {
        interval: [
            lowdiff_wasted_share(full_interval_seconds=interval, batch_seconds=batch, load_seconds=4.5, **LOWDIFF)
            for batch in range(1, 7)
        ]
        for interval in TABLE_I
    }
    for table in (wasted, TABLE_I):
        interval, batch = min(itertools.product(table, range(6)), key=lambda at: table[at[0]][at[1]])
        assert (interval, batch + 1) == (20, 2)
        batches = [min(range(6), key=lambda at: row[at]) + 1 for row in (table[each] for each in TABLE_I)]
        assert batches == sorted(batches)
        assert batches[:3] == [2, 2, 3]
    optimum = lowdiff_optimum(**LOWDIFF)
    assert 10 < optimum.full_interval_seconds < 50
    assert round(optimum.batch_seconds) == 2
