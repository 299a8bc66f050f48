"""Layouts: what is staged never overlaps, fits, and lies where every process thinks it lies."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memckpt.state.layout import HEADER_BYTES, PAGE, Layout
from memckpt.state.spec import (
    ITEM_BYTES,
    OwnerSpec,
    ParamSpec,
    StateSpec,
    StateTensorSpec,
    TensorSpec,
    first_difference,
)
from tests.support.trainings.specs import an_optimizer, large_spec

dtypes = st.sampled_from(["float32", "float64", "bfloat16", "complex64"])
shapes = st.lists(st.sampled_from([0, 1, 3, 40, 130, 700]), max_size=2).map(tuple)


@st.composite
def tensors(draw: Any, prefix: str, count: int) -> tuple[TensorSpec, ...]:
    return tuple(TensorSpec(f"{prefix}{i}", draw(shapes), draw(dtypes)) for i in range(draw(st.integers(0, count))))


@st.composite
def specs(draw: Any) -> StateSpec:
    optimizers = draw(st.integers(1, 3))
    params = []
    for tensor in draw(tensors("param", 6)):
        owners = []
        for index in draw(st.sets(st.integers(0, optimizers - 1), min_size=1)):
            state = [StateTensorSpec("step", (), "float32", False, True)] if draw(st.booleans()) else []
            if draw(st.booleans()):
                state.append(StateTensorSpec("exp_avg", tensor.shape, draw(dtypes), True, False))
            if draw(st.booleans()):
                state.append(StateTensorSpec("row_var", (7,), "float32", False, False))
            owners.append(OwnerSpec(index, 0, tuple(state)))
        params.append(ParamSpec(tensor, tuple(owners), draw(st.booleans()), draw(st.sampled_from([0, 0, 1000]))))
    mode = draw(st.sampled_from(["lazy", "eager", "snapshot"]))
    slots = draw(st.integers(2, 5))
    by_value = draw(tensors("buffer", 3))
    return StateSpec(
        params=tuple(params),
        optimizers=tuple(an_optimizer(i, draw(st.integers(1, 3))) for i in range(optimizers)),
        static=draw(tensors("static", 3)),
        by_value=by_value,
        shared=tuple(one.name for one in by_value if draw(st.booleans())),
        mode=mode,
        period=1 if mode == "snapshot" else draw(st.integers(1, 9)),
        every=draw(st.integers(1, 20)) if mode == "snapshot" else 1,
        slots=slots,
        by_value_slots=draw(st.sampled_from([0, slots + 1])) if mode == "lazy" else 0,
        local_ranks=tuple(range(draw(st.integers(1, 3)))),
        world_size=3,
    )


def ranges_in_slot(layout: Layout, record: int) -> list[tuple[int, int, str]]:
    """(start, stop, what) of everything that record number `record` has in its slot."""
    spec = layout.spec
    found = [(0, HEADER_BYTES, "header")]
    for index, optimizer in enumerate(spec.optimizers):
        for sub_step in range(0 if spec.mode == "snapshot" else optimizer.sub_steps):
            for param in layout.optimizer_params(index):
                start = layout.gradient_offset(index, sub_step, param)
                found.append((start, start + spec.grad_bytes(param), f"gradient {index} {sub_step} {param}"))
    for piece in layout.due(record):
        for owner, state, start in layout.piece_parts(piece):
            elements = piece.stop - piece.start
            if state is None:
                size = elements * ITEM_BYTES[spec.params[piece.param].tensor.dtype]
            else:
                size = elements * ITEM_BYTES[state.dtype] if state.elementwise else state.nbytes
            found.append((start, start + size, f"anchor {piece} {owner and owner.optimizer} {state and state.key}"))
    for rank in spec.local_ranks:
        start = layout.landing_base(rank)
        found.append((start, start + layout.landing_bytes, f"landings {rank}"))
    return found


def by_value_ranges(layout: Layout, record: int) -> list[tuple[int, int, str]]:
    """(start, stop, what) in the slots' region of the by-value tensors of record number `record`, with their stamps."""
    if not layout.spec.by_value:
        return []
    start, base = layout.by_value_slot_offset(record), layout.by_value_base(record)
    found = [(start, start + HEADER_BYTES, f"stamps {record}")]
    for rank in layout.spec.local_ranks:
        digests = layout.digests_base(record, rank)
        found.append((digests, digests + 16 * len(layout.shared), f"digests {record} {rank}"))
        for position, offset in enumerate(layout.by_value_offsets(rank)):
            tensor = layout.spec.by_value[position]
            holder = f"{rank}" if position not in layout.shared else "all"
            found.append((base + offset, base + offset + tensor.nbytes, f"by value {record} {holder} {tensor.name}"))
    return sorted(set(found))


def assert_disjoint(ranges: list[tuple[int, int, str]], limit: int) -> None:
    used = sorted(each for each in ranges if each[0] < each[1])
    for (_, stop, first), (start, _, second) in itertools.pairwise(used):
        assert stop <= start, f"{first} overlaps {second}"
    assert all(start >= 0 and stop <= limit for start, stop, _ in ranges)


@pytest.mark.promise("slots never overlap, and every element is anchored once a period")
@given(specs())
@settings(max_examples=80, deadline=None)
def test_nothing_in_a_slot_overlaps_or_sticks_out(spec: StateSpec) -> None:
    layout = Layout(spec)
    for record in range(spec.period):
        assert_disjoint(ranges_in_slot(layout, record), layout.slot_bytes)


@pytest.mark.promise("slots never overlap, and every element is anchored once a period")
@given(specs())
@settings(max_examples=80, deadline=None)
def test_every_element_is_anchored_once_in_a_period(spec: StateSpec) -> None:
    layout = Layout(spec)
    for first in (0, 5):
        anchored: dict[int, list[tuple[int, int]]] = {}
        for record in range(first, first + spec.period):
            for piece in layout.due(record):
                anchored.setdefault(piece.param, []).append((piece.start, piece.stop))
        for index, param in enumerate(spec.params):
            position = 0
            for start, stop in sorted(anchored[index]):
                assert start == position
                position = stop
            assert position == param.tensor.numel
            if param.whole:
                assert len(anchored[index]) == 1


@given(specs())
@settings(max_examples=100, deadline=None)
def test_slots_replica_and_static_tensors_do_not_overlap(spec: StateSpec) -> None:
    layout = Layout(spec)
    ring = {"lazy": spec.period + spec.slots, "eager": spec.slots, "snapshot": 2}[spec.mode]
    # Captured records: the first one, and multiples of N from then on.
    records = range(100, 100 + ring) if spec.mode != "snapshot" else (101, 101 // spec.every * spec.every + spec.every)
    offsets = {layout.slot_offset(record) for record in records}
    assert len(offsets) == ring
    assert layout.slot_bytes % PAGE == 0
    behind = [each for record in list(records)[-layout.by_value_ring :] for each in by_value_ranges(layout, record)]
    slots = [(offset, offset + layout.slot_bytes, "slot") for offset in offsets]
    assert_disjoint([*slots, *behind], layout.slots_bytes)
    static = [
        (offset, offset + tensor.nbytes, tensor.name)
        for tensor, offset in zip(spec.static, layout.static_offsets, strict=True)
    ]
    assert_disjoint(static, layout.static_bytes)
    replica = []
    for param, (value, states) in zip(spec.params, layout.replica_offsets, strict=True):
        replica.append((value, value + param.tensor.nbytes, param.tensor.name))
        for owner in param.owners:
            for state in owner.state:
                start = states[owner.optimizer, state.key]
                replica.append((start, start + state.nbytes, f"{param.tensor.name} {state.key}"))
    if spec.mode == "eager":
        assert_disjoint(replica, layout.replica_bytes)
    assert layout.total_bytes == layout.slots_bytes + layout.static_bytes + layout.replica_bytes


@given(specs())
@settings(max_examples=100, deadline=None)
def test_another_process_computes_the_same_layout_from_the_message(spec: StateSpec) -> None:
    received = msgspec.msgpack.decode(msgspec.msgpack.encode(spec), type=StateSpec)
    assert received == spec
    assert received.digest() == spec.digest()
    ours, theirs = Layout(spec), Layout(received)
    assert ours.anchor_groups == theirs.anchor_groups
    assert ours.stagers == theirs.stagers
    assert ours.replica_offsets == theirs.replica_offsets
    assert [ranges_in_slot(ours, record) for record in range(3)] == [
        ranges_in_slot(theirs, record) for record in range(3)
    ]


@pytest.mark.parametrize("period", [2, 4, 8, 32])
def test_each_step_of_a_period_anchors_about_as_much(period: int) -> None:
    layout = Layout(large_spec(period))
    loads = [sum(piece.nbytes for piece in layout.due(record)) for record in range(period)]
    assert max(loads) <= 1.5 * sum(loads) / period
    for record in range(period):
        for piece in layout.due(record):
            assert piece.start % 32 == 0


def test_differences_between_fingerprints_are_named() -> None:
    base = large_spec(4)
    lines = base.fingerprint()
    assert first_difference(lines, lines) is None
    changed = [*lines[:1], "p1 [301] float32", *lines[2:]]
    assert first_difference(lines, changed) == "held: p1 [300] float32; this run: p1 [301] float32"
    assert first_difference(lines, lines[:-1]) == "held: optimizer 0 m.O0; this run: nothing in its place"
    assert first_difference(lines[:-1], lines) == "held: nothing; this run: optimizer 0 m.O0"


def test_the_fingerprint_does_not_depend_on_what_is_frozen() -> None:
    spec = large_spec(4)
    moved = msgspec.structs.replace(spec, params=spec.params[1:], static=(spec.params[0].tensor,))
    assert moved.fingerprint() == spec.fingerprint()
    assert moved.digest() != spec.digest()


@given(specs())
def test_there_is_a_region_for_tensors_without_elements(spec: StateSpec) -> None:
    """A rank may hold nothing but empty pieces of what others hold."""
    layout = Layout(spec)
    assert bool(layout.static_bytes) == bool(spec.static)
    assert bool(layout.state_bytes) == bool(spec.params)
