"""Tiers that a plan is about."""

from __future__ import annotations

from memckpt_tools.planning.scheme import Tier


def disk(every_steps: float, restore_seconds: float, lag_steps: float = 0.0) -> Tier:
    return Tier(
        name="disk", every_steps=every_steps, lag_steps=lag_steps, restore_seconds=restore_seconds,
        survives_cluster=True,
    )  # fmt: skip
