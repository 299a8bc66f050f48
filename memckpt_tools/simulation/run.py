"""A simulation: repetitions of one setup with intervals of confidence, and sweeps over setups."""

from __future__ import annotations

import math
import multiprocessing
import statistics
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial

import msgspec
import numpy as np

from memckpt.config.checks import require
from memckpt.errors import ConfigurationError
from memckpt_tools.planning.scheme import Scheme
from memckpt_tools.planning.values import converted
from memckpt_tools.simulation.failures import KINDS, Cluster, FailureModel, Failures, Lifetime
from memckpt_tools.simulation.replay import NOTHING, Outcome, Repair, Training, replay


@dataclass(frozen=True)
class Estimate:
    """The mean of repetitions."""

    mean: float
    half_width: float | None  #: half of its confidence interval, by Student's t distribution; None with one repetition
    confidence: float
    repetitions: int

    @classmethod
    def of(cls, values: Sequence[float], confidence: float) -> Estimate:
        mean = statistics.fmean(values)
        count = len(values)
        if count < 2:
            return cls(mean, None, confidence, count)
        error = statistics.stdev(values, mean) / math.sqrt(count)
        return cls(mean, t_quantile((1 + confidence) / 2, count - 1) * error, confidence, count)

    def holds(self, value: float) -> bool:
        """Whether a value is in the interval."""
        return self.half_width is not None and abs(value - self.mean) <= self.half_width


def t_quantile(probability: float, degrees: int) -> float:
    """The value below which Student's t distribution has a probability, from 0.5 to less than 1."""
    low, high = 0.0, 1.0
    while _t_within(high, degrees) < 2 * probability - 1:
        low, high = high, 2 * high
    while high - low > 1e-12 * high:
        middle = (low + high) / 2
        if middle in (low, high):
            break
        if _t_within(middle, degrees) < 2 * probability - 1:
            low = middle
        else:
            high = middle
    return high


def _t_within(t: float, degrees: int) -> float:
    """Probability of a value between -t and t: the finite series of Abramowitz and Stegun, 26.7.3 and 26.7.4."""
    angle = math.atan(t / math.sqrt(degrees))
    sine, square = math.sin(angle), math.cos(angle) ** 2
    if degrees % 2 == 0:
        term = total = 1.0
        for i in range(1, degrees // 2):
            term *= square * (2 * i - 1) / (2 * i)
            total += term
        return sine * total
    if degrees == 1:
        return 2 * angle / math.pi
    term = total = math.cos(angle)
    for i in range(1, (degrees - 1) // 2):
        term *= square * (2 * i) / (2 * i + 1)
        total += term
    return 2 / math.pi * (angle + sine * total)


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What is simulated, apart from protection; `failures`: distributions to draw from, or the failures themselves."""

    cluster: Cluster
    failures: FailureModel | Failures
    training: Training
    repair: Repair = field(default_factory=Repair)


@dataclass(frozen=True)
class Summary:
    """The outcomes of one scheme's repetitions: at the same place those of the same failures for all schemes."""

    scheme: Scheme
    outcomes: tuple[Outcome, ...]
    confidence: float

    def estimate(self, value: Callable[[Outcome], float]) -> Estimate:
        """Mean and interval of a value of the outcomes."""
        return Estimate.of([value(outcome) for outcome in self.outcomes], self.confidence)

    @property
    def ettr(self) -> Estimate:
        """Effective training time ratio."""
        return self.estimate(lambda outcome: outcome.ettr)

    @property
    def lost_steps(self) -> Estimate:
        """Steps lost in the whole training."""
        return self.estimate(lambda outcome: outcome.lost_steps)

    @property
    def down_share(self) -> Estimate:
        """Share of time in which there is no training."""
        return self.estimate(lambda outcome: outcome.down_seconds / outcome.duration_seconds)

    @property
    def failures(self) -> dict[str, Estimate]:
        """Failures in the whole training, by kind."""
        return self._counts(KINDS, [outcome.failures for outcome in self.outcomes])

    @property
    def recoveries(self) -> dict[str, Estimate]:
        """Recoveries in the whole training by name of the tier, and from nothing."""
        names = [*(tier.name for tier in self.scheme.tiers), NOTHING]
        return self._counts(names, [outcome.recoveries for outcome in self.outcomes])

    def _counts(self, names: Sequence[str], rows: Sequence[tuple[int, ...]]) -> dict[str, Estimate]:
        return {
            name: Estimate.of(column, self.confidence)
            for name, column in zip(names, zip(*rows, strict=True), strict=True)
        }


def check_schemes(schemes: Sequence[Scheme], nodes: int) -> None:
    """Refuse schemes that a cluster of so many nodes cannot have, names that are not unique, values out of range."""
    if not schemes:
        raise ConfigurationError("schemes: expected one or more, found none")
    _refuse_twins("schemes", [scheme.name for scheme in schemes])
    for scheme in schemes:
        where = f"scheme {scheme.name!r}"
        converted(msgspec.to_builtins(scheme), Scheme, where)
        _refuse_twins(f"{where}: tiers", [tier.name for tier in scheme.tiers])
        for tier in scheme.tiers:
            place, most = f"{where}, tier {tier.name!r}: ", max(0, tier.group_nodes - 1)
            require(tier.group_nodes <= nodes, f"{place}group_nodes", f"0 to {nodes} nodes", tier.group_nodes)
            expected = f"0 to {most} nodes of a group of {tier.group_nodes}"
            require(tier.tolerates <= most, f"{place}tolerates", expected, tier.tolerates)


def _refuse_twins(where: str, names: Sequence[str]) -> None:
    twice = next((name for name in names if names.count(name) > 1), None)
    require(twice is None, where, "different names, each of them once", twice)


def simulate(
    setup: Setup,
    schemes: Sequence[Scheme],
    *,
    repetitions: int = 20,
    seed: int = 0,
    workers: int = 1,
    confidence: float = 0.95,
) -> list[Summary]:
    """Simulate trainings under each scheme, and summarize each. Raises ConfigurationError.

    A repetition depends on the seed and its number only: not on how many there are, nor on `workers`, the processes
    that share them. A trace is replayed once.
    """
    require(1 <= repetitions <= 1_000_000, "repetitions", "1 to 1000000", repetitions)
    require(0 <= seed < 2**63, "seed", "0 to 2^63 - 1", seed)
    require(1 <= workers <= 1024, "workers", "1 to 1024 processes", workers)
    require(0.5 <= confidence <= 0.9999, "confidence", "a probability of 0.5 to 0.9999", confidence)
    check_schemes(schemes, setup.cluster.nodes)
    if isinstance(setup.failures, Failures):
        repetitions = 1
    one = partial(_repeat, setup, tuple(schemes), seed)
    if workers == 1 or repetitions == 1:
        repeated = [one(number) for number in range(repetitions)]
    else:
        context = multiprocessing.get_context("forkserver")
        with ProcessPoolExecutor(min(workers, repetitions), mp_context=context) as pool:
            repeated = list(pool.map(one, range(repetitions), chunksize=-(-repetitions // (4 * workers))))
    return [
        Summary(scheme, outcomes, confidence)
        for scheme, outcomes in zip(schemes, zip(*repeated, strict=True), strict=True)
    ]


def _repeat(setup: Setup, schemes: Sequence[Scheme], seed: int, number: int) -> list[Outcome]:
    """One repetition: the same failures for all schemes."""
    failures = setup.failures
    if isinstance(failures, FailureModel):
        child = np.random.SeedSequence(seed, spawn_key=(number,))  # what `spawn` gives the child of this number
        failures = failures.draw(setup.cluster, setup.training.duration_seconds, child)
    return [replay(scheme, failures, setup.cluster, setup.training, setup.repair) for scheme in schemes]


FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)
#: Schemes for a mean time between failures of the job, in seconds, and a number of nodes.
SchemesAt = Callable[[float, int], Sequence[Scheme]]


@dataclass(frozen=True)
class Sweep:
    """Simulations along two axes, with the summaries of the schemes that are possible there; all else is as it was."""

    by_mtbf: tuple[tuple[float, tuple[Summary, ...]], ...]  #: by the job's mean time between failures in seconds
    by_nodes: tuple[tuple[int, tuple[Summary, ...]], ...]  #: each node fails as often in all of them


def sweep(
    setup: Setup,
    schemes_at: SchemesAt,
    run: Callable[[Setup, Sequence[Scheme]], Iterable[Summary]],
    mtbf_seconds: Sequence[float] = (),
    nodes: Sequence[int] = (),
) -> Sweep:
    """Simulate with other times between failures, and with other numbers of nodes, by `run`; else times each factor.

    Clusters smaller than the largest group of a scheme are left out. Failures are no trace, which fits one cluster.
    """
    model, cluster = setup.failures, setup.cluster
    assert isinstance(model, FailureModel), "distributions can be scaled"
    mtbf = model.mean_seconds(cluster)
    by_mtbf = []
    for each in mtbf_seconds or [mtbf * factor for factor in FACTORS]:
        often = replace(setup, failures=with_mean_scaled(model, each / mtbf))
        by_mtbf.append((each, tuple(run(often, schemes_at(each, cluster.nodes)))))
    by_nodes = []
    for size in nodes or sorted({round(cluster.nodes * factor) for factor in FACTORS}):
        sized = replace(setup, cluster=with_nodes(cluster, max(1, size)))
        schemes = schemes_at(model.mean_seconds(sized.cluster), sized.cluster.nodes)
        if schemes and size >= max([1, *(tier.group_nodes for scheme in schemes for tier in scheme.tiers)]):
            by_nodes.append((size, tuple(run(sized, schemes))))
    return Sweep(tuple(by_mtbf), tuple(by_nodes))


def with_mean_scaled(model: FailureModel, factor: float) -> FailureModel:
    """All times between failures, times a factor."""

    def scaled(lifetime: Lifetime | None) -> Lifetime | None:
        return lifetime and replace(lifetime, mean_seconds=lifetime.mean_seconds * factor)

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
