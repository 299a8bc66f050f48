"""A full disk: named as what it is, wherever it fills; what makes room, and what stays."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch

from memckpt.agent.saving.writer import checkpoint_writer as writer
from memckpt.errors import MemoryBudgetError, StorageError, StorageFullError
from memckpt.memory.region import Region
from memckpt.protocol.storing import Save, Saved, SaveFailed
from memckpt.state.layout import Layout
from memckpt.state.records import Timeline
from memckpt.state.spec import ParamSpec, StateSpec, TensorSpec
from memckpt.storage.batch import FileTensor, write_batch
from memckpt.storage.catalog import PINNED, note_passed, read_catalog, write_keys
from memckpt.storage.chain import stored_points
from memckpt.storage.format import Batch
from memckpt.storage.local_store import LocalStore
from memckpt.storage.store import verify_files
from tests.support.cluster.storage_node import spec_of
from tests.support.faults.full_disk import LimitedDisk
from tests.support.storage.stored_parts import batch_of, part_of

TINY = spec_of()
#: One of 20 kB.
SPEC = msgspec.structs.replace(
    TINY, params=(ParamSpec(TensorSpec("w", (5000,), "float32"), TINY.params[0].owners, False, 0),)
)
T1, T2 = Timeline(1, "a"), Timeline(2, "b")


def save(
    store: LocalStore, record: int, keep_every_steps: int | None = None, timeline: Timeline = T1, spec: StateSpec = SPEC
) -> Saved:
    """Write a small checkpoint, as the writer process does it."""
    region = Region.create("test", Layout(spec).copy_bytes)
    region.map[:16] = torch.full((4,), float(record)).numpy().tobytes()
    try:
        part = part_of(record, timeline=timeline, content=spec.content(), node="n")
        job = Save(store.url, part, spec, "copy", 1, {0: b"state"}, 2, keep_every_steps)
        return writer.save(job, [region, region])
    finally:
        region.close()


def log(
    store: LocalStore, first: int, last: int, timeline: Timeline = T1, follows: Timeline = T1, nbytes: int = 10_000
) -> Batch:
    batch = batch_of(first, last, timeline=timeline, follows=follows, content=SPEC.content())
    return write_batch(store, batch, [FileTensor("x", "uint8", (nbytes,), memoryview(bytes(nbytes)))])


def steps_of(store: LocalStore) -> list[int]:
    return [one.step for one in read_catalog(store).complete]


def batches_of(store: LocalStore) -> list[tuple[int, int]]:
    return [(one.first, one.last) for one in read_catalog(store).batches]


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LimitedDisk:
    monkeypatch.setattr(writer, "_FILES_BYTES", 1000)  # these checkpoints are tiny
    return LimitedDisk(monkeypatch, tmp_path / "disk")


@pytest.fixture
def store(disk: LimitedDisk) -> LocalStore:
    return LocalStore(disk.root)


# What is said


def test_a_full_disk_is_no_memory_budget() -> None:
    assert StorageFullError.exit_code not in (MemoryBudgetError.exit_code, StorageError.exit_code)


def test_it_is_named_with_what_is_needed_and_what_is_free(disk: LimitedDisk, store: LocalStore) -> None:
    save(store, 1)
    disk.room = disk.used() + 1000
    with pytest.raises(
        StorageFullError, match=r"no room for step 2: expected .* KiB, found 1000 B free\. Make"
    ) as full:
        save(store, 2)
    assert full.value.free == 1000
    assert full.value.needed is not None
    assert full.value.needed > 1000
    assert disk.refused == 0, "nothing is written where there is no room"
    assert steps_of(store) == [1]


def test_the_disk_s_own_words_are_not_lost_in_torch_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its writer of zip files says "unexpected pos 704 vs 598" of a full disk."""
    disk = LimitedDisk(monkeypatch, tmp_path / "disk", counted=False)
    disk.room = 1000
    with pytest.raises(StorageFullError, match="No space left on device"):
        save(LocalStore(disk.root), 1)
    assert disk.refused


def test_a_writer_s_traceback_is_told_once(
    disk: LimitedDisk, store: LocalStore, caplog: pytest.LogCaptureFixture
) -> None:
    disk.room = 1000
    region = Region.create("test", Layout(SPEC).copy_bytes)
    writer._complaints.reset()

    def attempt(record: int) -> Saved | SaveFailed:
        job = Save(store.url, part_of(record, content=SPEC.content(), node="n"), SPEC, "copy", 1, {0: b""}, 2, None)
        with caplog.at_level(logging.ERROR):
            return writer.try_to_save(job, [region, region])

    try:
        failed = [attempt(record) for record in range(1, 6)]
        assert all(isinstance(one, SaveFailed) and "has no room" in one.reason for one in failed)
        assert len(caplog.records) == 5
        assert caplog.text.count("Traceback") == 1
        disk.room = None
        assert isinstance(attempt(6), Saved)
        disk.room = disk.used()
        attempt(7)
        assert caplog.text.count("Traceback") == 2, "what comes after a success is news"
    finally:
        region.close()


# What makes room


def test_the_last_checkpoint_but_one_goes_where_there_is_room_for_no_third(
    disk: LimitedDisk, store: LocalStore, caplog: pytest.LogCaptureFixture
) -> None:
    save(store, 1)
    size = disk.used()
    disk.room = size * 3 + 1000
    for step in range(2, 6):
        save(store, step)
        assert steps_of(store) == [step, step - 1]
    disk.room = size * 2 + 1000
    save(store, 6)
    assert steps_of(store) == [6, 5]
    assert "deleted step 4, as the storage is full" in caplog.text
    assert verify_files(store, read_catalog(store).complete[0].part_files) == []


def test_nothing_goes_where_that_would_not_be_enough(
    disk: LimitedDisk, store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(store, 1)
    save(store, 2)
    disk.room = disk.used() + 10
    monkeypatch.setattr(writer, "_FILES_BYTES", 10_000)
    before = store.find("")
    with pytest.raises(StorageFullError, match="could be deleted"):
        save(store, 3)
    assert store.find("") == before


def test_what_is_kept_for_good_stays(disk: LimitedDisk, store: LocalStore) -> None:
    for step in (10, 11, 12):
        save(store, step, keep_every_steps=10)
    assert steps_of(store) == [12, 11, 10]
    disk.room = disk.used()
    save(store, 13, keep_every_steps=10)
    assert steps_of(store) == [13, 12, 10]
    disk.room = disk.used() - 100
    with pytest.raises(StorageFullError):
        save(store, 20, keep_every_steps=1)
    assert steps_of(store) == [13, 12, 10]


def passed_over(store: LocalStore) -> None:
    """A resume could not read the older one."""
    catalog = read_catalog(store)
    note_passed(store, catalog, add=[catalog.complete[1].key])


def pinned(store: LocalStore) -> None:
    write_keys(store, PINNED, [one.key for one in read_catalog(store).complete if one.step == 1])


def perhaps_pinned(store: LocalStore) -> None:
    store.write(PINNED, b"{")


@pytest.mark.parametrize("mark", [passed_over, pinned, perhaps_pinned])
def test_what_is_marked_stays(disk: LimitedDisk, store: LocalStore, mark: Callable[[LocalStore], None]) -> None:
    save(store, 1)
    save(store, 2)
    mark(store)
    disk.room = disk.used() + 1000
    with pytest.raises(StorageFullError):
        save(store, 3)
    assert steps_of(store) == [2, 1]


@pytest.mark.promise("a disk that fills, at whatever byte, takes no state from storage and leaves nothing half-written")
def test_the_one_before_stays_where_the_newest_is_not_good_any_more(disk: LimitedDisk, store: LocalStore) -> None:
    """What has been read back once may have rotted since."""
    save(store, 1)
    save(store, 2)
    newest = read_catalog(store).complete[0].part_files[0].path
    (disk.root / newest).write_bytes(b"rot")
    disk.room = disk.used() + 1000
    with pytest.raises(StorageFullError):
        save(store, 3)
    assert steps_of(store) == [2, 1]


def test_batches_that_nothing_needs_go_and_no_others(disk: LimitedDisk, store: LocalStore) -> None:
    save(store, 1)
    for first in (2, 4, 6):
        log(store, first, first + 1)
    save(store, 5)
    assert batches_of(store) == [(2, 3), (4, 5), (6, 7)], "the checkpoint before needs them"
    assert stored_points(read_catalog(store))[0].step == 7
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer, "_FILES_BYTES", 20_000)  # more than the older checkpoint has, less than with its batches
        disk.room = disk.used() + 1000
        save(store, 8)
    assert steps_of(store) == [8, 5]
    assert batches_of(store) == [(6, 7)]


def test_the_checkpoint_that_the_newest_logged_state_is_redone_on_stays(disk: LimitedDisk, store: LocalStore) -> None:
    """An attempt that went back to before the newest checkpoint has not made one of its own yet."""
    save(store, 1)
    log(store, 2, 3)
    save(store, 3)
    log(store, 3, 6, timeline=T2, follows=T1)
    log(store, 2, 2)
    newest = stored_points(read_catalog(store))[0]
    assert (newest.timeline, newest.step, newest.checkpoint.step) == (T2, 6, 1)
    disk.room = disk.used() + 100
    with pytest.raises(StorageFullError):
        save(store, 7, timeline=T2)
    after = stored_points(read_catalog(store))[0]
    assert (after.timeline, after.step, after.checkpoint.step) == (T2, 6, 1)


def test_where_nobody_says_what_is_free_a_write_that_is_refused_makes_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = LimitedDisk(monkeypatch, tmp_path / "disk", counted=False)
    store = LocalStore(disk.root)
    save(store, 1)
    size = disk.used()
    save(store, 2)
    disk.room = size * 2 + 1000
    save(store, 3)
    assert disk.refused == 1
    assert steps_of(store) == [3, 2]
    disk.room = size + 500
    with pytest.raises(StorageFullError, match="No space left"):
        save(store, 4)
    assert steps_of(store) == [3], "it may have gone: what is newest is good"
    assert verify_files(store, read_catalog(store).complete[0].part_files) == []


def test_a_store_that_cannot_be_asked_for_room_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("os.statvfs", broken)
    with pytest.raises(StorageError, match=r"could not look for room at .*Input/output error"):
        LocalStore(tmp_path).free()


def test_room_is_looked_for_where_a_directory_will_be(tmp_path: Path) -> None:
    free = LocalStore(tmp_path / "not" / "there").free()
    assert free is not None
    assert free > 0


# Wherever it fills


def attempt(write: Callable[[LocalStore], object], store: LocalStore) -> StorageFullError | None:
    try:
        write(store)
    except StorageFullError as error:
        return error
    return None


def every_byte(write: Callable[[LocalStore], object], make: Callable[[LocalStore], object], stride: int) -> int:
    """Fill the disk at one byte after the other; returns at how many."""
    count = 0
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as directory:
        disk = LimitedDisk(patch, Path(directory), counted=False)
        store = LocalStore(disk.root)
        make(store)
        before, used = store.find("", unfinished=True), disk.used()
        points = [one.key for one in stored_points(read_catalog(store))]
        while True:
            disk.room = used + count
            found = attempt(write, store)
            if found is None:
                break
            assert "No space left on device" in str(found)
            assert store.find("", unfinished=True) == before, f"at byte {count}"
            assert [one.key for one in stored_points(read_catalog(store))] == points
            count += stride
        assert len(stored_points(read_catalog(store))) > len(points), "with room again it is there"
        assert all(verify_files(store, one.part_files) == [] for one in read_catalog(store).complete)
    return count


@pytest.mark.promise("a disk that fills, at whatever byte, takes no state from storage and leaves nothing half-written")
@pytest.mark.parametrize("stride", [997, pytest.param(1, marks=pytest.mark.slow)])
def test_a_disk_may_fill_at_any_byte_of_a_checkpoint(stride: int) -> None:
    assert every_byte(lambda store: save(store, 2, spec=TINY), lambda store: save(store, 1, spec=TINY), stride) > 2000


@pytest.mark.promise("a disk that fills, at whatever byte, takes no state from storage and leaves nothing half-written")
@pytest.mark.parametrize("stride", [97, pytest.param(1, marks=pytest.mark.slow)])
def test_a_disk_may_fill_at_any_byte_of_a_batch(stride: int) -> None:
    assert every_byte(lambda store: log(store, 2, 3, nbytes=1000), lambda store: save(store, 1), stride) > 1000
