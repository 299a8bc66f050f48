"""Ratio of effective training time (ETTR), and the intervals of checkpoints that make it largest.

All times are in seconds, all ratios are shares of wall-clock time.
"""

from __future__ import annotations

import math

from memckpt_tools.planning.checks import require_number, require_seconds


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


def young_interval(write_seconds: float, mttf_seconds: float) -> float:
    """Young's optimal time between two checkpoints, in seconds.

    Source: J. W. Young, "A first order approximation to the optimum checkpoint interval", CACM 17(9), 1974:
    sqrt(2 x write x MTTF). It makes the synchronous ETTR above largest, too.
    """
    require_seconds("write_seconds", write_seconds)
    require_seconds("mttf_seconds", mttf_seconds, zero=False)
    return math.sqrt(2 * write_seconds * mttf_seconds)


def daly_interval(write_seconds: float, mttf_seconds: float) -> float:
    """Daly's optimal computing time between two checkpoints, without the write, in seconds.

    Source: J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", FGCS 22, 2006,
    equation 37: with x = sqrt(write / (2 MTTF)), sqrt(2 write MTTF) (1 + x/3 + x^2/9) - write where the write takes
    less than twice the MTTF, else the MTTF.
    """
    young = young_interval(write_seconds, mttf_seconds)
    if write_seconds >= 2 * mttf_seconds:
        return mttf_seconds
    ratio = math.sqrt(write_seconds / (2 * mttf_seconds))
    return young * (1 + ratio / 3 + ratio * ratio / 9) - write_seconds


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
    (:func:`memckpt_tools.planning.survival.beyond_memory_rate`).
    """
    require_seconds("save_seconds", save_seconds)
    require_number("failures_per_second", failures_per_second, 0, 1e6, "per second")
    return math.sqrt(2 * save_seconds / failures_per_second) if failures_per_second else math.inf
