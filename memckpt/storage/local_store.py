"""Durable files in a directory of a local or mounted file system.

A file is written under a temporary name, synced and renamed, and the directory is synced.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import IO, Any, cast

from memckpt.storage.store import Store, partial_name, store_is_away

_log = logging.getLogger("memckpt.storage")
#: Errors of file systems that do not support syncing directories.
_REFUSED_SYNCS = (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.EBADF)
#: Errors of file systems without hard links.
_REFUSED_LINKS = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK)


class LocalStore(Store):
    """A directory of a local or mounted file system.

    The file `witness` must exist before anything is written, so that nothing goes to an empty mount point. Empty: a
    missing directory is created.
    """

    def __init__(self, root: Path, witness: str = "") -> None:
        self.root = root
        self.url = str(root)
        self._witness = witness

    @property
    def _is_away(self) -> bool:
        return bool(self._witness) and not (self.root / self._witness).exists()

    @contextlib.contextmanager
    def _replacing(self, path: str) -> Iterator[IO[bytes]]:
        target = self.root / path
        partial = target.with_name(partial_name(target.name))
        try:
            with self._open_partial(partial) as file:
                draining = Draining(file)
                yield cast("IO[bytes]", draining)
                draining.finish()
            partial.replace(target)
        except BaseException:  # raised again after the unfinished file is deleted, also for an interrupt
            partial.unlink(missing_ok=True)
            raise
        sync_directory(target.parent)

    def _write_new(self, path: str, data: bytes) -> bool:
        target = self.root / path
        partial = target.with_name(partial_name(target.name))
        try:
            with self._open_partial(partial) as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            target.hardlink_to(partial)
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno not in _REFUSED_LINKS:
                raise
            if target.exists():
                return False
            partial.replace(target)
        finally:
            partial.unlink(missing_ok=True)
        sync_directory(target.parent)
        return True

    def _open_partial(self, partial: Path) -> IO[bytes]:
        """Open a new file. A directory that another process removed as empty meanwhile is created once more."""
        if self._is_away:
            raise store_is_away(self.url, self._witness)
        try:
            self._make_directory(partial.parent)
            return partial.open("wb")
        except FileNotFoundError:
            self._make_directory(partial.parent)
            return partial.open("wb")

    def drop_cached(self, path: str) -> None:
        with self.open(path) as file:
            drop_cached_pages(file.fileno())

    def _free(self) -> int | None:
        if self._is_away:
            return None
        found = os.statvfs(next(one for one in (self.root, *self.root.parents) if one.exists()))
        if not found.f_blocks:
            return None  # a file system without block counts
        # Root may use the reserved blocks. Too high a value is harmless: the write itself fails.
        return found.f_frsize * (found.f_bfree if os.geteuid() == 0 else found.f_bavail)

    def _make_directory(self, directory: Path) -> None:
        missing = [one for one in (directory, *directory.parents) if not one.exists()]
        directory.mkdir(parents=True, exist_ok=True)
        for one in reversed(missing):
            sync_directory(one.parent)

    def _open(self, path: str) -> IO[bytes]:
        return (self.root / path).open("rb")

    def _find(self, prefix: str, refused: Callable[[str, Exception], None]) -> Iterator[str]:
        def refuse(error: OSError) -> None:
            # A missing directory is empty; an unreadable one may hold anything.
            if not isinstance(error, (FileNotFoundError, NotADirectoryError)):
                refused(PurePosixPath(Path(error.filename).relative_to(self.root)).as_posix(), error)

        for directory, _, names in os.walk(self.root / prefix, onerror=refuse):
            for name in names:
                yield PurePosixPath(Path(directory, name).relative_to(self.root)).as_posix()

    def _move(self, path: str, to: str) -> None:
        source, target = self.root / path, self.root / to
        self._make_directory(target.parent)
        source.replace(target)
        sync_directory(target.parent)
        sync_directory(source.parent)
        self._remove_empty(source.parent)

    def _delete(self, path: str) -> None:
        target = self.root / path
        with contextlib.suppress(FileNotFoundError):
            target.unlink()
            sync_directory(target.parent)
        self._remove_empty(target.parent)

    def _remove_empty(self, directory: Path) -> None:
        """Remove empty directories: they would slow down every listing."""
        while directory != self.root:
            try:
                directory.rmdir()
            except FileNotFoundError:
                pass  # removed by another node
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.EBUSY, errno.ENOTDIR):
                    raise
                return  # in use, mounted, or a symbolic link
            directory = directory.parent


def sync_directory(directory: Path) -> None:
    """Make the names in a directory durable, where the file system supports syncing directories."""
    try:
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    except PermissionError as error:  # a directory may be writable and not readable
        _say_unsynced(os.stat(directory).st_dev, str(directory), str(error))
        return
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in _REFUSED_SYNCS:
            raise
        _say_unsynced(os.fstat(fd).st_dev, str(directory), str(error))
    finally:
        os.close(fd)


#: Devices of file systems that a warning has named.
_unsynced: set[int] = set()


def _say_unsynced(device: int, directory: str, reason: str) -> None:
    """Warn once for each file system, not for every file."""
    if device not in _unsynced:
        _unsynced.add(device)
        _log.warning(
            "the directory %s cannot be synced (%s): files are synced, but the newest ones may be lost in a power cut",
            directory,
            reason,
        )


#: Bytes written between two starts of writeback; at most twice as many are in memory.
_PIECE_BYTES = 32 << 20
_WAIT_BEFORE, _WRITE, _WAIT_AFTER = 1, 2, 4
#: Errors of file systems that do not support sync_file_range.
_REFUSED = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.ESPIPE, errno.EBADF)


def drop_cached_pages(fd: int) -> None:
    """Drop a file's clean pages from the page cache, so that the next read comes from the medium."""
    with contextlib.suppress(OSError):  # only advice; tmpfs, for one, has nothing but the cache
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


class Draining:
    """Writes to a binary file, from its beginning, with continuous writeback."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        #: Offsets in bytes up to which data are written, under writeback, and on the medium.
        self._written = self._begun = self._there = 0
        self._sync_range = getattr(ctypes.CDLL(None, use_errno=True), "sync_file_range", None)

    def write(self, data: Any) -> int:
        """Write all bytes. Raises OSError, also for a failed writeback of earlier ones."""
        nbytes = self._file.write(data)
        self._written += nbytes
        if self._written - self._begun >= _PIECE_BYTES:
            self._drain()
        return nbytes

    def flush(self) -> None:
        self._file.flush()

    def _drain(self) -> None:
        self._file.flush()
        self._range(self._begun, self._written, _WRITE)
        if self._begun > self._there:
            self._range(self._there, self._begun, _WAIT_BEFORE | _WRITE | _WAIT_AFTER)
            with contextlib.suppress(OSError):
                length = self._begun - self._there
                os.posix_fadvise(self._file.fileno(), self._there, length, os.POSIX_FADV_DONTNEED)
        self._there, self._begun = self._begun, self._written

    def _range(self, start: int, end: int, flags: int) -> None:
        if self._sync_range is None:
            return
        offsets = ctypes.c_int64(start), ctypes.c_int64(end - start)
        if self._sync_range(self._file.fileno(), *offsets, ctypes.c_uint(flags)) == 0:
            return
        number = ctypes.get_errno()
        if number not in _REFUSED:  # the kernel reports a writeback error once: a later fsync would succeed
            raise OSError(number, os.strerror(number))
        self._sync_range = None

    def finish(self) -> None:
        """Sync the file and drop its pages."""
        self._file.flush()
        os.fsync(self._file.fileno())
        drop_cached_pages(self._file.fileno())
