"""Checkpoints of sharded training: written in pieces, read in any others, by us and by stock tools."""

from __future__ import annotations

import pickle
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed.checkpoint as stock
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from memckpt.agent.saving.writer import checkpoint_writer as writer
from memckpt.config import StorageConfig
from memckpt.errors import DamagedStateError, StorageError, UnsupportedError
from memckpt.recovery.from_storage import StoredState, refuse_what_cannot_be_cut
from memckpt.session.resume import storage_tier
from memckpt.session.resume.storage_tier import StorageTier
from memckpt.state.records import Timeline
from memckpt.state.spec import Shard, StateTensorSpec
from memckpt.storage import dcp
from memckpt.storage.catalog import read_catalog, remove
from memckpt.storage.chain import stored_points
from memckpt.storage.dcp import merged, write_merged
from memckpt.storage.format import MERGED, Part, place_of
from memckpt.storage.local_store import LocalStore
from memckpt.storage.node_files import write_files
from memckpt.storage.retention import leftovers
from memckpt.storage.store import Store, StoredFile, matches, verify_files
from tests.support.cluster.mesh import all_empty, mesh_of
from tests.support.cluster.sharded_job import (
    TIMELINE,
    WHOLE,
    Box,
    Live,
    Stored,
    Unit,
    check,
    grid,
    plain,
    rows,
    train,
    write_part,
)
from tests.support.cluster.thread_ranks import on_ranks

#: Each example writes files.
ANY = {"deadline": None, "suppress_health_check": list(HealthCheck)}


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
        write_merged(store, "base", nodes)
        found = torch.empty_like(whole)
        stock.load({"t": found}, checkpoint_id=f"{directory}/base", no_dist=True)
        assert torch.equal(found, whole)


def test_tensors_that_are_not_simply_written_to_are_read_into(here: LocalStore) -> None:
    found = torch.arange(6.0).view(2, 3)
    with torch.inference_mode():
        made_in_inference = torch.zeros(2, 3)
    tensors = {"expanded": torch.zeros(3).expand(2, 3), "inference": made_in_inference, "t": torch.zeros(2, 3)}
    stored = {name: found[:1].repeat(2, 1) if name == "expanded" else found for name in tensors}
    dcp.save(here, "base", stored)
    dcp.load_into(here, "base", tensors)
    assert {name: torch.equal(tensors[name], stored[name]) for name in tensors} == dict.fromkeys(tensors, True)


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


def test_an_empty_piece_takes_no_place(here: LocalStore) -> None:
    """Ranks that are left without a piece may say that it begins where another's does."""
    dcp.save(
        here, "base/a", {"t": torch.zeros(0), "u": torch.zeros(0)}, {"t": Shard((0,), (4,)), "u": Shard((0,), (0,))}
    )
    dcp.save(here, "base/b", {"t": torch.arange(4.0)}, {"t": Shard((0,), (4,))})
    found = torch.empty(4)
    dcp.load_into(here, "base", {"t": found, "u": torch.empty(0)}, below=["a", "b"])
    assert torch.equal(found, torch.arange(4.0))


def test_pieces_of_different_tensors_are_not_put_together(here: LocalStore) -> None:
    dcp.save(here, "base/a", {"t": torch.zeros(2)}, {"t": Shard((0,), (4,))})
    dcp.save(here, "base/b", {"t": torch.zeros(2)}, {"t": Shard((2,), (5,))})
    with pytest.raises(DamagedStateError, match=r"expected t of torch.float32 and shape \[4\].*found.*\[5\]"):
        merged(here, "base", ["a", "b"])


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
    return {
        "boxes": cut,
        "units": units if cut else 1,
        "copies": draw(st.integers(1, 2)),
        "last": draw(st.integers(2, 4)),
    }


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


@pytest.mark.promise(
    "another number of ranks, or another mesh, gets parameters and optimizer state of the step, element for element"
)
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


@pytest.mark.parametrize("record", [2, 4])
@pytest.mark.parametrize(("copies", "shape", "cuts"), [(1, (3,), (0,)), (2, (2, 3), (None, 0))], ids=["fsdp", "hsdp"])
def test_the_same_ranks_go_on_from_their_own_parts(
    here: LocalStore, record: int, copies: int, shape: tuple[int, ...], cuts: tuple[int | None, ...]
) -> None:
    job = train(here, rows(3), 3, copies, last=4)
    for rank in range(3 * copies):
        with mesh_of(shape, rank) as mesh:
            live = Live.of({**all_empty(WHOLE, mesh, cuts)})
            stored = live.restore(job, record, rank, 3 * copies)
            assert stored.exact
            check(live, job, record, own=rank % 3)
            assert live.tensors["count"] == 100 * record + rank


def test_the_same_ranks_need_no_part_but_their_own(here: LocalStore) -> None:
    job = train(here, rows(2), 2)
    point = job.point(2)
    here.delete_directory(point.checkpoint.parts["n0"].base_directory)
    with mesh_of((2,), 1) as mesh:
        live = Live.of({**all_empty(WHOLE, mesh, (0,))})
        StoredState(here, point, 1, live.spec(1, 2)).restore(live.tensors, live.optimizers)
        check(live, job, 2, own=1)


def test_each_part_s_state_is_read_once(here: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    job = train(here, rows(2), 2, last=4)
    states = {part.state_path for part in job.point(4).checkpoint.parts.values()}
    paths, read = [], LocalStore.read

    def note_read(store: LocalStore, path: str) -> bytes:
        paths.append(path)
        return read(store, path)

    monkeypatch.setattr(LocalStore, "read", note_read)
    with mesh_of((3,), 1) as mesh:
        assert Live.of({**all_empty(WHOLE, mesh, (0,))}).restore(job, 4, 1, 3).resharded
    assert sorted(path for path in paths if path in states) == sorted(states)


def test_other_numbers_of_copies_of_the_same_pieces_are_not_put_together_anew(here: LocalStore) -> None:
    job = train(here, rows(2), 2, copies=2, last=3)
    with mesh_of((2,), 1) as mesh:
        live = Live.of({**all_empty(WHOLE, mesh, (0,))})
        stored = live.restore(job, 3, 1, 2)
        assert (stored.exact, stored.resharded) == (False, False)
        check(live, job, 3, own=1)


# Which of them there are


def committed(job: Stored) -> dict[str, Part]:
    (checkpoint,) = read_catalog(job.store).checkpoints
    return checkpoint.parts


def test_a_checkpoint_exists_when_there_are_parameters_for_all_ranks(here: LocalStore) -> None:
    job = train(here, rows(2), 2, copies=2)
    parts = committed(job)
    assert {node: (part.full, part.serves) for node, part in parts.items()} == {
        "n0": (True, (0, 2)), "n1": (True, (1, 3)), "n2": (False, (0, 2)), "n3": (False, (1, 3))
    }  # fmt: skip
    (checkpoint,) = read_catalog(here).complete
    assert [checkpoint.part_serving(rank).node for rank in range(4)] == ["n0", "n1", "n0", "n1"]
    assert [checkpoint.part_of(rank).node for rank in range(4)] == ["n0", "n1", "n2", "n3"]
    # With the states of all ranks, but parameters of some of them only:
    not_full = msgspec.structs.replace(parts["n1"], full=False)
    checkpoint.parts["n1"] = not_full
    assert not checkpoint.complete
    for node in parts:
        here.delete(parts[node].commit_path)
        assert read_catalog(here).complete == ()


def test_a_record_is_there_with_the_gradients_of_all_units(here: LocalStore) -> None:
    train(here, rows(2), 2, copies=2, last=4)
    catalog = read_catalog(here)
    assert [one.record for one in stored_points(catalog)] == [4, 2]
    assert len(list(stored_points(catalog)[0].batches)) == 4
    for batch in catalog.batches:
        here.delete(batch.commit_path)
        assert [one.record for one in stored_points(read_catalog(here))] == [2]


def test_gradients_of_other_pieces_are_not_redone(here: LocalStore) -> None:
    """A node that dies and comes back with other ranks holds other pieces under the same name."""
    train(here, rows(2), 2, last=4)
    catalog = read_catalog(here)
    one, other = catalog.batches
    for change in ({"serves": other.serves}, {"content": other.content}):
        swapped = replace(catalog, batches=(msgspec.structs.replace(one, **change), other))
        assert [point.record for point in stored_points(swapped)] == [2]


# What makes one of all parts


def test_the_last_writer_makes_one_checkpoint_of_all_parts(here: LocalStore) -> None:
    job = train(here, rows(3), 3)
    (checkpoint,) = read_catalog(here).complete
    assert checkpoint.merged_path in read_catalog(here).files
    written = here.read(checkpoint.merged_path)
    here.delete(checkpoint.parts["n2"].commit_path)
    here.delete(checkpoint.merged_path)
    again = Stored(here, 3, units=job.units)
    write_part(again, job.units[1], 1, 2, Timeline(1, "a"))
    assert checkpoint.merged_path not in read_catalog(here).files, "a part is missing"
    write_part(again, job.units[2], 2, 2, Timeline(1, "a"))
    assert here.read(checkpoint.merged_path) == written, "two that finish at once must write the same"


def test_what_was_not_merged_is_read_by_us_and_merged_with_the_next(here: LocalStore) -> None:
    job = train(here, rows(2), 2)
    (checkpoint,) = read_catalog(here).complete
    here.delete(checkpoint.merged_path)
    live = plain()
    live.restore(job, 2)
    check(live, job, 2)
    train(here, rows(2), 2, base_at=3, last=3)
    assert {checkpoint.merged_path, read_catalog(here).complete[0].merged_path} <= set(read_catalog(here).files)


def test_a_part_that_cannot_be_read_back_does_not_count(here: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what it was to replace stays."""
    job = train(here, rows(2), 2)

    def damaging(store: Store, *arguments: Any) -> Part:
        part = write_files(store, *arguments)
        path = next(file.path for file in part.files if file.path.endswith(".distcp"))
        store.write(path, store.read(path)[:-1])
        return part

    write_part(job, job.units[0], 0, 3, TIMELINE, keep_last=1)
    monkeypatch.setattr(writer, "write_files", damaging)
    with pytest.raises(StorageError, match=r"files just written cannot be read back: .*n1"):
        write_part(job, job.units[1], 1, 3, TIMELINE, keep_last=1)
    catalog = read_catalog(here)
    assert [(one.record, one.complete) for one in catalog.checkpoints] == [(3, False), (2, True)]
    assert verify_files(here, catalog.checkpoints[1].part_files) == []
    assert not [path for path in catalog.files if "000000000003/n1" in path]


def test_nothing_is_left_of_what_is_let_go(here: LocalStore) -> None:
    for record in (2, 3, 4):
        train(here, rows(2), 2, base_at=record, last=record, keep_last=1)
        assert [one.record for one in read_catalog(here).checkpoints] == [record]
        assert {place.record for path in here.find("") if (place := place_of(path)) is not None} == {record}
    remove(here, read_catalog(here).checkpoints[0])
    assert here.find("", unfinished=True) == []


def test_a_file_that_makes_one_of_what_is_gone_is_left_over(here: LocalStore) -> None:
    train(here, rows(2), 2, base_at=2)
    train(here, rows(2), 2, base_at=3, last=3)
    newest, older = read_catalog(here).complete
    unfinished = f"{older.merged_path}.partial-0123"
    for path in (unfinished, f"{newest.merged_path}.partial-0123"):
        here.write(path, b"half")
    assert leftovers(read_catalog(here), "n1", ()) == [unfinished], "of the newest one it may be on its way"
    for part in older.parts.values():
        here.delete(part.commit_path)
    assert {older.merged_path, unfinished} <= set(leftovers(read_catalog(here), "n1", ()))
    place = place_of(older.merged_path)
    assert (place.record, place.node) == (2, "")


def test_a_planted_pickle_among_the_parts_is_refused(here: LocalStore) -> None:
    train(here, rows(2), 2)
    (checkpoint,) = read_catalog(here).complete
    here.write(f"{checkpoint.parts['n1'].base_directory}/{MERGED}", pickle.dumps(print))
    with pytest.raises(DamagedStateError, match=r"found builtins\.print in it"):
        dcp.names(here, checkpoint.directory, checkpoint.tensor_nodes)


# What cannot be cut


def test_state_that_cannot_be_cut_is_refused_by_name() -> None:
    unit = Unit(0, {name: boxes[0] for name, boxes in rows(2).items()}, 7)
    unit.step(1)
    stored, whole = unit.spec((0,), (0,), 2), plain().spec(0, 1)
    refuse_what_cannot_be_cut(stored, whole)
    matrix = StateTensorSpec("precondition", (4, 4), "float32", False, False)
    (param,) = [one for one in stored.params if one.tensor.name == "w"]
    owner = msgspec.structs.replace(param.owners[0], state=(*param.owners[0].state, matrix))
    odd = msgspec.structs.replace(param, owners=(owner,))
    kept = msgspec.structs.replace(stored, params=(odd, *(one for one in stored.params if one is not param)))
    with pytest.raises(
        UnsupportedError, match=r"'precondition' that Adam keeps for w .* resume with the number of ranks"
    ):
        refuse_what_cannot_be_cut(kept, whole)
    # One that all ranks hold all of may go to any number of ranks that do.
    tensor = msgspec.structs.replace(param.tensor, shape=WHOLE["w"], shard=None)
    uncut = msgspec.structs.replace(kept, params=(msgspec.structs.replace(odd, tensor=tensor), *kept.params[1:]))
    refuse_what_cannot_be_cut(uncut, whole)
    with pytest.raises(UnsupportedError, match="'precondition'"):
        refuse_what_cannot_be_cut(uncut, stored)


@pytest.mark.parametrize("damaged", range(3))
def test_ranks_share_the_checking_and_agree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damaged: int) -> None:
    """Whichever rank comes upon the damage, all pass over the same states, and every file is read once."""
    store = LocalStore(tmp_path)
    for record in (2, 3):
        job = train(store, rows(3), 3, base_at=record, last=record)
    read: list[str] = []

    def noting(store: Store, file: StoredFile) -> str | None:
        read.append(file.path)
        return matches(store, file)

    monkeypatch.setattr(storage_tier, "matches", noting)
    config = StorageConfig(url=str(tmp_path))

    def resume(ranks: Any) -> tuple[int, Live]:
        tier = StorageTier(config, tmp_path, ranks, None)
        live = plain()
        stored = tier.open_newest(tier.points, live.spec(0, 1))
        stored.restore(live.tensors, live.optimizers)
        return stored.point.record, live

    for step, (record, live) in enumerate(on_ranks(3, resume)):
        assert record == 3, step
        check(live, job, 3)
    assert len(read) == len(set(read)) == 9  # two files of tensors and one with the rest, of three parts
    part = job.point(3).checkpoint.parts[f"n{damaged}"]
    path = tmp_path / part.base_directory / "__0_0.distcp"
    path.write_bytes(path.read_bytes()[:-1])
    assert [record for record, _ in on_ranks(3, resume)] == [2, 2, 2]
    older = tmp_path / part.base_directory.replace("000000000003", "000000000002") / ".metadata"
    older.write_bytes(b"")
    with pytest.raises(DamagedStateError, match=r"no checkpoint in storage is whole: step 3: .*; step 2: "):
        on_ranks(3, resume)
