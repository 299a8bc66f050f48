"""Snapshots: copies of the whole state in memory, taken while training runs.

The redo thread copies the replica between two records (eager), or the trainers copy their own state at a commit (lazy).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from memckpt.checkpointing.writer_jobs import Done
from memckpt.memory.budget import check_budget
from memckpt.memory.region import Region
from memckpt.node.generation import Generation
from memckpt.protocol.trainer import Message, ReplicaCopied, SaveFailed, SnapshotTaken, TakeSnapshot

_log = logging.getLogger("memckpt.agent")
_FIRST_LEAD, _LONGEST_LEAD = 2, 512


@dataclass
class Snapshot:
    """The state of a generation after a record; `region` holds it as a replica would, then the by-value tensors.

    Attributes:
        url, done: for where and whom it is.
        missing, plain: as in RecordMeta, of all optimizer state.
        seconds: that trainers took to copy it.
        for_peers: who gets it in place of storage; None where that was not taken.
    """

    generation: Generation
    record: int
    region: Region
    url: str
    done: Done
    missing: tuple[tuple[int, int, str], ...] = ()
    plain: bytes = b""
    seconds: float = 0.0
    taken: dict[int, SnapshotTaken] = field(default_factory=dict)
    for_peers: Callable[[Snapshot | None], None] | None = None


class Snapshots:
    """Takes one at a time.

    Args:
        order: sends a message, with a descriptor, to all trainers of the attempt.
        complete: called with each snapshot that is whole; it owns the region from then on.
        again: called with one that was not taken and is still wanted.
        hurried: called with the new :attr:`lead` when an order was too late.
    """

    def __init__(
        self,
        order: Callable[[Message, int], None],
        complete: Callable[[Snapshot], None],
        again: Callable[[Snapshot], None],
        hurried: Callable[[int], None] = lambda lead: None,
    ) -> None:
        self._order = order
        self._complete = complete
        self._again = again
        self._hurried = hurried
        self._current: Snapshot | None = None
        #: How many records ahead an order must be for every trainer to get it in time.
        self.lead = _FIRST_LEAD

    @property
    def busy(self) -> bool:
        return self._current is not None

    @property
    def for_whom(self) -> Done | None:
        """Who is told of the one that is being taken; None while none is."""
        return self._current.done if self._current is not None else None

    def begin(
        self,
        generation: Generation,
        record: int,
        url: str,
        done: Done,
        for_peers: Callable[[Snapshot | None], None] | None = None,
    ) -> bool:
        """Have the state after `record` copied; False if that record has passed.

        Raises:
            MemoryBudgetError: there is no memory for a copy.
        """
        layout = generation.layout
        check_budget(layout.snapshot_bytes, 0, None, "a copy of the state on its way to storage")
        region = Region.create("snapshot", layout.snapshot_bytes)
        try:
            region.populate_in_background()
        except RuntimeError:
            region.close()
            raise
        if generation.replica is None:
            self._order(TakeSnapshot(record), region.fd)
        elif not generation.replica.copy_at(record, region):
            region.close()
            return False
        generation.pinned = record
        self._current = Snapshot(generation, record, region, url, done, for_peers=for_peers)
        return True

    def taken(self, rank: int, message: SnapshotTaken) -> None:
        """A trainer has copied its part, or could not: the order came too late, or its layout has changed."""
        snapshot = self._current
        if snapshot is None or message.record != snapshot.record:
            return
        snapshot.taken[rank] = message
        if message.rank_state:
            snapshot.generation.amend(rank, message.record, message.rank_state)
        parts, ranks = snapshot.taken, snapshot.generation.spec.local_ranks
        if set(parts) < set(ranks):
            return
        if any(part.missed for part in parts.values()):
            self.hurry()
            _log.info("the order for a snapshot after record %d could not be met; once more", snapshot.record)
            self.drop(again=True)
            return
        if not snapshot.generation.agrees(snapshot.record):
            # It has one copy of what not all ranks had alike; or so late that this cannot be seen any more.
            _log.info("the snapshot after record %d is of no use; once more", snapshot.record)
            self.drop(again=True)
            return
        snapshot.missing, snapshot.plain = parts[ranks[0]].missing, parts[ranks[0]].plain
        snapshot.seconds = max(part.seconds for part in parts.values())
        self._current = None
        self._complete(snapshot)

    def hurry(self) -> None:
        """An order was too late: give the next ones earlier."""
        self.lead = min(2 * self.lead, _LONGEST_LEAD)
        self._hurried(self.lead)

    def copied(self, message: ReplicaCopied) -> None:
        """The redo thread has copied the replica, or could not. Its time is hidden behind the slots."""
        snapshot = self._current
        if snapshot is None or snapshot.record != message.record:
            return
        if message.problem:
            step = snapshot.generation.newest_step() or 0
            self.drop(again=False)
            snapshot.done(SaveFailed(step, message.problem))
            return
        snapshot.missing, snapshot.plain = message.missing, message.plain
        self._current = None
        self._complete(snapshot)

    def drop(self, again: bool) -> None:
        """Take none after all; with `again` another one is wanted."""
        snapshot, self._current = self._current, None
        if snapshot is None:
            return
        if snapshot.generation.replica is not None:
            snapshot.generation.replica.forget_copy()
        snapshot.region.close()
        if again:
            self._again(snapshot)

    def drop_of(self, generation: Generation) -> None:
        """A generation is about to be closed."""
        if self._current is not None and self._current.generation is generation:
            self.drop(again=True)
