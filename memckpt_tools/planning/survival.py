"""Probabilities that a state survives failures of nodes: Gemini's, ECCheck's, REFT's, and rates for a running job."""

from __future__ import annotations

import math

from memckpt.errors import ConfigurationError
from memckpt_tools.planning.checks import require_count, require_number, require_seconds, require_share

_MOST_NODES = 10_000_000
#: Most nodes lost at once that are counted exactly: numbers of sets have thousands of digits.
_MOST_FAILED = 1000
_MONTH_SECONDS = 30 * 86400.0


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


def beyond_memory_rate(
    node_failures_per_second: float, nodes: int, group_nodes: int, tolerates: int, window_seconds: float
) -> float:
    """Rate, per second, at which a group of a running job loses more nodes than it tolerates.

    Each lost node leaves its group with one node less for a window of time, until it has been replaced and is protected
    again. REFT, equation 7, is the case of one tolerated node. For windows that are short compared to the time between
    failures it is groups x C(n, m) (rate x window)^m x (n - m) x rate.

    Args:
        node_failures_per_second: of one node.
        nodes: nodes of the job. group_nodes: n, nodes of a group. tolerates: m.
        window_seconds: from the loss of a node until its group is whole again.
    """
    require_number("node_failures_per_second", node_failures_per_second, 0, 1e6, "per second")
    require_count("nodes", nodes, 1, _MOST_NODES)
    require_count("group_nodes", group_nodes, 1, nodes, "nodes (nodes)")
    require_seconds("window_seconds", window_seconds)
    if tolerates >= group_nodes:
        return 0.0
    down = node_failures_per_second * window_seconds
    down /= 1 + down  # of the time, by repairs that take the window on average
    worst = math.comb(group_nodes, tolerates) * down**tolerates * (1 - down) ** (group_nodes - tolerates)
    return nodes / group_nodes * worst * (group_nodes - tolerates) * node_failures_per_second


def monthly_probability(events_per_second: float) -> float:
    """Probability of at least one event in 30 days, of events that come at a constant rate."""
    require_number("events_per_second", events_per_second, 0, 1e9, "per second")
    return -math.expm1(-events_per_second * _MONTH_SECONDS)
