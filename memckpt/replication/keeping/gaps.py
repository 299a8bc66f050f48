"""Records that training has overwritten before every holder got them."""

from __future__ import annotations

#: A link is too slow once records were overtaken so many times, each time within so many windows of the last time.
_MOST_LOSSES, _LOSS_WINDOWS = 3, 4


class Gaps:
    """Stretches of records that not every holder gets, and how often one begins.

    Args:
        record: the record that every node can produce at the start.

    Attributes:
        last: first and last record of the newest stretch; None: there was none.
    """

    def __init__(self, record: int) -> None:
        self.last: tuple[int, int] | None = None
        #: The record that was overtaken last, and the number of losses that came soon after one another.
        self._lost_at, self._losses = record, 0

    def note(self, first: int, last: int, every: int) -> None:
        """Note records that not every holder gets. Stretches that touch become one.

        Args:
            every: distance between the numbers of two records.
        """
        if self.last is not None and first <= self.last[1] + every and last >= self.last[0]:
            first, last = min(first, self.last[0]), max(last, self.last[1])
        self.last = first, last

    def note_overtaken(self, record: int, kept: int) -> bool:
        """Note that training overwrote a record; returns whether that is no accident any more, but a slow link.

        Args:
            kept: number of records that a holder keeps.
        """
        since, self._lost_at = record - self._lost_at, max(record, self._lost_at)
        if since > kept:  # else it is one loss with the last one
            self._losses = self._losses + 1 if since <= _LOSS_WINDOWS * kept else 1
        if self._losses < _MOST_LOSSES:
            return False
        self._losses = 0
        return True
