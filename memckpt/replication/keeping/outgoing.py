"""One generation of a node's own records, on its way to the holders of their fragments."""

from __future__ import annotations

import mmap
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, Protocol

from memckpt.errors import DamagedStateError
from memckpt.memory.region import GenerationRegions, Region
from memckpt.memory.slots import SlotRing
from memckpt.protocol.replication import SendGeneration
from memckpt.replication.coding.blob import STATIC, Blob, Extent, RecordTail, Room
from memckpt.replication.keeping.kept_window import WindowSizes
from memckpt.replication.transport.messages import Window
from memckpt.state.layout import Layout
from memckpt.state.records import RecordMeta, decode_meta, encode_meta
from memckpt.state.spec import ITEM_BYTES


class Stripes(Protocol):
    """The bytes of a record, as :class:`Blob` has them."""

    nbytes: int
    stripes: int

    def stripe(self, index: int) -> bytes | memoryview: ...

    def release(self) -> None: ...


class Source(Protocol):
    """Bytes of one generation's records."""

    def open(self, record: int) -> Stripes | None:
        """The bytes of a record; None if they are not there any more."""
        ...

    def intact(self, record: int) -> bool:
        """Whether what has been read of a record until now was the record's."""
        ...

    def step(self, record: int) -> int:
        """The framework's step of a record."""
        ...

    def close(self) -> None: ...


class Outgoing:
    """One generation that is sent, as holders are told of it for fragment 0. Closes its source.

    `records`: first the virtual ones up to its base. `slots`: of the ring in which they lie.
    """

    def __init__(
        self, window: Window, sizes: WindowSizes, source: Source, records: Sequence[int], slots: int | None = None
    ) -> None:
        self.window, self.sizes = window, sizes
        self.source = source
        self.records = deque(records)
        self._slots = sizes.kept if slots is None else slots
        self._blobs: dict[int, Stripes] = {}

    @property
    def generation(self) -> str:
        return self.window.generation

    def add(self, record: int) -> None:
        """Append a record. Records further back than a window reaches are not needed again."""
        self.records.append(record)
        while len(self.records) > self.sizes.kept:
            self.release_record(self.records.popleft())

    def left(self, record: int) -> int:
        """Records that training may still commit before it overwrites the slot of this one."""
        newest = self.records[-1] if self.records else record
        return record // self.sizes.every + self._slots - 1 - newest // self.sizes.every

    def blob(self, record: int) -> Stripes | None:
        """The bytes of a record; None if they are not there any more."""
        found = self._blobs.get(record)
        if found is None:
            found = self.source.open(record)
            if found is not None:
                self._blobs[record] = found
        return found

    def release_record(self, record: int) -> None:
        """Release the bytes of a record, which no stream reads at present."""
        blob = self._blobs.pop(record, None)
        if blob is not None:
            blob.release()

    def close(self) -> None:
        for record in list(self._blobs):
            self.release_record(record)
        self.source.close()


#: Bytes of a record: all of them; those of its ranks alone; or those that every replica has.
Part = Literal["all", "private", "shared"]


class RegionSource:
    """The records of one generation, read from its regions, which it closes. `part`: bytes that are read by default."""

    def __init__(self, message: SendGeneration, regions: list[Region], part: Part = "all") -> None:
        self.spec = message.spec
        self.layout = Layout(message.spec)
        self._base = message.base
        # What is handed out has by-value tensors of the records whose states are wanted.
        wanted = [record for record, (_, _, rank_states) in message.records.items() if message.serve and rank_states]
        self._by_value_from = min(wanted, default=message.base)
        self._regions = GenerationRegions.of(self.layout, regions)
        self._ring = SlotRing(self._regions.slots, self.layout, message.number)
        self._missing, self._plain = message.missing, message.plain
        self._part = part
        self._records: dict[int, tuple[int, bytes, dict[int, bytes]]] = {}
        for record, (step, meta, rank_states) in message.records.items():
            self.note_record(record, step, meta, rank_states)

    def note_record(self, record: int, step: int, meta: bytes, rank_states: dict[int, bytes]) -> None:
        """Note what belongs to a whole record beside the bytes of its slot."""
        self._records[record] = (step, meta, rank_states)
        for old in [number for number in self._records if number < record - 2 * self.layout.ring - self.spec.period]:
            del self._records[old]

    def step(self, record: int) -> int:
        return self._records[record][0] if record in self._records else 0

    def intact(self, record: int) -> bool:
        if record == STATIC or (self._regions.replica is not None and record < self._base):
            return True  # the replica stands still until the agent has been told that this is over
        try:
            self._ring.check(record, self.spec.local_ranks)
            if record >= self._by_value_from:
                self._ring.check_by_value(record, self.spec.local_ranks)
        except DamagedStateError:
            return False
        return True

    def open(self, record: int, part: Part | None = None) -> Blob | None:
        """The bytes of a record, or another part of them; None if they are not there any more."""
        part = part or self._part
        if record == STATIC:
            if self._regions.static is None:
                return None
            return static_blob(self._regions.static)
        if record not in self._records or not self.intact(record):
            return None
        step, meta, rank_states = self._records[record]
        extents: list[Extent] = []
        views: list[memoryview] = []
        #: Of the slots' region: where bytes belong in the record, where they lie, and how many they are.
        places: list[tuple[int, int, int]] = []
        if part != "private":
            if record <= self._base and self._regions.replica is not None:
                meta = encode_meta(RecordMeta(record, self._base, True, (), self._missing, self._plain))
                extents, views = replica_extents(self.layout, record, memoryview(self._regions.replica.map))
            else:
                areas = [self.layout.gradient_area(one.optimizer, one.index) for one in decode_meta(meta).sub_steps]
                slot = self.layout.slot_offset(record)
                areas.append(self.layout.anchor_area(record))
                places += [(offset, slot + offset, nbytes) for offset, nbytes in areas]
        if part != "shared" and record >= self._by_value_from:
            offset, nbytes = self.layout.by_value_area()
            places.append((offset, self.layout.by_value_base(record), nbytes))
        whole = memoryview(self._regions.slots.map)
        extents += [Extent(offset, nbytes) for offset, _, nbytes in places if nbytes]
        views += [whole[start : start + nbytes] for _, start, nbytes in places if nbytes]
        meta, rank_states = (b"" if part == "private" else meta), (rank_states if part != "shared" else {})
        return Blob(RecordTail(step, meta, rank_states, tuple(extents)), views)

    def close(self) -> None:
        self._regions.close()


def rooms_for(layout: Layout, slots: mmap.mmap, record: int) -> list[Room]:
    """Memory for the bytes of a record from elsewhere: its slot, and that of its by-value tensors."""
    whole = memoryview(slots)
    begin, nbytes = layout.by_value_area()
    start = layout.slot_offset(record)
    rooms = [Room(0, whole[start : start + begin])]
    if nbytes:
        start = layout.by_value_base(record)
        rooms.append(Room(begin, whole[start : start + nbytes]))
    return rooms


def static_blob(region: Region) -> Blob:
    """What is sent once in a generation."""
    return Blob(RecordTail(0, b"", {}, (Extent(0, region.nbytes),)), [memoryview(region.map)])


def close_all(regions: Iterable[Region]) -> None:
    """Close regions that came with a message and have no use."""
    for region in regions:
        region.close()


def replica_extents(layout: Layout, record: int, replica: memoryview) -> tuple[list[Extent], list[memoryview]]:
    """The anchors that a virtual record of a replica's state carries, and where they lie in the replica."""
    parts = [part for part in _replica_parts(layout, record) if part[2]]
    extents = [Extent(target, nbytes) for target, _, nbytes in parts]
    return extents, [replica[start : start + nbytes] for _, start, nbytes in parts]


def _replica_parts(layout: Layout, record: int) -> Iterator[tuple[int, int, int]]:
    """Parts of a record's anchors: offset in a slot, offset in the replica, and bytes of each."""
    for piece in layout.due(record):
        param = layout.spec.params[piece.param]
        value, states = layout.replica_offsets[piece.param]
        length = piece.stop - piece.start
        for owner, state, target in layout.piece_parts(piece):
            if owner is None or state is None:
                item = ITEM_BYTES[param.tensor.dtype]
                yield target, value + piece.start * item, length * item
            elif state.elementwise:
                item = ITEM_BYTES[state.dtype]
                yield target, states[owner.optimizer, state.key] + piece.start * item, length * item
            else:
                yield target, states[owner.optimizer, state.key], state.nbytes
