"""Phase marks in shared memory: the current step and phase of each rank of a node.

Each rank writes to a ring of its own latest marks. An entry carries its number and a check word over its content. So a
reader takes complete entries only, whatever order the processor makes the stores visible in, and the number tells it
that it has been overtaken.
"""

from __future__ import annotations

import enum
import time
from typing import NamedTuple

from memckpt.errors import DamagedStateError
from memckpt.memory.region import Region


class Phase(enum.IntEnum):
    """Part of a training step. Gradients are reduced over the network during BACKWARD."""

    #: From the end of the last step: fetching the next batch, and forward.
    FORWARD = 1
    #: From the first gradient of a backward to its end.
    BACKWARD = 2
    #: From the end of a backward: the optimizer's step, or another micro-batch.
    STEP = 3


class Mark(NamedTuple):
    """A rank's entry into a phase, at `ns` on the machine's monotonic clock.

    `position`: index of the rank among those of its node. `step`: number of the record that is being made.
    """

    position: int
    step: int
    phase: Phase
    ns: int


_ENTRIES = 256  # about 80 steps: the time that a reader may sleep
_WORDS = 4  # check, number, step and phase, ns: aligned words of 64 bits
_RANK_WORDS = _ENTRIES * _WORDS
_RANK_BYTES = _RANK_WORDS * 8
_MASK = 2**64 - 1


def _check(number: int, what: int, ns: int) -> int:
    # Odd factors: a torn entry, part old and part new, fails the check.
    return (number * 0x9E3779B97F4A7C15 + what * 0xC2B2AE3D27D4EB4F + ns * 0x165667B19E3779F9 + 1) & _MASK


class PhasesPage:
    """The region and a view of it. Its creator, and each opener, closes it."""

    def __init__(self, region: Region) -> None:
        self._region = region
        self.words = memoryview(region.map).cast("Q")

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
    def fd(self) -> int:
        """Descriptor to hand over; -1 in a forked child, where nothing is mapped, and once closed."""
        return self._region.fd

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

    def close(self) -> None:
        """Unmap and close. Idempotent."""
        self.words.release()
        self._region.close()


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
