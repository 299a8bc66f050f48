"""Whether links hold training back by more than is allowed: then they do not carry every record."""

from __future__ import annotations

_RECORDS = 32


class HeldUp:
    """Share of records that training had to wait for, and the time that it took.

    One long wait, for a peer that is away, says nothing of the links: training has to wait for half of all records.

    Args:
        overhead: the share by which training may be slower than without peers.

    Attributes:
        too_long: whether training waited too long for too many of the last records.
        began: whether records are counted.
    """

    def __init__(self, overhead: float) -> None:
        self._overhead = overhead
        self.too_long = self.began = False
        self._since = 0.0
        self._seconds = 0.0
        self._records = self._waited_for = 0
        self._waited = False

    def forget(self) -> None:
        """Drop what was counted."""
        self.too_long = self.began = False

    def committed(self) -> None:
        """Count a record."""
        self._records += 1
        self._waited_for += self._waited
        self._waited = False

    def waited(self, seconds: float) -> None:
        """Add seconds that training has waited for the next record."""
        self._seconds += seconds
        self._waited = True

    def look(self, now: float, counts: bool) -> None:
        """Judge the last records, if there were enough. `counts`: whether the next ones are to be judged."""
        if not counts:
            self.began = False
        elif not self.began:
            self._begin(now)
        elif self._records >= _RECORDS:
            trained = max(now - self._since - self._seconds, 1e-9)
            often = 2 * self._waited_for >= self._records
            self.too_long = often and self._seconds > self._overhead * trained
            self._begin(now)

    def _begin(self, now: float) -> None:
        self.began, self._since, self._seconds = True, now, 0.0
        self._records = self._waited_for = 0
        self._waited = False
