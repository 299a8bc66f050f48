"""A link that carries less than records need, for ever: what is sent still gets there, and what is kept moves on."""

from __future__ import annotations

import pytest

from memckpt.replication.coding.blob import Blob, Extent, RecordTail
from memckpt.replication.coding.code import STRIPE_BYTES, Code
from memckpt.replication.keeping.kept_window import WindowSizes
from memckpt.replication.keeping.outgoing import Outgoing
from memckpt.replication.keeping.sender import Sender
from memckpt.replication.transport.links import Pieces
from memckpt.replication.transport.messages import Abandon, Put, Stored, Window, WireMessage

RANKS = (0,)
PERIOD, SLOTS = 8, 3
KEPT = PERIOD + SLOTS
STRIPES = 20
DATA = memoryview(bytes(STRIPES * STRIPE_BYTES - 200))


class Ring:
    """Slots that training fills anew without waiting."""

    newest = PERIOD

    def open(self, record: int) -> Blob | None:
        tail = RecordTail(record, b"", {}, (Extent(0, len(DATA)),))
        return Blob(tail, [DATA]) if self.intact(record) else None

    def intact(self, record: int) -> bool:
        return record > self.newest - KEPT

    def step(self, record: int) -> int:
        return record

    def close(self) -> None:
        pass


class Link:
    """Carries so many records in the time of a step, as a share; the holder says at once what it has.

    Unless `begun` nothing has been carried yet.
    """

    def __init__(self, share: float, begun: bool = True) -> None:
        self.share = share
        self.whole: set[int] = set()
        self.started: set[int] = set()
        self.abandoned: list[int] = []
        self._parts: dict[int, int] = {}
        self._credit = 0.0
        self._said: list[Stored] = []
        self.owner = Sender(RANKS, Code(1, 1), ["h"], self._take, lambda name: 1, 0, proceeds=True)
        self.ring = Ring()
        window = Window(RANKS, "n", "g", "a", 0, 1, 1, PERIOD, False, (), b"")
        sizes = WindowSizes(PERIOD, KEPT, 1, len(DATA), False, 0, 0, 0)
        self.owner.begin_generation(Outgoing(window, sizes, self.ring, range(1, PERIOD + 1)))
        self.owner.met("h")
        if begun:
            self.carry_all()

    def _take(self, holder: str, message: WireMessage, payload: Pieces) -> None:
        match message:
            case Put([*_, fragment] as fragments):
                record = fragment.record
                self.started.add(record)
                self._parts[record] = self._parts.get(record, 0) + len(fragments)
                if self._parts[record] == fragment.stripes:
                    self.whole.add(record)
                    self._said.append(Stored(RANKS, "g", record))
            case Abandon(_, _, record):
                self.abandoned.append(record)
                self._parts.pop(record, None)

    def _carry(self, credit: float) -> float:
        while credit > 0 and self.owner.wants:
            credit -= self.owner.pump(1)
        for message in self._said:
            self.owner.stored("h", message)
        self._said.clear()
        return credit

    def carry_all(self) -> None:
        """Carry all that there is, while training stands still."""
        self._carry(float("inf"))

    def train(self) -> None:
        """A step, and what the link carries meanwhile."""
        self.ring.newest += 1
        self.owner.committed(self.ring.newest)
        self._credit = self._carry(min(self._credit, 0.0) + self.share * len(DATA))


@pytest.mark.promise(
    "if links carry only part of the records, the watermark still advances: states by value follow each other "
    "every N steps, and all nodes can go back to the last one"
)
@pytest.mark.parametrize("share", [0.95, 0.8, 0.5, 0.3])
def test_what_is_acknowledged_moves_on_over_a_link_that_is_too_slow(share: float) -> None:
    link = Link(share)
    behind = 0
    for _ in range(300):
        link.train()
        behind = max(behind, link.ring.newest - link.owner.acknowledged)
    assert behind < 2 * KEPT
    assert link.owner.gap is not None


@pytest.mark.parametrize("share", [0.95, 0.8, 0.5])
def test_after_what_was_left_out_whole_states_get_there(share: float) -> None:
    link = Link(share)
    ends = set()
    for _ in range(300):
        link.train()
        if link.owner.whole:
            ends.add(link.owner.acknowledged)
    assert max(ends) > 300 - 4 * KEPT


def test_nothing_is_begun_that_cannot_get_there_in_time() -> None:
    link = Link(0.5)
    for _ in range(60):  # how fast the link is shows in what is sent
        link.train()
    link.abandoned.clear()
    link.started.clear()
    for _ in range(300):
        link.train()
    assert len(link.started) > 100
    assert link.abandoned == []
    assert link.started - link.whole == {max(link.started)} or link.started <= link.whole


def test_a_link_that_was_away_catches_up_with_all_that_is_there() -> None:
    link = Link(0.0)
    for _ in range(3 * KEPT):
        link.train()
    link.share = 50.0
    link.train()
    assert (link.owner.acknowledged, link.owner.whole) == (link.ring.newest, True)


def test_what_lies_in_its_slots_is_not_left_out_over_a_link_that_has_only_begun() -> None:
    """Quick steps at the start say nothing of the link: where training pauses then, it would long be unprotected."""
    link = Link(0.1, begun=False)
    for _ in range(SLOTS - 1):
        link.train()
    link.carry_all()
    assert (link.owner.acknowledged, link.owner.whole, link.owner.gap) == (link.ring.newest, True, None)
