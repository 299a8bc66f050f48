"""Writing large files without filling the page cache, which training uses for its data.

The kernel keeps written pages as long as it can, and evicts pages that others have read. So writeback starts after
every 32 MiB, and pages that are on the medium are dropped. That is also faster than one fsync at the end.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
from typing import IO, Any

#: Bytes written between two starts of writeback; at most twice as many are in memory.
_PIECE_BYTES = 32 << 20
_WAIT_BEFORE, _WRITE, _WAIT_AFTER = 1, 2, 4
#: Errors of file systems that do not support sync_file_range.
_REFUSED = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.ESPIPE, errno.EBADF)


def let_go(fd: int) -> None:
    """Drop a file's clean pages from the page cache, so that the next read comes from the medium."""
    with contextlib.suppress(OSError):  # only advice; tmpfs, for one, has nothing but the cache
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


class Draining:
    """Writes to a file, with continuous writeback.

    Args:
        file: a binary file, from its beginning.
    """

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
        let_go(self._file.fileno())
