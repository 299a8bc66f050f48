"""Files past the page cache, and commit files that are read once."""

from __future__ import annotations

import ctypes
import errno
import os
from pathlib import Path
from typing import Any

import pytest

from memckpt.agent.saving.writer import checkpoint_writer as writer
from memckpt.errors import ForeignStateError
from memckpt.storage import local_store
from memckpt.storage.catalog import read_catalog, remove
from memckpt.storage.local_store import LocalStore
from memckpt.storage.owner import claim
from tests.support.storage.stored_parts import part_of, save_part, write


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

    def save(record: int, rank: int) -> list[str]:
        rest = {"ranks": (rank,), "world_size": 3, "run": "run", "full": True, "serves": (rank,)}
        writer._known.clear()  # each node has a writer of its own
        read.clear()
        save_part(store.url, part_of(record, node=f"n{rank}", **rest), rank_states={rank: b""}, witness="owner.json")
        return [path for path in read if path.startswith("commit/")]

    for record in range(1, 5):
        found = [save(record, rank) for rank in range(3)]
        assert len(found[1]) == 1, "the other part of this checkpoint, and no other checkpoint's"
        assert [one.record for one in read_catalog(store).complete] == [record]


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
