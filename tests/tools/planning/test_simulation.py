"""Trainings replayed with failures: repair, groups, repetitions, and bad values. Closed forms: test_agreement.py."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import msgspec
import numpy as np
import pytest

from memckpt.errors import ConfigurationError
from memckpt.replication.coding.placement import place
from memckpt_tools.planning.scheme import Scheme, Tier
from memckpt_tools.simulation.failures import KINDS, Cluster, FailureModel, Failures
from memckpt_tools.simulation.replay import Repair, Training, group_of, replay
from memckpt_tools.simulation.run import Estimate, Setup, simulate, with_mean_scaled, with_nodes
from tests.support.planning.tiers import disk

DAY = 86400.0


def failures_of(*rows: tuple[float, str, int]) -> Failures:
    seconds, kinds, units = zip(*rows, strict=True)
    return Failures(np.array(seconds), np.array([KINDS.index(kind) for kind in kinds]), np.array(units))


# Repair, groups, repetitions


def test_training_waits_for_a_spare() -> None:
    scheme = Scheme(name="disk", overhead=0, tiers=(disk(1, 5),))
    trace = failures_of((100, "node", 0), (200, "node", 1), (1500, "process", 2))
    training = Training(step_seconds=1, duration_seconds=2000)

    def down(spares: int | None) -> float:
        repair = Repair(detection_seconds=3, replacement_seconds=20, repair_seconds=1000, spares=spares)
        return replay(scheme, trace, Cluster(nodes=4), training, repair).down_seconds

    assert down(None) == down(2) == 2 * (3 + 20 + 5) + (3 + 5)
    # The second node waits for the first one, until 1100; without spares both wait for their own repair.
    assert down(1) == 28 + (1100 + 20 + 5 - 200) + 8
    assert down(0) == 100 + (1200 + 20 + 5 - 200) + 8


@pytest.mark.parametrize(("nodes", "group", "rack"), [(12, 4, 3), (13, 4, 3), (2000, 6, 32), (17, 5, 2), (7, 7, 1)])
def test_groups_are_those_of_the_placement(nodes: int, group: int, rack: int) -> None:
    racks = [(f"rack-{node // rack:04d}", f"node-{node:05d}") for node in range(nodes)]
    for domains in ([path[:1] for path in racks], racks, [path[1:] for path in racks]):
        groups = place(domains, group - 1, 1).groups
        found = [{group_of(node, nodes, group) for node in each} for each in groups]
        assert [len(each) for each in found] == [1] * len(groups)
        assert len(set.union(*found)) == len(groups)


def test_a_rack_takes_one_node_of_each_group() -> None:
    tier = Tier(name="peers", every_steps=1, lag_steps=0, restore_seconds=0, group_nodes=4, tolerates=1)
    scheme, training = Scheme(name="peers", overhead=0, tiers=(tier,)), Training(step_seconds=1, duration_seconds=100)
    trace = failures_of((10, "rack", 2))
    assert replay(scheme, trace, Cluster(nodes=32, nodes_per_rack=8), training).recoveries == (1, 0)
    assert replay(scheme, trace, Cluster(nodes=32, nodes_per_rack=9), training).recoveries == (0, 1)


def small(**changes: object) -> Setup:
    setup = Setup(
        cluster=Cluster(nodes=64),
        failures=FailureModel.of_nodes(20 * DAY, software_share=0.3, shape=0.8),
        training=Training(step_seconds=5, duration_seconds=30 * DAY),
        repair=Repair(detection_seconds=60, replacement_seconds=300),
    )
    return replace(setup, **changes)  # type: ignore[arg-type]


TWO_SCHEMES = (
    Scheme(name="disk", overhead=0.01, tiers=(disk(100, 300, 20),)),
    Scheme(
        name="memory", overhead=0.02,
        tiers=(
            Tier(name="memory", every_steps=1, lag_steps=0, restore_seconds=30, group_nodes=1),
            Tier(name="peers", every_steps=1, lag_steps=1, restore_seconds=60, group_nodes=4, tolerates=1),
            disk(1000, 300, 20),
        ),
    ),
)  # fmt: skip


def test_results_depend_on_the_seed_and_on_nothing_else() -> None:
    few = simulate(small(), TWO_SCHEMES, repetitions=3)
    assert simulate(small(), TWO_SCHEMES, repetitions=3) == few
    many = simulate(small(), TWO_SCHEMES, repetitions=6, workers=2)
    assert [summary.outcomes[:3] for summary in many] == [summary.outcomes for summary in few]
    assert len(set(many[0].outcomes)) == 6
    assert simulate(small(), TWO_SCHEMES, repetitions=3, seed=1) != few
    # A scheme is replayed as if it were alone, with the failures that the others get.
    assert simulate(small(), TWO_SCHEMES[1:], repetitions=3) == few[1:]
    assert [one.failures for one in few[0].outcomes] == [one.failures for one in few[1].outcomes]


def test_more_nodes_and_more_failures_cost_more() -> None:
    ettrs = []
    for factor in (1, 4, 16):
        sized = small(cluster=with_nodes(Cluster(nodes=64), 64 * factor))
        often = small(
            failures=with_mean_scaled(FailureModel.of_nodes(20 * DAY, software_share=0.3, shape=0.8), 1 / factor)
        )
        ettrs.append([summary.ettr.mean for summary in simulate(sized, TWO_SCHEMES)])
        assert [summary.ettr.mean for summary in simulate(often, TWO_SCHEMES)] == pytest.approx(ettrs[-1], rel=0.05)
    assert all(before > after for first, second in pairwise(ettrs) for before, after in zip(first, second, strict=True))
    assert all(memory > storage for storage, memory in ettrs)


def test_t_quantiles_are_scipys() -> None:
    stats = pytest.importorskip("scipy.stats")
    for degrees in (1, 2, 3, 4, 9, 10, 99, 1000):
        for confidence in (0.5, 0.9, 0.95, 0.999):
            values = [0.0] * degrees + [1.0]
            estimate = Estimate.of(values, confidence)
            error = np.std(values, ddof=1) / math.sqrt(len(values))
            assert estimate.half_width == pytest.approx(stats.t.ppf((1 + confidence) / 2, degrees) * error, rel=1e-9)
    assert Estimate.of([2.0, 2.0], 0.95) == Estimate(2.0, 0.0, 0.95, 2)
    assert Estimate.of([2.0], 0.95).half_width is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"overhead": -0.1}, r"scheme 's'\.overhead: expected `float` >= 0.0, found -0.1"),
        ({"disk_bytes": -1.0}, r"scheme 's'\.disk_bytes: .* found -1.0"),
        ({"every_steps": 0}, r"scheme 's'\.tiers\[0\]\.every_steps: expected `float` > 0.0, found 0"),
        ({"lag_steps": -1}, r"tiers\[0\]\.lag_steps: .* found -1"),
        ({"restore_seconds": math.inf}, r"tiers\[0\]\.restore_seconds: .* found inf"),
        ({"rebuild_seconds": -5}, r"tiers\[0\]\.rebuild_seconds: .* found -5"),
        ({"group_nodes": 65}, "tier 'disk': group_nodes: expected 0 to 64 nodes, found 65"),
        ({"group_nodes": 4, "tolerates": 4}, "tier 'disk': tolerates: expected 0 to 3 nodes of a group of 4, found 4"),
        ({"tolerates": 1}, "tier 'disk': tolerates: expected 0 to 0 nodes .* found 1"),
    ],
)
def test_bad_schemes_are_named(changes: dict[str, float], message: str) -> None:
    of_scheme = {name: value for name, value in changes.items() if name in ("overhead", "disk_bytes")}
    of_tier = {name: value for name, value in changes.items() if name not in of_scheme}
    tier = msgspec.structs.replace(disk(10, 5), **of_tier)
    scheme = msgspec.structs.replace(Scheme(name="s", overhead=0, tiers=(tier,)), **of_scheme)
    with pytest.raises(ConfigurationError, match=message):
        simulate(small(), [scheme])


def test_bad_values_are_named() -> None:
    for make, message in (
        (lambda: Repair(repair_seconds=-1), "repair_seconds: expected a number, 0 to .* found -1"),
        (lambda: Repair(spares=-1), "spares: expected a whole number, 0 to .* found -1"),
        (lambda: Training(step_seconds=450, duration_seconds=1), "step_seconds: .* 0.0001 to 300, found 450"),
        (
            lambda: Training(step_seconds=1, duration_seconds=0),
            "duration_seconds: expected a number, more than 0, .* found 0",
        ),
        (lambda: simulate(small(), []), "schemes: expected one or more, found none"),
        (lambda: simulate(small(), TWO_SCHEMES[:1] * 2), "schemes: expected different names, .* found 'disk'"),
        (lambda: simulate(small(), [Scheme(name="s", overhead=0, tiers=(disk(1, 1),) * 2)]), "tiers: .* found 'disk'"),
        (lambda: simulate(small(), TWO_SCHEMES, repetitions=0), "repetitions: .* found 0"),
        (lambda: simulate(small(), TWO_SCHEMES, seed=-1), "seed: .* found -1"),
        (lambda: simulate(small(), TWO_SCHEMES, workers=0), "workers: .* found 0"),
        (lambda: simulate(small(), TWO_SCHEMES, confidence=95), "confidence: .* found 95"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            make()
