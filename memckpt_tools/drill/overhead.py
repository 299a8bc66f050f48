"""What protection costs a step: undisturbed runs compared with one in which memckpt is switched off."""

from __future__ import annotations

from dataclasses import dataclass

from memckpt_tools.drill.difference import RESULTS, Difference, compare
from memckpt_tools.drill.history import RunHistory


@dataclass(frozen=True)
class Overhead:
    """Durations of steps with protection and without.

    Attributes:
        protected: median seconds of a step, of each undisturbed run.
        unprotected: the same without protection; 0 if it is not known.
        changed: first result that is another one without protection, where the training repeats itself; else None.
        problem: why it was not measured; empty if it was.
    """

    protected: tuple[float, float]
    unprotected: float
    changed: Difference | None = None
    problem: str = ""

    @property
    def share(self) -> float:
        """Mean of the protected runs beyond the unprotected one, as a fraction of it."""
        return sum(self.protected) / 2 / self.unprotected - 1

    @property
    def noise(self) -> float:
        """By how much the two protected runs differ, as a fraction of the unprotected one."""
        return abs(self.protected[0] - self.protected[1]) / self.unprotected


def first_change(unprotected: RunHistory, first: RunHistory, second: RunHistory, last_record: int) -> Difference | None:
    """The first result that differs without protection, and not between two protected runs."""
    ignored = {each.key for each in compare(second, first, last_record)}
    found = compare(unprotected, first, last_record, ignored)
    return next((each for each in found if each.kind in RESULTS), None)
