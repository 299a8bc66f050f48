"""Simulations of a job whose failures are rarer or more frequent, and of larger and smaller clusters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from memckpt.errors import ConfigurationError
from memckpt_tools.planning.scheme import Scheme
from memckpt_tools.simulation.failures import Cluster, FailureModel
from memckpt_tools.simulation.lifetimes import Exponential, Lifetime, Weibull
from memckpt_tools.simulation.run import DEFAULT_CONFIDENCE, Setup, Summary, simulate

FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)


@dataclass(frozen=True)
class Sweep:
    """Simulations along two axes; all else is as it was, the schemes' costs, too.

    Attributes:
        by_mtbf: mean time between failures of the job in seconds, and the summaries of all schemes.
        by_nodes: number of nodes, and the summaries of all schemes. Each node fails as often in all of them.
    """

    by_mtbf: tuple[tuple[float, tuple[Summary, ...]], ...]
    by_nodes: tuple[tuple[int, tuple[Summary, ...]], ...]


def sweep(
    setup: Setup,
    schemes: Sequence[Scheme],
    *,
    factors: Sequence[float] = FACTORS,
    repetitions: int = 20,
    seed: int = 0,
    workers: int = 1,
    confidence: float = DEFAULT_CONFIDENCE,
) -> Sweep:
    """Simulate with times between failures, and with numbers of nodes, times each factor.

    Clusters that are smaller than the largest group of a scheme are left out. For the other arguments see
    :func:`simulate`.

    Raises:
        ConfigurationError: failures are a trace, which belongs to one cluster; or a value is out of range.
    """
    model = setup.failures
    if not isinstance(model, FailureModel):
        raise ConfigurationError("failures: expected distributions, which can be scaled, found a trace")

    def run(changed: Setup) -> tuple[Summary, ...]:
        return tuple(
            simulate(changed, schemes, repetitions=repetitions, seed=seed, workers=workers, confidence=confidence)
        )

    least = max((tier.group_nodes for scheme in schemes for tier in scheme.tiers), default=1)
    by_mtbf = [(factor, replace(setup, failures=with_mean_scaled(model, factor))) for factor in factors]
    sizes = sorted({round(setup.cluster.nodes * factor) for factor in factors})
    by_nodes = [
        (nodes, replace(setup, cluster=with_nodes(setup.cluster, nodes))) for nodes in sizes if nodes >= max(1, least)
    ]
    mtbf = model.mean_seconds(setup.cluster)
    return Sweep(
        by_mtbf=tuple((mtbf * factor, run(changed)) for factor, changed in by_mtbf),
        by_nodes=tuple((nodes, run(changed)) for nodes, changed in by_nodes),
    )


def with_mean_scaled(model: FailureModel, factor: float) -> FailureModel:
    """All times between failures, times a factor."""

    def scaled(lifetime: Lifetime | None) -> Lifetime | None:
        if isinstance(lifetime, Weibull):
            return Weibull(lifetime.shape, lifetime.scale_seconds * factor)
        return lifetime and Exponential(lifetime.mean_seconds * factor)

    return replace(
        model,
        nodes=scaled(model.nodes), processes=scaled(model.processes), racks=scaled(model.racks),
        zones=scaled(model.zones), cluster=scaled(model.cluster),
    )  # fmt: skip


def with_nodes(cluster: Cluster, nodes: int) -> Cluster:
    """A cluster of another size, with as large racks and zones, where it has room for them."""
    rack = None if cluster.nodes_per_rack is None else min(cluster.nodes_per_rack, nodes)
    zone = cluster.racks_per_zone
    return Cluster(nodes=nodes, nodes_per_rack=rack, racks_per_zone=zone and rack and min(zone, -(-nodes // rack)))
