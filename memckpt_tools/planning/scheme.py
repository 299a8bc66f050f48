"""A scheme of protection: its tiers, what they make of a job's failures on average, and what it costs there. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from memckpt.config import MemckptConfig
from memckpt.user_messages import nbytes_text
from memckpt_tools.planning.footprint import NodeMemory
from memckpt_tools.planning.job import Failures, Job

#: Longest time that is taken for meant, in seconds: 3,000 years as a mean time between failures is another unit's.
LONGEST_SECONDS = 1e11
Seconds = Annotated[float, Meta(ge=0, le=LONGEST_SECONDS)]
_Bytes = Annotated[float, Meta(ge=0, le=1e18)]

#: What is lost at once: a process (the node's memory stays), one or more nodes with their memory, or every node.
Failure = Literal["process", "nodes", "cluster"]


class Tier(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A place that a state is brought back from."""

    name: str
    every_steps: Annotated[float, Meta(gt=0, le=1e12)]
    #: Number of the newest steps that are on their way to it, and lost with what they come from.
    lag_steps: Annotated[float, Meta(ge=0, le=1e12)]
    restore_seconds: Seconds  #: from the start of processes to the first new step
    group_nodes: Annotated[int, Meta(ge=0)] = 0  #: of a group that protects its members; 0: nodes do not matter
    tolerates: Annotated[int, Meta(ge=0)] = (
        0  #: nodes of a group that may be lost at once; 0: it is the node's own memory
    )
    survives_cluster: bool = False
    #: From the first new step until a node that was replaced holds its part again; until then it counts as lost.
    rebuild_seconds: Seconds = 0.0


class Scheme(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A way to protect a training. Ranges hold for what is read from files; a plan's values are taken as they are.

    A recovery takes the tier with the newest state that survived, of equal ones the nearest, which comes first.
    """

    name: str
    overhead: Annotated[float, Meta(ge=0, le=100)]  #: time that it adds, as a share of undisturbed training time
    tiers: tuple[Tier, ...]
    memory_bytes: _Bytes = 0.0  #: of each node
    wire_bytes: _Bytes = 0.0  #: that a node sends for each step
    disk_bytes: _Bytes = 0.0  #: that the job writes for each step


@dataclass(frozen=True, kw_only=True)
class Expectation:
    """Expected results of one scheme, by kind of failure."""

    ettr: float  #: share of the wall-clock time that advances training
    lost_steps: dict[Failure, float]  #: steps that a failure costs on average; the step in progress counts
    recovery_seconds: dict[Failure, float]  #: from a failure to the first new step
    tiers: dict[Failure, str]  #: name of the tier that serves; empty where training starts over


def serving_tier(scheme: Scheme, failure: Failure) -> Tier | None:
    """The tier with the newest state that survives, on average; None where no tier does."""
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
    """Expect the behaviour of a scheme in a job. Where no tier survives a failure, training starts over.

    `beyond_per_second`: rate of failures, of those of nodes and domains, that take more nodes than a group tolerates.
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

    Exact for exponential failures that all go back to that tier, as in Daly (2006), section 3. Since the last one,
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


_MONTH_SECONDS = 30 * 86400.0


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A scheme for a certain job: what it costs there, what it gives, and why it may not do."""

    job: Job
    scheme: Scheme
    choice: str  #: its settings in words: an interval, (k, m), a compressor
    memory: NodeMemory
    config: MemckptConfig | None = None  #: settings of this product; None: a scheme of others
    exact: bool = True
    refused: tuple[str, ...] = ()  #: why it does not do for this job, whatever the budgets
    notes: tuple[str, ...] = ()

    @cached_property
    def expectation(self) -> Expectation:
        job = self.job
        return expect(
            self.scheme,
            job.failures,
            step_seconds=job.step_seconds,
            run_seconds=job.run_seconds,
            beyond_per_second=beyond_rate(job, self.scheme),
            restart_seconds=job.restart_seconds,
            replacement_seconds=job.replacement_seconds,
        )

    @cached_property
    def monthly_loss(self) -> float | None:
        """Probability of losing more than memory holds, in 30 days; None: it holds nothing in memory."""
        if all(tier.survives_cluster for tier in self.scheme.tiers):
            return None
        return monthly_probability(beyond_rate(self.job, self.scheme) + self.job.failures.cluster)

    @cached_property
    def survives_two(self) -> float | None:
        """Probability that memory holds the state when any two nodes are lost at once; None as above.

        Sources: the summary of Gemini, "Optimal checkpoint placement": groups of M nodes. ECCheck, equations 1 and 2:
        of the six pairs of four nodes, pairs of copies survive four, and a code with m = 2 all.
        """
        nodes = self.job.nodes
        if self.monthly_loss is None or nodes < 2:
            return None
        group = max(self.scheme.tiers, key=lambda tier: tier.tolerates)
        if group.tolerates != 1 or group.group_nodes > nodes:
            return float(group.tolerates > 1 and group.group_nodes <= nodes)
        groups = nodes // group.group_nodes
        size, larger = divmod(nodes, groups)
        together = (groups - larger) * math.comb(size, 2) + larger * math.comb(size + 1, 2)
        return 1 - together / math.comb(nodes, 2)

    @property
    def keeps_memory(self) -> bool:
        """Whether that is within the job's budget of losses."""
        return self.monthly_loss is not None and self.monthly_loss <= self.job.loss_budget

    @cached_property
    def problems(self) -> tuple[str, ...]:
        """Why it does not do for this job; empty: it does."""
        found, peak, budget = list(self.refused), self.memory.peak, self.job.memory_budget_bytes
        if budget is not None and peak > budget:
            found.append(f"memory: {nbytes_text(peak)} of {nbytes_text(budget)}")
        if self.config is not None and self.scheme.overhead > self.job.overhead_budget:
            found.append(f"overhead: {self.scheme.overhead:.1%} of {self.job.overhead_budget:.1%}")
        return tuple(found)

    @property
    def fits(self) -> bool:
        """Whether it does for the job, within the budgets."""
        return not self.problems


def beyond_rate(job: Job, scheme: Scheme) -> float:
    """Rate, per second, of failures of nodes and domains after which memory does not hold the newest state.

    A domain may have more nodes of a group than it tolerates; single failures may come before a group is whole again.
    """
    failures = job.failures
    groups = [tier for tier in scheme.tiers if tier.group_nodes]
    if not groups:
        return failures.node + failures.domain
    group = max(groups, key=lambda tier: tier.tolerates)
    if group.group_nodes > job.nodes:
        return failures.node + failures.domain
    domains = job.domains or job.nodes
    at_once = -(-group.group_nodes // domains)
    rate, per_node = 0.0, failures.node / job.nodes
    if at_once > group.tolerates:
        rate += failures.domain
    elif job.domains:
        per_node += failures.domain / job.domains
    window = job.restart_seconds + job.replacement_seconds + group.restore_seconds + group.rebuild_seconds
    return min(
        failures.node + failures.domain,
        rate + beyond_memory_rate(per_node, job.nodes, group.group_nodes, group.tolerates, window),
    )


def peer_rate(job: Job) -> float:
    """Rate at which a node encodes and sends, in bytes per second: the two are a pipeline."""
    return min(job.network_bytes_per_second, job.encode_bytes_per_second)


def storage_tier(name: str, job: Job, interval_seconds: float, persist_seconds: float, restore_seconds: float) -> Tier:
    """Storage that all nodes reach, with a state for each interval."""
    return Tier(
        name=name,
        every_steps=max(1.0, interval_seconds / job.step_seconds),
        lag_steps=persist_seconds / job.step_seconds,
        restore_seconds=restore_seconds,
        survives_cluster=True,
    )


def beyond_memory_rate(
    node_failures_per_second: float, nodes: int, group_nodes: int, tolerates: int, window_seconds: float
) -> float:
    """Rate, per second, at which a group of a running job loses more nodes than it tolerates.

    Each lost node leaves its group with one node less for a window, until it is replaced and protected again. REFT,
    equation 7, is the case of one tolerated node. For short windows the rate is
    groups x C(n, m) (rate x window)^m x (n - m) x rate, with n = `group_nodes` and m = `tolerates`.
    """
    if tolerates >= group_nodes:
        return 0.0
    down = node_failures_per_second * window_seconds
    down /= 1 + down  # of the time, by repairs that take the window on average
    worst = math.comb(group_nodes, tolerates) * down**tolerates * (1 - down) ** (group_nodes - tolerates)
    return nodes / group_nodes * worst * (group_nodes - tolerates) * node_failures_per_second


def monthly_probability(events_per_second: float) -> float:
    """Probability of at least one event in 30 days, of events that come at a constant rate."""
    return -math.expm1(-events_per_second * _MONTH_SECONDS)
