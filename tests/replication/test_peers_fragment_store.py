"""What a node keeps of others: taken as their layouts say, dropped as the watermark says, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memckpt.errors import MemoryBudgetError
from memckpt.replication.coding.blob import STATIC
from memckpt.replication.coding.code import STRIPE_BYTES, Code, Fragment, seal_stripe
from memckpt.replication.keeping.fragment_store import FragmentStore
from memckpt.replication.keeping.kept_window import SLOTS, KeptWindow, Room, sizes_of
from memckpt.replication.transport.messages import Kept, NotStored, Stored, Window
from memckpt.state.records import Branch, Timeline
from memckpt.state.spec import Shard, TensorSpec
from tests.support.cluster.peers_records import MemoryRoom, Records, layout_spec

CODE = Code(2, 2)
SPEC = layout_spec(elements=64)


@pytest.fixture(scope="module")
def records() -> Iterator[Records]:
    with closing(Records(SPEC)) as records:
        yield records


class Shelf:
    """A holder in attempt ``a1``, and the rooms that it has got, up to a number of bytes."""

    def __init__(self, limit: int = 1 << 30, agent: Agent | None = None) -> None:
        self.limit = limit
        self.rooms: list[MemoryRoom] = []
        self.fragment_store = FragmentStore("n", agent or self)
        self.fragment_store.begin_attempt("a1", 0, CODE)

    def make_room(self, window: Window, unit: int, slot: int, nbytes: int) -> MemoryRoom:
        if nbytes > self.limit:
            raise MemoryBudgetError(f"found room for {self.limit} bytes")
        self.rooms.append(MemoryRoom(nbytes))
        return self.rooms[-1]

    def drop_room(self, window: Window, slot: int) -> None:
        pass

    @property
    def open_rooms(self) -> int:
        return sum(not room.closed for room in self.rooms)

    def put(
        self, record: int, stripes: int = 1, content: bytes = b"x", **other: Any
    ) -> list[Stored | NotStored | None]:
        """All fragments of a record; what is said to each."""
        return [self.put_one(record, stripe, stripes, content, **other) for stripe in range(stripes)]

    def put_one(
        self, record: int, stripe: int, stripes: int, content: bytes, **other: Any
    ) -> Stored | NotStored | None:
        size = STRIPE_BYTES if stripe < stripes - 1 else 100
        fragment, payload = sealed(record, stripe, stripes, (content * size)[:size], **other)
        return self.fragment_store.put([fragment], 100 + record, payload)

    @property
    def window(self) -> KeptWindow:
        window = self.fragment_store.window((0, 1), "g")
        assert window is not None
        return window

    def records(self) -> list[int]:
        return self.window.records()


def opened(records: Records, agent: Agent | None = None) -> Shelf:
    """A holder with a window that is open."""
    shelf = Shelf(agent=agent)
    assert shelf.fragment_store.open(records.window("g", CODE)) is None
    return shelf


def sealed(
    record: int, stripe: int, stripes: int, data: bytes, index: int = 0, generation: str = "g", code: Code = CODE
) -> tuple[Fragment, bytes]:
    fragment, payload = seal_stripe(
        code, data, generation=generation, owner=(0, 1), record=record, stripe=stripe, stripes=stripes
    )[index]
    return fragment, bytes(payload)


def test_fragments_that_come_together_are_kept_one_by_one(records: Records) -> None:
    shelf = opened(records)
    stripes = [sealed(3, stripe, 3, b"x" * (STRIPE_BYTES if stripe < 2 else 100)) for stripe in range(3)]
    fragments, payload = [one for one, _ in stripes], b"".join(each for _, each in stripes)
    damaged = bytearray(payload)
    damaged[len(stripes[0][1])] ^= 1  # of the second one
    answer = shelf.fragment_store.put(fragments, 103, damaged)
    assert isinstance(answer, NotStored)
    assert shelf.records() == []
    assert shelf.fragment_store.put(fragments[:2], 103, payload) is not None  # longer than what it says
    assert shelf.fragment_store.put(fragments, 103, payload) == Stored((0, 1), "g", 3)
    assert shelf.fragment_store.put([], 103, b"") is None
    for stripe, (_, piece) in enumerate(stripes):
        assert bytes(shelf.window.fragment(3, stripe)[1]) == piece


def test_a_record_is_kept_when_all_of_it_is_here(records: Records) -> None:
    shelf = opened(records)
    assert shelf.put(3, stripes=3) == [None, None, Stored((0, 1), "g", 3)]
    assert shelf.put(STATIC)[-1] == Stored((0, 1), "g", STATIC)
    [held] = shelf.fragment_store.held(lambda window: None)
    assert (held.records, held.steps, held.static, held.index, held.node) == ((3,), (103,), True, 0, "n")
    window = shelf.window
    found = window.manifest(3)
    assert found[0] == 2 * STRIPE_BYTES + 100
    for stripe in range(3):
        kept = window.fragment(3, stripe)
        assert (bytes(kept[1]), kept[0].stripe) == (sealed(3, stripe, 3, b"x" * kept[0].length)[1], stripe)
    assert [window.fragment(3, stripe) for stripe in (-1, 3, 1 << 62)] == [None] * 3
    assert window.fragment(4, 0) is None
    assert shelf.fragment_store.nbytes == sum(room.nbytes for room in shelf.rooms)
    shelf.fragment_store.drop_all()
    assert shelf.open_rooms == 0


class Agent:
    """What the agent has of a replicator's memory: the bytes live on when the replicator has unmapped them."""

    def __init__(self) -> None:
        self.rooms: dict[int, MemoryRoom] = {}

    def make_room(self, window: Window, unit: int, slot: int, nbytes: int) -> MemoryRoom:
        assert slot not in self.rooms
        self.window, self.unit = window, unit
        self.rooms[slot] = MemoryRoom(nbytes)
        return self.rooms[slot]

    def drop_room(self, window: Window, slot: int) -> None:
        del self.rooms[slot]

    def mapped_again(self) -> dict[int, Room]:
        return {slot: room.mapped_again() for slot, room in self.rooms.items()}


def adopted(agent: Agent) -> FragmentStore:
    """Another holder, which maps the memory of one that has died."""
    holder = FragmentStore("n", agent)
    holder.take_over_window(agent.window, agent.unit, agent.mapped_again())
    return holder


def content(holder: FragmentStore) -> dict[tuple[int, int], tuple[Fragment, bytes]]:
    """All fragments of all complete records, by record and stripe."""
    window = holder.window((0, 1), "g")
    found = {(record, stripe): window.fragment(record, stripe) for record in (STATIC, *range(9)) for stripe in range(9)}
    return {key: (one[0], bytes(one[1])) for key, one in found.items() if one is not None}


@pytest.mark.promise(
    "fragments survive the replicator that kept them, whether it dies in training, between attempts or in a "
    "recovery; dropped or incomplete ones are not used"
)
def test_whole_records_are_found_by_who_maps_their_memory_later(records: Records) -> None:
    agent = Agent()
    shelf = opened(records, agent)
    most = sizes_of(SPEC, False).kept
    for record in range(3, 3 + most + 1):  # the first one's slot is taken by the last
        shelf.put(record, stripes=2, content=bytes([record]))
    shelf.put(STATIC, stripes=3)
    expected = content(shelf.fragment_store)
    shelf.fragment_store.unmap()
    holder = adopted(agent)
    assert content(holder) == expected
    assert holder.held(lambda window: None)[0].records == tuple(range(4, 4 + most))
    assert holder.held(lambda window: None)[0].steps == tuple(range(104, 104 + most))
    # The attempt goes on: what is sent once more is said once more, what follows takes the slot of the oldest.
    holder.begin_attempt("a1", None, CODE, rejoined=True)
    kept = holder.open(records.window("g", CODE))
    assert isinstance(kept, Kept)
    assert sorted(kept.records) == list(range(4, 4 + most))
    assert content(holder) == expected
    fragment, payload = sealed(4 + most, 0, 1, b"y" * 100)
    assert holder.put([fragment], 0, payload) == Stored((0, 1), "g", 4 + most)
    assert holder.held(lambda window: None)[0].records == tuple(range(5, 5 + most))
    holder.drop_all()
    assert agent.rooms == {}


@pytest.mark.promise(
    "fragments of a holder that is back are compared with those sent again, and dropped if they differ"
)
def test_what_is_kept_is_checked_when_it_is_sent_once_more(records: Records) -> None:
    agent = Agent()
    shelf = opened(records, agent)
    for record in (3, 4):
        shelf.put(record, stripes=2, content=b"x")
    expected = content(shelf.fragment_store)
    shelf.fragment_store.unmap()
    shelf.fragment_store = adopted(agent)
    shelf.fragment_store.begin_attempt("a1", None, CODE, rejoined=True)
    shelf.window._records[4].fragments[1][1][7] ^= 1  # a bit of what is kept
    assert shelf.put(3, stripes=2) == [None, Stored((0, 1), "g", 3)]
    first, second = shelf.put(4, stripes=2)
    assert first is None
    assert isinstance(second, NotStored)
    assert "sent anew" in second.reason
    assert shelf.records() == [3]
    assert shelf.put(4, stripes=2) == [None, Stored((0, 1), "g", 4)]
    assert content(shelf.fragment_store) == expected
    other = shelf.put(4, stripes=2, content=b"y")
    assert isinstance(other[0], NotStored)
    shelf.fragment_store.drop_all()


def drop_beyond(holder: FragmentStore) -> None:
    holder.end_attempt()
    holder.begin_attempt("a2", 3, CODE)


@pytest.mark.promise(
    "fragments survive the replicator that kept them, whether it dies in training, between attempts or in a "
    "recovery; dropped or incomplete ones are not used"
)
@pytest.mark.parametrize(
    "drop", [lambda holder: holder.abandon((0, 1), "g", 4), drop_beyond], ids=["withdrawn", "not gone on with"]
)
def test_what_was_dropped_is_not_found_again(records: Records, drop: Callable[[FragmentStore], None]) -> None:
    agent = Agent()
    shelf = opened(records, agent)
    shelf.put(3)
    shelf.put(4, stripes=3)
    drop(shelf.fragment_store)
    shelf.fragment_store.unmap()
    assert adopted(agent).held(lambda window: None)[0].records == (3,)


@pytest.mark.promise(
    "fragments survive the replicator that kept them, whether it dies in training, between attempts or in a "
    "recovery; dropped or incomplete ones are not used"
)
@pytest.mark.parametrize("present", range(3))
def test_of_a_record_that_was_not_whole_nothing_is_found(records: Records, present: int) -> None:
    """Neither where a former record of the slot had more stripes."""
    agent = Agent()
    shelf = opened(records, agent)
    for record in range(3, 3 + shelf.window.sizes.kept):
        shelf.put(record, stripes=3)
    newest = 3 + shelf.window.sizes.kept
    for stripe in range(present):
        assert shelf.put_one(newest, stripe, 3, b"y") is None
    shelf.fragment_store.unmap()
    shelf.fragment_store = adopted(agent)
    first = 3 if present == 0 else 4
    assert shelf.fragment_store.held(lambda window: None)[0].records == tuple(range(first, newest))
    shelf.fragment_store.begin_attempt("a1", None, CODE, rejoined=True)
    # From its beginning: what is left of the first try does not count.
    assert shelf.put(newest, stripes=3, content=b"z") == [None, None, Stored((0, 1), "g", newest)]


def test_memory_that_fits_no_window_is_refused(records: Records) -> None:
    agent = Agent()
    shelf = opened(records, agent)
    shelf.fragment_store.unmap()
    agent.rooms[SLOTS] = MemoryRoom(100)
    with pytest.raises(ValueError, match="expected a room of"):
        adopted(agent)


def test_half_a_record_is_none(records: Records) -> None:
    shelf = opened(records)
    assert shelf.put_one(3, 0, 2, b"x") is None
    window = shelf.window
    assert (window.records(), window.manifest(3), window.fragment(3, 0)) == ([], None, None)
    shelf.fragment_store.abandon((0, 1), "g", 3)
    # Neither is its end, nor what is here of it together with parts of another making.
    assert [shelf.put_one(3, stripe, of, b"x") for stripe, of in ((1, 2), (0, 3), (1, 3))] == [None] * 3
    assert window.records() == []


def test_large_records_get_more_room_once(records: Records) -> None:
    shelf = opened(records)
    for record in range(1, 21):
        assert isinstance(shelf.put(record, stripes=4, content=bytes([record]))[-1], Stored)
    assert shelf.open_rooms == 6
    window = shelf.window
    for record in shelf.records():
        for stripe in range(4):
            kept = window.fragment(record, stripe)
            assert bytes(kept[1]) == sealed(record, stripe, 4, bytes([record]) * kept[0].length)[1]


def test_no_room_is_said_and_leaves_what_is_here(records: Records) -> None:
    shelf = Shelf(limit=1000)
    answer = shelf.fragment_store.open(records.window("g", CODE))
    assert isinstance(answer, NotStored)
    assert "found room for 1000 bytes" in answer.reason
    assert shelf.fragment_store.window((0, 1), "g") is None
    assert isinstance(shelf.put(3)[0], NotStored)
    shelf.limit = 1 << 30
    assert shelf.fragment_store.open(records.window("g", CODE)) is None
    shelf.limit = 1000
    answer = shelf.put(3, stripes=2)[0]
    assert isinstance(answer, NotStored)
    assert "found room for 1000 bytes" in answer.reason
    assert isinstance(shelf.put(4)[0], Stored)
    assert shelf.records() == [4]


PIECE = TensorSpec("p", (4,), "float32", Shard((0,), (8,)))
WRONG_WINDOWS: dict[str, dict[str, Any]] = {
    "another owner's layout": {"owner": (2, 3)},
    "no layout": {"spec": b""},
    "no text": {"spec": b"\xd9\x01\xff"},
}
WRONG_LAYOUTS: dict[str, dict[str, Any]] = {
    "a dtype that is none": {"by_value": (TensorSpec("t", (1,), "float3"),)},
    "a shape that is none": {"by_value": (TensorSpec("t", (-1,), "float32"),)},
    "more than there is": {"by_value": (TensorSpec("t", (1 << 62, 1 << 62), "float32"),)},
    "no period": {"period": 0},
    "a long period": {"period": 1 << 60},
    "no slots": {"slots": -1},
    "no world": {"world_size": 0},
    "no ranks": {"local_ranks": ()},
    "a rank outside": {"local_ranks": (0, 9)},
    "a rank below": {"replicas": (-1, 0, 1)},
    "an optimizer too few": {"optimizers": ()},
    "a fragment twice": {"static": (PIECE, msgspec.structs.replace(PIECE, shard=Shard((4,), (8,))))},
}


@pytest.mark.parametrize("wrong", [*WRONG_WINDOWS, *WRONG_LAYOUTS])
def test_a_window_that_cannot_be_is_refused(records: Records, wrong: str) -> None:
    shelf = Shelf()
    spec = msgspec.msgpack.encode(msgspec.structs.replace(SPEC, **WRONG_LAYOUTS.get(wrong, {})))
    changes = {"spec": spec, **WRONG_WINDOWS.get(wrong, {})}
    answer = shelf.fragment_store.open(msgspec.structs.replace(records.window("g", CODE), **changes))
    assert isinstance(answer, NotStored)
    assert wrong in WRONG_WINDOWS or "layout" in answer.reason
    assert (shelf.fragment_store.windows(), shelf.open_rooms) == ([], 0)


@given(st.binary(max_size=60), st.integers(0, 400), st.integers(0, 255))
@settings(max_examples=100, deadline=None)
def test_whatever_a_layout_is_it_is_taken_or_refused(records: Records, junk: bytes, at: int, byte: int) -> None:
    shelf = Shelf(limit=1 << 24)
    whole = bytearray(records.window("g", CODE).spec)
    whole[at % len(whole)] = byte
    for spec in (bytes(whole), junk):
        answer = shelf.fragment_store.open(msgspec.structs.replace(records.window("g", CODE), spec=spec))
        assert answer is None or isinstance(answer, NotStored)
        shelf.fragment_store.held(lambda window: None)
    shelf.fragment_store.drop_all()
    assert shelf.open_rooms == 0


def test_a_fragment_that_cannot_be_is_refused(records: Records) -> None:
    shelf = opened(records)
    stripe = bytes(100)
    wrong = [
        sealed(3, 0, 1, stripe, index=1),
        sealed(3, 0, 1, stripe, code=Code(3, 1)),
        sealed(3, 0, 2, stripe),  # only the last stripe is shorter
        sealed(3, 0, 1 << 40, bytes(STRIPE_BYTES)),
        sealed(STATIC, 0, 3, bytes(STRIPE_BYTES)),
        sealed(0, 0, 1, stripe),  # before the generation
        sealed(STATIC - 1, 0, 1, stripe),
    ]
    fragment, payload = sealed(3, 0, 1, stripe)
    wrong += [(fragment, payload[:-1]), (fragment, b""), (msgspec.structs.replace(fragment, record=4), payload)]
    for number, (fragment, payload) in enumerate(wrong):
        answer = shelf.fragment_store.put([fragment], 3, payload)
        assert isinstance(answer, NotStored), number
        assert "a fragment of it came damaged" in answer.reason
    assert shelf.records() == []
    lacking = records.window("h", CODE)
    lacking = msgspec.structs.replace(lacking, private=True)
    assert shelf.fragment_store.open(lacking) is None
    assert isinstance(shelf.put(STATIC, generation="h")[0], NotStored)  # nothing is sent once there


def test_nothing_is_taken_outside_of_its_attempt(records: Records) -> None:
    shelf = Shelf()
    other = msgspec.structs.replace(records.window("g", CODE), attempt="a0")
    assert isinstance(shelf.fragment_store.open(other), NotStored)
    shelf.fragment_store.open(records.window("g", CODE))
    shelf.put(3)
    shelf.fragment_store.end_attempt()
    assert isinstance(shelf.fragment_store.open(records.window("h", CODE)), NotStored)
    assert isinstance(shelf.put(4)[0], NotStored)
    assert shelf.records() == [3]


@pytest.mark.promise(
    "a silent node is asked again if a resume would go back further without it, and its fragments are not dropped "
    "before a new attempt is protected"
)
def test_an_attempt_goes_on_with_what_it_builds_on(records: Records) -> None:
    shelf = opened(records)
    for record in range(1, 6):
        shelf.put(record)
    shelf.put(STATIC)
    shelf.fragment_store.begin_attempt("a2", 4, CODE)
    assert shelf.records() == [1, 2, 3, 4]
    assert isinstance(shelf.put(5)[0], NotStored)
    # One that starts over needs none of it, and may die before it is protected itself.
    shelf.fragment_store.begin_attempt("a3", None, CODE)
    assert shelf.records() == [1, 2, 3, 4]
    newer = msgspec.structs.replace(records.window("h", CODE), attempt="a3")
    shelf.fragment_store.open(newer)
    shelf.fragment_store.watermark_advanced(3, whole=False)
    assert [one.window.generation for one in shelf.fragment_store.windows()] == ["g", "h"]
    shelf.fragment_store.watermark_advanced(4, whole=True)
    assert [one.window.generation for one in shelf.fragment_store.windows()] == ["h"]


def test_what_an_attempt_has_no_use_for_goes_where_there_is_no_room_for_both(records: Records) -> None:
    class Small(Shelf):
        """Has room for one window."""

        def make_room(self, window: Window, unit: int, slot: int, nbytes: int) -> MemoryRoom:
            if self.open_rooms:
                raise MemoryBudgetError("found no room")
            return super().make_room(window, unit, slot, nbytes)

    shelf = Small()
    shelf.fragment_store.open(records.window("g", CODE))
    shelf.put(3)
    newer = msgspec.structs.replace(records.window("h", CODE), attempt="a2")
    shelf.fragment_store.begin_attempt("a2", 3, CODE)
    assert isinstance(shelf.fragment_store.open(newer), NotStored)  # the attempt may yet need what it goes on from
    assert shelf.records() == [3]
    shelf.fragment_store.begin_attempt("a2", None, CODE)
    assert shelf.fragment_store.open(newer) is None
    assert [one.window.generation for one in shelf.fragment_store.windows()] == ["h"]


def test_what_nobody_needs_any_more_goes(records: Records) -> None:
    shelf = opened(records)
    shelf.put(STATIC)
    for record in range(1, 6):
        shelf.put(record)
    shelf.fragment_store.watermark_advanced(4, whole=False)
    assert shelf.records() == [2, 3, 4, 5]  # the state of record 3 as well, for a check of record 4
    shelf.fragment_store.watermark_advanced(2, whole=True)
    assert shelf.records() == [2, 3, 4, 5]
    newer = msgspec.structs.replace(records.window("h", CODE), base=6, history=(Branch(Timeline(2, "b"), None),))
    assert shelf.fragment_store.open(newer) is None
    shelf.fragment_store.watermark_advanced(5, whole=True)
    assert shelf.records() == [3, 4, 5]
    shelf.fragment_store.watermark_advanced(6, whole=True)  # of which the earlier generation may have been told
    assert [one.window.generation for one in shelf.fragment_store.windows()] == ["g", "h"]
    shelf.fragment_store.watermark_advanced(7, whole=False)
    assert [one.window.generation for one in shelf.fragment_store.windows()] == ["h"]
    # Of another attempt, until all that this one has is protected.
    shelf.fragment_store.begin_attempt("a2", 6, CODE)
    later = msgspec.structs.replace(newer, generation="i", attempt="a2", base=7)
    assert shelf.fragment_store.open(later) is None
    shelf.fragment_store.watermark_advanced(7, whole=False)
    assert len(shelf.fragment_store.windows()) == 2
    shelf.fragment_store.watermark_advanced(7, whole=True)
    assert [one.window.generation for one in shelf.fragment_store.windows()] == ["i"]


def test_an_owner_has_only_so_many_generations(records: Records) -> None:
    shelf = Shelf()
    said = [shelf.fragment_store.open(records.window(f"g{number}", CODE)) for number in range(12)]
    assert said[:8] == [None] * 8
    assert all(isinstance(one, NotStored) and "8 generations" in one.reason for one in said[8:])
    told: Window = records.window("g3", CODE)
    assert shelf.fragment_store.open(told) is None


@given(st.lists(st.tuples(st.sampled_from(["put", "abandon", "passed"]), st.integers(1, 12)), max_size=40))
@settings(max_examples=60, deadline=None)
def test_kept_is_what_came_less_what_went(records: Records, operations: list[tuple[str, int]]) -> None:
    shelf = opened(records)
    shelf.put(STATIC)
    model: set[int] = set()
    past = 0
    for what, record in operations:
        match what:
            case "put" if record <= past or (
                len(model) == 5 and record < min(model)
            ):  # its owner is to hear that it need not wait
                assert isinstance(shelf.put(record, content=bytes([record]))[-1], Stored)
            case "put":
                shelf.put(record, content=bytes([record]))
                if record not in model and len(model) == 5:
                    model.remove(min(model))
                model.add(record)
            case "abandon":
                shelf.fragment_store.abandon((0, 1), "g", record)
                model.discard(record)
            case "passed":
                shelf.fragment_store.watermark_advanced(record, whole=False)
                past = shelf.fragment_store.watermark - SPEC.period - 1
                model = {one for one in model if one > past}
        assert shelf.records() == sorted(model)
    assert shelf.fragment_store.held(lambda window: None)[0].static
    window = shelf.window
    for record in model:
        kept = window.fragment(record, 0)
        assert bytes(kept[1]) == sealed(record, 0, 1, bytes([record]) * 100)[1]
