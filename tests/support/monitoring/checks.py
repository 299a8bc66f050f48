"""Outcomes of the doctor's checks."""

from __future__ import annotations

from memckpt_tools.doctor.checks import Check


def outcomes(*found: Check) -> list[str]:
    """Their outcomes; whatever is not well has a remedy, and only that."""
    for check in found:
        assert bool(check.remedy) == (check.outcome != "ok"), check
    return [check.outcome for check in found]
