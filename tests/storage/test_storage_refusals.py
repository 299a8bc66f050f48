"""What a storage refuses without being broken: to delete, to list for a moment, to sync directories."""

from __future__ import annotations

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

from memckpt.errors import StorageError
from memckpt.storage import local_store
from memckpt.storage.catalog import read_catalog
from memckpt.storage.local_store import LocalStore
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
