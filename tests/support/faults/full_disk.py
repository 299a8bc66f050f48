"""A disk with a limited number of bytes: writes beyond it fail as on a full one."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, cast

import pytest

from memckpt.storage.local_store import LocalStore


class LimitedDisk:
    """Limits all LocalStores of this process while `monkeypatch` is in effect.

    `counted`: the disk reports its free bytes; one with a quota does not.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, root: Path, counted: bool = True) -> None:
        self.root = root
        self.room: int | None = None  # bytes that files below `root` may take; None: unlimited
        self.written = self.refused = 0  # bytes since the disk was made, and failed writes
        begin = LocalStore._open_partial

        @contextlib.contextmanager
        def beginning(store: LocalStore, partial: Path) -> Iterator[IO[bytes]]:
            with begin(store, partial) as file:
                yield cast("IO[bytes]", _Limited(self, file))

        monkeypatch.setattr(os, "fsync", lambda fd: None)  # slow, and the power stays on
        monkeypatch.setattr(LocalStore, "_open_partial", beginning)
        monkeypatch.setattr(LocalStore, "free", lambda store: self.free() if counted else None)

    def used(self) -> int:
        return sum(path.stat().st_size for path in self.root.rglob("*") if path.is_file())

    def free(self) -> int | None:
        return None if self.room is None else max(0, self.room - self.used())


class _Limited:
    def __init__(self, disk: LimitedDisk, file: IO[bytes]) -> None:
        self._disk, self._file = disk, file

    def write(self, data: Any) -> int:
        self._file.flush()
        free = self._disk.free()
        data = memoryview(data).cast("B")
        fits = data.nbytes if free is None else min(free, data.nbytes)
        self._file.write(data[:fits])
        self._file.flush()
        self._disk.written += fits
        if fits < data.nbytes:
            self._disk.refused += 1
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return fits

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)
