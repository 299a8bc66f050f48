"""Pieces of other nodes' records, kept in memory that is reserved once for each of their generations."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol

import msgspec

from memckpt.errors import MemckptError
from memckpt.peers.blob import STATIC
from memckpt.peers.code import STRIPE_BYTES, Code
from memckpt.peers.fragments import Fragment, check
from memckpt.peers.wire import NotStored, Stored, Window
from memckpt.state.layout import StateSpec, first_difference
from memckpt.state.records import HeldPieces

_log = logging.getLogger("memckpt.courier")
#: Room for what belongs to a record beside its bytes; what does not fit lies on the heap.
_TAIL_BYTES = 64 << 10


class Room(Protocol):
    """Memory that is reserved; whoever has asked for it closes it."""

    @property
    def view(self) -> memoryview:
        """All of it."""
        ...

    def close(self) -> None: ...


class _KeptRecord:
    """The fragments of one record that have arrived, by stripe."""

    def __init__(self, slot: int | None) -> None:
        self.slot = slot
        self.step = 0
        self.stripes = 0
        self.fragments: dict[int, tuple[Fragment, memoryview]] = {}

    @property
    def complete(self) -> bool:
        return 0 < self.stripes == len(self.fragments)


class KeptWindow:
    """One generation of one owner's pieces.

    Args:
        window: what the owner has said of it.
        room: of `bytes_needed(window)`; closed by :meth:`close`.

    Raises:
        ValueError: the owner's layout cannot be read.
    """

    def __init__(self, window: Window, room: Room) -> None:
        self.window = window
        self.spec = msgspec.msgpack.decode(window.spec, type=StateSpec)
        self._owned = room
        self._room = room.view
        self._slot_bytes = _slot_bytes(window)
        self._free = list(range(window.kept))
        self._records: dict[int, _KeptRecord] = {}

    @staticmethod
    def bytes_needed(window: Window) -> int:
        """The memory that it takes, in bytes."""
        return max(_slot_bytes(window) * window.kept, 1)

    def put(self, fragment: Fragment, step: int, payload: memoryview | bytes) -> bool:
        """Keep a fragment; True when that makes its piece of the record complete."""
        number = fragment.record
        kept = self._records.get(number)
        if kept is None:
            if number != STATIC and not self._free:
                self._drop(min(one for one in self._records if one != STATIC))
            kept = self._records[number] = _KeptRecord(None if number == STATIC else self._free.pop(0))
        if kept.complete:  # sent once more: say so once more, at its end
            return fragment.stripe == fragment.stripes - 1
        kept.step, kept.stripes = step, fragment.stripes
        kept.fragments[fragment.stripe] = (fragment, self._place(kept.slot, fragment.stripe, payload))
        return kept.complete

    def _place(self, slot: int | None, stripe: int, payload: memoryview | bytes) -> memoryview:
        size, unit = len(payload), _stripe_room(self.window)
        offset = stripe * unit
        if slot is None or size > unit or offset + size > self._slot_bytes:
            return memoryview(bytes(payload))
        start = slot * self._slot_bytes + offset
        place = self._room[start : start + size]
        place[:] = payload
        return place

    def abandon(self, record: int) -> None:
        """No more comes of a record: what is here of it is of no use."""
        if record in self._records:
            self._drop(record)

    def drop_up_to(self, record: int) -> None:
        """Nobody can need these records any more."""
        for number in [one for one in self._records if STATIC < one <= record]:
            self._drop(number)

    def drop_beyond(self, record: int) -> None:
        """These belong to a past that is not gone on with."""
        for number in [one for one in self._records if one > record]:
            self._drop(number)

    def _drop(self, number: int) -> None:
        kept = self._records.pop(number)
        kept.fragments.clear()
        if kept.slot is not None:
            self._free.append(kept.slot)

    def fragment(self, record: int, stripe: int) -> tuple[Fragment, memoryview] | None:
        """One fragment of a record that is complete, with its bytes."""
        kept = self._records.get(record)
        return kept.fragments[stripe] if kept is not None and kept.complete and stripe < kept.stripes else None

    def manifest(self, record: int) -> tuple[int, bytes] | None:
        """Bytes of a record that is complete here, and the digests of its stripes."""
        kept = self._records.get(record)
        if kept is None or not kept.complete:
            return None
        headers = [kept.fragments[stripe][0] for stripe in range(kept.stripes)]
        return sum(one.length for one in headers), b"".join(one.digest for one in headers)

    def records(self) -> list[int]:
        """Those that are complete, ascending."""
        return sorted(number for number, kept in self._records.items() if kept.complete and number != STATIC)

    def held(self, node: str, fingerprint: tuple[str, ...] | None) -> HeldPieces:
        """What is here, for the plan.

        Args:
            node: this one.
            fingerprint: of the model that is to be resumed; None: there is nothing to compare with.
        """
        window, records = self.window, self.records()
        difference = first_difference(self.spec.fingerprint(), fingerprint) if fingerprint is not None else None
        static = self._records.get(STATIC)
        return HeldPieces(
            node=node,
            owner=window.owner,
            piece=window.piece,
            data=window.data,
            generation=window.generation,
            base=window.base,
            period=window.period,
            private=window.private,
            replicas=window.replicas,
            records=tuple(records),
            steps=tuple(self._records[number].step for number in records),
            history=window.history,
            static=not window.static or (static is not None and static.complete),
            world_size=self.spec.world_size,
            digest=self.spec.digest(),
            sharding=self.spec.sharding(),
            problem=difference or "",
        )

    @property
    def nbytes(self) -> int:
        return self._room.nbytes

    def close(self) -> None:
        """Let go of the memory."""
        self._records.clear()
        self._owned.close()


class Holder:
    """All that a node keeps for others. Opens and drops windows as their owners and the watermark say.

    Args:
        node: its name.
        reserve: makes room of so many bytes; raises MemckptError if it cannot.

    Attributes:
        watermark: the newest record that is acknowledged for every node of the job, as far as is known here.
    """

    def __init__(self, node: str, reserve: Callable[[int], Room]) -> None:
        self._node = node
        self._reserve = reserve
        self._attempt: str | None = None
        self._windows: dict[tuple[tuple[int, ...], str], KeptWindow] = {}
        self.watermark = 0

    @property
    def nbytes(self) -> int:
        """Memory that is reserved."""
        return sum(window.nbytes for window in self._windows.values())

    def windows(self) -> list[KeptWindow]:
        return list(self._windows.values())

    def window(self, owner: tuple[int, ...], generation: str) -> KeptWindow | None:
        return self._windows.get((owner, generation))

    # Attempts

    def halt(self) -> None:
        """The attempt is over: nothing more is taken until another one begins."""
        self._attempt = None

    def begin(self, attempt: str, record: int | None) -> None:
        """An attempt begins; it goes on behind `record`, or uses nothing of what is here (None)."""
        self._attempt = attempt
        self.watermark = record or 0
        for window in self.windows():
            if record is None:
                self._forget(window)
            else:
                window.drop_beyond(record)

    def close(self) -> None:
        for window in self.windows():
            self._forget(window)

    def _forget(self, window: KeptWindow) -> None:
        del self._windows[window.window.owner, window.window.generation]
        window.close()

    # What owners say

    def open(self, window: Window) -> NotStored | None:
        """Make room for a generation; an answer only if there is none."""
        key = window.owner, window.generation
        if window.attempt != self._attempt:
            return NotStored(*key, window.base, "it belongs to another attempt than the one that runs here")
        known = self._windows.get(key)
        if known is not None and known.window == window:
            return None  # the owner has lost sight of what is here, and sends it once more
        if known is not None:
            self._forget(known)
        try:
            room = self._reserve(KeptWindow.bytes_needed(window))
        except MemckptError as error:
            return NotStored(*key, window.base, str(error))
        try:
            self._windows[key] = KeptWindow(window, room)
        except ValueError as error:  # of msgspec, or of text that is no UTF-8
            room.close()
            return NotStored(*key, window.base, f"its layout cannot be read: {error}")
        return None

    def put(self, fragment: Fragment, step: int, payload: memoryview | bytes) -> Stored | NotStored | None:
        """Keep a fragment; the answer that its owner is to get, if any."""
        key = fragment.owner, fragment.generation
        window = self._windows.get(key)
        if window is None or window.window.attempt != self._attempt:
            return NotStored(*key, fragment.record, "no window of this generation is open here")
        problem = check(fragment, payload)
        told = window.window
        if not problem and (fragment.piece, fragment.data, fragment.tolerate) != (told.piece, told.data, told.tolerate):
            problem = f"it is piece {fragment.piece} of a ({fragment.data}, {fragment.tolerate}) code"
        if problem:
            return NotStored(*key, fragment.record, f"a fragment of it came damaged: {problem}")
        return Stored(*key, fragment.record) if window.put(fragment, step, payload) else None

    def abandon(self, owner: tuple[int, ...], generation: str, record: int) -> None:
        window = self._windows.get((owner, generation))
        if window is not None:
            window.abandon(record)

    def passed(self, watermark: int, whole: bool) -> None:
        """The watermark is known to have got so far; `whole`: every node is protected by this attempt's windows."""
        self.watermark = max(self.watermark, watermark)
        newest = {
            window.window.owner: window.window.base
            for window in sorted(self.windows(), key=lambda one: one.window.base)
            if window.window.attempt == self._attempt and window.window.base <= self.watermark
        }
        for window in self.windows():
            told = window.window
            if told.attempt != self._attempt:
                if whole:
                    self._forget(window)
            elif told.base < newest.get(told.owner, told.base):
                self._forget(window)
            else:
                window.drop_up_to(self.watermark - told.period * told.every)

    def forget_before(self, owner: tuple[int, ...], base: int) -> None:
        """What this attempt has kept of an owner's generations that begin before `base` is not needed any more."""
        for window in self.windows():
            told = window.window
            if told.owner == owner and told.attempt == self._attempt and told.base < base:
                self._forget(window)

    def held(self, fingerprint_of: Callable[[KeptWindow], tuple[str, ...] | None]) -> tuple[HeldPieces, ...]:
        """What is here, for the plan."""
        return tuple(window.held(self._node, fingerprint_of(window)) for window in self.windows())


def _stripe_room(window: Window) -> int:
    return Code(window.data, window.tolerate).fragment_bytes(STRIPE_BYTES)


def _slot_bytes(window: Window) -> int:
    stripes = -(-(window.record_bytes + _TAIL_BYTES) // STRIPE_BYTES)
    return stripes * _stripe_room(window)
