"""Number of records in a batch of the log, from measured times."""

from __future__ import annotations

import math
from collections import deque

#: Share of the time that writing may take.
_BUSY = 0.05
#: Shortest time between two batches: each is two files, which a resume has to look at.
_LEAST_SECONDS = 1.0
_SAMPLES = 4
#: A quotient this little above a number counts as the number.
_ROUNDING = 1e-3


class BatchSize:
    """As few records as leave the writer idle for 95% of the time, and a second between batches.

    A crash costs few steps then. Batches of b records are written every b steps, and take a time that depends little on
    b: flushes of files and directories. LowDiff (section IV-B) weighs the same two.

    Args:
        most: the largest number, also before anything is measured: a writer that falls behind leaves a hole.
        fixed: whether it is always `most`.
    """

    def __init__(self, most: int, fixed: bool) -> None:
        self._most = most
        self._fixed = fixed
        # The longest write and the shortest step of the last few count: one of each may be unusual.
        self._writes: deque[float] = deque(maxlen=_SAMPLES)
        self._intervals: deque[float] = deque(maxlen=_SAMPLES)
        self._last: float | None = None

    def wrote(self, records: int, seconds: float, now: float) -> None:
        """Note a batch that has been written.

        Args:
            records: its records.
            seconds: time that writing took.
            now: time when that was over, in seconds.
        """
        self._writes.append(seconds)
        if self._last is not None:
            self._intervals.append((now - self._last) / records)
        self._last = now

    @property
    def records(self) -> int:
        """Records of the next batch."""
        if self._fixed or not self._intervals:
            return self._most
        step = min(self._intervals)
        seconds = max(_LEAST_SECONDS, max(self._writes) / _BUSY)
        return min(self._most, max(1, math.ceil(seconds / step - _ROUNDING))) if step > 0 else self._most
