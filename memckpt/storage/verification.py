"""Verification of stored files by size and checksum."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import xxhash

from memckpt.errors import StorageError
from memckpt.storage.store import Store, StoredFile, is_missing

_PIECE_BYTES = 8 << 20


def matches(store: Store, file: StoredFile, progress: Callable[[int], None] | None = None) -> str | None:
    """Read a file and compare its size and checksum. Returns the difference; None: there is none.

    `progress` is called with the bytes read since its last call.

    Raises:
        StorageError: the file exists and cannot be read; its content may be good.
    """
    digest, nbytes = xxhash.xxh3_64(), 0
    try:
        with store.open(file.path) as stream:
            while chunk := stream.read(_PIECE_BYTES):
                digest.update(chunk)
                nbytes += len(chunk)
                if progress is not None:
                    progress(len(chunk))
    except StorageError as error:
        if is_missing(error):
            return f"{file.path}: the file is missing"
        raise
    if nbytes != file.nbytes:
        return f"{file.path}: expected {file.nbytes} bytes, found {nbytes}"
    if digest.hexdigest() != file.xxh3:
        return f"{file.path}: expected checksum {file.xxh3}, found {digest.hexdigest()}"
    return None


class Examined(NamedTuple):
    """Problems of examined files: those proved damaged, and those that could not be read and may be good."""

    damaged: list[str]
    unreadable: list[str]


def examine(store: Store, files: Iterable[StoredFile], progress: Callable[[int], None] | None = None) -> Examined:
    """Read files and compare sizes and checksums. `progress` is called with the bytes read since its last call."""
    found = Examined([], [])
    for file in files:
        try:
            problem = matches(store, file, progress)
        except StorageError as error:
            found.unreadable.append(str(error))
            continue
        if problem is not None:
            found.damaged.append(problem)
    return found


def verify_files(store: Store, files: Iterable[StoredFile], progress: Callable[[int], None] | None = None) -> list[str]:
    """Read files and compare sizes and checksums. Returns the problems.

    Raises:
        StorageError: a file cannot be read.
    """
    found = examine(store, files, progress)
    if found.unreadable:
        raise StorageError("; ".join(found.unreadable))
    return found.damaged


def read_back(store: Store, files: Sequence[StoredFile]) -> None:
    """Verify files that have just been written, and drop them from the page cache.

    Raises:
        StorageError: a file differs from what was written.
    """
    problems = verify_files(store, files)
    if problems:
        raise StorageError(f"files just written cannot be read back: {'; '.join(problems)}")
    for file in files:
        store.drop_cached(file.path)
