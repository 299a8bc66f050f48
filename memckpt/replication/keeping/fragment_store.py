"""Fragments of other nodes' records, kept in memory that is reserved once for each of their generations."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

import msgspec

from memckpt.errors import MemckptError
from memckpt.memory.budget import check_budget
from memckpt.memory.region import AT_ONCE_BYTES, Region, Reservation, bytes_being_reserved
from memckpt.protocol.channel import ReplicatorChannel
from memckpt.protocol.replication import KeepRoom, LetGoOfRoom
from memckpt.replication.coding.code import STRIPE_BYTES, Code, Fragment, Payload, check
from memckpt.replication.keeping.kept_window import BeingReservedError, KeptWindow, Room, Rooms
from memckpt.replication.transport.messages import Kept, NotStored, Stored, Window
from memckpt.state.records import HeldFragments, RankGroup

_log = logging.getLogger("memckpt.replicator")
#: Number of generations of one owner that are kept while the watermark stands still.
MOST_WINDOWS = 8


class FragmentStore:
    """All fragments that a node keeps for others: a window for each generation. Belongs to the replicator's loop.

    A payload is the caller's again when :meth:`put` returns. A record that was answered with :class:`Stored` stays as
    it is. Windows go when the watermark passes the base of a later one, or with the record that their owner abandons;
    those of earlier attempts once this one is whole.
    """

    def __init__(self, node: str, rooms: Rooms) -> None:
        self.node, self._rooms = node, rooms
        self._attempt: str | None = None
        #: Whether the attempt needs what was kept of earlier ones, until it is protected itself.
        self._goes_on = True
        self._code: Code | None = None
        self._windows: dict[tuple[RankGroup, str], KeptWindow] = {}
        self.watermark = 0

    @property
    def nbytes(self) -> int:
        return sum(window.nbytes for window in self._windows.values())

    def windows(self) -> list[KeptWindow]:
        return list(self._windows.values())

    def window(self, owner: RankGroup, generation: str) -> KeptWindow | None:
        return self._windows.get((owner, generation))

    # Attempts

    def end_attempt(self) -> None:
        """Take nothing more until another attempt begins."""
        self._attempt = self._code = None

    def take_over_window(self, window: Window, unit: int, rooms: Mapping[int, Room]) -> None:
        """Take over what a process that has died kept of a generation; ValueError: the rooms are not its window's."""
        kept = KeptWindow(window, unit, self._rooms, rooms)
        self._windows[window.owner, window.generation] = kept

    def begin_attempt(self, attempt: str, record: int | None, code: Code, rejoined: bool = False) -> None:
        """Take fragments of an attempt, which goes on behind `record`; None: it uses nothing of what is here.

        What is of no use stays until the attempt is protected. `rejoined`: it had begun, with another process.
        """
        self._attempt, self._code = attempt, code
        self.watermark = record or 0
        if rejoined:
            return
        self._goes_on = record is not None
        if record is not None:
            for window in self.windows():
                window.drop_beyond(record)

    def drop_all(self) -> None:
        """Drop all that is kept: nobody wants it."""
        for window in self.windows():
            self._drop(window)

    def unmap(self) -> None:
        """Unmap everything; its keeper keeps it."""
        self.end_attempt()
        for window in self.windows():
            window.unmap()
        self._windows.clear()

    def _drop(self, window: KeptWindow) -> None:
        del self._windows[window.window.owner, window.window.generation]
        window.close()

    # What owners say

    def open(self, window: Window) -> NotStored | Kept | None:
        """Make room for a generation, or go on with it; an answer if there is no room, or what is here already."""
        key = window.owner, window.generation
        if window.attempt != self._attempt or self._code is None:
            return NotStored(*key, window.base, "it belongs to another attempt than the one that runs here", True)
        known = self._windows.get(key)
        if known is not None and known.window == window:
            return Kept(*key, whole) if (whole := known.whole) else None  # the owner has lost sight of it
        if known is not None:
            self._drop(known)
        count = sum(one.window.owner == window.owner and one.window.attempt == self._attempt for one in self.windows())
        if count >= MOST_WINDOWS:
            return NotStored(*key, window.base, f"{count} generations are kept until every node has what follows", True)
        try:
            self._windows[key] = self._make_window(window, self._code)
        except (MemckptError, ValueError) as error:
            return NotStored(*key, window.base, str(error), True)
        return None

    def _make_window(self, window: Window, code: Code) -> KeptWindow:
        unit = code.fragment_bytes(STRIPE_BYTES)
        try:
            return KeptWindow(window, unit, self._rooms)
        except BeingReservedError:
            raise
        except MemckptError as error:
            former = [one for one in self.windows() if one.window.attempt != self._attempt]
            if self._goes_on or not former:
                raise
            _log.warning("dropping fragments of an earlier attempt, which this one does not use: %s", error)
            for one in former:
                self._drop(one)
            return KeptWindow(window, unit, self._rooms)

    def keep_own(self, window: Window, code: Code) -> KeptWindow:
        """Make room for a state of this node's own ranks, which it keeps itself; MemckptError: there is none."""
        self.drop_generation(window.owner, window.generation)
        kept = KeptWindow(window, code.fragment_bytes(STRIPE_BYTES), self._rooms)
        self._windows[window.owner, window.generation] = kept
        return kept

    def drop_generation(self, owner: RankGroup, generation: str) -> None:
        window = self._windows.get((owner, generation))
        if window is not None:
            self._drop(window)

    def put(self, fragments: Sequence[Fragment], step: int, payload: Payload) -> Stored | NotStored | None:
        """Copy fragments of whole stripes, but for the last one; the answer that their owner is to get, if any."""
        rest, answer = memoryview(payload), None
        for fragment in fragments:
            nbytes = (
                len(rest)
                if self._code is None or fragment is fragments[-1]
                else self._code.fragment_bytes(STRIPE_BYTES)
            )
            answer = self._put(fragment, step, rest[:nbytes])
            if isinstance(answer, NotStored):
                break
            rest = rest[nbytes:]
        return answer

    def _put(self, fragment: Fragment, step: int, payload: Payload) -> Stored | NotStored | None:
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

    def abandon(self, owner: RankGroup, generation: str, record: int) -> None:
        """Drop what has come of a record of which no more comes."""
        window = self._windows.get((owner, generation))
        if window is None:
            return
        window.abandon(record)
        if window.window.by_value and not window.records():
            self._drop(window)  # another state is sent instead

    def watermark_advanced(self, watermark: int, whole: bool) -> None:
        """Drop what is not needed any more. `whole`: every node is protected by windows of this attempt."""
        self.watermark = max(self.watermark, watermark)
        # Beyond the base: that itself was acknowledged before, where a generation begins because its agent was lost.
        newest = {
            window.window.owner: window.window.base
            for window in sorted(self.windows(), key=lambda one: one.window.base)
            if window.window.attempt == self._attempt
            and window.window.base < self.watermark
            and not window.window.by_value
        }
        for window in self.windows():
            told = window.window
            if told.attempt != self._attempt:
                if whole:
                    self._drop(window)
            elif told.by_value:
                if told.base < self.watermark:
                    self._drop(window)  # a later state is with all its holders, or records reach further
            elif told.base < newest.get(told.owner, told.base):
                self._drop(window)
            else:
                # One more than a state takes, for who repeats a step: where a slot is needed, the oldest goes first.
                window.drop_up_to(self.watermark - window.sizes.period * window.sizes.every - (not window.snapshots))

    def kept(self) -> tuple[tuple[str, RankGroup, int], ...]:
        """Node, ranks and newest record of all that is kept for other nodes."""
        others = [one for one in self.windows() if one.window.node != self.node]
        return tuple((one.window.node, one.window.owner, max(records)) for one in others if (records := one.records()))

    def held(self, fingerprint_of: Callable[[KeptWindow], tuple[str, ...] | None]) -> tuple[HeldFragments, ...]:
        """Description of all that is kept, for the plan."""
        return tuple(window.held(self.node, fingerprint_of(window)) for window in self.windows())


class FragmentMemory:
    """Makes memory for other nodes' fragments, and has the agent keep it. `budget`, `own_bytes`: of the node."""

    def __init__(self, channel: ReplicatorChannel) -> None:
        self.budget: int | None = None
        self.own_bytes = 0
        self._channel = channel
        #: Rooms that were given out; those that are closed since are dropped at the next reservation.
        self._rooms: list[Region] = []
        self._reserving: list[tuple[Region, Reservation]] = []
        #: Rooms of the replicator before this one, by window and slot, until this node's name is known.
        self._inherited: dict[tuple[RankGroup, str], dict[int, tuple[KeepRoom, Region]]] = {}

    def make_room(self, window: Window, unit: int, slot: int, nbytes: int) -> Room:
        """Make memory, and have the agent keep it."""
        room = self._reserve(nbytes)
        room.populate_in_background()
        self._rooms.append(room)
        told = msgspec.msgpack.encode(window)
        self._channel.send(KeepRoom(window.owner, window.generation, told, unit, slot), [room.fd])
        return room

    def drop_room(self, window: Window, slot: int) -> None:
        """Tell the agent that a room is not needed any more."""
        self._channel.send(LetGoOfRoom(window.owner, window.generation, slot))

    def _reserve(self, nbytes: int) -> Region:
        """Make memory, if need be in a thread. Raises BeingReservedError: ask again; MemoryBudgetError."""
        one = next((each for each in self._reserving if each[0].nbytes == nbytes), None)
        if one is None:
            self._rooms = [room for room in self._rooms if room.fd >= 0]
            kept = sum(room.nbytes for room in self._rooms) + sum(region.nbytes for region, _ in self._reserving)
            held, detail = self.own_bytes + kept, "fragments of other nodes' records"
            check_budget(nbytes, held, self.budget, detail, coming=bytes_being_reserved())
            if nbytes <= AT_ONCE_BYTES:
                return Region.create("fragments", nbytes)
            region = Region.lay_out("fragments", nbytes)
            one = region, Reservation("fragments", [(region, 0, nbytes)])
            self._reserving.append(one)
        region, reservation = one
        if not reservation.over:
            raise BeingReservedError(
                f"memory for it is being reserved: {reservation.reserved / 2**30:.1f} of {nbytes / 2**30:.1f} GiB"
            )
        self._reserving.remove(one)
        try:
            reservation.finish()
        except MemckptError:
            region.close()
            raise
        return region

    # Of the replicator before

    def inherit(self, message: KeepRoom, region: Region) -> None:
        """Take over a room of a replicator that has died."""
        rooms = self._inherited.setdefault((message.owner, message.generation), {})
        rooms[message.slot] = message, region

    def hand_over(self, store: FragmentStore) -> None:
        """Give the rooms that were taken over to the store, with the fragments in them."""
        for key, rooms in list(self._inherited.items()):
            told, _ = next(iter(rooms.values()))
            try:
                window = msgspec.msgpack.decode(told.window, type=Window)
                store.take_over_window(window, told.unit, {slot: room for slot, (_, room) in rooms.items()})
            except (MemckptError, ValueError) as error:
                _log.error("fragments of ranks %s are dropped: %s", list(told.owner), error)
                for slot in rooms:
                    self._channel.send(LetGoOfRoom(*key, slot))
                continue
            self._rooms += [room for _, room in rooms.values()]
            del self._inherited[key]
        self._close_inherited()

    def _close_inherited(self) -> None:
        for rooms in self._inherited.values():
            for _, room in rooms.values():
                room.close()
        self._inherited.clear()

    def halt(self) -> None:
        """Reserve no more of what is on its way."""
        for region, reservation in self._reserving:
            reservation.close()
            region.close()
        self._reserving.clear()

    def close(self) -> None:
        """Close what no store has been given; the store closes what it has."""
        self.halt()
        self._close_inherited()
