"""The storage tier's files: written whole or not at all, checked byte by byte, never executed."""

from __future__ import annotations

import dataclasses
import enum
import gc
import io
import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import msgspec
import pytest
import torch

from memckpt.errors import ConfigurationError, DamagedStateError, StorageError, UnsupportedError
from memckpt.state.records import Timeline
from memckpt.state.spec import TensorSpec
from memckpt.storage import dcp as our_dcp
from memckpt.storage.catalog import read_catalog, remove
from memckpt.storage.dcp import read_metadata
from memckpt.storage.format import (
    FORMAT_VERSION,
    Batch,
    Part,
    decode_commit,
    decode_node_state,
    encode_commit,
    encode_node_state,
)
from memckpt.storage.local_store import LocalStore
from memckpt.storage.retention import leftovers, superseded
from memckpt.storage.store import Store, matches, verify_files
from memckpt.storage.urls import ObjectStore, open_store
from tests.support.storage.stored_parts import part_of, some_state, write

# Files


def test_a_file_is_there_when_it_is_whole(store: Store) -> None:
    stored = store.write("a/b/c", b"some bytes")
    assert store.read("a/b/c") == b"some bytes"
    assert stored.nbytes == 10
    assert matches(store, stored) is None
    assert matches(store, store.write("empty", b"")) is None
    assert store.find("a") == ["a/b/c"]
    store.delete("a/b/c")
    store.delete("a/b/c")
    assert store.find("a") == []


def test_a_file_whose_writing_fails_is_not_there(store: Store) -> None:
    def write_half() -> None:
        with store.create("a/b") as stream:
            stream.write(b"half")
            raise KeyError("no more")

    with pytest.raises(KeyError):
        write_half()
    gc.collect()  # a file that was opened must do nothing more
    assert store.find("", unfinished=True) == []
    store.write("a/b", b"old")
    with pytest.raises(KeyError):
        write_half()
    gc.collect()
    assert store.read("a/b") == b"old"
    assert store.find("", unfinished=True) == ["a/b"]


def test_what_is_listed_is_what_is_below_a_directory(store: Store) -> None:
    assert store.find("") == store.find("a") == []
    for path in ("a/b/1", "a/b2/1", "a/c", "d/e/f/g"):
        store.write(path, b"x")
    assert store.find("") == ["a/b/1", "a/b2/1", "a/c", "d/e/f/g"]
    assert store.find("a/b") == ["a/b/1"]
    assert store.find("d") == ["d/e/f/g"]
    store.delete_directory("a/b")
    store.delete_directory("a/nothing")
    assert store.find("a") == ["a/b2/1", "a/c"]


def test_another_process_of_the_same_store_is_seen(store: Store) -> None:
    """Listings and sizes are not remembered."""
    other = open_store(store.url)
    store.write("a/b", b"long content")
    assert other.find("a") == ["a/b"]
    assert other.read("a/b") == b"long content"
    stored = store.write("a/b", b"short")
    store.write("a/c", b"")
    assert other.read("a/b") == b"short"
    assert matches(other, stored) is None
    assert other.find("a") == ["a/b", "a/c"]
    assert other.read("a/c") == b""


def test_deleting_leaves_no_directories(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "store")
    for path in ("a/b/c/d", "a/b/e"):
        store.write(path, b"x")
    store.delete("a/b/c/d")
    assert not (tmp_path / "store/a/b/c").exists()
    assert store.read("a/b/e") == b"x"
    store.delete("a/b/e")
    assert list((tmp_path / "store").iterdir()) == []


def test_a_file_that_cannot_be_written_or_read_is_named(tmp_path: Path, store: Store) -> None:
    (tmp_path / "file").write_text("not a directory")
    with pytest.raises(StorageError, match=r"could not write inside/x in .*file"):
        LocalStore(tmp_path / "file").write("inside/x", b"")
    with pytest.raises(StorageError, match="could not read nothing/here"):
        store.read("nothing/here")


def test_errors_of_a_driver_are_errors_of_storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """botocore's, for one, are no OSError: an agent's writer and the command line must know them all the same."""
    store = open_store(f"memory://{tmp_path.name}")
    assert isinstance(store, ObjectStore)
    lost = type("NoCredentialsError", (Exception,), {"__module__": "botocore.exceptions"})

    def fail(*_: Any, **__: Any) -> None:
        raise lost("Unable to locate credentials")

    for name in ("open", "find", "ls"):
        monkeypatch.setattr(store._fs, name, fail)
    for call in (lambda: store.write("a", b""), lambda: store.read("a"), lambda: store.find("a")):
        with pytest.raises(StorageError, match="NoCredentialsError: Unable to locate credentials"):
            call()


def test_a_catalog_is_read_while_retention_deletes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = LocalStore(tmp_path)
    gone, kept = write(store, part_of(1)), write(store, part_of(2))
    listed = store.find("commit")
    store.delete(gone.commit_path)
    monkeypatch.setattr(store, "find", lambda prefix, unfinished, unlisted: listed if prefix == "commit" else [])
    catalog = read_catalog(store)
    assert [one.record for one in catalog.checkpoints] == [kept.record]
    assert catalog.damaged == {}


def test_an_unknown_kind_of_store_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"storage.url: expected .* found 'quux://x'"):
        open_store("quux://x")
    # fsspec opens each of these as a local path.
    for url in ("s3://", "s3:///some/run", "gs://"):
        with pytest.raises(ConfigurationError, match=rf"storage.url: expected a bucket .* found {url!r}"):
            open_store(url)
    for url in ("s3:", "s3:/bucket/run", "a:b/c"):
        with pytest.raises(ConfigurationError, match=rf"storage.url: expected .*://.* found {url!r}.* \./{url}"):
            open_store(url)
    assert open_store("./a:b/c").url.endswith("/a:b/c")
    assert isinstance(open_store("memory://x"), ObjectStore)


# What must be durable, by a model of a file system that drops what was not synced


class PowerCut(BaseException):
    """The machine stops here."""


class Disk:
    """Follows what a LocalStore does and can say what a power cut would leave of it at any moment."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, stop_after: int | None) -> None:
        self.operations: list[str] = []
        self._stop_after = stop_after
        for owner, name in ((os, "fsync"), (Path, "replace"), (Path, "unlink")):
            monkeypatch.setattr(owner, name, self._counting(name, getattr(owner, name)))
        self.synced: dict[str, int] = {}

    def _counting(self, name: str, original: Any) -> Any:
        def counted(first: Any, *rest: Any, **settings: Any) -> Any:
            if self._stop_after is not None and len(self.operations) >= self._stop_after:
                raise PowerCut
            result = original(first, *rest, **settings)
            target = os.readlink(f"/proc/self/fd/{first}") if name == "fsync" else str(first)
            self.operations.append(f"{name} {target}")
            if name == "fsync" and os.path.isfile(target):
                self.synced[target] = os.path.getsize(target)
            if name == "replace":
                self.synced[str(rest[0])] = self.synced.pop(str(first), 0)
            return result

        return counted

    def cut(self, root: Path) -> None:
        """Leave of every file what had been synced, as the most forgetful disk would."""
        for path in [each for each in root.rglob("*") if each.is_file()]:
            with path.open("r+b") as file:
                file.truncate(self.synced.get(str(path), 0))


@pytest.mark.promise(
    "a checkpoint in storage is complete or does not exist, after a power cut, damage, or a flip of any single bit"
)
@pytest.mark.promise("a power cut or a flipped bit never leads to a step that loads wrongly")
def test_a_power_cut_anywhere_leaves_the_old_checkpoint_and_never_a_wrong_new_one(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        disk = Disk(monkeypatch, None)
        write(LocalStore(tmp_path / "count"), part_of(2))
    total = len(disk.operations)
    assert total >= 12  # four files: each is synced, renamed, and its directory synced
    for stop_after in range(total + 1):
        root = tmp_path / f"cut-{stop_after}"
        with pytest.MonkeyPatch.context() as monkeypatch:
            disk = Disk(monkeypatch, None)
            write(LocalStore(root), part_of(1))
            disk.operations.clear()
            disk._stop_after = stop_after
            try:
                write(LocalStore(root), part_of(2))
                finished = True
            except (PowerCut, DamagedStateError):  # DCP turns whatever happens into an exception of its own
                finished = False
        disk.cut(root)
        catalog = read_catalog(LocalStore(root))
        found = [one.record for one in catalog.complete]
        assert found in ([1], [2, 1]), disk.operations
        assert finished <= (found == [2, 1])
        for one in catalog.complete:
            assert verify_files(LocalStore(root), one.part_files) == []


def test_every_file_is_synced_before_it_gets_its_name_and_its_directory_after(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        disk = Disk(monkeypatch, None)
        write(LocalStore(tmp_path / "store"), part_of(1))
    renames = [index for index, operation in enumerate(disk.operations) if operation.startswith("replace")]
    assert len(renames) == 4
    for index in renames:
        partial = disk.operations[index].removeprefix("replace ")
        assert disk.operations[index - 1] == f"fsync {partial}"
        assert disk.operations[index + 1] == f"fsync {Path(partial).parent}"
    assert ".json" in disk.operations[renames[-1]]


# Damage


@pytest.mark.promise("a power cut or a flipped bit never leads to a step that loads wrongly")
def test_any_flipped_bit_and_any_cut_is_noticed(store: Store) -> None:
    part = write(store, part_of(1))
    (checkpoint,) = read_catalog(store).complete
    for file in part.files:
        data = store.read(file.path)
        for position in {0, 1, len(data) // 3, len(data) // 2, len(data) - 1}:
            for bit in (0, 5):
                damaged = bytearray(data)
                damaged[position] ^= 1 << bit
                store.write(file.path, bytes(damaged))
                assert any(file.path in problem for problem in verify_files(store, checkpoint.part_files))
        for length in (0, 1, len(data) - 1):
            store.write(file.path, data[:length])
            assert any(f"found {length}" in problem for problem in verify_files(store, checkpoint.part_files))
        store.delete(file.path)
        assert any(file.path in problem for problem in verify_files(store, checkpoint.part_files))
        store.write(file.path, data)
    assert verify_files(store, checkpoint.part_files) == []


@pytest.mark.promise(
    "a checkpoint in storage is complete or does not exist, after a power cut, damage, or a flip of any single bit"
)
def test_any_single_bit_of_any_file_counts(tmp_path: Path) -> None:
    """Tensors, DCP's metadata, the node's state, the commit file: each bit of each, and each cut of the last."""
    store = LocalStore(tmp_path)
    part = write(store, part_of(1))
    by_kind = {Path(file.path).suffix or Path(file.path).name: file for file in part.files}
    assert by_kind.keys() == {".distcp", ".metadata", ".msgpack"}
    flipped = 0
    for stored in part.files:
        with (tmp_path / stored.path).open("r+b", buffering=0) as file:
            for _ in each_flip(file):
                flipped += 1
                assert matches(store, stored) is not None
    with (tmp_path / part.commit_path).open("r+b", buffering=0) as file:
        for _ in each_flip(file):
            flipped += 1
            catalog = read_catalog(store)
            assert catalog.checkpoints == ()
            assert list(catalog.damaged) == [part.commit_path]
    data = store.read(part.commit_path)
    for length in range(len(data)):
        with pytest.raises(DamagedStateError):
            decode_commit(data[:length], part.commit_path)
    assert flipped == 8 * sum((tmp_path / path).stat().st_size for path in store.find(""))
    (checkpoint,) = read_catalog(store).complete
    assert verify_files(store, checkpoint.part_files) == []


def each_flip(file: IO[bytes]) -> Iterator[None]:
    """With one bit after the other turned, and turned back afterwards."""
    for position, byte in enumerate(file.read()):
        for bit in range(8):
            os.pwrite(file.fileno(), bytes([byte ^ 1 << bit]), position)
            yield
        os.pwrite(file.fileno(), bytes([byte]), position)


def test_a_commit_file_in_another_place_is_passed_over(store: Store) -> None:
    data = store.read(write(store, part_of(1)).commit_path)
    elsewhere = part_of(2).commit_path
    store.write(elsewhere, data)
    assert elsewhere in read_catalog(store).damaged


def test_what_another_version_wrote_is_refused(store: Store) -> None:
    part = part_of(1, format=FORMAT_VERSION + 1)
    store.write(part.commit_path, encode_commit(part))
    with pytest.raises(UnsupportedError, match=f"expected format {FORMAT_VERSION}, found {FORMAT_VERSION + 1}"):
        read_catalog(store)


class Harmful:
    """Unpickling it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


@pytest.mark.promise("reading storage executes nothing")
def test_a_planted_pickle_is_refused_and_nothing_of_it_runs(store: Store, tmp_path: Path) -> None:
    planted = tmp_path / "was executed"
    part = write(store, part_of(1))
    target = {"model.weight": torch.zeros(2, 3)}
    metadata = f"{part.base_directory}/.metadata"
    good = store.read(metadata)
    store.write(metadata, pickle.dumps(Harmful(planted)))
    with pytest.raises(DamagedStateError, match=r"Path"):
        our_dcp.load_into(store, part.base_directory, target)
    store.write(metadata, b"no pickle at all")
    with pytest.raises(DamagedStateError, match="cannot be read"):
        our_dcp.load_into(store, part.base_directory, target)
    store.write(metadata, good)
    (data,) = [file.path for file in part.files if file.path.endswith(".distcp")]
    store.write(data, pickle.dumps(Harmful(planted)))
    with pytest.raises(DamagedStateError):
        our_dcp.load_into(store, part.base_directory, target)
    for path in (part.state_path, part.commit_path):
        store.write(path, pickle.dumps(Harmful(planted)))
    assert read_catalog(store).complete == ()
    assert not planted.exists()


class _AsGetattr(pickle.Pickler):
    """Pickles enumerations as Python 3.11.0 to 3.11.3 do."""

    def reducer_override(self, found: Any) -> Any:
        return (getattr, (type(found), found.name)) if isinstance(found, enum.Enum) else NotImplemented


class Attribute:
    """Unpickles to an attribute, whatever it is of."""

    def __init__(self, of: object, name: str) -> None:
        self.of, self.name = of, name

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self.of, self.name)


def test_metadata_of_any_python_can_be_read(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    part = write(store, part_of(1))
    path = f"{part.base_directory}/.metadata"
    expected = read_metadata(store.read(path))
    with io.BytesIO() as file:
        _AsGetattr(file).dump(expected)
        written = file.getvalue()
    assert b"getattr" in written
    assert read_metadata(written) == expected
    for of, name in ((torch.Size, "__init__"), (expected, "planner_data")):
        with pytest.raises(DamagedStateError, match=r"found attribute"):
            read_metadata(pickle.dumps(Attribute(of, name)))


@pytest.mark.parametrize("path", ["../0.distcp", "/etc/passwd", "a/../../0.distcp", "", 7])
def test_metadata_name_no_file_outside_of_their_checkpoint(tmp_path: Path, path: Any) -> None:
    store = LocalStore(tmp_path)
    part = write(store, part_of(1))
    metadata = read_metadata(store.read(f"{part.base_directory}/.metadata"))
    places = metadata.storage_data
    metadata.storage_data = {key: dataclasses.replace(one, relative_path=path) for key, one in places.items()}
    store.write(f"{part.base_directory}/.metadata", pickle.dumps(metadata))
    with pytest.raises(DamagedStateError, match=r"expected paths of files in the store|metadata cannot be read"):
        our_dcp.load_into(store, part.base_directory, {"model.weight": torch.zeros(2, 3)})


def test_a_state_of_which_no_layout_can_be_made_is_damaged() -> None:
    whole = some_state()
    assert decode_node_state(encode_node_state(whole)) == whole
    for wrong in ({"slots": 1 << 40}, {"local_ranks": (5,)}, {"by_value": (TensorSpec("x", (-1,), "float32"),)}):
        state = msgspec.structs.replace(whole, spec=msgspec.structs.replace(whole.spec, **wrong))
        with pytest.raises(DamagedStateError, match="expected a node's state with a valid layout spec"):
            decode_node_state(encode_node_state(state))


# Which checkpoints there are


def test_a_checkpoint_exists_when_all_its_parts_do(store: Store) -> None:
    write(store, part_of(1, node="a", ranks=(0, 1), world_size=4))
    assert read_catalog(store).complete == ()
    write(store, part_of(1, node="b", ranks=(2, 3), world_size=4))
    (checkpoint,) = read_catalog(store).complete
    assert checkpoint.part_serving(3).node == "a"
    assert checkpoint.part_of(3).node == "b"
    assert verify_files(store, checkpoint.part_files) == []


def test_later_attempts_come_first(store: Store) -> None:
    for timeline, record in ((1, 5), (2, 3), (1, 9), (10, 1)):
        write(store, part_of(record, timeline=Timeline(timeline, "x")))
    found = [(one.timeline.number, one.record) for one in read_catalog(store).complete]
    assert found == [(10, 1), (2, 3), (1, 9), (1, 5)]


def test_retention_keeps_the_last_ones_and_every_so_many_steps(store: Store) -> None:
    for record in range(1, 11):
        write(store, part_of(record))
    catalog = read_catalog(store)
    gone = [one.record for one in superseded(catalog.checkpoints, 2, 4)]
    assert sorted(gone) == [1, 2, 3, 5, 6, 7]
    for one in superseded(catalog.checkpoints, 2, None):
        remove(store, one)
    assert [one.record for one in read_catalog(store).complete] == [10, 9]
    assert not [path for path in store.find("") if "000000000003" in path]


def test_an_incomplete_checkpoint_newer_than_the_newest_is_left_alone(store: Store) -> None:
    write(store, part_of(1))
    write(store, part_of(2, node="a", ranks=(0,), world_size=2))
    write(store, part_of(3))
    write(store, part_of(4, node="a", ranks=(0,), world_size=2))
    catalog = read_catalog(store)
    assert [one.record for one in superseded(catalog.checkpoints, 2, None)] == [2]


# What killed writers leave


def uncommitted(store: Store, part: Part) -> list[str]:
    """A part as a writer leaves it that is killed before its last word."""
    written = write(store, part)
    store.delete(part.commit_path)
    return sorted(file.path for file in written.files)


def test_only_what_nobody_can_be_writing_is_left_over(store: Store) -> None:
    first, second = Timeline(1, "x"), Timeline(2, "y")
    pair = {"ranks": (0,), "world_size": 2}
    earlier = uncommitted(store, part_of(1, timeline=first, node="gone"))
    older = uncommitted(store, part_of(3, timeline=second, node="a"))
    of_another = uncommitted(store, part_of(3, timeline=second, node="b"))
    write(store, part_of(4, timeline=second, node="a", **pair))
    write(store, part_of(4, timeline=second, node="b", ranks=(1,), world_size=2))
    newer = uncommitted(store, part_of(5, timeline=second, node="a"))
    for path in ("notes.txt", "base/notes", "base/of/some/body/else", "commit/of/somebody"):
        store.write(path, b"not ours")
    catalog = read_catalog(store)
    assert [one.record for one in catalog.complete] == [4]
    assert catalog.latest_attempt == 2
    assert sorted(leftovers(catalog, "a", ())) == sorted(earlier + older)
    assert sorted(leftovers(catalog, "b", ())) == sorted(earlier + of_another)
    assert set(leftovers(catalog, "a", [part_of(5, timeline=second, node="a")])) == {*earlier, *older, *newer}
    assert sorted(leftovers(catalog, "a", [part_of(4, timeline=second, node="a")])) == sorted(earlier + older)


def test_where_nothing_is_complete_only_what_is_known_to_be_dead_is_left_over(store: Store) -> None:
    first, second = uncommitted(store, part_of(1)), uncommitted(store, part_of(2))
    catalog = read_catalog(store)
    assert catalog.latest_attempt == 1
    assert leftovers(catalog, "node", ()) == []
    assert sorted(leftovers(catalog, "node", [part_of(1)])) == first
    assert sorted(leftovers(catalog, "node", [part_of(2)])) == second


def test_files_that_were_cut_short_are_left_over(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    for record in (1, 2):
        write(store, part_of(record))
    cut = [f"{path}.partial-0123" for path in (part_of(1).commit_path, part_of(1).state_path)]
    cut.append(f"{part_of(1).base_directory}/__0_0.distcp.partial-0123")
    for path in cut:
        (tmp_path / path).write_bytes(b"half")
    assert sorted(leftovers(read_catalog(store), "node", ())) == sorted(cut)


def test_merged_metadata_that_was_cut_short_goes_with_its_writer(tmp_path: Path) -> None:
    """The last checkpoint of a training is written again, under the same name, and none comes after it."""
    store = LocalStore(tmp_path)
    alone, one_of_two = part_of(1), part_of(2, node="a", ranks=(0,), world_size=2)
    cut = {}
    for part in (alone, one_of_two):
        write(store, part)
        cut[part.record] = f"base/{part.place}/.metadata.partial-0123"
        (tmp_path / cut[part.record]).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / cut[part.record]).write_bytes(b"half")
    catalog = read_catalog(store)
    assert leftovers(catalog, "node", ()) == []
    assert leftovers(catalog, "node", [alone]) == [cut[1]]
    assert leftovers(catalog, "a", [one_of_two]) == [], "the other node may be writing it"


def test_formats_are_stable() -> None:
    """A change of the commit file's fields needs a new format version."""
    common = {
        "format", "timeline", "world_size", "ranks", "node", "full", "created", "files", "content", "serves", "run",
        "inexact",
    }  # fmt: skip
    assert {field.name for field in msgspec.structs.fields(Part)} == common | {"record", "step"}
    assert {field.name for field in msgspec.structs.fields(Batch)} == common | {"first", "last", "steps", "follows"}
    assert FORMAT_VERSION == 1
