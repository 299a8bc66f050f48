"""Liveness of another process: a counter in shared memory that its loop moves, and the kernel's account of it.

A process that is stopped or deadlocked moves no counter and uses no CPU time. One whose loop is busy for long uses CPU
time, and one that waits for a processor is runnable. The check needs no cooperation of the process, so a long call that
holds Python's lock does not count as a standstill.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from memckpt.memory.region import Region

#: Bytes of a page; and number of beats and looks per time limit.
_PAGE_BYTES, _LOOKS = 4096, 8
_LONGEST_LOOK_SECONDS = 1.0


def look_seconds(limit: float) -> float:
    """Seconds between beats and between looks if a process may show nothing for `limit` seconds."""
    return min(_LONGEST_LOOK_SECONDS, limit / _LOOKS)


class LifePage:
    """The counter of one process. Its creator, and each opener, closes it."""

    def __init__(self, region: Region) -> None:
        self._region = region
        self._words = memoryview(region.map).cast("Q")

    @classmethod
    def create(cls) -> LifePage:
        """Create a page. Raises MemoryBudgetError: the kernel has no room for it."""
        return cls(Region.create("life", _PAGE_BYTES))

    @classmethod
    def open(cls, fd: int) -> LifePage:
        """Map a page that was handed over; takes ownership of the descriptor."""
        return cls(Region.open(fd))

    @property
    def fd(self) -> int:
        """Descriptor to hand over; -1 in a forked child, where nothing is mapped, and once closed."""
        return self._region.fd

    @property
    def beats(self) -> int:
        """Number of rounds of the loop; -1 if the page is closed or not mapped."""
        try:
            return self._words[0] if self._region.fd >= 0 else -1
        except ValueError:  # closed meanwhile by another thread
            return -1

    def beat(self) -> None:
        """Count one round of the loop. For the page's own process only."""
        if self._region.fd >= 0:
            self._words[0] = self._words[0] + 1 & 2**64 - 1

    def close(self) -> None:
        """Unmap and close. Idempotent."""
        self._words.release()
        self._region.close()


class LifeWatch:
    """Measures how long a process has shown no sign of life, in time during which the watcher itself ran.

    Each look adds the time since the last one, but at most twice the longest pause between looks: a watcher that was
    stopped has seen nothing.

    `limit`: seconds without a sign of life after which it counts as standing still. `threads`: threads whose CPU time
    counts; ``"main"`` if others run independently of the loop.
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
        """Longest time between two looks, in seconds."""
        return look_seconds(self.limit)

    @property
    def due(self) -> float:
        """Time of the next look, by the clock."""
        return self._looked + self.pause

    def look_for_life(self) -> float:
        """Look; returns the seconds without a sign of life."""
        now = self._clock()
        passed, self._looked = min(now - self._looked, 2 * self.pause), now
        runnable, computed = self._account()
        seen = self._page.beats, computed
        self._quiet = 0.0 if runnable or seen != self._seen else self._quiet + passed
        self._seen = seen
        return self._quiet

    def stands_still(self) -> bool:
        """Look, if that is due; returns whether the limit is reached."""
        if self._quiet < self.limit and self._clock() < self.due:
            return False
        return self.look_for_life() >= self.limit

    def _account(self) -> tuple[bool, int]:
        """Whether the process is runnable, and its CPU time in the kernel's ticks."""
        try:
            # The process's name, in parentheses, may contain anything.
            fields = self._stat.read_text(errors="replace").rpartition(")")[2].split()
            return fields[0] == "R", int(fields[11]) + int(fields[12])
        except (OSError, IndexError, ValueError):
            return False, -1  # it has ended, or the kernel keeps no account: only the counter is left
