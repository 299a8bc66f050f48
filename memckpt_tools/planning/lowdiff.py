"""LowDiff's model of full checkpoints with batches of differences between them: wasted time, and its optimum."""

from __future__ import annotations

from typing import NamedTuple

from memckpt_tools.planning.checks import require_number, require_seconds


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
