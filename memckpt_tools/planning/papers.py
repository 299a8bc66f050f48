"""Formulas of papers, for rows of ``memckpt plan`` that are to come: Gemini, ECCheck, LowDiff.

Each names its paper, and has a test against a number that the paper prints.
"""

from __future__ import annotations

import math
from typing import NamedTuple


def gemini_recovery(nodes: int, copies: int, failed: int) -> float:
    """Gemini's probability to recover from memory; exact for fewer than 2m lost nodes, else a lower bound.

    Source: the corollary of Gemini's placement (Wang et al., SOSP 2023) for m copies on N machines of which k are lost:
    1 for k < m, else 1 - (N/m) C(N - m, k - m) / C(N, k), and not less than 0. A set of k < 2m machines contains at
    most one whole group, so that nothing is counted twice.

    Args:
        nodes: N, a multiple of `copies`. copies: m, nodes that hold each checkpoint. failed: k, nodes lost at once.
    """
    if failed < copies:
        return 1.0
    lost = nodes // copies * math.comb(nodes - copies, failed - copies)
    return max(0.0, 1 - lost / math.comb(nodes, failed))


def coded_group_recovery(failure_probability: float, group_nodes: int, tolerates: int) -> float:
    """Probability that a group of nodes with an erasure code loses nothing.

    Source: ECCheck, equation 2 and section V-G: sum of C(n, i) p^i (1 - p)^(n - i) for i up to m.

    Args:
        failure_probability: p, of each node, independent of the others.
        group_nodes: n = k + m. tolerates: m.
    """
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
    return float((1 - failure_probability**copies) ** (group_nodes // copies))


class LowDiffOptimum(NamedTuple):
    """The best settings: 1/f, time between two full checkpoints, and b, training time whose differences are a batch."""

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
    """Share of the job's time that recovery and writing of full checkpoints waste.

    Source: LowDiff, section IV-C, equation 3, for each GPU and second of the job, from the terms listed there. A
    failure costs half a batch that was not written, loading a full checkpoint, and merging half of the batches that
    follow one: (b/2 + R_F + R_D/2 (1/(f b) - 1)) / M. Writing costs f S/W.

    Args:
        full_interval_seconds: 1/f.
        batch_seconds: b, at most 1/f.
        state_bytes: S, of a full checkpoint. write_bytes_per_second: W. mtbf_seconds: M.
        load_seconds: R_F, time to load a full checkpoint.
        merge_seconds: R_D, time to merge one batch at a recovery.
    """
    merges = (full_interval_seconds / batch_seconds - 1) / 2
    recovery = batch_seconds / 2 + load_seconds + merge_seconds * merges
    return recovery / mtbf_seconds + state_bytes / write_bytes_per_second / full_interval_seconds


def lowdiff_optimum(
    *, state_bytes: float, write_bytes_per_second: float, mtbf_seconds: float, merge_seconds: float
) -> LowDiffOptimum:
    """The interval of full checkpoints and the batch that waste least.

    Source: LowDiff, section IV-C, equation 5: f = (R_D W^2 / (4 S^2 M^2))^(1/3), b = (2 S R_D M / W)^(1/3).
    """
    write_seconds = state_bytes / write_bytes_per_second
    frequency = (merge_seconds / (4 * (write_seconds * mtbf_seconds) ** 2)) ** (1 / 3)
    return LowDiffOptimum(1 / frequency, (2 * write_seconds * merge_seconds * mtbf_seconds) ** (1 / 3))
