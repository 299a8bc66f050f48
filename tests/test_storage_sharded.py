"""Checkpoints of sharded training: written in pieces, read in any others, by us and by stock tools."""

from __future__ import annotations

import pickle
import tempfile
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed.checkpoint as stock
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from memckpt.errors import DamagedStateError, UnsupportedError
from memckpt.recovery.from_storage import StoredState
from memckpt.recovery.resharding import refuse_what_cannot_be_cut
from memckpt.state.layout import Shard, StateTensorSpec
from memckpt.state.records import Timeline
from memckpt.state.tensors import local
from memckpt.storage import dcp
from memckpt.storage.catalog import leftovers, read_catalog, remove, verify
from memckpt.storage.chain import stored_points
from memckpt.storage.format import MERGED, Part, place_of
from memckpt.storage.store import LocalStore, Store, matches
from tests.mesh import all_empty, mesh_of
from tests.sharded_job import PARAMS, WHOLE, Box, Live, Stored, Unit, check, grid, rows, train, write_part

#: Each example writes files.
ANY = {"deadline": None, "suppress_health_check": list(HealthCheck)}


def plain() -> Live:
    """A rank that holds all of everything."""
    return Live.of({name: torch.full(shape, torch.nan) for name, shape in WHOLE.items()})


@pytest.fixture
def here(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "store")


# Pieces of tensors


@st.composite
def cut_tensors(draw: st.DrawFn) -> tuple[torch.Tensor, list[Box], Box]:
    """A tensor, a cut of it, and a piece that is wanted of it."""
    shape = draw(st.lists(st.integers(0, 7), max_size=3))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool]))
    boxes = grid(shape, [draw(st.lists(st.integers(1, 6), max_size=3)) for _ in shape])
    offsets = tuple(draw(st.integers(0, size)) for size in shape)
    sizes = tuple(draw(st.integers(0, size - at)) for size, at in zip(shape, offsets, strict=True))
    whole = torch.arange(prod(shape)).reshape(shape).remainder(251).to(dtype)
    return whole, draw(st.permutations(boxes)), Box(offsets, sizes)


@given(cut_tensors(), st.data())
@settings(max_examples=60, **ANY)
def test_any_piece_is_put_together_from_any_others(
    given_: tuple[torch.Tensor, list[Box], Box], data: st.DataObject
) -> None:
    whole, boxes, wanted = given_
    shape = tuple(whole.shape)
    with tempfile.TemporaryDirectory() as directory:
        store = LocalStore(Path(directory))
        nodes = [f"n{index}" for index in range(len(boxes))]
        twice = data.draw(st.lists(st.integers(0, len(boxes) - 1), max_size=2))
        for node, box in [*zip(nodes, boxes, strict=True), *((f"again{at}", boxes[at]) for at in twice)]:
            dcp.save(store, f"base/{node}", {"t": box.of(whole).clone()}, {"t": Shard(box.offsets, shape)})
        nodes += [f"again{at}" for at in dict.fromkeys(twice)]
        assert dcp.names(store, "base", nodes) == {"t": (shape, whole.dtype)}
        room = torch.empty(wanted.sizes, dtype=whole.dtype)
        dcp.load_into(store, "base", {"t": room}, {"t": Shard(wanted.offsets, shape)}, nodes)
        assert torch.equal(room, wanted.of(whole))
        dcp.write_merged(store, "base", nodes)
        found = torch.empty_like(whole)
        stock.load({"t": found}, checkpoint_id=f"{directory}/base", no_dist=True)
        assert torch.equal(found, whole)


def test_a_piece_that_is_not_there_is_missed(here: LocalStore) -> None:
    whole = torch.arange(12.0).view(4, 3)
    for index in range(2):
        box = Box((index, 0), (1, 3))
        dcp.save(here, f"base/n{index}", {"t": box.of(whole).clone()}, {"t": Shard(box.offsets, (4, 3))})
    with pytest.raises(DamagedStateError, match="expected 12 elements of t, found 6"):
        dcp.load_into(here, "base", {"t": torch.empty(4, 3)}, below=["n0", "n1"])
    with pytest.raises(DamagedStateError, match="expected the tensor u, found none"):
        dcp.load_into(here, "base", {"u": torch.empty(4, 3)}, below=["n0", "n1"])
    with pytest.raises(DamagedStateError, match=r"expected t of shape \[4, 2\], found one of shape \[4, 3\]"):
        dcp.load_into(here, "base", {"t": torch.empty(4, 2)}, below=["n0", "n1"])


def test_pieces_of_different_tensors_are_not_put_together(here: LocalStore) -> None:
    dcp.save(here, "base/a", {"t": torch.zeros(2)}, {"t": Shard((0,), (4,))})
    dcp.save(here, "base/b", {"t": torch.zeros(2)}, {"t": Shard((2,), (5,))})
    with pytest.raises(DamagedStateError, match=r"expected t of torch.float32 and shape \[4\].*found.*\[5\]"):
        dcp.merged(here, "base", ["a", "b"])


# Whole states


@st.composite
def sharded_jobs(draw: st.DrawFn) -> dict[str, Any]:
    """How many units there are, and which cells of which grids they hold; some hold the same as others, or nothing."""
    units = draw(st.integers(1, 5))
    boxes = rows(units)
    if draw(st.booleans()):
        for name, shape in WHOLE.items():
            cells = grid(shape, [draw(st.lists(st.integers(1, 6), max_size=1)) for _ in shape])
            if len(cells) <= units:
                boxes[name] = [cells[index % len(cells)] for index in range(units)]
    cut = draw(st.sampled_from([boxes, boxes, boxes, None]))
    return {"boxes": cut, "units": units if cut else 1, "copies": draw(st.integers(1, 2)), "last": draw(st.integers(2, 4))}


MESHES = st.sampled_from([(1,), (2,), (3,), (5,), (8,), (2, 2), (2, 3)])


def check_resharding(
    described: dict[str, Any], shape: Sequence[int], cuts: Sequence[int | None], ranks: set[int]
) -> None:
    with tempfile.TemporaryDirectory() as directory:
        job = train(LocalStore(Path(directory)), **described)
        records = {2, described["last"]}
        for record in records:
            live = plain()
            stored = live.restore(job, record)
            check(live, job, record)
            assert stored.exact == (described["boxes"] is None and job.world_size == 1)
        for rank in {rank % prod(shape) for rank in ranks}:
            with mesh_of(shape, rank) as mesh:
                for record in records:
                    live = Live.of({**all_empty(WHOLE, mesh, cuts)})
                    stored = live.restore(job, record, rank, prod(shape))
                    check(live, job, record, 0 if stored.resharded else rank % job.world_size % len(job.units))
                    assert live.tensors["count"] == 100 * record + rank % job.world_size


@given(sharded_jobs(), MESHES, st.data())
@settings(max_examples=15, **ANY)
def test_any_ranks_go_on_from_what_any_others_had(described: dict[str, Any], shape: Sequence[int], data: Any) -> None:
    cuts = [data.draw(st.sampled_from([0, 1, None])) for _ in shape]
    check_resharding(described, shape, cuts, {0, data.draw(st.integers(0, 7)), -1})


@pytest.mark.slow
@given(sharded_jobs(), MESHES, st.data())
@settings(max_examples=200, **ANY)
def test_the_same_for_many_more(described: dict[str, Any], shape: Sequence[int], data: Any) -> None:
    check_resharding(described, shape, [data.draw(st.sampled_from([0, 1, 2, None])) for _ in shape], set(range(8)))
