"""The states that a store can produce: each checkpoint, and each record that can be redone on one. Torch-free.

A record is redone on the state before it. So a chain begins at a checkpoint and extends while the next record is
complete: all ranks' parts, and gradients for every part of the checkpoint that has parameters. A chain may cross from
one attempt's timeline to the next, which may branch off in the middle of a batch of the earlier one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from memckpt.errors import DamagedStateError
from memckpt.state.records import Timeline
from memckpt.storage.catalog import Catalog, Checkpoint
from memckpt.storage.format import Batch, Committed, Part
from memckpt.storage.store import StoredFile


@dataclass(frozen=True)
class StoredPoint:
    """A state that a store can produce: a checkpoint, and batches to redo on it, the last ones only up to `record`."""

    checkpoint: Checkpoint
    batches: tuple[Batch, ...]
    timeline: Timeline
    record: int
    step: int

    @property
    def key(self) -> tuple[int, str, int]:
        """Sort key: the attempt, then the record."""
        return self.timeline.number, self.timeline.nonce, self.record

    @property
    def world_size(self) -> int:
        return self.checkpoint.world_size

    @property
    def inexact(self) -> str:
        """What audits had found in its redo when it was written, in words; empty if nothing."""
        written: tuple[Committed, ...] = (*self.checkpoint.parts.values(), *self.batches)
        return next((one.inexact for one in written if one.inexact), "")

    @property
    def files(self) -> Iterator[StoredFile]:
        """All files of the checkpoint and of the batches."""
        for part in self.checkpoint.parts.values():
            yield from part.files
        for batch in self.batches:
            yield from batch.files

    def earlier(self, record: int) -> StoredPoint | None:
        """The state after an earlier record of its chain; None: the chain begins later."""
        start = self.checkpoint
        if not start.record <= record <= self.record:
            return None
        if record == start.record:
            return StoredPoint(start, (), start.timeline, record, start.step)
        batches = tuple(batch for batch in self.batches if batch.first <= record)
        # A branch comes later in the chain than the timeline that it leaves.
        last = next(batch for batch in reversed(batches) if record <= batch.last)
        return StoredPoint(start, batches, last.timeline, record, last.steps[record - last.first])

    def last_batch_of(self, rank: int) -> Batch | None:
        """The batch with a rank's own state after `record`; None: the checkpoint has it."""
        for batch in reversed(self.batches):
            if rank in batch.ranks and batch.timeline == self.timeline and batch.first <= self.record <= batch.last:
                return batch
        return None

    def gradient_batches(self, part: Part) -> list[tuple[int, Batch]]:
        """Each record to redo on one part of the checkpoint, oldest first, with a batch that has its gradients.

        An attempt may have branched off in the middle of an earlier one's batch: a later batch in the chain replaces
        the same records of an earlier one. Raises DamagedStateError if a record is missing.
        """
        found: dict[int, Batch] = {}
        for batch in self.batches:
            if batch.full and _redoes(batch) == _redoes(part):
                found |= dict.fromkeys(range(batch.first, batch.last + 1), batch)
        wanted = range(self.checkpoint.record + 1, self.record + 1)
        missing = [record for record in wanted if record not in found]
        if missing:
            raise DamagedStateError(f"expected the records {wanted.start} to {self.record}, found no {missing[0]}")
        return [(record, found[record]) for record in wanted]


def _redoes(held: Batch | Part) -> tuple[tuple[int, ...], str]:
    """A key that is equal for a part and the batches whose gradients can be redone on it."""
    return held.served, held.content


class _Log:
    """The batches of a store, by record."""

    def __init__(self, batches: Sequence[Batch]) -> None:
        self._at: dict[tuple[Timeline, int], list[Batch]] = defaultdict(list)
        self._branches: dict[tuple[Timeline, int], list[Timeline]] = defaultdict(list)
        for batch in batches:
            for record in range(batch.first, batch.last + 1):
                self._at[batch.timeline, record].append(batch)
            if batch.follows is not None and batch.follows != batch.timeline:
                children = self._branches[batch.follows, batch.first - 1]
                if batch.timeline not in children:
                    children.append(batch.timeline)

    def record(self, timeline: Timeline, number: int, base: Checkpoint) -> list[Batch]:
        """The batches with a record, if it is complete and can be redone on `base`; else none."""
        found = [batch for batch in self._at.get((timeline, number), ()) if batch.world_size == base.world_size]
        whole = {rank for batch in found for rank in batch.ranks} >= set(range(base.world_size))
        redone = {_redoes(part) for part in base.full_parts} <= {_redoes(batch) for batch in found if batch.full}
        return found if whole and redone else []

    def branches(self, timeline: Timeline, record: int) -> list[Timeline]:
        """Logged timelines that branch off after a record of this one."""
        return self._branches.get((timeline, record), [])


def stored_points(catalog: Catalog, also: int | None = None) -> tuple[StoredPoint, ...]:
    """States that a store can produce, newest first: checkpoints, and records at the end of a batch or of the log.

    Records of the step `also` are included even in the middle of a batch.
    """
    log = _Log(catalog.batches)
    points = [point for checkpoint in catalog.complete for point in _points_on(checkpoint, log, also)]
    points.sort(key=lambda point: (point.key, point.checkpoint.key), reverse=True)
    return tuple(points)


def point_before(points: Sequence[StoredPoint], point: StoredPoint) -> StoredPoint | None:
    """The state before the step of `point`, of all `points` of the store, on its chain or another checkpoint's."""
    before = point.earlier(point.record - 1)
    if before is not None:
        return before
    for other in points:
        same = other.earlier(point.record)
        if other.key == (*point.key[:2], point.record - 1) or (same is not None and same.key == point.key):
            before = other.earlier(point.record - 1)
            if before is not None:
                return before
    return None


def _points_on(checkpoint: Checkpoint, log: _Log, also: int | None = None) -> Iterator[StoredPoint]:
    """The points of all chains that begin at a checkpoint."""
    start = StoredPoint(checkpoint, (), checkpoint.timeline, checkpoint.record, checkpoint.step)
    yield start
    paths = [(start, [checkpoint.timeline])]
    while paths:
        at, nexts = paths.pop()
        for timeline in [*nexts, *log.branches(at.timeline, at.record)]:
            batches = list(at.batches)
            record = at.record
            found = log.record(timeline, record + 1, checkpoint)
            while found:
                record += 1
                recent = {id(batch) for batch in batches[-2 * len(found) :]}
                batches += [batch for batch in found if id(batch) not in recent]
                step = found[0].steps[record - found[0].first]
                branches, following = bool(log.branches(timeline, record)), log.record(timeline, record + 1, checkpoint)
                if branches or not following or step == also or any(batch.last == record for batch in found):
                    point = StoredPoint(checkpoint, tuple(batches), timeline, record, step)
                    yield point
                    if branches:
                        paths.append((point, []))
                found = following


def unneeded_batches(catalog: Catalog, kept: Sequence[Checkpoint]) -> list[Batch]:
    """Batches in no chain of the `kept` checkpoints, of which the newest is one; none beyond the newest checkpoint."""
    log = _Log(catalog.batches)
    needed = {batch.commit_path for one in kept for point in _points_on(one, log) for batch in point.batches}
    newest = max(one.key for one in kept)
    return [
        batch
        for batch in catalog.batches
        if batch.commit_path not in needed and (batch.timeline.number, batch.timeline.nonce, batch.last) <= newest
    ]
