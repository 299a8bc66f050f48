"""Signs of life of another process: a counter in shared memory that its loop moves, and the kernel's account of it.

A process that is stopped or dead-locked moves no counter and computes nothing. One whose loop is busy for long
computes, and one that waits for its turn on a processor is runnable. To look asks nothing of the process, so that a
long call that holds Python's lock is no standstill.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from memckpt.memory.region import Region

#: Bytes of a page, and how often in a time limit a loop moves its counter and is looked at.
_PAGE_BYTES, _LOOKS = 4096, 8
_LONGEST_LOOK_SECONDS = 1.0


def look_seconds(limit: float) -> float:
    """How often a loop moves its counter, and is looked at, where it may show nothing for `limit` seconds."""
    return min(_LONGEST_LOOK_SECONDS, limit / _LOOKS)


class LifePage:
    """The counter of one process. Whoever makes or opens one closes it."""

    def __init__(self, region: Region) -> None:
        self._region = region
        self._words = memoryview(region.map).cast("Q")

    @classmethod
    def create(cls) -> LifePage:
        """Make a page.

        Raises:
            MemoryBudgetError: the kernel has no room for it.
        """
        return cls(Region.create("life", _PAGE_BYTES))

    @classmethod
    def open(cls, fd: int) -> LifePage:
        """Map a page that was handed over; takes over the descriptor."""
        return cls(Region.open(fd))

    @property
    def fd(self) -> int:
        """Descriptor to hand over; -1 in a forked child, where nothing is mapped, and once closed."""
        return self._region.fd

    @property
    def beats(self) -> int:
        """How often the loop has come round; -1 where the page is closed, or not mapped."""
        try:
            return self._words[0] if self._region.fd >= 0 else -1
        except ValueError:  # closed meanwhile by another thread
            return -1

    def beat(self) -> None:
        """The loop has come round. Only its own process calls this."""
        if self._region.fd >= 0:
            self._words[0] = self._words[0] + 1 & 2**64 - 1

    def close(self) -> None:
        """Unmap and close. Idempotent."""
        self._words.release()
        self._region.close()


class LifeWatch:
    """For how long a process has shown no sign of life, as far as the watcher itself was there to see it.

    Time counts from look to look, and no more than twice the longest pause between two: a watcher that was stopped
    itself has seen nothing.

    Args:
        page: of the process; belongs to the caller.
        pid: of the process.
        limit: seconds without a sign of life after which it stands still.
        threads: whose computing counts, ``"main"`` where others compute whatever the loop does.
        clock: in seconds.
    """

    def __init__(
        self,
        page: LifePage,
        pid: int,
        limit: float,
        threads: Literal["main", "all"],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._page = page
        self._stat = Path(f"/proc/{pid}/task/{pid}/stat" if threads == "main" else f"/proc/{pid}/stat")
        self.limit = limit
        self._clock = clock
        self._looked = clock()
        self._quiet = 0.0
        self._seen: tuple[int, int] | None = None

    @property
    def pause(self) -> float:
        """Seconds between two looks, at most."""
        return look_seconds(self.limit)

    @property
    def due(self) -> float:
        """When the next look is due, by the clock."""
        return self._looked + self.pause

    def look(self) -> float:
        """Seconds for which nothing was to be seen."""
        now = self._clock()
        passed, self._looked = min(now - self._looked, 2 * self.pause), now
        runnable, computed = self._account()
        seen = self._page.beats, computed
        self._quiet = 0.0 if runnable or seen != self._seen else self._quiet + passed
        self._seen = seen
        return self._quiet

    def stands_still(self) -> bool:
        """Look; whether nothing was to be seen for so long that it counts as standing still."""
        return self.look() >= self.limit

    def _account(self) -> tuple[bool, int]:
        """Whether it computes or waits for its turn, and for how long it has computed, in the kernel's ticks."""
        try:
            # The name of the process, in parentheses, may have anything in it.
            fields = self._stat.read_text(errors="replace").rpartition(")")[2].split()
            return fields[0] == "R", int(fields[11]) + int(fields[12])
        except (OSError, IndexError, ValueError):
            return False, -1  # it has ended, or the kernel keeps no account: the counter alone tells
