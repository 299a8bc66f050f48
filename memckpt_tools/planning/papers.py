"""Formulas of papers: probabilities that a state survives, ratios of effective training time, intervals.

No command shows them yet: rows of ``memckpt plan`` for Gemini, REFT, ECCheck and LowDiff will. Each names its paper.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from memckpt.errors import ConfigurationError
from memckpt_tools.planning.checks import require_count, require_number, require_seconds, require_share


def ettr_synchronous(mttf_seconds: float, interval_seconds: float, write_seconds: float, read_seconds: float) -> float:
    """ETTR with checkpoints for which training waits.

    Source: "ETTR, aka, how good is the training goodput", first formulation: for each failure a read, half an interval
    that is repeated, and one write for each interval.

    Args:
        mttf_seconds: mean time to failure of the job.
        interval_seconds: time from one checkpoint to the next.
        write_seconds: time that training waits for a checkpoint.
        read_seconds: time to read one after a failure.

    Returns:
        the share of effective time; 0 where the formula, which holds for failures that are rare, gives less.
    """
    return ettr_asynchronous(mttf_seconds, interval_seconds, write_seconds, read_seconds, 0.0)


def ettr_asynchronous(
    mttf_seconds: float,
    interval_seconds: float,
    write_seconds: float,
    read_seconds: float,
    persist_seconds: float,
) -> float:
    """ETTR with checkpoints that are persisted while training goes on.

    Source: the same post, section "Effect of asynchronous checkpoint writes". A failure before the newest checkpoint is
    persistent also costs the interval before it: `persist_seconds` once for each failure.

    Args:
        mttf_seconds, interval_seconds, read_seconds: as in :func:`ettr_synchronous`.
        write_seconds: time that training waits for the copy.
        persist_seconds: time from the copy until it is persistent, at most an interval.
    """
    require_seconds("mttf_seconds", mttf_seconds, zero=False)
    require_seconds("interval_seconds", interval_seconds, zero=False)
    require_seconds("write_seconds", write_seconds)
    require_seconds("read_seconds", read_seconds)
    require_number("persist_seconds", persist_seconds, 0, interval_seconds, "s (interval_seconds)")
    writes = mttf_seconds / interval_seconds * write_seconds
    lost = interval_seconds / 2 + persist_seconds
    return max(0.0, 1 - (read_seconds + writes + lost) / mttf_seconds)


def wall_seconds(
    work_seconds: float, interval_seconds: float, write_seconds: float, read_seconds: float, mttf_seconds: float
) -> float:
    """Expected wall-clock time of a job with exponential failures and synchronous checkpoints, in seconds.

    Source: Daly (2006), equation 20, exact for a job of many intervals: M e^(R/M) (e^((t + d)/M) - 1) W/t.

    Args:
        work_seconds: W, computing time without checkpoints and failures.
        interval_seconds: t, computing time between two checkpoints.
        write_seconds: d. read_seconds: R. mttf_seconds: M.
    """
    require_seconds("work_seconds", work_seconds)
    require_seconds("interval_seconds", interval_seconds, zero=False)
    require_seconds("write_seconds", write_seconds)
    require_seconds("read_seconds", read_seconds)
    require_seconds("mttf_seconds", mttf_seconds, zero=False)
    grown = math.exp(min(700.0, read_seconds / mttf_seconds))
    spent = math.expm1(min(700.0, (interval_seconds + write_seconds) / mttf_seconds))
    return mttf_seconds * grown * spent * work_seconds / interval_seconds


def reft_interval(save_seconds: float, failures_per_second: float) -> float:
    """REFT's optimal interval of snapshots or checkpoints, in seconds; infinite without failures.

    Source: REFT, appendix A, equations 4 and 5: saving costs T_save for each interval, a failure half an interval, so
    that the interval is sqrt(2 T_save / rate). Equation 9 has it for snapshots, with the failures of a node; equation
    11 for the checkpoints behind them, with the rate of failures that memory does not survive, of equation 7
    (:func:`memckpt_tools.planning.planned.beyond_memory_rate`).
    """
    require_seconds("save_seconds", save_seconds)
    require_number("failures_per_second", failures_per_second, 0, 1e6, "per second")
    return math.sqrt(2 * save_seconds / failures_per_second) if failures_per_second else math.inf


_MOST_NODES = 10_000_000
#: Most nodes lost at once that are counted exactly: numbers of sets have thousands of digits.
_MOST_FAILED = 1000


def recoverable_choices(groups: int, group_nodes: int, tolerates: int, failed: int) -> int:
    """Number of sets of failed nodes with at most `tolerates` nodes of each group.

    Exact: the coefficient of x^failed in (sum of C(group_nodes, i) x^i for i up to tolerates)^groups.
    """
    require_count("groups", groups, 1, _MOST_NODES)
    require_count("group_nodes", group_nodes, 1, 1024, "nodes")
    require_count("tolerates", tolerates, 0, group_nodes, "nodes (group_nodes)")
    require_count("failed", failed, 0, min(_MOST_FAILED, groups * group_nodes), "nodes")
    power = [math.comb(group_nodes, lost) for lost in range(min(tolerates, failed) + 1)]
    product, rest = [1], groups
    while rest:
        if rest & 1:
            product = _times(product, power, failed)
        rest >>= 1
        if rest:
            power = _times(power, power, failed)
    return product[failed] if failed < len(product) else 0


def _times(left: list[int], right: list[int], most: int) -> list[int]:
    """The product of two polynomials, up to the power `most`."""
    found = [0] * min(len(left) + len(right) - 1, most + 1)
    for power, factor in enumerate(left):
        for other, value in enumerate(right[: len(found) - power]):
            found[power + other] += factor * value
    return found


def recovery_when_lost(groups: int, group_nodes: int, tolerates: int, failed: int) -> float:
    """Probability that memory holds everything when `failed` nodes are lost at once, all sets of them alike."""
    choices = recoverable_choices(groups, group_nodes, tolerates, failed)
    return choices / math.comb(groups * group_nodes, failed)


def gemini_recovery(nodes: int, copies: int, failed: int) -> float:
    """Gemini's probability to recover from memory: groups of M nodes that hold each other's checkpoints.

    Source: the authors' summary of Gemini (Wang et al., SOSP 2023), "Optimal checkpoint placement": groups of M
    machines, which is optimal where M divides their number. The probability is counted exactly.

    Args:
        nodes: N, a multiple of `copies`.
        copies: M, nodes that hold each checkpoint.
        failed: nodes that are lost at once.
    """
    _check_groups(nodes, copies)
    require_count("failed", failed, 0, nodes, "nodes (nodes)")
    return recovery_when_lost(nodes // copies, copies, copies - 1, failed)


def gemini_corollary(nodes: int, copies: int, failed: int) -> float:
    """The closed form of :func:`gemini_recovery`, exact for fewer than 2M lost nodes, else a lower bound.

    Source: the corollary of Gemini's placement (Wang et al., SOSP 2023) for m copies on N machines of which k are lost:
    1 for k < m, else 1 - (N/m) C(N - m, k - m) / C(N, k), and not less than 0. A set of k < 2m machines contains at
    most one whole group, so that nothing is counted twice.
    """
    _check_groups(nodes, copies)
    require_count("failed", failed, 0, nodes, "nodes (nodes)")
    if failed < copies:
        return 1.0
    lost = nodes // copies * math.comb(nodes - copies, failed - copies)
    return max(0.0, 1 - lost / math.comb(nodes, failed))


def _check_groups(nodes: int, copies: int) -> None:
    require_count("copies", copies, 1, 1024, "nodes")
    require_count("nodes", nodes, copies, _MOST_NODES, f"nodes (at least the {copies} copies)")
    if nodes % copies:
        raise ConfigurationError(f"nodes: expected a multiple of copies={copies}, found {nodes}")


def coded_group_recovery(failure_probability: float, group_nodes: int, tolerates: int) -> float:
    """Probability that a group of nodes with an erasure code loses nothing.

    Source: ECCheck, equation 2 and section V-G: sum of C(n, i) p^i (1 - p)^(n - i) for i up to m.

    Args:
        failure_probability: p, of each node, independent of the others.
        group_nodes: n = k + m. tolerates: m.
    """
    require_share("failure_probability", failure_probability)
    require_count("group_nodes", group_nodes, 1, 1024, "nodes")
    require_count("tolerates", tolerates, 0, group_nodes, "nodes (group_nodes)")
    alive = 1 - failure_probability
    lost = sum(
        math.comb(group_nodes, failed) * failure_probability**failed * alive ** (group_nodes - failed)
        for failed in range(tolerates + 1, group_nodes + 1)
    )  # the sum of what is small keeps its digits
    return 1 - lost


def replicated_group_recovery(failure_probability: float, group_nodes: int, copies: int) -> float:
    """Probability that a group of nodes loses nothing in which sets of `copies` nodes hold each other's state.

    Source: ECCheck, equation 1 (4 nodes, 2 copies) and section V-G: no set is lost as a whole.
    """
    require_share("failure_probability", failure_probability)
    _check_groups(group_nodes, copies)
    return float((1 - failure_probability**copies) ** (group_nodes // copies))


def cluster_recovery(group_recovery: float, groups: int) -> float:
    """Probability that no group of a cluster loses anything: the group's to the power of their number.

    Source: ECCheck, section II-B (R^500 for 2,000 nodes in groups of four).
    """
    require_share("group_recovery", group_recovery)
    require_count("groups", groups, 1, _MOST_NODES)
    return float(group_recovery**groups)


def weibull_survival(seconds: float, failures_per_second: float, shape: float) -> float:
    """Probability that a node has not failed until a time: exp(-(rate x time)^shape).

    Source: REFT, section 5, assumption 1 and equation 1. A shape of 1 is the exponential distribution, more than 1
    nodes that age, less than 1 failures that come early.
    """
    require_seconds("seconds", seconds)
    require_number("failures_per_second", failures_per_second, 0, 1e6, "per second")
    require_number("shape", shape, 0.01, 100)
    return math.exp(-((failures_per_second * seconds) ** shape))


def reft_survival(node_survival: float, group_nodes: int, groups: int, tolerates: int = 1) -> float:
    """Probability that REFT holds the current state: at most one node of each sharding group has failed.

    Source: REFT, equation 2, with processes that hold snapshots as reliable as the nodes that they run on. Software
    failures of the training do not count.

    Args:
        node_survival: probability that a node has not failed (:func:`weibull_survival`).
        group_nodes: nodes of a sharding group.
        groups: number of groups.
        tolerates: nodes of a group that may fail; 1 in REFT.
    """
    require_share("node_survival", node_survival)
    return cluster_recovery(coded_group_recovery(1 - node_survival, group_nodes, tolerates), groups)


def checkpoint_survival(node_survival: float, software_survival: float, nodes: int) -> float:
    """Probability that the current state has survived without REFT: no node has failed, and no process.

    Source: REFT, equation 3.
    """
    require_share("node_survival", node_survival)
    require_share("software_survival", software_survival)
    require_count("nodes", nodes, 1, _MOST_NODES)
    return float((node_survival * software_survival) ** nodes)


class LowDiffOptimum(NamedTuple):
    """The best settings.

    Attributes:
        full_interval_seconds: 1/f, time between two full checkpoints.
        batch_seconds: b, training time whose differences are written as one batch.
    """

    full_interval_seconds: float
    batch_seconds: float


def lowdiff_wasted_share(
    *,
    full_interval_seconds: float,
    batch_seconds: float,
    state_bytes: float,
    write_bytes_per_second: float,
    mtbf_seconds: float,
    load_seconds: float,
    merge_seconds: float,
) -> float:
    """Wasted share of the job's time: recovery and writing of full checkpoints.

    Source: LowDiff, section IV-C, equation 3, for each GPU and second of the job, from the terms listed there. A
    failure costs half a batch that was not written, loading a full checkpoint, and merging half of the batches that
    follow one: (b/2 + R_F + R_D/2 (1/(f b) - 1)) / M. Writing costs f S/W.

    Args:
        full_interval_seconds: 1/f.
        batch_seconds: b, at most 1/f.
        state_bytes: S, of a full checkpoint.
        write_bytes_per_second: W.
        mtbf_seconds: M.
        load_seconds: R_F, time to load a full checkpoint.
        merge_seconds: R_D, time to merge one batch at a recovery.
    """
    require_seconds("full_interval_seconds", full_interval_seconds, zero=False)
    require_number("batch_seconds", batch_seconds, 0, full_interval_seconds, "s (full_interval_seconds)", above=True)
    _check(state_bytes, write_bytes_per_second, mtbf_seconds, merge_seconds)
    require_seconds("load_seconds", load_seconds)
    merges = (full_interval_seconds / batch_seconds - 1) / 2
    recovery = batch_seconds / 2 + load_seconds + merge_seconds * merges
    return recovery / mtbf_seconds + state_bytes / write_bytes_per_second / full_interval_seconds


def lowdiff_optimum(
    *, state_bytes: float, write_bytes_per_second: float, mtbf_seconds: float, merge_seconds: float
) -> LowDiffOptimum:
    """The interval of full checkpoints and the batch that waste least.

    Source: LowDiff, section IV-C, equation 5: f = (R_D W^2 / (4 S^2 M^2))^(1/3), b = (2 S R_D M / W)^(1/3).
    """
    _check(state_bytes, write_bytes_per_second, mtbf_seconds, merge_seconds)
    write_seconds = state_bytes / write_bytes_per_second
    frequency = (merge_seconds / (4 * (write_seconds * mtbf_seconds) ** 2)) ** (1 / 3)
    return LowDiffOptimum(1 / frequency, (2 * write_seconds * merge_seconds * mtbf_seconds) ** (1 / 3))


def _check(state_bytes: float, write_bytes_per_second: float, mtbf_seconds: float, merge_seconds: float) -> None:
    require_number("state_bytes", state_bytes, 0, 1e18, "bytes", above=True)
    require_number("write_bytes_per_second", write_bytes_per_second, 0, 1e15, "bytes per second", above=True)
    require_seconds("mtbf_seconds", mtbf_seconds, zero=False)
    require_seconds("merge_seconds", merge_seconds, zero=False)
