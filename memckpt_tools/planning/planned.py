"""A scheme for a certain job: what it costs there, what it gives, and why it may not do."""

from __future__ import annotations

import math
from dataclasses import dataclass

from memckpt.config import MemckptConfig
from memckpt.user_messages import nbytes_text
from memckpt_tools.planning.footprint import NodeMemory
from memckpt_tools.planning.job import Job
from memckpt_tools.planning.scheme import Expectation, Scheme, Tier, expect

_MONTH_SECONDS = 30 * 86400.0


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A scheme, evaluated for a job.

    Attributes:
        choice: its settings in words: an interval, (k, m), a compressor.
        monthly_loss: probability of losing more than memory holds, in 30 days; None: it holds nothing in memory.
        keeps_memory: whether that is within the job's budget of losses.
        config: settings of this product; None for a scheme of others.
        problems: why it does not do for this job; empty: it does.
    """

    scheme: Scheme
    choice: str
    expectation: Expectation
    memory: NodeMemory
    monthly_loss: float | None
    keeps_memory: bool = False
    config: MemckptConfig | None = None
    exact: bool = True
    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def fits(self) -> bool:
        """Whether it does for the job, within the budgets."""
        return not self.problems


def evaluate(
    job: Job,
    scheme: Scheme,
    *,
    choice: str,
    memory: NodeMemory,
    in_memory: bool = True,
    config: MemckptConfig | None = None,
    exact: bool = True,
    problems: tuple[str, ...] = (),
    notes: tuple[str, ...] = (),
) -> Planned:
    """Evaluate a scheme for a job. `in_memory`: whether it holds anything in memory; others as in :class:`Planned`."""
    beyond = beyond_rate(job, scheme)
    expectation = expect(
        scheme,
        job.failures,
        step_seconds=job.step_seconds,
        run_seconds=job.run_seconds,
        beyond_per_second=beyond,
        restart_seconds=job.restart_seconds,
        replacement_seconds=job.replacement_seconds,
    )
    found = list(problems)
    budget = job.memory_budget_bytes
    if budget is not None and memory.peak > budget:
        found.append(f"memory: {nbytes_text(memory.peak)} of {nbytes_text(budget)}")
    if in_memory and scheme.overhead > job.overhead_budget:
        found.append(f"overhead: {scheme.overhead:.1%} of {job.overhead_budget:.1%}")
    monthly = monthly_probability(beyond + job.failures.cluster) if in_memory else None
    return Planned(
        scheme=scheme,
        choice=choice,
        expectation=expectation,
        memory=memory,
        monthly_loss=monthly,
        keeps_memory=monthly is not None and monthly <= job.loss_budget,
        config=config,
        exact=exact,
        problems=tuple(found),
        notes=notes,
    )


def beyond_rate(job: Job, scheme: Scheme) -> float:
    """Rate, per second, of failures of nodes and domains after which memory does not hold the newest state.

    These are failures of a domain in which a group has more nodes than it tolerates, and single failures that come
    while the group is not whole again after others.
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

    Each lost node leaves its group with one node less for a window of time, until it has been replaced and is protected
    again. REFT, equation 7, is the case of one tolerated node. For windows that are short compared to the time between
    failures it is groups x C(n, m) (rate x window)^m x (n - m) x rate.

    Args:
        node_failures_per_second: of one node.
        nodes: of the job. group_nodes: n. tolerates: m.
        window_seconds: from the loss of a node until its group is whole again.
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
