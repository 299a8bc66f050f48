"""A scheme of protection: its tiers, and what they make of a job's failures on average. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from memckpt_tools.planning.job import Failures

#: Longest time that is taken for meant, in seconds: 3,000 years as a mean time between failures is another unit's.
LONGEST_SECONDS = 1e11
Seconds = Annotated[float, Meta(ge=0, le=LONGEST_SECONDS)]
_Bytes = Annotated[float, Meta(ge=0, le=1e18)]

#: What is lost at once: a process (the node's memory stays), one or more nodes with their memory, or every node.
Failure = Literal["process", "nodes", "cluster"]


class Tier(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A place that a state is brought back from.

    Attributes:
        every_steps: interval of the states that it holds, in steps.
        lag_steps: number of the newest steps that are on their way to it, and lost with what they come from.
        restore_seconds: time from the start of processes to the first new step.
        group_nodes: nodes of a group that protects its members; 0 where nodes do not matter.
        tolerates: nodes of a group that may be lost at once; 0: none, the tier is the node's own memory.
        survives_cluster: whether it survives the loss of all nodes.
        rebuild_seconds: time from the first new step until a node that was replaced holds its part of it again; until
            then it counts as lost.
    """

    name: str
    every_steps: Annotated[float, Meta(gt=0, le=1e12)]
    lag_steps: Annotated[float, Meta(ge=0, le=1e12)]
    restore_seconds: Seconds
    group_nodes: Annotated[int, Meta(ge=0)] = 0
    tolerates: Annotated[int, Meta(ge=0)] = 0
    survives_cluster: bool = False
    rebuild_seconds: Seconds = 0.0


class Scheme(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A way to protect a training. Ranges hold for what is read from files; a plan's values are taken as they are.

    Attributes:
        overhead: time that it adds to training, as a share of undisturbed training time.
        tiers: its tiers, nearest first; a recovery takes the tier with the newest state that survived, and of equal
            ones the nearest.
        memory_bytes: host memory for each node, in bytes.
        wire_bytes: bytes that a node sends for each step.
        disk_bytes: bytes that the job writes for each step.
    """

    name: str
    overhead: Annotated[float, Meta(ge=0, le=100)]
    tiers: tuple[Tier, ...]
    memory_bytes: _Bytes = 0.0
    wire_bytes: _Bytes = 0.0
    disk_bytes: _Bytes = 0.0


@dataclass(frozen=True, kw_only=True)
class Expectation:
    """Expected results of one scheme.

    Attributes:
        ettr: share of the wall-clock time that advances training.
        lost_steps: steps that a failure of a kind costs on average; those of the step in progress count.
        recovery_seconds: time from a failure of a kind to the first new step.
        tiers: name of the tier that serves; empty where training starts over.
    """

    ettr: float
    lost_steps: dict[Failure, float]
    recovery_seconds: dict[Failure, float]
    tiers: dict[Failure, str]


def serving_tier(scheme: Scheme, failure: Failure) -> Tier | None:
    """The tier with the newest state that survives, on average; None where no tier does.

    A failure of nodes is one that a group tolerates.
    """
    survivors = [tier for tier in scheme.tiers if survives(tier, failure)]
    # Mean age of its newest state at a failure, by the ETTR post: half an interval, and what was not persistent yet.
    return min(survivors, key=lambda tier: tier.lag_steps + tier.every_steps / 2, default=None)


def survives(tier: Tier, failure: Failure) -> bool:
    """Whether a tier survives a failure (of nodes: of as many as it tolerates)."""
    if failure == "process" or tier.survives_cluster:
        return True
    return failure == "nodes" and tier.tolerates > 0


def expect(
    scheme: Scheme,
    failures: Failures,
    *,
    step_seconds: float,
    run_seconds: float,
    beyond_per_second: float = 0.0,
    restart_seconds: float = 0.0,
    replacement_seconds: float = 0.0,
) -> Expectation:
    """Expect the behaviour of a scheme; times are those of a job.

    Args:
        run_seconds: length of the job; where no tier survives a failure, training starts over.
        beyond_per_second: rate of failures, of those of nodes and domains, that take more nodes than a group tolerates.
    """
    nodes = failures.node + failures.domain
    beyond = min(nodes, beyond_per_second)
    rates: dict[Failure, float] = {
        "process": failures.process,
        "nodes": nodes - beyond,
        "cluster": failures.cluster + beyond,
    }
    slowed = step_seconds * (1 + scheme.overhead)
    from_start = Tier(name="", every_steps=run_seconds / step_seconds, lag_steps=0, restore_seconds=0)
    serving = {failure: serving_tier(scheme, failure) or from_start for failure in rates}
    recovery = {
        failure: restart_seconds + tier.restore_seconds + (0 if failure == "process" else replacement_seconds)
        for failure, tier in serving.items()
    }
    total = sum(rates.values())
    up = 1.0
    if total:
        # A failure in a restore begins it anew: its time is cut off at the next failure.
        up = sum(rate / total * math.exp(-recovery[failure] * total) for failure, rate in rates.items())
    lost_share, lost_steps = 0.0, {}
    by_tier: dict[Tier, float] = {}
    for failure, rate in rates.items():
        by_tier[serving[failure]] = by_tier.get(serving[failure], 0.0) + rate
    for failure, tier in serving.items():
        # The mean age, where nothing has failed between two states of a tier.
        seconds = _lost_seconds(tier, by_tier[tier], slowed)
        lost_steps[failure] = seconds / slowed
        lost_share += rates[failure] * seconds
    return Expectation(
        ettr=max(0.0, up * (1 - lost_share)) / (1 + scheme.overhead),
        lost_steps=lost_steps,
        recovery_seconds=recovery,
        tiers={failure: tier.name for failure, tier in serving.items()},
    )


def _lost_seconds(tier: Tier, failures_per_second: float, step_seconds: float) -> float:
    """Training time that a failure takes back to a tier's newest state, in seconds, on average.

    Exact for exponential failures that all go back to that tier, as in Daly (2006), section 3: since the last one,
    states at multiples of an interval t are kept, each of them a lag a later, so that
    1/rate - t e^(-a rate)/(e^(t rate) - 1) is lost. For rare failures this is t/2 + a, as in the ETTR post.
    """
    interval, lag = tier.every_steps * step_seconds, tier.lag_steps * step_seconds
    passed = interval * failures_per_second
    if passed < 1e-6:
        return interval / 2 + lag
    if passed > 700:
        return 1 / failures_per_second
    return 1 / failures_per_second - interval * math.exp(-lag * failures_per_second) / math.expm1(passed)
