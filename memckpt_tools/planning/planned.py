"""A scheme for a certain job: what it costs there, what it gives, and why it may not do."""

from __future__ import annotations

from dataclasses import dataclass

from memckpt.config import MemckptConfig
from memckpt.user_messages import nbytes_text
from memckpt_tools.planning.expectation import Expectation, expect
from memckpt_tools.planning.footprint import NodeMemory
from memckpt_tools.planning.job import Job
from memckpt_tools.planning.scheme import Scheme, Tier
from memckpt_tools.planning.survival import beyond_memory_rate, monthly_probability


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A scheme, evaluated for a job.

    Attributes:
        scheme: its costs and tiers.
        choice: its settings in words: an interval, (k, m), a compressor.
        expectation: steps lost, time to recover, ETTR.
        memory: host memory of a node, by who needs it.
        monthly_loss: probability of losing more than memory holds, in 30 days; None: it holds nothing in memory.
        keeps_memory: whether that is within the job's budget.
        config: settings of this product; None for a scheme of others.
        exact: whether a resume is equal bit for bit.
        problems: why it does not do for this job; empty: it does.
        notes: what else is to be known.
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
    """Evaluate a scheme for a job.

    Args:
        job: the job.
        scheme: the scheme.
        choice, memory, config, exact, problems, notes: as in :class:`Planned`.
        in_memory: whether it holds anything in memory.
    """
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


def steps(job: Job, seconds: float) -> float:
    """A time in steps."""
    return seconds / job.step_seconds


def storage_tier(name: str, job: Job, interval_seconds: float, persist_seconds: float, restore_seconds: float) -> Tier:
    """Storage that all nodes reach, with a state for each interval."""
    return Tier(
        name=name,
        every_steps=max(1.0, steps(job, interval_seconds)),
        lag_steps=steps(job, persist_seconds),
        restore_seconds=restore_seconds,
        survives_cluster=True,
    )
