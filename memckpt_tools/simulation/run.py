"""Repetitions of a simulation, for one scheme or several, with the same failures for all of them."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from memckpt_tools.planning.checks import require_count, require_number
from memckpt_tools.planning.scheme import Scheme
from memckpt_tools.simulation.checks import check_schemes
from memckpt_tools.simulation.failures import KINDS, Cluster, FailureModel, Failures
from memckpt_tools.simulation.replay import NOTHING, Outcome, Repair, Training, replay
from memckpt_tools.simulation.statistics import Estimate

DEFAULT_CONFIDENCE = 0.95


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What is simulated, apart from protection.

    Attributes:
        cluster: the nodes.
        failures: distributions to draw from, or the failures themselves.
        training: what is trained.
        repair: how lost nodes are replaced.
    """

    cluster: Cluster
    failures: FailureModel | Failures
    training: Training
    repair: Repair = field(default_factory=Repair)


@dataclass(frozen=True)
class Summary:
    """The repetitions of one scheme.

    Attributes:
        scheme: the scheme.
        outcomes: what became of each repetition; the same failures at the same place for all schemes.
        confidence: that of the intervals.
    """

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


def simulate(
    setup: Setup,
    schemes: Sequence[Scheme],
    *,
    repetitions: int = 20,
    seed: int = 0,
    workers: int = 1,
    confidence: float = DEFAULT_CONFIDENCE,
) -> list[Summary]:
    """Simulate trainings under each scheme.

    A repetition depends on the seed and its number only: not on how many there are, nor on `workers`. A trace is
    replayed once.

    Args:
        seed: seed of all draws, 0 or more.
        workers: processes that repetitions are shared among. With more than one, the caller's main module must be
            importable without side effects, as `multiprocessing` asks for.
        confidence: that of the intervals.

    Returns:
        A summary for each scheme, in their order.

    Raises:
        ConfigurationError: a value is out of range, or does not fit the cluster.
    """
    require_count("repetitions", repetitions, 1, 1_000_000, "repetitions")
    require_count("seed", seed, 0, 2**63 - 1, "")
    require_count("workers", workers, 1, 1024, "processes")
    require_number("confidence", confidence, 0.5, 0.9999, "(a probability)")
    check_schemes(schemes, setup.cluster.nodes)
    if isinstance(setup.failures, Failures):
        setup.failures.check(setup.cluster)
        repetitions = 1
    else:
        setup.failures.check(setup.cluster, setup.training.duration_seconds)
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
