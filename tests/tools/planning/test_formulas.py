"""The papers' formulas, against the papers' own numbers, and against counting and drawing."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from memckpt.errors import ConfigurationError
from memckpt_tools.planning.papers import (
    checkpoint_survival,
    cluster_recovery,
    coded_group_recovery,
    ettr_asynchronous,
    ettr_synchronous,
    gemini_corollary,
    gemini_recovery,
    lowdiff_optimum,
    lowdiff_wasted_share,
    recoverable_choices,
    reft_interval,
    reft_survival,
    replicated_group_recovery,
    wall_seconds,
    weibull_survival,
)
from memckpt_tools.planning.planned import beyond_memory_rate, monthly_probability
from memckpt_tools.planning.schemes import daly_interval, young_interval

# ETTR, Young, Daly


def test_ettr_of_a_post_worked_out_by_hand() -> None:
    """One failure in 10,000 s: 100 s to read, 20 writes of 5 s, 250 s repeated; asynchronous 40 s more."""
    assert ettr_synchronous(10_000, 500, 5, 100) == pytest.approx(1 - (100 + 100 + 250) / 10_000)
    assert ettr_asynchronous(10_000, 500, 5, 100, 40) == pytest.approx(1 - (100 + 100 + 250 + 40) / 10_000)
    assert ettr_synchronous(100, 500, 5, 100) == 0


def test_wasted_training_of_the_post_is_that_of_drawn_failures() -> None:
    """ "Effect of asynchronous checkpoint writes": half an interval, and the time until a checkpoint is persistent."""
    interval, persist, numbers = 500.0, 120.0, random.Random(1)
    lost = [at if at > persist else at + interval for at in (numbers.uniform(0, interval) for _ in range(200_000))]
    found = (1 - ettr_asynchronous(1e6, interval, 0, 0, persist)) * 1e6
    assert found == pytest.approx(sum(lost) / len(lost), rel=0.01)


@pytest.mark.parametrize(("write", "mttf"), [(5, 10_000), (60, 86_400), (300, 3 * 3600)])
def test_young_makes_ettr_largest_and_daly_the_wall_time_least(write: float, mttf: float) -> None:
    young, daly = young_interval(write, mttf), daly_interval(write, mttf)
    for factor in (0.8, 1.25):
        assert ettr_synchronous(mttf, young, write, 10) > ettr_synchronous(mttf, factor * young, write, 10)
        assert wall_seconds(1e6, daly, write, 10, mttf) < wall_seconds(1e6, factor * daly, write, 10, mttf)
    best = min(range(1, 200), key=lambda percent: wall_seconds(1e6, young * percent / 100, write, 10, mttf))
    assert daly == pytest.approx(young * best / 100, rel=0.02)


def test_daly_takes_the_time_to_failure_where_writes_are_longer() -> None:
    """Daly (2006), equation 37, second case."""
    assert daly_interval(300, 100) == 100


# Gemini


@pytest.mark.parametrize(("failed", "recovered"), [(1, 1.0), (2, 0.933), (3, 0.800)])
def test_gemini_with_16_machines_and_two_copies(failed: int, recovered: float) -> None:
    """Groups of two: 1 - 8/120 with two lost machines of 16, 1 - 8 x 14/560 with three."""
    assert gemini_recovery(16, 2, failed) == pytest.approx(recovered, abs=5e-4)
    assert gemini_corollary(16, 2, failed) == pytest.approx(recovered, abs=5e-4)


@pytest.mark.parametrize(("nodes", "copies"), [(6, 2), (8, 2), (9, 3), (8, 4)])
def test_gemini_is_what_counting_all_sets_of_lost_machines_gives(nodes: int, copies: int) -> None:
    for failed in range(nodes + 1):
        sets = list(itertools.combinations(range(nodes), failed))
        groups = [set(range(first, first + copies)) for first in range(0, nodes, copies)]
        held = sum(not any(group <= set(lost) for group in groups) for lost in sets)
        assert recoverable_choices(nodes // copies, copies, copies - 1, failed) == held
        exact = gemini_recovery(nodes, copies, failed)
        assert exact == pytest.approx(held / len(sets))
        if failed < 2 * copies:
            assert gemini_corollary(nodes, copies, failed) == pytest.approx(exact)
        assert gemini_corollary(nodes, copies, failed) <= exact + 1e-12


def test_placement_of_a_hundred_thousand_nodes_is_counted_exactly() -> None:
    assert gemini_recovery(100_000, 2, 2) == pytest.approx(1 - 1 / 99_999, rel=1e-12)
    assert 0 < gemini_recovery(100_000, 2, 500) < 1


# ECCheck


@pytest.mark.parametrize("p", [0.001, 0.01, 0.05, 0.1])
def test_eccheck_recovery_of_2000_nodes(p: float) -> None:
    """ECCheck, equations 1 and 2, R^500 and their difference 2 p^2 (1 - p)^2 (section II-B, figure 3)."""
    replicated = (1 - p) ** 4 + 4 * p * (1 - p) ** 3 + (6 - 2) * p**2 * (1 - p) ** 2
    coded = (1 - p) ** 4 + 4 * p * (1 - p) ** 3 + 6 * p**2 * (1 - p) ** 2
    assert replicated_group_recovery(p, 4, 2) == pytest.approx(replicated, rel=1e-12)
    assert coded_group_recovery(p, 4, 2) == pytest.approx(coded, rel=1e-12)
    gained = coded_group_recovery(p, 4, 2) - replicated_group_recovery(p, 4, 2)
    assert gained == pytest.approx(2 * p**2 * (1 - p) ** 2, rel=1e-9)
    assert cluster_recovery(replicated_group_recovery(p, 4, 2), 500) == pytest.approx(replicated**500)
    assert cluster_recovery(coded_group_recovery(p, 4, 2), 500) == pytest.approx(coded**500)


def test_eccheck_2000_nodes_by_lost_nodes() -> None:
    """At p = 1% two copies hold with 90.5%, the code of the same redundancy with 99.8% (the curves of figure 3)."""
    assert cluster_recovery(replicated_group_recovery(0.01, 4, 2), 500) == pytest.approx(0.905, abs=5e-4)
    assert cluster_recovery(coded_group_recovery(0.01, 4, 2), 500) == pytest.approx(0.998, abs=5e-4)


@pytest.mark.parametrize("nodes", [4, 8, 16])
def test_eccheck_half_of_the_nodes(nodes: int) -> None:
    """Section V-G and figure 15: k = m = n/2 against pairs, of which any i lost nodes are in distinct ones."""
    p, half = 0.1, nodes // 2
    coded = sum(math.comb(nodes, i) * p**i * (1 - p) ** (nodes - i) for i in range(half + 1))
    pairs = sum(math.comb(half, i) * 2**i * p**i * (1 - p) ** (nodes - i) for i in range(half + 1))
    assert coded_group_recovery(p, nodes, half) == pytest.approx(coded)
    assert replicated_group_recovery(p, nodes, 2) == pytest.approx(pairs)


# REFT


def test_reft_survival_is_that_of_drawn_nodes() -> None:
    """REFT, equations 1 to 3: at most one node of each group, against all nodes and all processes."""
    seconds, rate, shape, group, groups = 5 * 86400.0, 1 / (60 * 86400.0), 1.3, 6, 8
    alive = weibull_survival(seconds, rate, shape)
    numbers, held, whole, rounds = random.Random(2), 0, 0, 20_000
    for _ in range(rounds):
        lost = [sum(numbers.weibullvariate(1 / rate, shape) < seconds for _ in range(group)) for _ in range(groups)]
        held += max(lost) <= 1
        whole += max(lost) == 0
    assert reft_survival(alive, group, groups) == pytest.approx(held / rounds, abs=0.015)
    assert checkpoint_survival(alive, 1.0, group * groups) == pytest.approx(whole / rounds, abs=0.015)
    assert checkpoint_survival(alive, 0.99, group * groups) < checkpoint_survival(alive, 1.0, group * groups)


def test_reft_survives_many_times_longer_than_a_checkpoint() -> None:
    """Figure 8: the curves fall with time, that of checkpoints at once; the text: no failed node but one in a group."""
    rate, days = 1e-4 / 3600, [0.5, 1, 2, 4, 8, 16]
    alive = [weibull_survival(day * 86400, rate, 1.3) for day in days]
    reft = [reft_survival(one, 6, 64) for one in alive]
    plain = [checkpoint_survival(one, one, 384) for one in alive]
    assert reft == sorted(reft, reverse=True)
    assert plain == sorted(plain, reverse=True)
    assert all(ours > theirs for ours, theirs in zip(reft, plain, strict=True))
    survived = [next(day for day in range(1, 5000) if probability(day / 10) < 0.9) for probability in (
        lambda day: reft_survival(weibull_survival(day * 86400, rate, 1.3), 6, 64),
        lambda day: checkpoint_survival(weibull_survival(day * 86400, rate, 1.3), 1.0, 384),
    )]  # fmt: skip
    assert survived[0] > 10 * survived[1]


def test_reft_interval_balances_saving_and_repeating() -> None:
    """Appendix A, equations 4 and 5."""
    saving, rate = 3.0, 1 / 7200

    def cost(interval: float) -> float:
        return saving / interval + rate * interval / 2

    best = reft_interval(saving, rate)
    assert cost(best) < min(cost(0.9 * best), cost(1.1 * best))
    assert best == pytest.approx(young_interval(saving, 7200))
    assert reft_interval(saving, 0) == math.inf


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


# Bad input


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: young_interval(1, 0), "mttf_seconds: expected more than 0, at most 3.2e"),
        (lambda: young_interval(-1, 10), "write_seconds: expected 0 to 3.2e"),
        (lambda: ettr_asynchronous(100, 10, 1, 1, 20), "persist_seconds: expected 0 to 10 s"),
        (lambda: ettr_synchronous(math.nan, 10, 1, 1), "mttf_seconds: expected .* found nan"),
        (lambda: gemini_recovery(15, 2, 1), "nodes: expected a multiple of copies=2, found 15"),
        (lambda: gemini_recovery(16, 2, 17), "failed: expected a whole number from 0 to 16"),
        (lambda: gemini_recovery(4, 8, 1), "nodes: expected a whole number from 8"),
        (lambda: coded_group_recovery(2.0, 4, 2), "failure_probability: expected 0 to 1, found 2.0"),
        (lambda: coded_group_recovery(0.1, 4, 5), "tolerates: expected a whole number from 0 to 4"),
        (lambda: beyond_memory_rate(1, 4, 6, 1, 1), "group_nodes: expected a whole number from 1 to 4"),
        (lambda: weibull_survival(-1, 1, 1), "seconds: expected 0"),
        (lambda: lowdiff_optimum(state_bytes=-1, write_bytes_per_second=1, mtbf_seconds=1, merge_seconds=1),
         "state_bytes: expected more than 0, .*found -1"),
        (lambda: young_interval("5", 10), "write_seconds: expected .* found '5'"),
        (lambda: young_interval(True, 10), "write_seconds: expected .* found True"),
    ],
)  # fmt: skip
def test_bad_input_is_named(call, named) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ConfigurationError, match=named):
        call()
