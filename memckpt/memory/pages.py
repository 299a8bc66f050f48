"""Pages of shared memory that tell what a process does: the phase of each rank's step, and whether a loop turns.

*Phases*: each rank writes its latest marks to its own ring. An entry carries its number and a check word over its
content. So a reader takes complete entries only, in whichever order the processor makes the stores visible, and the
number tells it that it has been overtaken.

*Life*: a counter that a process's loop moves, and the kernel's account of the process. One that is stopped or
deadlocked moves no counter and uses no CPU time. One whose loop is busy for long uses CPU time, and one that waits for
a processor is runnable. So a long call that holds Python's lock does not count as a standstill.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal, NamedTuple

from memckpt.errors import DamagedStateError
from memckpt.memory.region import Region


class _Page:
    """A region as words of 64 bits. Its creator, and each opener, closes it."""

    def __init__(self, region: Region) -> None:
        self._region = region
        self.words = memoryview(region.map).cast("Q")

    @property
    def fd(self) -> int:
        """Descriptor to hand over; -1 in a forked child, where nothing is mapped, and once closed."""
        return self._region.fd

    def close(self) -> None:
        """Unmap and close. Idempotent."""
        self.words.release()
        self._region.close()


class Phase(enum.IntEnum):
    """Part of a training step. Gradients are reduced over the network during BACKWARD."""

    #: From the end of the last step: fetching the next batch, and forward.
    FORWARD = 1
    #: From the first gradient of a backward to its end.
    BACKWARD = 2
    #: From the end of a backward: the optimizer's step, or another micro-batch.
    STEP = 3


class Mark(NamedTuple):
    """A rank's entry into a phase."""

    position: int  #: index of the rank among those of its node
    step: int  #: number of the record that is being made
    phase: Phase
    ns: int  #: on the machine's monotonic clock


_ENTRIES = 256  # about 80 steps: the time that a reader may sleep
_WORDS = 4  # check, number, step and phase, ns: aligned words of 64 bits
_RANK_WORDS = _ENTRIES * _WORDS
_RANK_BYTES = _RANK_WORDS * 8
_MASK = 2**64 - 1


def _check(number: int, what: int, ns: int) -> int:
    # Odd factors: a torn entry, part old and part new, fails the check.
    return (number * 0x9E3779B97F4A7C15 + what * 0xC2B2AE3D27D4EB4F + ns * 0x165667B19E3779F9 + 1) & _MASK


class PhasesPage(_Page):
    """The marks of a node's ranks."""

    @classmethod
    def create(cls, ranks: int) -> PhasesPage:
        """Create a page for `ranks` local ranks, 8 KiB each. Raises MemoryBudgetError: there is no room for it."""
        return cls(Region.create("phases", ranks * _RANK_BYTES))

    @classmethod
    def open(cls, fd: int) -> PhasesPage:
        """Map a page that was received, and take over its descriptor. Raises DamagedStateError: its size is wrong."""
        region = Region.open(fd)
        if region.nbytes % _RANK_BYTES:
            region.close()
            raise DamagedStateError(
                f"phase marks: expected a multiple of {_RANK_BYTES} bytes, found {region.nbytes}; "
                "agent and trainer are of different versions"
            )
        return cls(region)

    @property
    def ranks(self) -> int:
        """Number of ranks that it has room for."""
        return self._region.nbytes // _RANK_BYTES

    def entry(self, position: int, number: int) -> tuple[int, int, int] | None:
        """The entry in the place of `number`: its own number, step and phase, ns; None while it is being written."""
        at = position * _RANK_WORDS + number % _ENTRIES * _WORDS
        check, *entry = self.words[at : at + _WORDS].tolist()
        found, what, ns = entry
        return (found, what, ns) if check == (_check(found, what, ns) if found else 0) else None

    def newest(self, position: int) -> int:
        """The number of a rank's newest complete entry; 0 if it has none."""
        return max((entry[0] for n in range(_ENTRIES) if (entry := self.entry(position, n)) is not None), default=0)


class PhaseWriter:
    """Writes one rank's marks. The page belongs to the caller."""

    def __init__(self, page: PhasesPage, position: int) -> None:
        if not 0 <= position < page.ranks:
            raise ValueError(f"position: expected 0 to {page.ranks - 1}, found {position}")
        self._page = page
        self._words = page.words
        self._base = position * _RANK_WORDS
        self._number = page.newest(position)  # a rank of the last attempt may have written before

    def write_mark(self, step: int, phase: Phase) -> None:
        """Mark the start of a phase of a step. Does nothing once the page is closed."""
        if self._page.fd < 0:
            return
        self._number = number = self._number + 1
        what, ns = step << 2 | phase, time.monotonic_ns()
        at = self._base + number % _ENTRIES * _WORDS
        words = self._words
        words[at + 1] = number
        words[at + 2] = what
        words[at + 3] = ns
        words[at] = _check(number, what, ns)


class PhaseReader:
    """Reads the marks of all ranks since the last read. The page belongs to the caller."""

    def __init__(self, page: PhasesPage) -> None:
        self._page = page
        self._next = [page.newest(position) or 1 for position in range(page.ranks)]

    def read(self) -> list[Mark]:
        """New marks, in order for each rank. An overtaken reader continues in the middle of the ring."""
        marks: list[Mark] = []
        for position in range(len(self._next)):
            self._read_rank(position, marks)
        return marks

    def _read_rank(self, position: int, marks: list[Mark]) -> None:
        while (entry := self._page.entry(position, self._next[position])) is not None:
            number, what, ns = entry
            if number < self._next[position]:
                return
            if number > self._next[position]:  # overtaken
                self._next[position] = max(self._next[position] + 1, self._page.newest(position) - _ENTRIES // 2)
                continue
            self._next[position] += 1
            marks.append(Mark(position, what >> 2, Phase(what & 3), ns))


#: Bytes of a page; and number of beats and looks per time limit.
_PAGE_BYTES, _LOOKS = 4096, 8
_LONGEST_LOOK_SECONDS = 1.0


def look_seconds(limit: float) -> float:
    """Seconds between beats and between looks if a process may show nothing for `limit` seconds."""
    return min(_LONGEST_LOOK_SECONDS, limit / _LOOKS)


class LifePage(_Page):
    """The counter of one process."""

    @classmethod
    def create(cls) -> LifePage:
        """Create a page. Raises MemoryBudgetError: the kernel has no room for it."""
        return cls(Region.create("life", _PAGE_BYTES))

    @classmethod
    def open(cls, fd: int) -> LifePage:
        """Map a page that was handed over; takes ownership of the descriptor."""
        return cls(Region.open(fd))

    @property
    def beats(self) -> int:
        """Number of rounds of the loop; -1 if the page is closed or not mapped."""
        try:
            return self.words[0] if self._region.fd >= 0 else -1
        except ValueError:  # closed meanwhile by another thread
            return -1

    def beat(self) -> None:
        """Count one round of the loop. For the page's own process only."""
        if self._region.fd >= 0:
            self.words[0] = self.words[0] + 1 & 2**64 - 1


class LifeWatch:
    """Measures how long a process has shown no sign of life, in time during which the watcher itself ran.

    Each look adds the time since the last one, but at most twice the longest pause between looks. After `limit` seconds
    the process stands still. ``"main"``: only its main thread's CPU time counts, as others run independently.
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
