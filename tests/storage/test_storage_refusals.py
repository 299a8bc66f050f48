"""What a storage refuses without being broken; files past the page cache; commit files that are read once."""

from __future__ import annotations

import ctypes
import errno
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem
from fsspec.spec import AbstractFileSystem

from memckpt.agent.saving.writer import checkpoint_writer as writer
from memckpt.errors import ForeignStateError, StorageError
from memckpt.storage import local_store
from memckpt.storage.catalog import read_catalog, remove
from memckpt.storage.local_store import LocalStore
from memckpt.storage.owner import claim
from memckpt.storage.urls import open_store
from tests.support.storage.stored_parts import part_of, save_part, write

# Deleting


def refuse_to_delete(monkeypatch: pytest.MonkeyPatch, refused: str) -> None:
    """As a bucket with an object lock does, or a directory without permission."""
    delete = LocalStore._delete

    def refuse(self: LocalStore, path: str) -> None:
        if path == refused:
            raise PermissionError(errno.EPERM, "Operation not permitted", path)
        delete(self, path)

    monkeypatch.setattr(LocalStore, "_delete", refuse)


@pytest.mark.promise(
    "a refused delete fails no checkpoint, and a listing that fails is an error on every file system, never an "
    "empty store"
)
def test_a_refused_delete_is_no_failed_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is reported beside the checkpoint, which is there; what else may go, goes."""
    store = LocalStore(tmp_path)
    kept, gone = write(store, part_of(1)), write(store, part_of(2))
    refuse_to_delete(monkeypatch, kept.commit_path)
    message = save_part(tmp_path, part_of(3))
    assert message.step == 3
    assert f"could not delete {kept.commit_path}" in message.untidy
    assert [one.record for one in read_catalog(store).complete] == [3, 1]
    assert store.find(gone.base_directory) == []
    assert store.find(kept.base_directory) != [], "a commit file that stays keeps what it names"


def test_leftovers_that_cannot_be_deleted_do_not_stop_the_next_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, dead = LocalStore(tmp_path), part_of(2)
    store.write(dead.state_path, b"half")
    store.write(f"{dead.base_directory}/__0_0.distcp", b"half")
    refuse_to_delete(monkeypatch, dead.state_path)
    message = save_part(tmp_path, part_of(3), abandoned=(dead,))
    assert f"could not delete {dead.state_path}" in message.untidy
    assert store.find(dead.base_directory) == []
    monkeypatch.undo()
    assert save_part(tmp_path, part_of(4)).untidy == ""
    assert dead.state_path not in store.find("")


def test_a_listing_that_fails_behind_the_commit_is_no_failed_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, part = LocalStore(tmp_path), part_of(3)
    find = LocalStore._find

    def fail(self: LocalStore, *where: Any) -> Iterator[str]:
        if (tmp_path / part.commit_path).exists():
            raise OSError(errno.ETIMEDOUT, "Connection timed out")
        return find(self, *where)

    monkeypatch.setattr(LocalStore, "_find", fail)
    assert "Connection timed out" in save_part(tmp_path, part).untidy
    monkeypatch.undo()
    assert [one.record for one in read_catalog(store).complete] == [3]


# Listing


class Flaky(LocalFileSystem):
    """As `sftp://`, `smb://`, `webdav://`: fsspec's generic `find()`. Listings of `failing` time out."""

    protocol = "flaky"
    cachable = False
    failing = ""

    def ls(self, path: str, detail: bool = False, **rest: Any) -> Any:
        if Flaky.failing and str(path).endswith(Flaky.failing):
            raise OSError(errno.ETIMEDOUT, "Connection timed out")
        return super().ls(path, detail=detail, **rest)

    def find(self, *arguments: Any, **rest: Any) -> Any:
        return AbstractFileSystem.find(self, *arguments, **rest)

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        return LocalFileSystem._strip_protocol(str(path).replace("flaky://", ""))


@pytest.fixture
def flaky(monkeypatch: pytest.MonkeyPatch) -> type[Flaky]:
    monkeypatch.setattr(Flaky, "failing", "")
    fsspec.register_implementation("flaky", Flaky, clobber=True)
    return Flaky


@pytest.mark.parametrize("failing", ["commit", "000000000001", "base", "node"])
def test_a_listing_that_fails_is_an_error_and_no_empty_store(tmp_path: Path, flaky: type[Flaky], failing: str) -> None:
    store = open_store(f"flaky://{tmp_path}")
    assert read_catalog(store).complete == (), "a place where nothing is yet"
    for record in (1, 2):
        write(LocalStore(tmp_path), part_of(record))
    assert [one.record for one in read_catalog(store).complete] == [2, 1]
    flaky.failing = failing
    if failing in ("000000000001", "node"):  # of one checkpoint, which is named and hides no other
        assert any(path.endswith(failing) for path in read_catalog(store).unlisted)
        return
    with pytest.raises(StorageError, match=r"could not list .* Connection timed out"):
        read_catalog(store)


# Syncing directories


@pytest.fixture
def nothing_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_store, "_unsynced", set())


def refuse_to_sync(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    sync = os.fsync

    def refuse(fd: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{fd}"):
            raise OSError(number, os.strerror(number))
        sync(fd)

    monkeypatch.setattr(os, "fsync", refuse)


@pytest.mark.usefixtures("nothing_said")
@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP, errno.ENOSYS])
def test_directories_that_cannot_be_synced_are_named_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, number: int
) -> None:
    refuse_to_sync(monkeypatch, number)
    for record in (1, 2):
        write(LocalStore(tmp_path), part_of(record))
    assert [one.record for one in read_catalog(LocalStore(tmp_path)).complete] == [2, 1]
    said = [one for one in caplog.records if one.levelno == logging.WARNING]
    assert len(said) == 1
    assert "cannot be synced" in said[0].getMessage()


@pytest.mark.usefixtures("nothing_said")
def test_any_other_error_of_a_sync_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_to_sync(monkeypatch, errno.EIO)
    with pytest.raises(StorageError, match="could not write a/b"):
        LocalStore(tmp_path).write("a/b", b"x")


@pytest.mark.promise("files are read back from the medium after writing, and no early error of the medium is lost")
def test_what_is_written_is_on_the_medium_piece_by_piece_and_not_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So it does not throw out of memory what training reads, and is read back from the medium."""
    monkeypatch.setattr(local_store, "_PIECE_BYTES", 1 << 20)
    advised: list[tuple[int, int]] = []
    advise = os.posix_fadvise

    def noting(fd: int, offset: int, length: int, advice: int) -> None:
        assert advice == os.POSIX_FADV_DONTNEED
        advised.append((offset, length))
        advise(fd, offset, length, advice)

    monkeypatch.setattr(os, "posix_fadvise", noting)
    data = os.urandom(5 << 20)
    with LocalStore(tmp_path).create("a") as stream:
        for start in range(0, len(data), 1 << 20):
            stream.write(data[start : start + (1 << 20)])
    assert advised == [(index << 20, 1 << 20) for index in range(4)] + [(0, 0)]
    assert LocalStore(tmp_path).read("a") == data


@pytest.mark.promise("files are read back from the medium after writing, and no early error of the medium is lost")
@pytest.mark.promise('`"replica"` (default)')
def test_an_error_that_the_medium_reports_early_is_not_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel says it once: the fsync at the end would succeed."""
    monkeypatch.setattr(local_store, "_PIECE_BYTES", 1)

    def failing(*_: Any) -> int:
        ctypes.set_errno(errno.ENOSPC)
        return -1

    draining = local_store.Draining((tmp_path / "x").open("wb"))
    draining._sync_range = failing
    with pytest.raises(OSError, match="No space left"):
        draining.write(b"data")


def test_a_file_system_without_early_writing_is_synced_at_the_end(tmp_path: Path) -> None:
    def refusing(*_: Any) -> int:
        ctypes.set_errno(errno.ESPIPE)
        return -1

    with (tmp_path / "x").open("wb") as file:
        draining = local_store.Draining(file)
        draining._sync_range = refusing
        for _ in range(3):
            draining.write(bytes(local_store._PIECE_BYTES))
        draining.finish()
    assert (tmp_path / "x").stat().st_size == 3 * local_store._PIECE_BYTES


def test_commit_files_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = LocalStore(tmp_path)
    for record in range(1, 6):
        write(store, part_of(record))
    known: dict[str, Any] = {}
    first = read_catalog(store, known)
    read: list[str] = []
    opened = LocalStore._open
    monkeypatch.setattr(LocalStore, "_open", lambda self, path: read.append(path) or opened(self, path))  # type: ignore[func-returns-value]
    assert read_catalog(store, known) == first
    remove(store, first.complete[-1])
    part = write(store, part_of(6))
    read.clear()
    second = read_catalog(store, known)
    assert [one.record for one in second.complete] == [6, 5, 4, 3, 2]
    assert [path for path in read if path.startswith("commit/")] == [part.commit_path]
    assert set(known) == {path for path in second.files if path.startswith("commit/")}


def test_of_several_nodes_the_last_one_tidies_up_and_the_others_read_no_more_than_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = LocalStore(tmp_path)
    claim(store, "run")
    read: list[str] = []
    opened = LocalStore._open
    monkeypatch.setattr(LocalStore, "_open", lambda self, path: read.append(path) or opened(self, path))  # type: ignore[func-returns-value]

    whole: list[bool] = []

    def save(record: int, rank: int) -> list[str]:
        rest = {"ranks": (rank,), "world_size": 3, "run": "run", "full": True, "serves": (rank,)}
        writer._known.clear()  # each node has a writer of its own
        read.clear()
        part = part_of(record, node=f"n{rank}", **rest)
        whole.append(save_part(store.url, part, rank_states={rank: b""}, witness="owner.json").whole)
        return [path for path in read if path.startswith("commit/")]

    for record in range(1, 5):
        found = [save(record, rank) for rank in range(3)]
        assert len(found[1]) == 1, "the other part of this checkpoint, and no other checkpoint's"
        assert [one.record for one in read_catalog(store).complete] == [record]
        assert whole[-3:] == [False, False, True]


def test_a_part_of_other_ranks_is_not_replaced(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)

    def save(rank: int, state: bytes) -> None:
        part = part_of(1, node="n", ranks=(rank,), world_size=2, full=True, serves=(rank,))
        save_part(store.url, part, rank_states={rank: state})

    save(1, b"first")
    before = {path: store.read(path) for path in store.find("")}
    with pytest.raises(ForeignStateError, match=r"part of ranks \[0\], found that of ranks \[1\], which is kept"):
        save(0, b"other")
    assert {path: store.read(path) for path in store.find("")} == before
    save(1, b"again")
    assert len(store.find("")) == len(before)
