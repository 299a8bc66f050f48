"""One generation of another node's records on their way into the slots of its standby replica."""

from __future__ import annotations

from collections.abc import Callable

from memckpt.errors import DamagedStateError
from memckpt.memory.generation_regions import GenerationRegions
from memckpt.memory.region import Region
from memckpt.memory.slots import SlotRing
from memckpt.protocol.standby import StandbyOpened, StandbyRecord, StandbySkip
from memckpt.replication.coding.blob import STATIC, BlobReader, RecordTail, Room
from memckpt.replication.coding.fragments import Fragment, check
from memckpt.replication.keeping.windows import misfit, sizes_of
from memckpt.replication.process.source import replica_parts, rooms_for
from memckpt.replication.transport.wire import NotStored, Stored, Window
from memckpt.state.layout import Layout
from memckpt.state.received import read_spec
from memckpt.state.records import RankGroup, decode_meta

#: The owner's ranks, and the name of their generation.
Key = tuple[RankGroup, str]


class _AllLostError(DamagedStateError):
    """Records that were stored before are of no use any more, either."""


class StandbyWindow:
    """One generation of an owner's records on their way into the slots of its standby replica. Closes the regions.

    Takes nothing before it is :meth:`opened_by_owner`.

    Args:
        window: what the owner has said of it.
        opened: what the agent has made for it.
        regions: slots, then static where present, and replica.
        tell: a record is whole, or records are lost.

    Attributes:
        newest: the last record that has come; None before the first.
        watermark: up to which record redo may go, at least.
    """

    def __init__(
        self,
        window: Window,
        opened: StandbyOpened,
        regions: list[Region],
        tell: Callable[[StandbyRecord | StandbySkip], None],
    ) -> None:
        self.window = window
        self.newest: int | None = None
        self.watermark = 0
        #: The first of the records that have come without a gap up to the newest.
        self._first = 0
        owners = read_spec(window.spec)
        self._sizes = sizes_of(owners, private=False)
        self._layout = Layout(opened.spec)
        self._regions = GenerationRegions.of(self._layout, regions)
        self._ring = SlotRing(self._regions.slots, self._layout, opened.number)
        self._tell = tell
        #: How many records may be stored and not yet applied when one is acknowledged.
        self._ahead = opened.spec.slots - owners.slots
        self._trails = opened.spec.trails
        self._slots_of_owner = owners.slots
        self._applied: int | None = None
        self._static_here = False
        #: Records that are here, and not applied as far as is known; and those that are not acknowledged.
        self._to_redo: list[int] = []
        self._unacknowledged: list[int] = []
        self._into: BlobReader | None = None
        self._next = (0, 0)
        #: All is ignored until the owner begins anew: it was refused before this was made, and what was on its way then
        #: lacks what comes first. So it is after each refusal.
        self._deaf = True

    def close(self) -> None:
        """Close the regions."""
        self._into = None
        self._regions.close()

    def opened_by_owner(self) -> None:
        """Take records from the first: the owner sends all that it has, be it here or not."""
        self._into, self._deaf = None, False

    def abandon(self, record: int) -> None:
        """Drop what has come of a record of which no more comes."""
        if self._next[0] == record:
            self._into = None

    def put(self, fragment: Fragment, payload: memoryview | bytes) -> Stored | NotStored | None:
        """Take the next stripe; the answer that the owner is to get, if any."""
        record, told = fragment.record, self.window
        if self._deaf:
            return None
        problem = check(fragment, payload) or misfit(told, self._sizes, fragment)
        if not problem and len(payload) != fragment.length:  # a code of one fragment: it is the stripe itself
            problem = f"expected {fragment.length} bytes, found {len(payload)}"
        if problem:
            return self._refuse(record, f"a fragment of it came damaged: {problem}")
        if self._has(record):
            last = fragment.stripe == fragment.stripes - 1
            if not last or record in self._unacknowledged:
                return None
            return Stored(*self.key, record, too_late=STATIC < record < self._first)
        try:
            if fragment.stripe == 0:
                self._begin(record)
            if self._into is None or self._next != (record, fragment.stripe):
                raise DamagedStateError(f"expected stripe {self._next[1]} of record {self._next[0]}")
            self._into.take(bytes(payload))
            self._next = record, fragment.stripe + 1
            if self._next[1] < fragment.stripes:
                return None
            tail = self._into.finish()
            self._into = None
            self._check(record, tail)
        except DamagedStateError as error:
            return self._refuse(record, str(error), nothing=isinstance(error, _AllLostError))
        self._complete(record, tail)
        if record > self.window.base and not self._may_acknowledge(record):
            self._unacknowledged.append(record)
            return None
        return self._stored(record)

    def _refuse(self, record: int, reason: str, nothing: bool = False) -> NotStored:
        self._into, self._deaf = None, True
        return NotStored(*self.key, record, reason, nothing)

    @property
    def key(self) -> Key:
        return self.window.owner, self.window.generation

    def _has(self, record: int) -> bool:
        if record == STATIC:
            return self._static_here
        return self.newest is not None and record <= self.newest

    def _stored(self, record: int) -> Stored:
        return Stored(*self.key, record)

    def _may_acknowledge(self, record: int) -> bool:
        """Whether redo keeps up: all is applied but a few records, and what it may not apply yet."""
        assert self._applied is not None
        may_apply = max(self.watermark, record - self._slots_of_owner)
        return self._applied >= min(record - self._ahead, may_apply - self._trails)

    def _begin(self, record: int) -> None:
        """The first stripe of a record has come: where it goes to.

        Raises:
            DamagedStateError: redo still needs its slot.
        """
        self._next = record, 0
        if record == STATIC:
            if self._regions.static is None:
                raise DamagedStateError("expected a layout with static tensors, found one without")
            self._into = BlobReader([Room(0, memoryview(self._regions.static.map))])
            return
        if record > self.window.base:
            if self._applied is None:
                self._applied = record - 1  # what the replica begins with is missing: it goes on from anything
            self._claim_slot(record)
        for rank in self.window.owner:
            self._ring.open_for_writing(record, rank)
            if record >= self.window.base:
                self._ring.open_by_value(record, rank)
        self._into = BlobReader(rooms_for(self._layout, self._regions.slots.map, record))

    def _claim_slot(self, record: int) -> None:
        """Make sure that redo does not need the slot of a record any more.

        Raises:
            DamagedStateError: it does.
        """
        slot = self._layout.slot_number(record)
        if all(self._layout.slot_number(one) != slot for one in self._to_redo):
            return
        problem = f"the replica here is {len(self._to_redo)} records behind; agent.threads gives it more CPU time"
        if self.newest is None or record == self.newest + 1:
            raise DamagedStateError(problem)
        # What it has got is of no use without what is lost between: it need not be redone.
        self.newest, self._first = record - 1, record
        self._tell(StandbySkip(*self.key, record - 1))
        raise _AllLostError(problem)

    def _check(self, record: int, tail: RecordTail) -> None:
        if record == STATIC:
            return
        try:
            meta = decode_meta(tail.meta)
        except ValueError as error:  # of msgspec, or of text that is no UTF-8
            raise DamagedStateError(f"the metadata of record {record} cannot be decoded: {error}") from error
        if meta.record != record:
            raise DamagedStateError(f"expected the metadata of record {record}, found those of record {meta.record}")
        lacking = set(self.window.owner) - set(tail.rank_states)
        if record >= self.window.base and lacking:
            raise DamagedStateError(f"expected the states of all its ranks, found none of ranks {sorted(lacking)}")

    def _complete(self, record: int, tail: RecordTail) -> None:
        """All of a record is here."""
        if record == STATIC:
            self._static_here = True
            return
        base = self.window.base
        if record <= base:
            self._take_anchors(record)
        for rank in self.window.owner:
            self._ring.seal(record, rank, by_value=record >= base)
        if record == base:
            self._applied = base
        if record > base:
            self._to_redo.append(record)
        if self.newest is None or record != self.newest + 1:
            self._first = record
        self.newest = record
        self._tell(StandbyRecord(*self.key, record, tail.step, tail.meta, tail.rank_states))

    def _take_anchors(self, record: int) -> None:
        """What a virtual record carries is the state itself."""
        start = self._layout.slot_offset(record)
        assert self._regions.replica is not None
        slots, replica = memoryview(self._regions.slots.map), memoryview(self._regions.replica.map)
        for offset, target, nbytes in replica_parts(self._layout, record):
            replica[target : target + nbytes] = slots[start + offset : start + offset + nbytes]

    def applied(self, record: int) -> list[Stored]:
        """Redo has got so far: what the owner is to get."""
        if self._applied is None or record > self._applied:
            self._applied = record
        self._to_redo = [one for one in self._to_redo if one > self._applied]
        free = [one for one in self._unacknowledged if self._may_acknowledge(one)]
        self._unacknowledged = [one for one in self._unacknowledged if one not in free]
        return [self._stored(one) for one in free]
