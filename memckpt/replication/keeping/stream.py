"""What one holder is sent of a unit's records, in order, and what it has said that it stored."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from typing import NamedTuple

from memckpt.replication.coding.blob import STATIC
from memckpt.replication.keeping.outgoing import Outgoing
from memckpt.replication.transport.messages import NotStored, Stored

#: The longest reason from a peer that is kept and logged, in characters.
MAX_REASON_CHARS = 500
_FIRST_RETRY_SECONDS, _LAST_RETRY_SECONDS = 0.1, 5.0
#: Records over which a link's rate is averaged, and how many it takes to know one: the first few say how fast training
#: is, and not how fast the link.
_RATE_RECORDS, _LEAST_RATE_RECORDS = 16, 4

#: In a stream's queue, in place of a record: tell the holder that the generation begins.
OPEN = None


class Due(NamedTuple):
    """An entry of a stream's queue: a record of a generation, or :data:`OPEN`."""

    outgoing: Outgoing
    record: int | None


class LinkRate:
    """Bytes that a link carries while training commits a record, measured while something waits to be sent."""

    def __init__(self) -> None:
        #: Records committed since something has been waiting all the time, and bytes sent meanwhile; both decay.
        self._records = self._bytes = 0.0
        #: Records committed since the last byte went.
        self._idle_records = 0

    def note_record(self, waiting: bool) -> None:
        """Note that a record was committed. `waiting`: whether earlier records still wait to be sent."""
        if not waiting:
            self._records = self._bytes = 0.0
            return
        self._idle_records += 1
        self._records += 1
        if self._records > _RATE_RECORDS:
            self._records, self._bytes = self._records / 2, self._bytes / 2

    def note_sent(self, nbytes: int) -> None:
        if self._idle_records >= _RATE_RECORDS:  # the link was away: how fast it was tells nothing
            self._records = self._bytes = 0.0
        self._idle_records = 0
        self._bytes += nbytes

    @property
    def bytes_per_record(self) -> float | None:
        """The rate; None: the link carried all that there was, or its rate is not known."""
        return self._bytes / self._records if self._records >= _LEAST_RATE_RECORDS and self._bytes else None


class Stream:
    """The records that one holder is sent, and those that it has stored.

    `queue`: what is still to be sent; `stripe`: the next one of its head. The holder has all from `since` to
    `acknowledged`. `met`: it is there. `problem`: why it refused a record. `heard`: number of records acknowledged.
    """

    def __init__(self, holder: str, index: int, start: int) -> None:
        self.holder, self.index = holder, index
        self.queue: deque[Due] = deque()
        self.stripe = 0
        self.acknowledged = self.since = start
        self.met = False
        self.problem = ""
        self.waits = False
        self.retry_at = 0.0
        self.rate = LinkRate()
        self._backoff = _FIRST_RETRY_SECONDS
        self.heard = 0
        #: Records that are sent or queued, in order; and those that the holder has acknowledged, by generation.
        self._pending: deque[tuple[Outgoing, int]] = deque()
        self._stored: set[tuple[str, int]] = set()

    @property
    def progress(self) -> int | None:
        """Number of records that the holder has acknowledged; None: it owes no acknowledgement."""
        return self.heard if self._pending or self.problem or not self.met else None

    # What is to be sent

    def reset(self) -> None:
        """Note that the holder has come, with nothing of ours."""
        self.met, self.waits, self.problem, self._backoff = True, False, "", _FIRST_RETRY_SECONDS
        self._stored.clear()

    def restart(self, outgoing: Outgoing | None) -> None:
        """Send a generation from its beginning, and nothing else; None: send nothing."""
        self.queue.clear()
        self._pending.clear()
        self.stripe = 0
        if outgoing is not None:
            self.since = max(self.since, outgoing.window.base)
            self.queue_generation(outgoing)

    def queue_generation(self, outgoing: Outgoing) -> None:
        """Queue a generation with all records that are there."""
        self.queue.append(Due(outgoing, OPEN))
        for record in ([STATIC] if outgoing.sizes.static else []) + list(outgoing.records):
            self.add(outgoing, record)

    def add(self, outgoing: Outgoing, record: int) -> None:
        self.queue.append(Due(outgoing, record))
        self._pending.append((outgoing, record))

    def pop(self) -> None:
        """Remove the head of the queue: all of it was sent, or nothing more of it is."""
        self.queue.popleft()
        self.stripe = 0

    def skip(self) -> bool:
        """Remove the record at the head of the queue unsent; returns whether the holder lacks it."""
        outgoing, record = self.queue[0]
        assert record is not OPEN
        self.pop()
        lacks = (outgoing, record) in self._pending
        if lacks:
            self._pending.remove((outgoing, record))
        self._advance()
        return lacks

    def lost_by_restart(self, outgoing: Outgoing) -> list[int]:
        """Queued records that :meth:`restart` with a generation would not queue again."""
        return [
            record
            for one, record in self.queue
            if record is not OPEN and record >= one.window.base and (one is not outgoing or record not in one.records)
        ]

    def leave_out(self, outgoing: Outgoing, upto: int) -> tuple[list[int], bool]:
        """Remove a generation's records up to one from the queue; they, and whether part of the first was sent."""
        out = [one for one in self.queue if one.outgoing is outgoing and _is_up_to(one.record, upto)]
        begun = bool(out) and self.queue[0] == out[0] and self.stripe > 0
        if out and self.queue[0] == out[0]:
            self.stripe = 0
        self.queue = deque(one for one in self.queue if one not in out)
        self._pending = deque(one for one in self._pending if one not in out)
        self._advance()
        return [record for _, record in out if record is not OPEN], begun

    def drop(self, outgoing: Outgoing) -> None:
        """Remove a generation that nobody needs any more."""
        if self.queue and self.queue[0].outgoing is outgoing:
            self.stripe = 0
        self.queue = deque(one for one in self.queue if one.outgoing is not outgoing)
        self._pending = deque(one for one in self._pending if one[0] is not outgoing)
        self._stored = {one for one in self._stored if one[0] != outgoing.generation}
        self._advance()

    # What the holder says

    def stored(self, message: Stored) -> None:
        """Note that the holder has a record. It counts if all of it was sent, and was not known to be there."""
        found = [one for one in self._pending if (one[0].generation, one[1]) == (message.generation, message.record)]
        if found and found[0] not in self.queue:
            self.heard += 1
            self._stored.add((message.generation, message.record))
            self._advance()

    def keep(self, outgoing: Outgoing, records: Collection[int]) -> list[int]:
        """Note that the holder has these from before; returns those that it is not sent once more.

        They may be gone from their slots: whoever has taken the place of a dead process never had them to send.
        """
        newest = outgoing.records[-1] if outgoing.records else outgoing.window.base
        oldest = newest - outgoing.sizes.kept * outgoing.sizes.every
        here = {Due(outgoing, one) for one in records if one == STATIC or oldest < one <= newest}
        if self.queue and self.stripe:
            here.discard(self.queue[0])  # it comes to its end, which the holder acknowledges
        spared = [one for one in self.queue if one in here]
        self.queue = deque(one for one in self.queue if one not in here)
        self._stored |= {(outgoing.generation, one) for _, one in here if one is not OPEN}
        self.heard += len(spared)
        self._advance()
        return [record for _, record in spared if record is not OPEN]

    def _advance(self) -> None:
        while self._pending and (self._pending[0][0].generation, self._pending[0][1]) in self._stored:
            outgoing, record = self._pending.popleft()
            if record >= outgoing.window.base:
                if record > self.acknowledged + outgoing.sizes.every:
                    self.since = record
                self.acknowledged = max(self.acknowledged, record)
                self.problem, self._backoff = "", _FIRST_RETRY_SECONDS
                oldest = record - outgoing.sizes.kept * outgoing.sizes.every
                self._stored = {
                    one for one in self._stored if one[0] != outgoing.generation or one[1] == STATIC or one[1] > oldest
                }

    def not_stored(self, message: NotStored, now: float) -> None:
        """Note that the holder refused a record, and when to try again: later each time."""
        self._stored.discard((message.generation, message.record))
        if message.nothing:
            self._stored = {one for one in self._stored if one[0] != message.generation}
        self.queue.clear()
        self._pending.clear()
        self.problem, self.waits = message.reason[:MAX_REASON_CHARS], True
        self.retry_at = now + self._backoff
        self._backoff = min(2 * self._backoff, _LAST_RETRY_SECONDS)

    def holds(self, outgoing: Outgoing, record: int) -> bool:
        """Whether the holder has all that the state after a record needs."""
        needed = {record - index * outgoing.sizes.every for index in range(outgoing.sizes.period)}
        if outgoing.sizes.static:
            needed.add(STATIC)
        return all((outgoing.generation, one) in self._stored for one in needed)


def _is_up_to(record: int | None, last: int) -> bool:
    return record is not OPEN and record != STATIC and record <= last
