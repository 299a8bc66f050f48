"""Drift: differences between what redo gives and what training has, as the audit of the agent finds them."""

from __future__ import annotations

import logging

from memckpt.protocol.trainer import Drift

_log = logging.getLogger("memckpt")
#: Drift beyond the rounding of other kernels: a first finding of so many ulp, or a growth by so large a factor.
_MUCH_ULP = 1 << 16
_JUMP = 1024


def drift_text(drift: Drift) -> str:
    """What the audit has found, in words."""
    first, last = drift.steps
    return f"the audit found {drift.tensor} off by {drift.max_ulp:g} ulp when steps {first} to {last} were redone"


class DriftReports:
    """Logs the first drift that another device's rounding explains, and tells it from findings.

    Args:
        exact: whether the replica is redone on the hardware that trains, so that there must be no drift.

    Attributes:
        largest_ulp: largest drift that was found, in units in the last place (ulp).
    """

    def __init__(self, exact: bool) -> None:
        self._exact = exact
        self.largest_ulp = 0.0

    def is_finding(self, drift: Drift) -> bool:
        """Note a drift. Returns True if rounding does not explain it."""
        before, self.largest_ulp = self.largest_ulp, max(self.largest_ulp, drift.max_ulp)
        if drift.max_ulp <= 0:
            return False
        if drift.sure or self._exact or drift.max_ulp > (_JUMP * before if before else _MUCH_ULP):
            return True
        if not before:
            _log.info(
                "memckpt: the replica, which is redone on the CPU, differs from the training's accelerator: %s by "
                "%g ulp at record %d; a resume is off by as much (said once; see drift_ulp)",
                drift.tensor,
                drift.max_ulp,
                drift.record,
            )
        return False
