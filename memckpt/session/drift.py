"""Log messages about drift: differences that the audit finds between an eager replica and the live state."""

from __future__ import annotations

import logging

from memckpt.protocol.trainer import Drift

_log = logging.getLogger("memckpt")
#: Drift beyond the rounding of other kernels: a first finding of so many ulp, or a growth by so large a factor.
_MUCH_ULP = 1 << 16
_JUMP = 1024


class DriftReports:
    """Logs the first drift, and drift that other hardware does not explain.

    Args:
        exact: whether the replica is redone on the hardware that trains, so that there must be no drift.

    Attributes:
        largest_ulp: largest drift that was found, in units in the last place (ulp).
    """

    def __init__(self, exact: bool) -> None:
        self._exact = exact
        self.largest_ulp = 0.0

    def wants_rewrite(self, drift: Drift) -> bool:
        """Note a finding. Returns True if the replica has to be written again."""
        before, self.largest_ulp = self.largest_ulp, max(self.largest_ulp, drift.max_ulp)
        if drift.max_ulp <= 0:
            return False
        if self._exact or drift.max_ulp > (_JUMP * before if before else _MUCH_ULP):
            _log.warning(
                "memckpt: the audit found %s off by %g ulp at record %d: it was changed outside the optimizer, or the "
                "optimizer cannot be redone exactly; the replica is written anew",
                drift.tensor,
                drift.max_ulp,
                drift.record,
            )
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
