"""A record as bytes: cut into stripes and put together again, whatever lies where; and the leader's watermark."""

from __future__ import annotations

import random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memckpt.errors import DamagedStateError
from memckpt.replication.coding.blob import Blob, BlobReader, Extent, RecordTail, Room
from memckpt.replication.coding.code import STRIPE_BYTES
from memckpt.replication.pacing.watermark import Leader
from memckpt.replication.transport.messages import Acknowledged, Watermark

SIZES = [0, 1, 7, 4096, STRIPE_BYTES - 60, STRIPE_BYTES - 1, STRIPE_BYTES, STRIPE_BYTES + 1, 2 * STRIPE_BYTES + 5]


@st.composite
def placed(draw: st.DrawFn) -> tuple[list[Extent], int]:
    """Extents that do not overlap, in any order, and the room that they lie in."""
    offset, extents = 0, []
    for size in draw(st.lists(st.sampled_from(SIZES), max_size=6)):
        offset += draw(st.integers(0, 3))
        extents.append(Extent(offset, size))
        offset += size
    return draw(st.permutations(extents)), offset


def blob_of(extents: list[Extent], room: bytes, states: dict[int, bytes]) -> tuple[Blob, RecordTail]:
    tail = RecordTail(7, b"meta", states, tuple(extents))
    views = [memoryview(room)[one.offset : one.offset + one.nbytes] for one in extents]
    return Blob(tail, views), tail


@given(placed(), st.sampled_from([0, 10, STRIPE_BYTES, 2 * STRIPE_BYTES + 1]), st.integers(0, 1 << 30))
@settings(max_examples=60, deadline=None)
def test_a_record_is_what_it_was(where: tuple[list[Extent], int], state_bytes: int, seed: int) -> None:
    extents, size = where
    numbers = random.Random(seed)
    room = numbers.randbytes(size)
    blob, tail = blob_of(extents, room, {0: numbers.randbytes(state_bytes)})
    stripes = [bytes(blob.stripe(index)) for index in range(blob.stripes)]
    assert {len(stripe) for stripe in stripes[:-1]} <= {STRIPE_BYTES}
    assert sum(map(len, stripes)) == blob.nbytes
    filled = bytearray(size)
    reader = BlobReader([Room(0, memoryview(filled))])
    for stripe in stripes:
        reader.take(stripe)
    assert reader.finish() == tail
    for one in extents:
        assert filled[one.offset : one.offset + one.nbytes] == room[one.offset : one.offset + one.nbytes]
    blob.release()


@given(placed(), st.integers(0, 1 << 30), st.data())
@settings(max_examples=60, deadline=None)
def test_other_bytes_are_refused_or_stay_in_their_room(
    where: tuple[list[Extent], int], seed: int, data: st.DataObject
) -> None:
    extents, size = where
    room = random.Random(seed).randbytes(size)
    blob, _ = blob_of(extents, room, {})
    whole = bytearray(b"".join(bytes(blob.stripe(index)) for index in range(blob.stripes)))
    for _ in range(data.draw(st.integers(1, 3))):
        whole[data.draw(st.integers(0, min(len(whole), 60) - 1))] = data.draw(st.integers(0, 255))
    del whole[data.draw(st.integers(0, len(whole))) :]
    reader = BlobReader([Room(0, memoryview(bytearray(size)))])
    try:
        for start in range(0, len(whole), STRIPE_BYTES):
            reader.take(bytes(whole[start : start + STRIPE_BYTES]))
        reader.finish()
    except DamagedStateError:
        pass


@pytest.mark.parametrize(
    ("extents", "body"),
    [
        ((Extent(0, 9),), bytes(9)),
        ((Extent(8, 1),), bytes(1)),
        ((Extent(-1, 1),), bytes(1)),
        ((Extent(0, -1),), b""),
        ((Extent(1 << 62, 1 << 62),), bytes(1)),
        ((Extent(0, 4),), bytes(5)),
        ((Extent(0, 4),), bytes(3)),
        ((), bytes(1)),
    ],
)
def test_what_does_not_fit_is_refused(extents: tuple[Extent, ...], body: bytes) -> None:
    tail = msgspec.msgpack.encode(RecordTail(1, b"", {}, extents))
    reader = BlobReader([Room(0, memoryview(bytearray(8)))])
    with pytest.raises(DamagedStateError, match="a record of fragments"):  # noqa: PT012  either of them finds it
        reader.take(len(tail).to_bytes(8, "little") + tail + body)
        reader.finish()


def test_a_tail_that_is_too_long_or_none_is_refused() -> None:
    with pytest.raises(DamagedStateError, match="at most 100 bytes"):
        BlobReader([Room(0, memoryview(bytearray(8)))], limit=100).take((101).to_bytes(8, "little"))
    with pytest.raises(DamagedStateError, match="cannot be read"):
        BlobReader([Room(0, memoryview(bytearray(8)))]).take((2).to_bytes(8, "little") + b"\xff\xff")
    with pytest.raises(DamagedStateError, match="ends before"):
        BlobReader([Room(0, memoryview(bytearray(8)))]).finish()


# The leader


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["a", "b", "c", "stranger"]),
            st.integers(0, 20) | st.sampled_from([-(1 << 62), 1 << 62]),
            st.booleans(),
        ),
        max_size=40,
    )
)
def test_the_watermark_is_the_newest_record_that_all_nodes_have_had_at_once(said: list[tuple[str, int, bool]]) -> None:
    leader, newest, told = Leader("abc", 3), dict[str, tuple[int, bool]](), Watermark(3, False)
    assert leader.watermark == told
    for node, record, whole in said:
        now = leader.acknowledged(Acknowledged(node, record, 0, whole))
        if node != "stranger":
            newest[node] = record, whole
        heard = len(newest) == 3
        common = min(record for record, _ in newest.values()) if heard else 3
        before, told = told, Watermark(max(told.record, common), heard and all(whole for _, whole in newest.values()))
        assert now == (None if told == before else told)
        assert leader.watermark == told


def test_nothing_is_whole_while_a_node_is_not_heard() -> None:
    leader = Leader(["a", "b"], 0)
    leader.acknowledged(Acknowledged("a", 5, 0, True))
    assert leader.look(0, frozenset()) is None
    assert leader.acknowledged(Acknowledged("b", 5, 0, True)) == Watermark(5, True)
    assert leader.look(0, frozenset("b")) == Watermark(5, False, unheard=("b",))
    assert leader.look(0, frozenset("b")) is None
    assert leader.acknowledged(Acknowledged("a", 6, 0, True)) is None
    assert leader.missing() == ("b",)
    assert leader.look(0, frozenset()) == Watermark(5, True)


def test_nobody_waits_while_a_node_has_lost_all_that_it_had() -> None:
    leader = Leader(["a", "b"], 10)
    assert leader.acknowledged(Acknowledged("a", 12, 0, True)) is None
    suspended = Watermark(10, False, waits_suspended=True)
    assert leader.acknowledged(Acknowledged("b", 10, 10, False, lost=True)) == suspended
    assert leader.acknowledged(Acknowledged("b", 13, 13, False)) == Watermark(10, False)
    assert leader.acknowledged(Acknowledged("a", 13, 0, True)) == Watermark(13, False)


def test_a_leader_that_has_lost_all_lets_nobody_wait_before_it_has_heard_of_all() -> None:
    leader = Leader(["a", "b"], 0)
    assert leader.acknowledged(Acknowledged("a", 0, 0, False, lost=True)) == Watermark(0, False, waits_suspended=True)
