"""Failures as they are drawn: how many, when, of what; the same again with the same seed."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memckpt.errors import ConfigurationError
from memckpt_tools.simulation.failures import NODE, PROCESS, RACK, ZONE, Cluster, FailureModel, Failures, Lifetime
from memckpt_tools.simulation.run import Estimate

DAY = 86400.0


def draw(model: FailureModel, cluster: Cluster, days: float = 100, seed: int = 0) -> Failures:
    return model.draw(cluster, days * DAY, np.random.SeedSequence(seed))


def rows(failures: Failures) -> list[tuple[float, int, int]]:
    return list(zip(failures.seconds.tolist(), failures.kinds.tolist(), failures.units.tolist(), strict=True))


@pytest.mark.parametrize("shape", [1.0, 0.7, 3.0])
def test_nodes_in_service_fail_at_their_rate_from_the_start(shape: float) -> None:
    """An ordinary renewal process in equilibrium has time / mean failures in any time, whatever the distribution."""
    model = FailureModel.of_nodes(30 * DAY, shape=shape)
    for days in (1, 100):
        counts = [len(draw(model, Cluster(nodes=500), days, seed)) for seed in range(100)]
        assert Estimate.of(counts, 0.999).holds(500 * days / 30)


@pytest.mark.parametrize("shape", [0.7, 1.0, 3.0])
def test_new_nodes_survive_as_reft_says(shape: float) -> None:
    """REFT, equation 1: the probability that a node has had no failure after some time; of all of them, its power."""
    lifetime = Lifetime(30 * DAY, shape)
    model, nodes, days = FailureModel(nodes=lifetime, new=True), 20_000, 20
    expected = math.exp(-((days * DAY / lifetime.scale_seconds) ** shape))
    failed = np.unique(draw(model, Cluster(nodes=nodes), days).units)
    alive = [0.0] * len(failed) + [1.0] * (nodes - len(failed))
    assert Estimate.of(alive, 0.999).holds(expected)
    # No failure of 8 nodes in a time in which that has a probability of 0.5.
    short = lifetime.scale_seconds * (math.log(2) / 8) ** (1 / shape) / DAY
    none = [float(len(draw(model, Cluster(nodes=8), short, seed)) == 0) for seed in range(2000)]
    assert Estimate.of(none, 0.999).holds(0.5)


def test_software_and_hardware_share_the_failures_of_nodes() -> None:
    model = FailureModel.of_nodes(10 * DAY, software_share=0.25, shape=0.8)
    failures = draw(model, Cluster(nodes=2000))
    assert len(failures) == pytest.approx(2000 * 100 / 10, rel=0.05)
    assert np.mean(failures.kinds == PROCESS) == pytest.approx(0.25, abs=0.02)
    assert model.mean_seconds(Cluster(nodes=2000)) == pytest.approx(10 * DAY / 2000)
    assert set(draw(FailureModel.of_nodes(DAY, software_share=1.0), Cluster(nodes=9)).kinds.tolist()) == {PROCESS}
    assert set(draw(FailureModel.of_nodes(DAY), Cluster(nodes=9)).kinds.tolist()) == {NODE}


def test_same_seed_same_failures_and_kinds_do_not_change_each_other() -> None:
    cluster = Cluster(nodes=100, nodes_per_rack=10, racks_per_zone=5)
    model = FailureModel(nodes=Lifetime(20 * DAY, 0.8), processes=Lifetime(30 * DAY))
    both = rows(draw(model, cluster))
    assert both == rows(draw(model, cluster))
    assert both != rows(draw(model, cluster, seed=1))
    more = FailureModel(nodes=model.nodes, processes=model.processes, racks=Lifetime(50 * DAY), zones=Lifetime(DAY))
    all_kinds = rows(draw(more, cluster))
    assert [row for row in all_kinds if row[1] in (PROCESS, NODE)] == both
    assert {row[2] for row in all_kinds if row[1] == RACK} <= set(range(10))
    assert {row[2] for row in all_kinds if row[1] == ZONE} == {0, 1}
    alike = draw(FailureModel(nodes=Lifetime(20 * DAY), processes=Lifetime(20 * DAY)), cluster)
    assert len(np.unique(alike.seconds)) == len(alike)
    seed = np.random.SeedSequence(5)
    assert rows(model.draw(cluster, DAY, seed)) == rows(model.draw(cluster, DAY, seed))


lifetimes = st.one_of(
    st.builds(Lifetime, st.floats(0.1 * DAY, 1e4 * DAY)),
    st.builds(Lifetime, st.floats(0.1 * DAY, 1e4 * DAY), st.floats(0.4, 5)),
)


@settings(deadline=None)
@given(
    nodes=lifetimes, racks=st.none() | lifetimes, new=st.booleans(), seed=st.integers(0, 99), size=st.integers(1, 40)
)
def test_failures_are_in_order_and_of_the_cluster(
    nodes: Lifetime, racks: Lifetime | None, new: bool, seed: int, size: int
) -> None:
    cluster = Cluster(nodes=size, nodes_per_rack=min(size, 7))
    failures = draw(FailureModel(nodes=nodes, racks=racks, new=new), cluster, days=30, seed=seed)
    assert np.all(np.diff(failures.seconds) >= 0)
    assert np.all((failures.seconds >= 0) & (failures.seconds < 30 * DAY))
    assert np.all((failures.units >= 0) & (failures.units < size))
    assert np.all(failures.units[failures.kinds == RACK] < -(-size // 7))


def test_racks_and_zones_are_runs_of_nodes() -> None:
    cluster = Cluster(nodes=23, nodes_per_rack=5, racks_per_zone=2)
    assert [cluster.nodes_of(RACK, rack) for rack in range(cluster.count(RACK))] == [
        range(5), range(5, 10), range(10, 15), range(15, 20), range(20, 23)
    ]  # fmt: skip
    assert [cluster.nodes_of(ZONE, zone) for zone in range(cluster.count(ZONE))] == [
        range(10), range(10, 20), range(20, 23)
    ]  # fmt: skip
    assert cluster.nodes_of(NODE, 7) == range(7, 8)
    assert len(cluster.nodes_of(PROCESS, 7)) == 0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Lifetime(0), r"mean_seconds: expected a number, more than 0, at most 1e\+11, found 0"),
        (lambda: Lifetime(math.nan), "mean_seconds: .* found nan"),
        (lambda: Lifetime(1, 0), r"shape: expected a number, 0.2 to 20, found 0"),
        (lambda: Lifetime(-1, 2), "mean_seconds: .* found -1"),
        (lambda: Lifetime(math.inf), "mean_seconds: .* found inf"),
        (lambda: FailureModel.of_nodes(0), "mean_seconds: .* found 0"),
        (lambda: FailureModel.of_nodes(DAY, software_share=22), r"software_share: expected 0 to 1, found 22"),
        (lambda: Cluster(nodes=0), "nodes: expected a whole number, 1 to 1000000, found 0"),
        (lambda: Cluster(nodes=8, nodes_per_rack=9), "nodes_per_rack: expected 1 to 8 nodes .* found 9"),
        (lambda: Cluster(nodes=8, racks_per_zone=2), "racks_per_zone: expected nodes_per_rack beside it, found 2"),
        (lambda: Cluster(nodes=8, nodes_per_rack=4, racks_per_zone=3), "racks_per_zone: .* 1 to 2 racks .* found 3"),
        (lambda: draw(FailureModel(racks=Lifetime(DAY)), Cluster(nodes=8)), "racks: expected nodes_per_rack .* None"),
        (lambda: draw(FailureModel(zones=Lifetime(1)), Cluster(nodes=8)), "zones: expected racks_per_zone .* None"),
        (lambda: draw(FailureModel.of_nodes(1.0), Cluster(nodes=1000)), "mean time between failures: .* in seconds"),
    ],
)
def test_bad_values_are_named(make: object, message: str) -> None:
    assert callable(make)
    with pytest.raises(ConfigurationError, match=message):
        make()
