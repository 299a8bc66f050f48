"""A node's records on their way: to each holder in order, once more where they were not taken, and never wrong."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memckpt.replication.coding.blob import STATIC, Blob, BlobReader, Extent, RecordTail, Room
from memckpt.replication.coding.code import STRIPE_BYTES, Code, check
from memckpt.replication.keeping.kept_window import WindowSizes
from memckpt.replication.keeping.outgoing import Outgoing
from memckpt.replication.keeping.sender import Sender
from memckpt.replication.transport.links import Pieces
from memckpt.replication.transport.messages import Abandon, Kept, NotStored, Open, Put, Stored, Window, WireMessage

CODE = Code(1, 3)
HOLDERS = ["x", "y", "z"]
RANKS = (0,)
PERIOD, KEPT = 3, 5
SIZE = STRIPE_BYTES + 100


class Slots:
    """Records in memory that is used over and over, so that the oldest are gone."""

    def __init__(self, newest: int = 0) -> None:
        self.here = {record: bytearray([record % 251]) * SIZE for record in (*range(-2, newest + 1), STATIC)}
        self.closed = False

    def overwrite(self, record: int) -> None:
        if record in self.here:
            self.here[record][:] = b"\xff" * SIZE
            del self.here[record]

    def fill(self, record: int) -> None:
        self.here[record] = bytearray([record % 251]) * SIZE

    def open(self, record: int) -> Blob | None:
        if record not in self.here:
            return None
        return Blob(RecordTail(record, b"m", {}, (Extent(0, SIZE),)), [memoryview(self.here[record])])

    def intact(self, record: int) -> bool:
        return record in self.here

    def step(self, record: int) -> int:
        return 100 + record

    def close(self) -> None:
        self.closed = True


@dataclass
class Shelf:
    """A holder that checks what it gets, and says what it has."""

    name: str
    room: int = 1
    opened: list[tuple[str, int]] = field(default_factory=list)
    parts: dict[tuple[str, int], dict[int, bytes]] = field(default_factory=lambda: defaultdict(dict))
    whole: dict[tuple[str, int], bytes] = field(default_factory=dict)
    abandoned: list[int] = field(default_factory=list)
    taken: int = 0

    def take(self, message: WireMessage, payload: Pieces) -> Stored | Kept | None:
        match message:
            case Open(told):
                known = any(generation == told.generation for generation, _ in self.opened)
                self.opened.append((told.generation, told.index))
                if known:
                    whole = [record for generation, record in self.whole if generation == told.generation]
                    return Kept(RANKS, told.generation, tuple(whole))
            case Abandon(_, generation, record):
                self.abandoned.append(record)
                self.parts.pop((generation, record), None)
            case Put(fragments, step):
                for fragment, piece in zip(fragments, payload, strict=True):
                    assert check(fragment, piece, owner=RANKS) == ""
                    assert step == 100 + fragment.record
                    assert (fragment.generation, fragment.index) == self.opened[-1]
                    key = fragment.generation, fragment.record
                    self.taken += 1
                    self.parts[key][fragment.stripe] = bytes(piece)
                    if len(self.parts[key]) == fragment.stripes:
                        self.whole[key] = b"".join(each for _, each in sorted(self.parts.pop(key).items()))
                        return Stored(RANKS, *key)
            case _:
                raise AssertionError(message)
        return None

    def check(self) -> None:
        """Whatever is whole is a record, and no mixture."""
        for (_, record), blob in self.whole.items():
            room = bytearray(SIZE)
            reader = BlobReader([Room(0, memoryview(room))])
            reader.take(blob)
            assert reader.finish().step == record
            assert room == bytes([record % 251]) * SIZE


class Sent:
    """An owner, its holders, and what they have said that has not arrived."""

    def __init__(self, base: int = 0) -> None:
        self.shelves = {name: Shelf(name) for name in HOLDERS}
        self.said: list[tuple[str, Stored | Kept]] = []
        self.owner = Sender(RANKS, CODE, HOLDERS, self._send, lambda name: self.shelves[name].room, 0)
        self.slots = Slots(base)

    def _send(self, peer: str, message: WireMessage, payload: Pieces) -> None:
        answer = self.shelves[peer].take(message, payload)
        if answer is not None:
            self.said.append((peer, answer))

    def begin(
        self, generation: str = "g", base: int = 0, static: bool = True, records: Sequence[int] | None = None
    ) -> Slots:
        slots, self.slots = self.slots, Slots(base)
        records = range(base - PERIOD + 1, base + 1) if records is None else records
        window = Window(RANKS, "n", generation, "a1", 0, 1, 3, base, False, (), b"")
        sizes = WindowSizes(PERIOD, KEPT, 1, SIZE, static, 0, 0, 0)
        self.owner.begin_generation(Outgoing(window, sizes, self.slots, records))
        return slots

    def meet(self, *names: str) -> None:
        for name in names or HOLDERS:
            self.owner.met(name)

    def commit(self, *records: int) -> None:
        for record in records:
            self.slots.fill(record)
            self.owner.committed(record)

    def run(self) -> None:
        """Send all that can be sent, and hear all that is said."""
        while self.owner.wants:
            self.owner.pump(1)
        self.hear(len(self.said))

    def hear(self, count: int) -> None:
        """Hear so much of what is said."""
        said, self.said = self.said[:count], self.said[count:]
        for peer, message in said:
            if isinstance(message, Kept):
                self.owner.kept(peer, message)
            else:
                self.owner.stored(peer, message)

    def succeed(self) -> None:
        """Another process sends in the owner's place, which has died; nothing is left that was on its way."""
        for shelf in self.shelves.values():
            shelf.parts.clear()
        self.said.clear()
        self.owner = Sender(RANKS, CODE, HOLDERS, self._send, lambda name: self.shelves[name].room, 0)

    def check(self) -> None:
        for shelf in self.shelves.values():
            shelf.check()


def begun(static: bool = True) -> Sent:
    """All holders have the state that a generation begins with."""
    sent = Sent()
    sent.begin(static=static)
    sent.meet()
    sent.run()
    return sent


def behind(owner: Sender) -> dict[str, int]:
    """Number of records that are yet to be sent, by holder."""
    return {one.holder: sum(record is not None for _, record in one.queue) for one in owner._streams}


def test_all_holders_get_all_records() -> None:
    sent = Sent()
    sent.begin()
    sent.meet()
    assert (sent.owner.acknowledged, sent.owner.whole) == (0, False)
    sent.run()
    assert (sent.owner.acknowledged, sent.owner.whole) == (0, True)
    sent.commit(1, 2)
    assert behind(sent.owner) == dict.fromkeys(HOLDERS, 2)
    assert sent.owner.wants
    sent.run()
    assert (sent.owner.acknowledged, sent.owner.whole, sent.owner.wants) == (2, True, False)
    assert [shelf.opened for shelf in sent.shelves.values()] == [[("g", 0)], [("g", 1)], [("g", 2)]]
    for shelf in sent.shelves.values():
        assert set(shelf.whole) == {("g", record) for record in (STATIC, -2, -1, 0, 1, 2)}
    assert sent.owner.last_record_bytes is not None
    assert sent.owner.last_record_bytes > 3 * SIZE
    assert sent.owner.gap is None
    sent.check()


def test_what_is_not_taken_is_sent_once_more_later_each_time() -> None:
    sent = begun()
    sent.commit(1)
    newest = 1
    for now, wait in ((10.0, 0.1), (20.0, 0.2), (30.0, 0.4)):
        sent.owner.not_stored("x", NotStored(RANKS, "g", 1, "no room" * 1000), now)
        # All that follows says the same once.
        sent.owner.not_stored("x", NotStored(RANKS, "g", 1, "again"), now + 1)
        assert sent.owner.retry_at() == pytest.approx(now + wait)
        assert sent.owner.problems.keys() == {"x"}
        assert sent.owner.problems["x"].startswith("no room")
        assert len(sent.owner.problems["x"]) <= 500
        sent.commit(newest + 1, newest + 2)
        newest += 2
        assert behind(sent.owner)["x"] == 0
        sent.owner.retry(now)
        assert behind(sent.owner)["x"] == 0
        sent.owner.retry(now + wait)
        assert sent.owner.retry_at() is None
        assert behind(sent.owner)["x"] > 0
    sent.run()
    assert (sent.owner.acknowledged, sent.owner.whole, sent.owner.problems) == (7, True, {})
    sent.owner.not_stored("x", NotStored(RANKS, "another", 1, "of the past"), 50.0)
    assert sent.owner.problems == {}
    assert sent.shelves["x"].opened == [("g", 0)] * 2
    sent.check()


def test_what_is_gone_from_its_slot_is_a_gap() -> None:
    sent = begun()
    sent.commit(1, 2, 3, 4)
    sent.slots.overwrite(2)
    sent.slots.overwrite(3)
    sent.run()
    assert sent.owner.gap == (2, 3)
    assert (sent.owner.acknowledged, sent.owner.whole) == (4, False)
    assert all(shelf.abandoned == [] for shelf in sent.shelves.values())
    sent.commit(5, 6)
    sent.run()
    assert (sent.owner.acknowledged, sent.owner.whole) == (6, True)
    sent.check()


def test_what_goes_while_it_is_sent_is_abandoned() -> None:
    sent = begun(static=False)
    sent.commit(1, 2)
    sent.owner.pump(1)
    sent.slots.overwrite(1)
    sent.run()
    assert [shelf.abandoned for shelf in sent.shelves.values()] == [[1]] * 3
    assert sent.owner.gap == (1, 1)
    assert all(("g", 2) in shelf.whole and ("g", 1) not in shelf.whole for shelf in sent.shelves.values())
    sent.check()


def test_a_holder_that_takes_nothing_does_not_hold_up_the_others() -> None:
    sent = begun()
    sent.shelves["z"].room = 0
    for record in range(1, 40):
        sent.commit(record)
        sent.slots.overwrite(record - KEPT)
        sent.run()
    assert behind(sent.owner)["x"] == 0
    assert behind(sent.owner)["z"] <= 3 * KEPT
    gap = sent.owner.gap
    assert 1 <= gap[0] <= gap[1] < 40
    sent.shelves["z"].room = 1
    sent.run()
    assert (sent.owner.acknowledged, sent.owner.whole) == (39, True)
    sent.check()


def test_a_gap_over_two_generations_is_from_first_to_last() -> None:
    sent = begun()
    sent.shelves["z"].room = 0
    sent.commit(*range(1, 9))
    old = sent.begin("h", base=8)
    for record in range(9, 30):
        sent.commit(record)
        if sent.owner.gap is not None:
            break
    assert sent.owner.gap[0] == 1
    assert sent.owner.gap[1] >= 8
    assert not old.closed


def test_an_older_generation_goes_when_the_watermark_has_passed() -> None:
    sent = Sent()
    sent.begin()
    sent.meet()
    sent.commit(1, 2)
    sent.run()
    sent.shelves["z"].room = 0
    sent.commit(3)
    old = sent.begin("h", base=4)
    sent.run()
    assert (sent.owner.acknowledged, sent.owner.whole) == (2, False)
    sent.owner.watermark_advanced(3)
    assert not old.closed
    sent.owner.watermark_advanced(4)
    assert old.closed
    assert behind(sent.owner)["z"] == 1 + PERIOD
    sent.shelves["z"].room = 1
    sent.run()
    assert (sent.owner.acknowledged, sent.owner.whole) == (4, True)
    sent.owner.close()
    assert sent.slots.closed
    sent.check()


def test_what_is_given_up_is_not_read_any_more() -> None:
    """The replica, where virtual records lie, goes on: what would be read of it is another state."""
    sent = Sent()
    sent.begin(static=False)
    sent.meet()
    sent.owner.pump(1)
    sent.commit(1)
    begun = {name for name, shelf in sent.shelves.items() if ("g", -2) in shelf.parts}
    assert begun
    sent.owner.give_up("another")
    sent.owner.give_up("g")
    for record in (-2, -1, 0):
        sent.slots.here[record][:] = b"\xee" * SIZE
    sent.run()
    for name, shelf in sent.shelves.items():
        assert set(shelf.whole) == {("g", 1)}
        assert shelf.abandoned == ([-2] if name in begun else [])
    assert (sent.owner.acknowledged, sent.owner.whole) == (1, False)
    sent.meet("x")
    sent.commit(2, 3)
    sent.run()
    assert (sent.owner.acknowledged, sent.owner.whole) == (3, True)
    sent.check()


def test_a_holder_that_is_back_is_not_sent_what_it_has_kept() -> None:
    """Its process has died, or the link was cut; and what it has is gone from the slots."""
    sent = begun(static=False)
    sent.commit(1, 2, 3, 4)
    sent.run()
    before = sent.shelves["x"].taken
    for record in range(-2, 4):
        sent.slots.overwrite(record)
    sent.shelves["x"].whole.pop(("g", 4))
    sent.meet("x")
    assert not sent.owner.whole
    sent.run()
    assert (sent.owner.acknowledged, sent.owner.whole, sent.owner.since) == (4, True, 0)
    assert sent.shelves["x"].taken == before + 2
    sent.check()


@pytest.mark.parametrize("newest", [3, 4])
def test_whoever_takes_the_place_of_an_owner_s_process_goes_on_with_what_holders_have(newest: int) -> None:
    """A replica's log has the last few records only."""
    sent = begun()
    sent.commit(1, 2, 3)
    sent.run()
    sent.succeed()
    sent.begin(records=range(3, newest + 1))
    for record in range(3, newest + 1):
        sent.slots.fill(record)
    sent.meet()
    sent.run()
    assert (sent.owner.acknowledged, sent.owner.whole, sent.owner.since) == (newest, True, 3)
    sent.check()


def test_what_nobody_has_sent_is_kept_by_nobody() -> None:
    sent = begun()
    sent.owner.kept("x", Kept(RANKS, "g", (1, 2)))
    sent.owner.kept("x", Kept(RANKS, "other", (0,)))
    sent.commit(1)
    assert sent.owner.acknowledged == 0
    sent.run()
    assert ("g", 1) in sent.shelves["x"].whole


ACTIONS = st.one_of(
    st.tuples(st.just("commit"), st.just("")),
    st.tuples(st.just("generation"), st.just("")),
    st.tuples(st.just("pass"), st.just("")),
    st.tuples(st.just("give up"), st.just("")),
    st.tuples(st.just("overwrite"), st.just("")),
    st.tuples(st.sampled_from(["pump", "hear"]), st.just("")),
    st.tuples(st.sampled_from(["meet", "back", "refuse", "stop", "go", "lie"]), st.sampled_from(HOLDERS)),
)


@given(st.lists(ACTIONS, max_size=60), st.booleans(), st.booleans())
@settings(max_examples=80, deadline=None)
def test_whatever_happens_all_that_holders_have_is_right(
    actions: list[tuple[str, str]], static: bool, met: bool
) -> None:
    sent = Sent()
    sent.begin("0", static=static)
    if met:
        sent.meet()
        sent.run()
    record, generation, now = 0, 0, 0.0
    had = dict.fromkeys(HOLDERS, 0)
    for what, name in actions:
        now += 1.0
        match what:
            case "commit":
                record += 1
                sent.commit(record)
            case "generation":
                generation, record = generation + 1, record + 1
                sent.begin(str(generation), record, static)
            case "pass":
                sent.owner.watermark_advanced(sent.owner.acknowledged)
            case "give up":
                sent.owner.give_up(str(generation))
                for one in [one for one in sent.slots.here if one != STATIC]:
                    if sent.owner._generations[-1].window.base >= one:
                        sent.slots.here[one][:] = b"\xee" * SIZE
            case "overwrite":
                sent.slots.overwrite(min((one for one in sent.slots.here if one != STATIC), default=0))
            case "pump":
                for _ in range(9):
                    sent.owner.pump(1)
            case "hear":
                sent.hear(4)
            case "back":
                sent.shelves[name].parts.clear()
                sent.said = [one for one in sent.said if one[0] != name]
                sent.meet(name)
            case "meet":
                sent.shelves[name] = Shelf(name)
                sent.said = [one for one in sent.said if one[0] != name]
                sent.meet(name)
            case "refuse":
                sent.owner.not_stored(name, NotStored(RANKS, str(generation), record, "no"), now)
            case "stop" | "go":
                sent.shelves[name].room = int(what == "go")
            case "lie":
                sent.owner.stored(name, Stored(RANKS, str(generation), record))
        sent.owner.retry(now)
        sent.check()
        for shelf in sent.shelves.values():
            had[shelf.name] = max([had[shelf.name], *(number for _, number in shelf.whole)])
        assert sent.owner.acknowledged <= min(had.values())
    # Left alone, all holders soon have all that a state needs.
    for shelf in sent.shelves.values():
        shelf.room = 1
    for name, shelf in sent.shelves.items():
        if not shelf.opened:
            sent.meet(name)
    sent.owner.retry(now + 100)
    sent.run()
    sent.commit(*range(record + 1, record + 1 + PERIOD))
    sent.run()
    assert (sent.owner.acknowledged, sent.owner.whole) == (record + PERIOD, True)
    needed = {(str(generation), one) for one in (*range(record + 1, record + 1 + PERIOD), *[STATIC] * static)}
    assert all(needed <= shelf.whole.keys() for shelf in sent.shelves.values())
    sent.check()


@pytest.mark.parametrize(("limit", "expected"), [(1 << 20, [2]), (STRIPE_BYTES, [1, 1])])
def test_what_may_go_at_once_is_one_message(limit: int, expected: list[int]) -> None:
    """Each message costs its own, so the fragments of both stripes go together where both may go."""
    sent = Sent()
    sent.begin(static=False)
    counts: list[int] = []
    shelf, take = sent.shelves["x"], sent.shelves["x"].take

    def count(message: WireMessage, payload: Pieces) -> Stored | Kept | None:
        if isinstance(message, Put):
            counts.append(len(message.fragments))
        return take(message, payload)

    shelf.take = count  # type: ignore[method-assign]
    sent.meet("x")
    while sent.owner.wants:
        sent.owner.pump(limit)
    assert counts == expected * PERIOD
    assert len(shelf.whole) == PERIOD
    shelf.check()
