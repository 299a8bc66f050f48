"""Large files on their way to a disk, past the page cache: what training reads stays there.

The kernel keeps what is written in memory until it must not, and throws out what others have read for it. So writing to
the medium begins behind every piece, and what has got there is let go of. That is also faster than to begin with an
fsync at the end.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
from typing import IO, Any

#: How much is written before the kernel is told; twice that is in memory at most.
_PIECE_BYTES = 32 << 20
_WAIT_BEFORE, _WRITE, _WAIT_AFTER = 1, 2, 4
#: With these a file system says that it has none of this.
_REFUSED = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.ESPIPE, errno.EBADF)


def let_go(fd: int) -> None:
    """Have the page cache forget what it has of a file and what is on the medium: the next read comes from there."""
    with contextlib.suppress(OSError):  # advice; tmpfs, for one, has nothing but the cache
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


class Draining:
    """Passes bytes on to a file, and the file's pages to the medium.

    Args:
        file: a binary file, from its beginning.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        #: Up to where it has been written, is being written to the medium, and is there.
        self._written = self._begun = self._there = 0
        self._sync_range = getattr(ctypes.CDLL(None, use_errno=True), "sync_file_range", None)

    def write(self, data: Any) -> int:
        """Write all of some bytes. Raises OSError, also for what was written before and has not got to the medium."""
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
        if number not in _REFUSED:  # an fsync does not say again what has been said here
            raise OSError(number, os.strerror(number))
        self._sync_range = None

    def finish(self) -> None:
        """Have all of it on the medium, and nothing in memory."""
        self._file.flush()
        os.fsync(self._file.fileno())
        let_go(self._file.fileno())
