"""What the lines of a drilled run say, by rank and attempt."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, TypeVar

from memckpt_tools.drill.lines import AnyLine, Begun, Key, Loaders, Reader, Restored, Taken, Tensors

LineT = TypeVar("LineT", Taken, Restored, covariant=True)


@dataclass(frozen=True)
class Point(Generic[LineT]):
    """The state behind a committed step, or behind a restore.

    Attributes:
        line: its line.
        keys: names of the tensors whose digests are in the line.
    """

    line: LineT
    keys: tuple[Key, ...]

    @property
    def step(self) -> int:
        return self.line.step

    @property
    def record(self) -> int:
        return self.line.record


@dataclass
class Attempt:
    """One process of a rank.

    Attributes:
        begun: its begin.
        restored: the restored state; None where training began anew.
        points: its committed steps, in order.
    """

    begun: Begun
    restored: Point[Restored] | None = None
    points: list[Point[Taken]] = field(default_factory=list)

    @property
    def taken(self) -> list[Taken]:
        return [point.line for point in self.points]

    @property
    def last_record(self) -> int:
        """Newest record that was taken or restored; 0 if there is none."""
        if self.points:
            return self.points[-1].record
        return self.restored.record if self.restored is not None else 0

    @property
    def check(self) -> tuple[str, str]:
        """The last verdict of the resume check, and its line; empty if there was none."""
        return next((line.check for line in reversed(self.taken) if line.check is not None), ("", ""))

    @property
    def resumed_behind(self) -> tuple[int, int]:
        """Step and record behind which training goes on: the repeated ones, if a step is repeated; (0, 0): anew."""
        if self.restored is None:
            return 0, 0
        repeated = next((line for line in self.taken if line.repeated), None)
        if repeated is not None:
            return repeated.step, repeated.record
        return self.restored.step, self.restored.record


@dataclass
class RankHistory:
    """The attempts of one rank.

    Attributes:
        attempts: in order.
        loaders: datasets of its DataLoaders, and their workers.
    """

    attempts: list[Attempt] = field(default_factory=list)
    loaders: tuple[str, ...] = ()
    _keys: tuple[Key, ...] = ()

    def add(self, line: AnyLine) -> None:
        """Add the next line of the rank's file."""
        if isinstance(line, Begun):
            self.attempts.append(Attempt(line))
        elif isinstance(line, Loaders):
            self.loaders = line.names
        elif isinstance(line, Tensors):
            self._keys = line.keys
        elif isinstance(line, Restored):
            self.attempts[-1].restored = Point(line, self._keys)
        else:
            self.attempts[-1].points.append(Point(line, self._keys))

    def points(self) -> Iterator[Point[Taken] | Point[Restored]]:
        """All points of all attempts, restored ones too."""
        for attempt in self.attempts:
            if attempt.restored is not None:
                yield attempt.restored
            yield from attempt.points

    @property
    def last_record(self) -> int:
        """Newest record of the newest attempt; 0 if there is none."""
        return self.attempts[-1].last_record if self.attempts else 0

    @property
    def furthest(self) -> int:
        """Newest record of all attempts."""
        return max((attempt.last_record for attempt in self.attempts), default=0)


class RunHistory:
    """The lines of all ranks of a run, followed as they come. :meth:`close` it.

    Args:
        directory: directory of the run of the drill.

    Attributes:
        ranks: histories by rank.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._readers: dict[int, Reader] = {}
        self.ranks: dict[int, RankHistory] = {}

    def poll(self) -> bool:
        """Read what has come; True if anything has."""
        for path in self._directory.glob("rank-*.jsonl"):
            rank = int(path.stem.removeprefix("rank-"))
            if rank not in self._readers:
                self._readers[rank] = Reader(path)
                self.ranks[rank] = RankHistory()
        news = False
        for rank, reader in self._readers.items():
            for line in reader.poll():
                self.ranks[rank].add(line)
                news = True
        return news

    @property
    def attempts(self) -> int:
        """Number of attempts in which every rank has begun."""
        begun = [each.attempts[-1].begun for each in self.ranks.values() if each.attempts]
        if not begun or len(self.ranks) < max(each.world_size for each in begun):
            return 0
        return min(len(each.attempts) for each in self.ranks.values())

    @property
    def last_record(self) -> int:
        """Newest record that every rank has reached in its newest attempt."""
        return min((each.last_record for each in self.ranks.values()), default=0)

    @property
    def furthest(self) -> int:
        """Newest record that some rank has reached in any attempt."""
        return max((each.furthest for each in self.ranks.values()), default=0)

    def close(self) -> None:
        for reader in self._readers.values():
            reader.close()
        self._readers.clear()
