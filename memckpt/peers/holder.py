"""Pieces of other nodes' records, kept in memory that is reserved once for each of their generations."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol

from memckpt.errors import MemckptError
from memckpt.peers.blob import STATIC
from memckpt.peers.code import STRIPE_BYTES, Code
from memckpt.peers.fragments import Fragment, check
from memckpt.peers.windows import differing, misfit, sizes_of
from memckpt.peers.wire import NotStored, Stored, Window
from memckpt.state.layout import first_difference
from memckpt.state.received import read_spec
from memckpt.state.records import HeldPieces

_log = logging.getLogger("memckpt.courier")
#: Generations of one owner that are kept while the watermark stands still.
MOST_WINDOWS = 8
_STATIC_SLOT = -1


class Room(Protocol):
    """Memory that is reserved; whoever has asked for it closes it."""

    @property
    def view(self) -> memoryview:
        """All of it."""
        ...

    def close(self) -> None: ...


#: Makes room of so many bytes; raises MemckptError if it cannot.
Reserve = Callable[[int], Room]


class _KeptRecord:
    """The fragments of one record that have arrived, by stripe."""

    def __init__(self, slot: int, stripes: int) -> None:
        self.slot = slot
        self.stripes = stripes
        self.step = 0
        self.fragments: dict[int, tuple[Fragment, memoryview]] = {}

    @property
    def complete(self) -> bool:
        return len(self.fragments) == self.stripes


class KeptWindow:
    """One generation of one owner's pieces.

    Args:
        window: what the owner has said of it.
        unit: bytes of a fragment of a whole stripe.
        reserve: for the memory that it takes, all of it that is known beforehand now; closed by :meth:`close`.

    Raises:
        ValueError: the owner's layout cannot be read, or the window does not follow from it.
        MemckptError: there is no room.
    """

    def __init__(self, window: Window, unit: int, reserve: Reserve) -> None:
        self.window = window
        self.spec = read_spec(window.spec)
        self._sizes = sizes_of(self.spec, window.private)
        problem = differing(window, self.spec, self._sizes)
        if problem:
            raise ValueError(problem)
        self._unit = unit
        self._reserve = reserve
        self._slot_bytes = self._sizes.stripes * unit
        self._room = reserve(self._slot_bytes * window.kept)
        #: By slot, what its records have beyond that, as much as any of them had.
        self._more: dict[int, Room] = {}
        self._free = list(range(window.kept))
        self._records: dict[int, _KeptRecord] = {}
        #: Nobody can need this record any more, or those before it.
        self._past = STATIC

    @property
    def captures(self) -> bool:
        """Whether each record is a state by itself."""
        return self.spec.mode == "capture"

    def misfit(self, fragment: Fragment) -> str:
        """Why a fragment that is whole cannot be one of this window, in words; empty if it can."""
        return misfit(self.window, self._sizes, fragment)

    def put(self, fragment: Fragment, step: int, payload: memoryview | bytes) -> bool:
        """Keep a fragment that fits; True when that makes its piece of the record complete.

        Raises:
            MemckptError: there is no room for it.
        """
        number = fragment.record
        kept = self._records.get(number)
        if (kept is not None and kept.complete) or STATIC < number <= self._past or self._is_too_old(number):
            # Sent once more, or not needed: its owner waits to hear of it, at its end.
            return fragment.stripe == fragment.stripes - 1
        if kept is not None and kept.stripes != fragment.stripes:
            self._drop(number)
            kept = None
        if kept is None:
            kept = self._make_record(number, fragment.stripes)
        kept.step = step
        kept.fragments[fragment.stripe] = (fragment, self._place(kept.slot, fragment.stripe, payload))
        return kept.complete

    def _is_too_old(self, number: int) -> bool:
        """Whether a record would take the slot of a later one: there are as many slots as records that are needed."""
        return not self._free and STATIC < number < min(one for one in self._records if one != STATIC)

    def _make_record(self, number: int, stripes: int) -> _KeptRecord:
        if number != STATIC and not self._free:
            self._drop(min(one for one in self._records if one != STATIC))
        slot = _STATIC_SLOT if number == STATIC else self._free[0]
        beyond = (stripes - self._in_slot(slot)) * self._unit
        more = self._more.get(slot)
        if beyond > 0 and (more is None or more.view.nbytes < beyond):
            if more is not None:
                self._more.pop(slot).close()
            self._more[slot] = self._reserve(beyond)
        if number != STATIC:
            self._free.pop(0)
        kept = self._records[number] = _KeptRecord(slot, stripes)
        return kept

    def _in_slot(self, slot: int) -> int:
        """Stripes for which there is room without more being reserved."""
        return 0 if slot == _STATIC_SLOT else self._sizes.stripes

    def _place(self, slot: int, stripe: int, payload: memoryview | bytes) -> memoryview:
        beyond = stripe - self._in_slot(slot)
        if beyond < 0:
            room, start = self._room.view, slot * self._slot_bytes + stripe * self._unit
        else:
            room, start = self._more[slot].view, beyond * self._unit
        place = room[start : start + len(payload)]
        place[:] = payload
        return place

    def abandon(self, record: int) -> None:
        """No more comes of a record: what is here of it is of no use."""
        if record in self._records:
            self._drop(record)

    def drop_up_to(self, record: int) -> None:
        """Nobody can need these records any more. What still comes of them is acknowledged, and not kept."""
        self._past = max(self._past, record)
        for number in [one for one in self._records if STATIC < one <= record]:
            self._drop(number)

    def drop_beyond(self, record: int) -> None:
        """These belong to a past that is not gone on with."""
        for number in [one for one in self._records if one > record]:
            self._drop(number)

    def _drop(self, number: int) -> None:
        kept = self._records.pop(number)
        kept.fragments.clear()
        if number != STATIC:
            self._free.append(kept.slot)

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
        """Memory that is reserved."""
        return sum(room.view.nbytes for room in (self._room, *self._more.values()))

    def close(self) -> None:
        """Let go of the memory."""
        self._records.clear()
        for room in (self._room, *self._more.values()):
            room.close()


class Holder:
    """All that a node keeps for others. Opens and drops windows as their owners and the watermark say.

    Args:
        node: its name.
        reserve: makes room of so many bytes; raises MemckptError if it cannot.

    Attributes:
        watermark: the newest record that is acknowledged for every node of the job, as far as is known here.
    """

    def __init__(self, node: str, reserve: Reserve) -> None:
        self._node = node
        self._reserve = reserve
        self._attempt: str | None = None
        self._code: Code | None = None
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
        self._attempt = self._code = None

    def begin(self, attempt: str, record: int | None, code: Code) -> None:
        """An attempt begins; it goes on behind `record`, or uses nothing of what is here (None).

        Its pieces are of `code`, which belongs to the caller and is not used after the attempt.
        """
        self._attempt, self._code = attempt, code
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
        if window.attempt != self._attempt or self._code is None:
            return NotStored(*key, window.base, "it belongs to another attempt than the one that runs here", True)
        known = self._windows.get(key)
        if known is not None and known.window == window:
            return None  # the owner has lost sight of what is here, and sends it once more
        if known is not None:
            self._forget(known)
        count = sum(one.window.owner == window.owner and one.window.attempt == self._attempt for one in self.windows())
        if count >= MOST_WINDOWS:
            return NotStored(*key, window.base, f"{count} generations are kept until every node has what follows", True)
        try:
            self._windows[key] = KeptWindow(window, self._code.fragment_bytes(STRIPE_BYTES), self._reserve)
        except (MemckptError, ValueError) as error:
            return NotStored(*key, window.base, str(error), True)
        return None

    def put(self, fragment: Fragment, step: int, payload: memoryview | bytes) -> Stored | NotStored | None:
        """Keep a fragment; the answer that its owner is to get, if any."""
        key = fragment.owner, fragment.generation
        window = self._windows.get(key)
        if window is None or window.window.attempt != self._attempt or self._code is None:
            return NotStored(*key, fragment.record, "no window of this generation is open here", True)
        problem = check(fragment, payload) or window.misfit(fragment)
        if not problem and len(payload) != (size := self._code.fragment_bytes(fragment.length)):
            problem = f"expected {size} bytes, found {len(payload)}"
        if problem:
            return NotStored(*key, fragment.record, f"a fragment of it came damaged: {problem}")
        try:
            return Stored(*key, fragment.record) if window.put(fragment, step, payload) else None
        except MemckptError as error:
            return NotStored(*key, fragment.record, str(error))

    def abandon(self, owner: tuple[int, ...], generation: str, record: int) -> None:
        window = self._windows.get((owner, generation))
        if window is not None:
            window.abandon(record)

    def passed(self, watermark: int, whole: bool) -> None:
        """The watermark is known to have got so far; `whole`: every node is protected by this attempt's windows."""
        self.watermark = max(self.watermark, watermark)
        # Beyond the base: that itself was acknowledged before, where a generation begins because its agent was lost.
        newest = {
            window.window.owner: window.window.base
            for window in sorted(self.windows(), key=lambda one: one.window.base)
            if window.window.attempt == self._attempt and window.window.base < self.watermark
        }
        for window in self.windows():
            told = window.window
            if told.attempt != self._attempt:
                if whole:
                    self._forget(window)
            elif told.base < newest.get(told.owner, told.base):
                self._forget(window)
            else:
                # One more than a state takes, for who repeats a step: where a slot is needed, the oldest goes first.
                window.drop_up_to(self.watermark - told.period * told.every - (not window.captures))

    def forget_before(self, owner: tuple[int, ...], base: int) -> None:
        """What this attempt has kept of an owner's generations that begin before `base` is not needed any more."""
        for window in self.windows():
            told = window.window
            if told.owner == owner and told.attempt == self._attempt and told.base < base:
                self._forget(window)

    def held(self, fingerprint_of: Callable[[KeptWindow], tuple[str, ...] | None]) -> tuple[HeldPieces, ...]:
        """What is here, for the plan."""
        return tuple(window.held(self._node, fingerprint_of(window)) for window in self.windows())
