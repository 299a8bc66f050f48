"""Bytes of records, from shared memory, from peers and from batches in storage: damage is a typed error of ours.

What is found valid may have other values, and nothing else: no other exception, no hang, no memory that the bytes have
no room for.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from memckpt.errors import DamagedFragmentsError, DamagedStateError
from memckpt.memory.slots import SlotRing
from memckpt.replication.coding.blob import Blob, BlobReader, Extent, RecordTail, Room
from memckpt.replication.coding.code import Candidate, Code, decode_stripe, seal_stripe
from memckpt.state import encodings
from memckpt.state.layout import Layout
from memckpt.state.records import RecordMeta, SubStep
from memckpt.state.spec import GradientEncoding, encoded_bytes, is_possible
from memckpt.storage.batch import RecordReader, gradient_name
from memckpt.storage.local_store import LocalStore
from tests.support.cluster.peers_records import Records, layout_spec
from tests.support.faults.changed_bytes import FUZZ, NASTY, changed
from tests.support.storage.stored_parts import batch_of

# Slots


@pytest.fixture(scope="module")
def records() -> Iterator[Records]:
    found = Records(layout_spec(elements=50))
    yield found
    for region in found.regions:
        region.close()


@given(data=st.data())
@FUZZ
def test_stamps_of_a_slot(records: Records, data: st.DataObject) -> None:
    """A trainer that dies leaves any of them: what is not whole is not read."""
    at = records.layout.slot_offset(4)
    room = records.regions[0].map
    before = bytes(room[at : at + 64])
    room[at : at + 64] = data.draw(changed(before)).ljust(64, b"\0")[:64]
    try:
        untouched = room[at : at + 32] == before[:32]
        ring = SlotRing(records.regions[0], records.layout, 1)
        with contextlib.suppress(DamagedStateError):
            ring.check(4, records.spec.local_ranks)
            assert untouched
        with contextlib.suppress(DamagedStateError):
            ring.check_by_value(4, records.spec.local_ranks)
        ring.disagreed(4)
    finally:
        room[at : at + 64] = before


# Records as fragments

TAIL = RecordTail(7, b"meta", {0: b"rank", 1: b"other"}, (Extent(0, 40), Extent(60, 20)))
CODE = Code(2, 2)
STRIPE = bytes(range(200))
KNOWN = {"generation": "g", "owner": (0, 1), "record": 5, "stripe": 0, "stripes": 1}


@given(data=st.data())
@FUZZ
def test_a_record_that_peers_have_sent(data: st.DataObject) -> None:
    blob = Blob(TAIL, [memoryview(bytes(40)), memoryview(bytes(20))])
    whole = b"".join(bytes(blob.stripe(index)) for index in range(blob.stripes))
    length = data.draw(st.sampled_from([0, 8, 12]))
    nasty = data.draw(st.sampled_from(NASTY))
    sent = data.draw(
        st.one_of(changed(whole), st.just((len(nasty)).to_bytes(8, "little") + nasty), st.just(whole[:length]))
    )
    room = bytearray(100)
    reader = BlobReader([Room(0, memoryview(room))], limit=1 << 20)
    with contextlib.suppress(DamagedStateError):
        for start in range(0, len(sent), 50):
            reader.take(sent[start : start + 50])
        reader.finish()


def test_a_tail_of_lists_in_lists() -> None:
    encoded = msgspec.msgpack.encode((7, b"", {}, (), 0))[:-1] + b"\x91" * 100_000 + b"\xc0"
    reader = BlobReader([Room(0, memoryview(bytearray(8)))])
    with pytest.raises(DamagedStateError, match="its tail cannot be read"):
        reader.take(len(encoded).to_bytes(8, "little") + encoded)


NUMBERS = ("index", "data", "tolerate", "stripe", "stripes", "length")
FIELDS: dict[str, st.SearchStrategy[object]] = {
    "generation": st.text(max_size=3),
    "owner": st.tuples(st.integers(-1, 3)),
    **dict.fromkeys(NUMBERS, st.integers(-(2**63), 2**63 - 1)),
    "checksum": st.binary(max_size=9),
    "digest": st.binary(max_size=20),
}


@given(data=st.data())
@FUZZ
def test_fragments_that_lie(data: st.DataObject) -> None:
    """With m - 1 of k + m - 1 changed, the stripe is right; with more it is right or refused."""
    sealed = seal_stripe(CODE, STRIPE, **KNOWN)  # type: ignore[arg-type]
    candidates = [Candidate(f"n{index}", fragment, payload) for index, (fragment, payload) in enumerate(sealed)]
    liars = data.draw(st.sets(st.integers(0, len(candidates) - 1), min_size=1))
    for liar in liars:
        source, fragment, payload = candidates[liar]
        name = data.draw(st.sampled_from([*FIELDS, "payload"]))
        if name == "payload":
            payload = data.draw(changed(bytes(payload)))
        else:
            fragment = msgspec.structs.replace(fragment, **{name: data.draw(FIELDS[name])})
        candidates[liar] = Candidate(source, fragment, payload)
    try:
        stripe, _ = decode_stripe(CODE, candidates, **KNOWN, length=len(STRIPE))  # type: ignore[arg-type]
    except DamagedFragmentsError:
        assert len(liars) > 1
    else:
        assert stripe == STRIPE


# Compressed gradients

ENCODINGS = st.builds(
    GradientEncoding,
    st.sampled_from(["sparse", "quantized", "half", "factors"]),
    st.integers(0, 40),
    st.sampled_from(["", "float32", "bfloat16", "float16"]),
    st.integers(0, 12),
)


@given(encoding=ENCODINGS, numel=st.integers(1, 300), data=st.data())
@FUZZ
def test_parts_of_a_compressed_gradient(encoding: GradientEncoding, numel: int, data: st.DataObject) -> None:
    if not is_possible(encoding, numel, "float32"):
        return
    size = encoded_bytes(encoding, numel, "float32")
    room = bytearray(data.draw(st.binary(min_size=size, max_size=size)))
    parts = encodings.views(room, 0, encoding, numel, "float32")
    start = data.draw(st.integers(0, numel - 1))
    cut = data.draw(st.sampled_from([None, (start, numel), (0, start + 1)]))
    with contextlib.suppress(DamagedStateError):
        found = encodings.decode(encoding, parts, numel, torch.float32, cut)
        assert found.shape == (numel if cut is None else cut[1] - cut[0],)


# Batches in storage

BATCH = batch_of(5, 5, follows=None, created=time.time(), content="c")
META = RecordMeta(5, 4, False, (SubStep(0, 0, b""),))
NAMES = ["quantized8", "quantized0", "sparse", "half", "factors2x3", "factors0x0", "factors9999x1"]


def read(store: LocalStore, data: bytes) -> None:
    path = store.root / BATCH.log_path
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    reader = RecordReader(store)
    layout = Layout(layout_spec(elements=12))
    for param in range(len(layout.spec.params)):
        with contextlib.suppress(DamagedStateError):
            reader.gradient(BATCH, layout, META, META.sub_steps[0], param)
            reader.gradient(BATCH, layout, META, META.sub_steps[0], param, (3, 9))


TENSORS = st.builds(
    lambda dtype, shape: torch.zeros(shape, dtype=dtype),
    st.sampled_from([torch.float32, torch.int8, torch.int16, torch.int32, torch.int64, torch.bfloat16, torch.bool]),
    st.lists(st.integers(0, 12), max_size=2),
)


@given(data=st.data())
@FUZZ
def test_a_batch_with_other_tensors_than_its_records_need(data: st.DataObject, tmp_path: Path) -> None:
    """safetensors checks its own format; what the tensors are is for us to check."""
    from safetensors.torch import save

    layout = Layout(layout_spec(elements=12))
    tensors = {}
    for param in layout.spec.params:
        base = gradient_name(5, META.sub_steps[0], param.tensor.name)
        kind = data.draw(st.sampled_from([*NAMES, ""]))
        for index in range(4):
            tensors[f"{base}/{kind}/{index}" if kind else base] = data.draw(TENSORS)
    read(LocalStore(tmp_path), save(tensors))


@given(data=st.data())
@FUZZ
def test_a_batch_that_is_no_safetensors_file(data: st.DataObject, tmp_path: Path) -> None:
    from safetensors.torch import save

    valid = save({"records/5/meta": torch.zeros(4, dtype=torch.uint8)})
    read(LocalStore(tmp_path), data.draw(st.one_of(changed(valid), st.sampled_from(NASTY))))
