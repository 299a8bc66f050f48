"""A record as the bytes that are cut into fragments: what lies in its slot, and behind that what belongs to it.

Shared memory is not copied: stripes look at it, and only one that spans several places is put together.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from memckpt.errors import MALFORMED, DamagedStateError
from memckpt.replication.coding.code import STRIPE_BYTES

_HEAD = struct.Struct("<Q")  # length of the encoded tail
#: Number in place of a record's, for what is sent once in a generation.
STATIC = -(1 << 40)
#: Limit on what belongs to a record beside the bytes of its slot, in bytes.
MOST_TAIL_BYTES = 1 << 30


class Extent(msgspec.Struct, frozen=True, array_like=True):
    """Bytes of a record and where they belong: an offset in the record, or in the static region."""

    offset: int
    nbytes: int


class RecordTail(msgspec.Struct, frozen=True, array_like=True):
    """What belongs to a record beside the bytes of its slot: scalars, states, and where its bytes belong.

    `meta`: a RecordMeta, encoded; empty for private bytes. `rank_states`: empty for virtual records.
    """

    step: int
    meta: bytes
    rank_states: dict[int, bytes]
    extents: tuple[Extent, ...]


class Blob:
    """The bytes of a record in stripes: its tail, then views of shared memory, which must not change meanwhile."""

    def __init__(self, tail: RecordTail, views: Sequence[memoryview]) -> None:
        encoded = msgspec.msgpack.encode(tail)
        first = memoryview(_HEAD.pack(len(encoded)) + encoded)
        self._views = [view for view in (first, *views) if view.nbytes]
        self._starts: list[int] = []
        self.nbytes = 0
        for view in self._views:
            self._starts.append(self.nbytes)
            self.nbytes += view.nbytes
        self.stripes = -(-self.nbytes // STRIPE_BYTES)

    def stripe(self, index: int) -> bytes | memoryview:
        """The bytes of one stripe; the last one may be shorter."""
        start = index * STRIPE_BYTES
        stop = min(start + STRIPE_BYTES, self.nbytes)
        found = []
        for begin, view in zip(self._starts, self._views, strict=True):
            if begin < stop and start < begin + view.nbytes:
                found.append(view[max(start - begin, 0) : stop - begin])
        return found[0] if len(found) == 1 else b"".join(found)

    def release(self) -> None:
        self._views.clear()
        self._starts.clear()


class Room(NamedTuple):
    """Where those bytes of a record lie that begin at `offset` in it; or those of the static region."""

    offset: int
    view: memoryview

    def has(self, extent: Extent) -> bool:
        end = self.offset + self.view.nbytes
        return self.offset <= extent.offset and extent.nbytes >= 0 and extent.offset + extent.nbytes <= end


class BlobReader:
    """Takes the stripes of a record in their order and puts its bytes into rooms (a record's, or the static one)."""

    def __init__(self, rooms: Sequence[Room], limit: int = MOST_TAIL_BYTES) -> None:
        self._rooms, self._limit = rooms, limit
        self._first = bytearray()
        self._size: int | None = None
        #: What is yet to come, and where each extent of it belongs.
        self._targets: list[memoryview] = []
        self._position = 0
        self.tail: RecordTail | None = None

    def take(self, stripe: bytes) -> None:
        """Take the next stripe; raises DamagedStateError for bytes that are no record's, or do not fit the rooms."""
        rest = memoryview(stripe)
        if self.tail is None:
            self._first += stripe
            if not self._take_tail():
                return
            assert self._size is not None
            rest = memoryview(bytes(self._first[self._size :]))
            self._first.clear()
        while rest.nbytes:
            if not self._targets:
                raise DamagedStateError(f"a record of fragments: expected its end, found {rest.nbytes} bytes more")
            target = self._targets[0]
            count = min(rest.nbytes, target.nbytes - self._position)
            target[self._position : self._position + count] = rest[:count]
            rest, self._position = rest[count:], self._position + count
            if self._position == target.nbytes:
                self._targets.pop(0)
                self._position = 0

    def _take_tail(self) -> bool:
        if self._size is None and len(self._first) >= _HEAD.size:
            (length,) = _HEAD.unpack_from(self._first)
            if length > self._limit:
                raise DamagedStateError(f"a record of fragments: expected a tail of at most {self._limit} bytes")
            self._size = _HEAD.size + length
        if self._size is None or len(self._first) < self._size:
            return False
        try:
            tail = msgspec.msgpack.decode(bytes(self._first[_HEAD.size : self._size]), type=RecordTail)
        except MALFORMED as error:
            raise DamagedStateError(f"a record of fragments: its tail cannot be read: {error}") from error
        self._targets = [view for extent in tail.extents if (view := self._target(extent)).nbytes]
        self.tail = tail
        return True

    def _target(self, extent: Extent) -> memoryview:
        for room in self._rooms:
            if room.has(extent):
                start = extent.offset - room.offset
                return room.view[start : start + extent.nbytes]
        bounds = ", ".join(f"{room.offset} to {room.offset + room.view.nbytes}" for room in self._rooms)
        raise DamagedStateError(f"a record of fragments: expected bytes within {bounds}, found {extent}")

    def finish(self) -> RecordTail:
        """The tail of the record, once all stripes were taken; raises DamagedStateError if some are missing."""
        if self.tail is None or self._targets:
            raise DamagedStateError("a record of fragments ends before all of its bytes are there")
        return self.tail
