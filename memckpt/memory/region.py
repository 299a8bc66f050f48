"""Anonymous shared memory: memfd regions handed over by file descriptor.

Regions have no name in any file system, so nothing can be left behind: the kernel frees a region with its last holder.
Space is reserved when a region is made, so missing memory is an error at that time and not a SIGBUS at step 40,000.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import resource
import threading
import weakref
from collections.abc import Sequence

from memckpt.errors import MemoryBudgetError

_MADV_POPULATE_WRITE = 23  # Linux 5.14; mmap has no name for it
#: Bytes that are touched in one call, which holds the lock of the process's memory map: training that allocates waits.
_POPULATE_CHUNK = 2 << 20

_libc = ctypes.CDLL(None, use_errno=True)
_live: weakref.WeakSet[Region] = weakref.WeakSet()


def no_room(name: str, nbytes: int, error: OSError) -> OSError | MemoryBudgetError:
    """The exception for memory that the kernel has refused: MemoryBudgetError for want of something, else `error`."""
    expected = f"expected {nbytes / 2**20:.0f} MiB of memory for {name}"
    match error.errno:
        case errno.ENOMEM | errno.ENOSPC | errno.EDQUOT:
            return MemoryBudgetError(
                f"{expected}, found less ({error.strerror}); "
                "lower anchor_period_steps or slots, choose redo='eager', or give the job more memory"
            )
        case errno.EFBIG:
            limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0] / 2**20
            return MemoryBudgetError(
                f"{expected}, found a limit of {limit:.3g} MiB on the size of files, which counts for shared memory, "
                "too; raise it (ulimit -f unlimited) before the agent is started"
            )
        case errno.EMFILE | errno.ENFILE:
            return MemoryBudgetError(
                f"{expected}, found no descriptor left for it ({error.strerror}); raise the limit on open files "
                "(ulimit -n) before the agent is started"
            )
    return error


class Region:
    """One shared mapping. The creator owns the memory, every opener a mapping; each calls :meth:`close` on its own.

    A forked child has no mapping (MADV_DONTFORK), and its descriptor is closed: loader workers cannot keep state alive
    or write into it.
    """

    def __init__(self, fd: int, nbytes: int) -> None:
        self.fd = fd
        self.nbytes = nbytes
        self.map = mmap.mmap(fd, nbytes)
        self.map.madvise(mmap.MADV_DONTFORK)
        self._populating: threading.Thread | None = None
        self._closing = threading.Event()
        _live.add(self)

    @classmethod
    def create(cls, name: str, nbytes: int, ranges: Sequence[tuple[int, int]] | None = None) -> Region:
        """Reserve anonymous memory.

        `ranges`: offsets and lengths, in bytes, of the parts to reserve now; None: all. Other parts must not be touched
        before :meth:`reserve` has returned. Raises MemoryBudgetError: the kernel has no room for it.
        """
        fd = -1
        try:
            fd = os.memfd_create(f"memckpt:{name}", os.MFD_CLOEXEC)
            os.ftruncate(fd, nbytes)
            for start, length in [(0, nbytes)] if ranges is None else ranges:
                os.posix_fallocate(fd, start, length)
            return cls(fd, nbytes)
        except OSError as error:
            if fd >= 0:
                os.close(fd)
            raise no_room(name, nbytes, error) from error

    @classmethod
    def open(cls, fd: int) -> Region:
        """Map a region that was received over a socket; takes ownership of the descriptor."""
        return cls(fd, os.fstat(fd).st_size)

    @classmethod
    def open_all(cls, fds: Sequence[int]) -> list[Region]:
        """Map several regions, or none; takes ownership of the descriptors in either case."""
        opened: list[Region] = []
        try:
            for fd in fds:
                opened.append(cls.open(fd))
        except BaseException:  # raised again: nobody else knows of them
            for region in opened:
                region.close()
            for fd in fds[len(opened) :]:
                os.close(fd)
            raise
        return opened

    def reserve(self, name: str) -> None:
        """Reserve the parts that :meth:`create` has left out; existing content stays.

        Raises MemoryBudgetError: the kernel has no room for it, and nothing has changed.
        """
        try:
            os.posix_fallocate(self.fd, 0, self.nbytes)
        except OSError as error:
            raise no_room(name, self.nbytes, error) from error

    @property
    def taken_bytes(self) -> int:
        """Bytes of memory that the kernel has allocated to it."""
        return os.fstat(self.fd).st_blocks * 512

    def populate_in_background(self) -> None:
        """Touch every page in a thread, so that no step pays for page faults."""
        if self._populating is None:
            self._populating = threading.Thread(target=self._populate, name="memckpt-populate", daemon=True)
            self._populating.start()

    def _populate(self) -> None:
        address = ctypes.addressof(ctypes.c_char.from_buffer(self.map))
        for offset in range(0, self.nbytes, _POPULATE_CHUNK):
            if self._closing.is_set():
                return
            length = min(_POPULATE_CHUNK, self.nbytes - offset)
            # Advice only: a kernel without it (EINVAL) leaves the first touch to the first steps.
            _libc.madvise(ctypes.c_void_p(address + offset), ctypes.c_size_t(length), _MADV_POPULATE_WRITE)

    def close(self) -> None:
        """Unmap and close. Idempotent. While views of the mapping exist, its memory stays."""
        if self.fd < 0:
            return
        self._closing.set()
        if self._populating is not None:
            self._populating.join()
        fd, self.fd = self.fd, -1
        os.close(fd)
        # A tensor may still view the mapping; the mmap object then unmaps with the last of them.
        with contextlib.suppress(BufferError):
            self.map.close()


# In a forked child the ranges are not mapped. The Python objects are kept alive there forever, so that no finalizer
# unmaps something that the child has since mapped at the same addresses.
_kept_in_child: list[mmap.mmap] = []


def _forget_in_child() -> None:
    live = [region for region in _live if region.fd >= 0]
    for region in live:
        _kept_in_child.append(region.map)
        region.fd = -1
    if live:
        # Before Python 3.13 a mmap object keeps a duplicate of its descriptor, which only its own close would end.
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):  # the listing's own descriptor is gone by now
                if os.readlink(f"/proc/self/fd/{name}").startswith("/memfd:memckpt"):
                    os.close(int(name))


os.register_at_fork(after_in_child=_forget_in_child)
