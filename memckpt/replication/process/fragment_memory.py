"""Memory in which a replicator keeps other nodes' fragments. The agent has it, too: it outlives the replicator."""

from __future__ import annotations

import logging

import msgspec

from memckpt.errors import MemckptError
from memckpt.memory.budget import check_budget
from memckpt.memory.region import Region, Reservation
from memckpt.protocol.channel import ReplicatorChannel
from memckpt.protocol.replication import KeepRoom, LetGoOfRoom
from memckpt.replication.keeping.fragment_store import FragmentStore
from memckpt.replication.keeping.kept_window import BeingReservedError, Place, Room
from memckpt.replication.transport.wire import Window
from memckpt.state.records import RankGroup

_log = logging.getLogger("memckpt.replicator")
#: The largest memory that is reserved while the loop waits, in bytes; it takes some milliseconds.
_AT_ONCE_BYTES = 64 << 20


class _RegionRoom:
    """Memory for fragments. Owns the region."""

    def __init__(self, region: Region) -> None:
        self._region = region
        self._view: memoryview | None = memoryview(region.map)

    @classmethod
    def populated(cls, region: Region) -> _RegionRoom:
        region.populate_in_background()
        return cls(region)

    @property
    def fd(self) -> int:
        return self._region.fd

    @property
    def nbytes(self) -> int:
        """Bytes of the region; 0 once it is closed."""
        return 0 if self._view is None else self._view.nbytes

    @property
    def view(self) -> memoryview:
        assert self._view is not None
        return self._view

    def close(self) -> None:
        self._view = None
        self._region.close()


class FragmentMemory:
    """Makes memory for other nodes' fragments, and has the agent keep it for the next replicator.

    Args:
        channel: to the agent; belongs to the caller.

    Attributes:
        budget: configured limit on the memory of the node, in bytes; None: there is none.
        own_bytes: memory that the agent of this node holds, in bytes.
    """

    def __init__(self, channel: ReplicatorChannel) -> None:
        self.budget: int | None = None
        self.own_bytes = 0
        self._channel = channel
        #: Rooms that were given out; those that are closed since are dropped at the next reservation.
        self._rooms: list[_RegionRoom] = []
        self._reserving: list[Reservation] = []
        #: Rooms of the replicator before this one, by window and slot, until this node's name is known.
        self._inherited: dict[tuple[RankGroup, str], dict[int, tuple[KeepRoom, _RegionRoom]]] = {}

    def reserve(self, nbytes: int) -> Room:
        """Make memory, if the node has some beside its own. A thread makes much of it while the loop goes on.

        Raises:
            BeingReservedError: it is not there yet; whoever wants it asks again.
            MemoryBudgetError: there is none.
        """
        one = next((each for each in self._reserving if each.nbytes == nbytes), None)
        if one is None:
            self._rooms = [room for room in self._rooms if room.nbytes]
            kept = sum(room.nbytes for room in self._rooms) + sum(each.nbytes for each in self._reserving)
            check_budget(nbytes, self.own_bytes + kept, self.budget, "fragments of other nodes' records")
        if nbytes <= _AT_ONCE_BYTES:
            return self._give_out(_RegionRoom.populated(Region.create("fragments", nbytes)))
        if one is None:
            one = Reservation("fragments", nbytes)
            self._reserving.append(one)
        if not one.over:
            raise BeingReservedError(
                f"memory for it is being reserved: {one.reserved / 2**30:.1f} of {nbytes / 2**30:.1f} GiB"
            )
        self._reserving.remove(one)
        return self._give_out(_RegionRoom.populated(one.take_region()))

    def _give_out(self, room: _RegionRoom) -> _RegionRoom:
        self._rooms.append(room)
        return room

    # The agent keeps rooms, too

    def keep(self, place: Place, room: Room) -> None:
        """Give the agent a room that was reserved."""
        assert isinstance(room, _RegionRoom)
        told = place.window
        message = KeepRoom(told.owner, told.generation, msgspec.msgpack.encode(told), place.unit, place.slot)
        self._channel.send(message, [room.fd])

    def drop_room(self, place: Place) -> None:
        """Tell the agent that a room is not needed any more."""
        self._channel.send(LetGoOfRoom(place.window.owner, place.window.generation, place.slot))

    def inherit(self, message: KeepRoom, region: Region) -> None:
        """Take over a room of a replicator that has died."""
        rooms = self._inherited.setdefault((message.owner, message.generation), {})
        rooms[message.slot] = message, _RegionRoom(region)

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
        for one in self._reserving:
            one.close()
        self._reserving.clear()

    def close(self) -> None:
        """Close what no store has been given; the store closes what it has."""
        self.halt()
        self._close_inherited()
