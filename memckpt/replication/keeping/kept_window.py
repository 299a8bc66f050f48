"""One generation of another node's fragments, in memory that describes itself.

Each fragment lies behind a stamp, cleared first and written last. So a process that maps the memory after its writer's
death finds the records that were whole.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from typing import NamedTuple, Protocol

from memckpt.errors import DamagedStateError, MemoryBudgetError
from memckpt.replication.coding.blob import MOST_TAIL_BYTES, STATIC
from memckpt.replication.coding.code import STRIPE_BYTES, Fragment, check
from memckpt.replication.transport.messages import Window
from memckpt.state.layout import SNAPSHOTS, Layout
from memckpt.state.records import HeldFragments
from memckpt.state.spec import StateSpec, read_spec

#: Bytes of room for what belongs to a record beside its slot; more is reserved when more comes.
_TAIL_BYTES = 64 << 10


class WindowSizes(NamedTuple):
    """Sizes of a window, and of the memory that a holder needs for it: owner and holders compute the same.

    `period`: T; 1 where each record stands for itself. `kept`: records at most (T + D). `every`: record numbers are
    multiples of it. `record_bytes`, `stripes`: as a rule. `static`: something is sent once for all records.
    """

    period: int
    kept: int
    every: int
    record_bytes: int
    static: bool
    stripes: int
    most_stripes: int
    most_static_stripes: int


def sizes_of(spec: StateSpec, private: bool, by_value: bool = False) -> WindowSizes:
    """Sizes of a window of records with a layout; `private`: they have only the bytes of their ranks alone."""
    layout = Layout(spec)
    period = 1 if private else spec.period
    capture = spec.mode == "snapshot"
    record_bytes = layout.by_value_area()[1]
    if not private:
        record_bytes += layout.anchor_bytes + (0 if by_value else layout.gradient_bytes)
    static_bytes = 0 if private else layout.static_bytes
    return WindowSizes(
        period=period,
        kept=period + (0 if by_value else SNAPSHOTS if capture else spec.slots),
        every=spec.every if capture else 1,
        record_bytes=record_bytes,
        static=static_bytes > 0,
        stripes=_stripes(record_bytes + _TAIL_BYTES),
        most_stripes=_stripes(record_bytes + MOST_TAIL_BYTES),
        most_static_stripes=_stripes(static_bytes + _TAIL_BYTES) if static_bytes else 0,
    )


def _stripes(nbytes: int) -> int:
    return -(-nbytes // STRIPE_BYTES)


#: Stripes of the record (0: the cell is empty), record, step, stripe, length, bytes, checksum, digest.
_STAMP = struct.Struct("<Iqq3I8s16s")
_STRIPES = struct.Struct("<I")
#: Bytes in front of each fragment.
STAMP_BYTES = 64


class Found(NamedTuple):
    """A fragment where it lies. `step`: the framework's step of its record."""

    fragment: Fragment
    step: int
    payload: memoryview


class Cells:
    """The cells of a slot, in parts of memory one after the other. Each cell has a stamp and a fragment's bytes."""

    def __init__(self, window: Window, unit: int, parts: list[memoryview]) -> None:
        self._window, self._unit, self._parts = window, unit, parts

    def __len__(self) -> int:
        return sum(part.nbytes for part in self._parts) // (STAMP_BYTES + self._unit)

    def _cell(self, stripe: int) -> memoryview:
        start = stripe * (STAMP_BYTES + self._unit)
        for part in self._parts:
            if start < part.nbytes:
                return part[start : start + STAMP_BYTES + self._unit]
            start -= part.nbytes
        raise IndexError(f"expected one of {len(self)} cells, found {stripe}")

    def write(self, fragment: Fragment, step: int, payload: memoryview | bytes) -> memoryview:
        """Write a fragment to its cell; returns its bytes there."""
        one, cell = fragment, self._cell(fragment.stripe)
        # A writer that dies in between leaves an empty cell: the number of stripes is cleared first and written last.
        _STRIPES.pack_into(cell, 0, 0)
        place = cell[STAMP_BYTES : STAMP_BYTES + len(payload)]
        place[:] = payload
        _STAMP.pack_into(cell, 0, 0, one.record, step, one.stripe, one.length, len(payload), one.checksum, one.digest)
        _STRIPES.pack_into(cell, 0, one.stripes)
        return place

    def clear(self) -> None:
        for stripe in range(len(self)):
            _STRIPES.pack_into(self._cell(stripe), 0, 0)

    def find(self) -> list[Found]:
        """The fragments of the record that is whole here, by stripe; empty if none is."""
        stripes = _STRIPES.unpack_from(self._cell(0))[0] if len(self) else 0
        if not 1 <= stripes <= len(self):
            return []
        found = [one for stripe in range(stripes) if (one := self._fragment(stripe, stripes)) is not None]
        return found if len(found) == stripes and len({(one.fragment.record, one.step) for one in found}) == 1 else []

    def _fragment(self, expected: int, expected_stripes: int) -> Found | None:
        cell = self._cell(expected)
        stripes, record, step, stripe, length, nbytes, checksum, digest = _STAMP.unpack_from(cell)
        if (stripes, stripe) != (expected_stripes, expected) or nbytes > self._unit:
            return None
        told = self._window
        fragment = Fragment(
            told.generation, told.owner, record, stripe, stripes, told.index, told.data, told.tolerate, length,
            checksum, digest,
        )  # fmt: skip
        return Found(fragment, step, cell[STAMP_BYTES : STAMP_BYTES + nbytes])


#: A window's room for all slots; other rooms have the number of the slot to which they belong.
SLOTS = -2
_STATIC_SLOT = -1


class Room(Protocol):
    """Memory that is reserved, zeros at first, as a Region; its window closes it."""

    nbytes: int

    @property
    def map(self) -> mmap.mmap | bytearray: ...

    def close(self) -> None: ...


class BeingReservedError(MemoryBudgetError):
    """There is no room yet: it is being made."""


class Rooms(Protocol):
    """Makes memory for windows, and keeps it beyond this process. `slot`: :data:`SLOTS`, or one that needs more."""

    def make_room(self, window: Window, unit: int, slot: int, nbytes: int) -> Room:
        """Reserve memory; MemckptError: there is none, BeingReservedError: it is to be asked for again."""
        ...

    def drop_room(self, window: Window, slot: int) -> None:
        """Drop a room that is not needed any more."""
        ...


class _KeptRecord:
    """The fragments of one record that have arrived, by stripe."""

    def __init__(self, slot: int, stripes: int) -> None:
        self.slot, self.stripes = slot, stripes
        self.step = 0
        self.fragments: dict[int, tuple[Fragment, memoryview]] = {}

    @property
    def complete(self) -> bool:
        return len(self.fragments) == self.stripes


class KeptWindow:
    """One generation of one owner's fragments, in memory that is reserved.

    `unit`: bytes of a whole stripe's fragment. `found`: rooms of a dead process, by slot, whose whole records are kept.
    Raises ValueError: the layout is another owner's, or unreadable; MemckptError: there is no room.
    """

    def __init__(self, window: Window, unit: int, rooms: Rooms, found: Mapping[int, Room] | None = None) -> None:
        self.window = window
        self.spec = read_spec(window.spec)
        if window.owner != self.spec.local_ranks:
            raise ValueError(f"expected a layout of ranks {list(window.owner)}, found {list(self.spec.local_ranks)}")
        self.sizes = sizes_of(self.spec, window.private, window.by_value)
        self._unit = unit
        self._maker = rooms
        self._slot_bytes = self.sizes.stripes * self._cell_bytes
        #: By slot, what its records have beyond that of all slots, as much as any of them had.
        self._rooms = dict(found or {})
        if SLOTS not in self._rooms:
            self._add_room(SLOTS, self._slot_bytes * self.sizes.kept)
        elif (nbytes := self._rooms[SLOTS].nbytes) != self._slot_bytes * self.sizes.kept:
            raise ValueError(f"expected a room of {self._slot_bytes * self.sizes.kept} bytes, found {nbytes}")
        self._free = list(range(self.sizes.kept))
        self._records: dict[int, _KeptRecord] = {}
        #: Nobody needs this record any more, or those before it.
        self._past = STATIC
        if found:
            self._find_records()

    @property
    def snapshots(self) -> bool:
        return self.spec.mode == "snapshot"

    def misfit(self, fragment: Fragment) -> str:
        """Why a fragment that is whole cannot be one of this window, in words; empty if it can."""
        told, one, sizes = self.window, fragment, self.sizes
        if (one.index, one.data, one.tolerate) != (told.index, told.data, told.tolerate):
            return f"it is fragment {one.index} of a ({one.data}, {one.tolerate}) code"
        if one.record != STATIC and one.record <= told.base - sizes.period * sizes.every:
            return f"record {one.record} lies before the generation, which begins after {told.base}"
        most = sizes.most_static_stripes if one.record == STATIC else sizes.most_stripes
        if one.stripes > most:
            return f"expected a record of at most {most} stripes, found {one.stripes}"
        if one.length < STRIPE_BYTES and one.stripe < one.stripes - 1:
            return f"expected {STRIPE_BYTES} bytes of all stripes but the last, found {one.length}"
        return ""

    # Records

    def put(self, fragment: Fragment, step: int, payload: memoryview | bytes) -> bool:
        """Keep a fragment that fits; True: the record is complete. Raises MemckptError: no room, or it differs."""
        number = fragment.record
        kept = self._records.get(number)
        if kept is not None and kept.complete:
            self._compare(kept, fragment)
        if (kept is not None and kept.complete) or STATIC < number <= self._past or self._is_too_old(number):
            # Sent once more, or not needed: its owner waits to hear of it, at its end.
            return fragment.stripe == fragment.stripes - 1
        if kept is not None and kept.stripes != fragment.stripes:
            self._drop(number)
            kept = None
        if kept is None:
            kept = self._make_record(number, fragment.stripes)
        kept.step = step
        kept.fragments[fragment.stripe] = (fragment, self._cells(kept.slot).write(fragment, step, payload))
        return kept.complete

    def _compare(self, kept: _KeptRecord, fragment: Fragment) -> None:
        """Check what is here of a record that is sent once more: its owner, or this node, was away for a while."""
        known = kept.fragments.get(fragment.stripe)
        same = known is not None and (known[0].checksum, known[0].digest) == (fragment.checksum, fragment.digest)
        problem = check(*known) if known is not None and same else "it differs from what is sent now"
        if problem:
            self._drop(fragment.record)
            raise DamagedStateError(f"what was kept of it is dropped, and it is to be sent anew: {problem}")

    def _is_too_old(self, number: int) -> bool:
        """Whether a record would take the slot of a later one: there are as many slots as records that are needed."""
        return not self._free and STATIC < number < min(one for one in self._records if one != STATIC)

    def _make_record(self, number: int, stripes: int) -> _KeptRecord:
        if number != STATIC and not self._free:
            self._drop(min(one for one in self._records if one != STATIC))
        slot = _STATIC_SLOT if number == STATIC else self._free[0]
        beyond = (stripes - self._in_slot(slot)) * self._cell_bytes
        more = self._rooms.get(slot)
        if beyond > 0 and (more is None or more.nbytes < beyond):
            self._remove_room(slot)
            self._add_room(slot, beyond)
        if number != STATIC:
            self._free.pop(0)
        kept = self._records[number] = _KeptRecord(slot, stripes)
        return kept

    def _find_records(self) -> None:
        """Take up the records that are whole in memory of a process that has died; nothing else stays there."""
        for slot in [*([_STATIC_SLOT] if _STATIC_SLOT in self._rooms else []), *range(self.sizes.kept)]:
            cells = self._cells(slot)
            found = cells.find()
            number = found[0].fragment.record if found else None
            misplaced = (number == STATIC) != (slot == _STATIC_SLOT) or number in self._records
            if number is None or misplaced or any(self.misfit(one.fragment) for one in found):
                cells.clear()
                continue
            kept = self._records[number] = _KeptRecord(slot, len(found))
            kept.step = found[0].step
            kept.fragments = {one.fragment.stripe: (one.fragment, one.payload) for one in found}
            if slot in self._free:
                self._free.remove(slot)

    def abandon(self, record: int) -> None:
        if record in self._records:
            self._drop(record)

    def drop_up_to(self, record: int) -> None:
        """Drop records that nobody needs any more. What still comes of them is acknowledged, and not kept."""
        self._past = max(self._past, record)
        for number in [one for one in self._records if STATIC < one <= record]:
            self._drop(number)

    def drop_beyond(self, record: int) -> None:
        """Drop these records: they belong to an abandoned timeline."""
        for number in [one for one in self._records if one > record]:
            self._drop(number)

    def _drop(self, number: int) -> None:
        kept = self._records.pop(number)
        kept.fragments.clear()
        self._cells(kept.slot).clear()
        if number != STATIC:
            self._free.append(kept.slot)

    # Memory

    @property
    def _cell_bytes(self) -> int:
        return STAMP_BYTES + self._unit

    def _in_slot(self, slot: int) -> int:
        """Number of stripes for which a slot has room without more being reserved."""
        return 0 if slot == _STATIC_SLOT else self.sizes.stripes

    def _cells(self, slot: int) -> Cells:
        parts = []
        if slot != _STATIC_SLOT:
            whole = memoryview(self._rooms[SLOTS].map)
            parts.append(whole[slot * self._slot_bytes : (slot + 1) * self._slot_bytes])
        if slot in self._rooms:
            parts.append(memoryview(self._rooms[slot].map))
        return Cells(self.window, self._unit, parts)

    def _add_room(self, slot: int, nbytes: int) -> None:
        self._rooms[slot] = self._maker.make_room(self.window, self._unit, slot, nbytes)

    def _remove_room(self, slot: int) -> None:
        room = self._rooms.pop(slot, None)
        if room is None:
            return
        room.close()
        self._maker.drop_room(self.window, slot)

    @property
    def nbytes(self) -> int:
        return sum(room.nbytes for room in self._rooms.values())

    def close(self) -> None:
        """Close the memory; its maker drops it, too."""
        self._records.clear()
        for slot in list(self._rooms):
            self._remove_room(slot)

    def unmap(self) -> None:
        """Unmap the memory; its maker keeps it."""
        self._records.clear()
        for room in self._rooms.values():
            room.close()
        self._rooms.clear()

    # What is here

    def fragment(self, record: int, stripe: int) -> tuple[Fragment, memoryview] | None:
        """One fragment of a record that is complete, with its bytes."""
        kept = self._records.get(record)
        return kept.fragments.get(stripe) if kept is not None and kept.complete else None

    def manifest(self, record: int) -> tuple[int, bytes] | None:
        """Bytes of a record that is complete here, and the digests of its stripes."""
        kept = self._records.get(record)
        if kept is None or not kept.complete:
            return None
        headers = [kept.fragments[stripe][0] for stripe in range(kept.stripes)]
        return sum(one.length for one in headers), b"".join(one.digest for one in headers)

    @property
    def whole(self) -> tuple[int, ...]:
        """Numbers of all that is complete, also of what is sent once."""
        return tuple(number for number, kept in self._records.items() if kept.complete)

    def records(self) -> list[int]:
        """Numbers of the records that are complete, ascending."""
        return sorted(number for number in self.whole if number != STATIC)

    def held(self, node: str, fingerprint: tuple[str, ...] | None) -> HeldFragments:
        """Description of what is here, for the plan; `fingerprint`: of the model that is to be resumed, if known."""
        window, records = self.window, self.records()
        difference = self.spec.difference(fingerprint) if fingerprint is not None else None
        static = self._records.get(STATIC)
        return HeldFragments(
            node=node,
            owner=window.owner,
            index=window.index,
            data=window.data,
            generation=window.generation,
            base=window.base,
            period=self.sizes.period,
            private=window.private,
            replicas=self.spec.serves,
            records=tuple(records),
            steps=tuple(self._records[number].step for number in records),
            history=window.history,
            static=not self.sizes.static or (static is not None and static.complete),
            world_size=self.spec.world_size,
            digest=self.spec.digest(),
            sharding=self.spec.sharding(),
            problem=difference or "",
        )
