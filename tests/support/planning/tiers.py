"""Tiers that a plan is about."""

from __future__ import annotations

import math

from memckpt_tools.planning.scheme import Tier


def disk(every_steps: float, restore_seconds: float, lag_steps: float = 0.0) -> Tier:
    return Tier(
        name="disk", every_steps=every_steps, lag_steps=lag_steps, restore_seconds=restore_seconds,
        survives_cluster=True,
    )  # fmt: skip


def daly_wall_seconds(work: float, interval: float, write: float, read: float, mttf: float) -> float:
    """Daly (2006), equation 20: time of a job of many intervals with exponential failures; intervals without writes."""
    return mttf * math.exp(read / mttf) * math.expm1((interval + write) / mttf) * work / interval
