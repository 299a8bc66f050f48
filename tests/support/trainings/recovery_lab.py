"""Stand-ins for a holding whose state an agent has fetched."""

from __future__ import annotations

from collections.abc import Callable

from memckpt.protocol.replication import FromFragments, WantedState
from tests.support.cluster.peers_records import layout_spec

SPEC = layout_spec((0,), elements=64)


def wanted(*ranks: int) -> WantedState:
    return WantedState(ranks, 5, FromFragments("g", (("a", 0), ("c", 1)), 2, 2))


class Room:
    """Stand-in for a generation that is filled."""

    regions = ()

    def __init__(self) -> None:
        self.closed = self.filled = False

    def refill(self, *arguments: object) -> None:
        assert not self.closed
        self.filled = True

    def close(self) -> None:
        self.closed = True


class Place:
    """Stand-in for the holding of the ranks that get the fetched state."""

    def __init__(self) -> None:
        self.rooms: list[Room] = []
        self.held: Room | None = None

    def make_room_for(self, spec: object, budget: object) -> Room:
        self.rooms.append(Room())
        return self.rooms[-1]

    def when_reserved(self, room: Room, answer: Callable[[None], None]) -> None:
        answer(None)

    def take_over(self, room: Room, history: object) -> None:
        self.held = room
