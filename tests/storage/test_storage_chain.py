"""Which states a store can produce from checkpoints and batches; the files of batches; when records are logged."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch
from safetensors import safe_open

from memckpt.errors import DamagedStateError
from memckpt.state.layout import Layout
from memckpt.state.records import RecordMeta, SparseGradient, SubStep, Timeline
from memckpt.state.spec import OptimizerSpec, OwnerSpec, ParamSpec, StateSpec, TensorSpec
from memckpt.storage.batch import FileTensor, RecordReader, write_batch
from memckpt.storage.catalog import Catalog, Checkpoint, read_catalog
from memckpt.storage.chain import StoredPoint, point_before, stored_points, unneeded_batches
from memckpt.storage.format import Batch, decode_commit, encode_commit, place_of
from memckpt.storage.local_store import LocalStore
from memckpt.storage.retention import leftovers, superseded
from tests.support.storage.stored_parts import batch_of, part_of

T1, T2 = Timeline(1, "a"), Timeline(2, "b")


def checkpoint(timeline: Timeline, record: int, content: str = "same", **nodes: tuple[int, ...]) -> Checkpoint:
    """One whose parts are of these nodes, with these ranks; of one node with one rank if none are given."""
    nodes = nodes or {"n": (0,)}
    size = sum(len(ranks) for ranks in nodes.values())
    rest = {"step": record * 10, "world_size": size, "content": content, "timeline": timeline}
    parts = {node: part_of(record, node=node, ranks=ranks, **rest) for node, ranks in nodes.items()}
    return Checkpoint(timeline, record, parts)


def batch(
    timeline: Timeline,
    first: int,
    last: int,
    follows: Timeline | None = None,
    content: str = "same",
    node: str = "n",
    ranks: tuple[int, ...] = (0,),
    world_size: int = 1,
) -> Batch:
    steps = tuple(record * 10 for record in range(first, last + 1))
    rest = {"steps": steps, "node": node, "ranks": ranks, "world_size": world_size, "content": content}
    return batch_of(first, last, timeline=timeline, follows=follows or timeline, **rest)


def catalog(*found: Checkpoint | Batch) -> Catalog:
    checkpoints = sorted((one for one in found if isinstance(one, Checkpoint)), key=lambda one: one.key, reverse=True)
    batches = sorted((one for one in found if isinstance(one, Batch)), key=lambda one: (one.timeline, one.first))
    return Catalog(tuple(checkpoints), {}, (), tuple(batches))


def reached(found: Catalog, also: int | None = None) -> list[tuple[int, int, int]]:
    """(attempt, record, record of the checkpoint) of every state that can be produced."""
    return [(one.timeline.number, one.record, one.checkpoint.record) for one in stored_points(found, also)]


@pytest.mark.promise(
    "a damaged batch is named, and the step before it is used; a missed record is followed by a checkpoint"
)
def test_a_chain_goes_on_as_far_as_no_record_is_missing() -> None:
    found = catalog(checkpoint(T1, 4), batch(T1, 3, 5), batch(T1, 6, 8), batch(T1, 10, 12))
    assert reached(found) == [(1, 8, 4), (1, 5, 4), (1, 4, 4)]
    assert [one.step for one in stored_points(found)] == [80, 50, 40]
    newest = stored_points(found)[0]
    assert [(one.first, one.last) for one in newest.batches] == [(3, 5), (6, 8)]


def before(found: Catalog) -> StoredPoint | None:
    """The state before the newest one."""
    points = stored_points(found)
    return point_before(points, points[0])


def passed(point: StoredPoint | None) -> tuple[int, int, int, int, list[int]] | None:
    """Attempt, record, step, record of the checkpoint, and where the batches begin."""
    if point is None:
        return None
    batches = [one.first for one in point.batches]
    return point.timeline.number, point.record, point.step, point.checkpoint.record, batches


def test_a_chain_passes_through_the_state_before_its_last_record() -> None:
    chain = checkpoint(T1, 4), batch(T1, 3, 5), batch(T1, 6, 8)
    assert passed(before(catalog(*chain))) == (1, 7, 70, 4, [3, 6])
    assert passed(before(catalog(*chain[:2]))) == (1, 4, 40, 4, [])
    assert passed(before(catalog(*chain, batch(T1, 9, 9)))) == (1, 8, 80, 4, [3, 6])
    assert before(catalog(checkpoint(T1, 4))) is None


def test_the_state_before_the_first_record_of_an_attempt_is_of_the_one_that_it_left() -> None:
    chain = checkpoint(T1, 4), batch(T1, 5, 8), batch(T2, 7, 7, follows=T1), batch(T2, 8, 9)
    assert passed(before(catalog(*chain[:3]))) == (1, 6, 60, 4, [5])
    # Of record 8 there are two: that of the attempt which was given up does not count.
    assert passed(before(catalog(*chain))) == (2, 8, 80, 4, [5, 7, 8])


def test_the_state_before_a_checkpoint_is_in_the_chain_of_an_older_one() -> None:
    newest = checkpoint(T1, 8)
    assert passed(before(catalog(checkpoint(T1, 4), newest, batch(T1, 5, 9, content="other")))) is None
    assert passed(before(catalog(checkpoint(T1, 4), newest, batch(T1, 5, 9)))) == (1, 8, 80, 8, [])
    assert passed(before(catalog(checkpoint(T1, 4), newest, batch(T1, 5, 7)))) == (1, 7, 70, 4, [5])
    assert passed(before(catalog(checkpoint(T1, 4), newest, batch(T1, 5, 8)))) == (1, 7, 70, 4, [5])
    assert passed(before(catalog(checkpoint(T1, 7), newest))) == (1, 7, 70, 7, [])
    # Another attempt's record 7 is not the state that record 8 was made from.
    assert before(catalog(checkpoint(T2, 8), checkpoint(T1, 4), batch(T1, 5, 7))) is None
    branched = checkpoint(T2, 8), checkpoint(T1, 4), batch(T1, 5, 8), batch(T2, 8, 8, follows=T1)
    assert passed(before(catalog(*branched))) == (1, 7, 70, 4, [5])


def test_a_step_inside_a_batch_is_found_when_it_is_asked_for() -> None:
    found = catalog(checkpoint(T1, 4), batch(T1, 5, 9))
    assert (1, 7, 4) not in reached(found)
    assert (1, 7, 4) in reached(found, also=70)


def test_a_checkpoint_beyond_a_hole_begins_a_chain_of_its_own_and_the_shorter_way_comes_first() -> None:
    found = catalog(checkpoint(T1, 2), checkpoint(T1, 6), batch(T1, 3, 7), batch(T1, 8, 9))
    assert reached(found) == [(1, 9, 6), (1, 9, 2), (1, 7, 6), (1, 7, 2), (1, 6, 6), (1, 2, 2)]


def test_a_record_that_was_logged_twice_has_its_own_states() -> None:
    found = catalog(checkpoint(T1, 2), batch(T1, 3, 9), batch(T1, 7, 7))
    last = stored_points(found)[0].last_batch_of(0)
    assert (last.first, last.last) == (3, 9)


def test_what_is_of_no_use_is_named() -> None:
    assert catalog().stranded == ""
    assert catalog(batch(T1, 3, 4), batch(T1, 5, 6)).stranded == (
        "records of steps 30 to 60, without a checkpoint to redo them on"
    )
    half = Checkpoint(T1, 2, {"a": msgspec.structs.replace(checkpoint(T1, 2).parts["n"], world_size=2)})
    assert catalog(half).stranded == "parts of a checkpoint of step 20, which is not complete"
    assert " and parts of" in catalog(half, batch(T1, 3, 4)).stranded


def test_records_of_another_content_or_another_number_of_ranks_are_not_redone() -> None:
    other = batch(T1, 5, 6, content="other")
    more = batch(T1, 5, 6, world_size=2)
    assert reached(catalog(checkpoint(T1, 4), other)) == [(1, 4, 4)]
    assert reached(catalog(checkpoint(T1, 4), more)) == [(1, 4, 4)]


def test_with_several_nodes_a_record_is_there_when_all_ranks_parts_are() -> None:
    found = catalog(
        checkpoint(T1, 4, a=(0,), b=(1,)),
        batch(T1, 5, 9, node="a", ranks=(0,), world_size=2),
        batch(T1, 3, 6, node="b", ranks=(1,), world_size=2),
        batch(T1, 7, 7, node="b", ranks=(1,), world_size=2),
    )
    assert reached(found) == [(1, 7, 4), (1, 6, 4), (1, 4, 4)]
    newest = stored_points(found)[0]
    last = newest.last_batch_of(1)
    assert (last.node, last.first) == ("b", 7)
    # Ranks may have moved: what counts is whose states are there.
    moved = catalog(
        checkpoint(T1, 4, a=(0,), b=(1,)), batch(T2, 5, 6, follows=T1, node="c", ranks=(0, 1), world_size=2)
    )
    assert reached(moved)[0] == (2, 6, 4)


def test_retention_keeps_the_batches_that_kept_checkpoints_need() -> None:
    found = catalog(
        checkpoint(T1, 2), checkpoint(T1, 6), checkpoint(T1, 9),
        batch(T1, 1, 3), batch(T1, 4, 5), batch(T1, 6, 7), batch(T1, 8, 10), batch(T1, 11, 12),
    )  # fmt: skip
    assert [one.record for one in superseded(found.checkpoints, 2, None)] == [2]
    gone = unneeded_batches(found, found.complete[:2])
    assert [(one.first, one.last) for one in gone] == [(1, 3), (4, 5)]


def test_what_is_newer_than_every_checkpoint_stays_though_nothing_can_use_it_yet() -> None:
    found = catalog(checkpoint(T1, 4), batch(T1, 6, 8), batch(T2, 2, 3))
    assert unneeded_batches(found, found.complete) == []


def file_tensor(name: str, value: torch.Tensor) -> FileTensor:
    data = memoryview(value.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return FileTensor(name, str(value.dtype).removeprefix("torch."), tuple(value.shape), data)


def test_a_batch_is_a_safetensors_file_that_stock_tools_read(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    values = {
        "5/gradients/0/0/weight": torch.randn(3, 5),
        "5/gradients/0/0/half": torch.randn(7).to(torch.bfloat16),
        "5/by_value/0/count": torch.tensor(3),
        "5/by_value/0/mask": torch.tensor([True, False, True]),
        "5/by_value/0/empty": torch.empty(0, 4),
        "5/meta": torch.tensor(list(b"meta"), dtype=torch.uint8),
    }
    tensors = [file_tensor(name, value) for name, value in values.items()]
    written = write_batch(store, batch(T1, 5, 5), tensors)
    with safe_open(tmp_path / written.log_path, "pt") as file:
        assert set(file.keys()) == set(values)
        for name, value in values.items():
            assert torch.equal(file.get_tensor(name), value)
            assert file.get_tensor(name).dtype == value.dtype
    reader = RecordReader(store)
    assert reader.data(written, "5/meta") == b"meta"
    with pytest.raises(DamagedStateError, match="expected the tensor 5/none, found none"):
        reader.tensor(written, "5/none")
    assert read_catalog(store).batches == (written,)
    (tmp_path / written.log_path).write_bytes(b"\\x80\\x04no safetensors file")
    with pytest.raises(DamagedStateError, match="expected a safetensors file"):
        RecordReader(store).tensor(written, "5/meta")


@pytest.mark.parametrize(
    "wrong",
    [
        {"indices": torch.tensor([[0, 9]])},
        {"indices": torch.tensor([[-1, 0]])},
        {"indices": torch.tensor([[1, 1]])},  # it says that it is coalesced
        {"values": torch.zeros(2, 3)},
        {"values": torch.zeros(1, 2)},
    ],
)
def test_a_sparse_gradient_that_does_not_fit_its_parameter_is_damaged(
    tmp_path: Path, wrong: dict[str, torch.Tensor]
) -> None:
    """An index beyond the parameter would write to foreign memory."""
    store = LocalStore(tmp_path)
    param = ParamSpec(TensorSpec("table", (4, 2), "float32"), (OwnerSpec(0, 0, ()),), True, 64)
    optimizer = OptimizerSpec("torch.optim.sgd", "SGD", b"", (1,), 1)
    layout = Layout(StateSpec((param,), (optimizer,), (), (), "lazy", 4, 3, (0,), 1))
    step = SubStep(0, 0, b"", sparse=(SparseGradient(0, 1, 2, True),))
    meta = RecordMeta(5, 4, False, (step,))
    parts = {"indices": torch.tensor([[0, 3]]), "values": torch.ones(2, 2)}

    def read(parts: dict[str, torch.Tensor]) -> torch.Tensor | None:
        tensors = [file_tensor(f"5/gradients/0/0/table/{name}", one) for name, one in parts.items()]
        return RecordReader(store).gradient(write_batch(store, batch(T1, 5, 5), tensors), layout, meta, step, 0)

    whole = read(parts)
    assert whole.to_dense().tolist() == [[1, 1], [0, 0], [0, 0], [1, 1]]
    with pytest.raises(DamagedStateError, match="5/gradients/0/0/table as a sparse gradient of shape"):
        read(parts | wrong)


def test_a_batch_s_commit_file_is_not_taken_for_a_checkpoint_s() -> None:
    one = batch(T1, 5, 8)
    assert decode_commit(encode_commit(one), one.commit_path) == one
    place = place_of(one.commit_path)
    assert (place.first, place.record, place.node) == (5, 8, "n")
    part = checkpoint(T1, 8).parts["n"]
    other = place_of(part.commit_path)
    assert other is not None
    assert other != place
    with pytest.raises(DamagedStateError):
        decode_commit(encode_commit(part), one.commit_path)
    moved = msgspec.structs.replace(one, first=6)
    with pytest.raises(DamagedStateError, match="belongs at"):
        decode_commit(encode_commit(moved), one.commit_path)


def test_a_batch_that_is_being_written_is_no_leftover(tmp_path: Path) -> None:
    """Another process writes it, without a word to the one that looks for leftovers; an earlier attempt's is one."""
    store = LocalStore(tmp_path)
    for one in (checkpoint(T2, 9).parts["n"],):
        store.write(one.commit_path, encode_commit(one))
    for path in (batch(T2, 4, 6).log_path, batch(T1, 4, 6).log_path):
        store.write(path, b"no commit file names it yet")
    assert leftovers(read_catalog(store), "n", ()) == [batch(T1, 4, 6).log_path]
