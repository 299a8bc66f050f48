"""Memory reserved in chunks by a thread, so that the caller's loop does not block."""

from __future__ import annotations

import os
import threading

from memckpt.memory.region import Region, no_room

CHUNK_BYTES = 256 << 20
_fallocate = os.posix_fallocate


class Reservation:
    """A region in the making. Owns its memory until :meth:`take` hands it over; call :meth:`close` at the end.

    Args:
        name: purpose of the region.
        nbytes: size of the region.
    """

    def __init__(self, name: str, nbytes: int) -> None:
        self.nbytes = nbytes
        #: Bytes reserved so far.
        self.reserved = 0
        self._name = name
        self._fd = os.memfd_create(f"memckpt:{name}", os.MFD_CLOEXEC)
        self._problem: OSError | None = None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="memckpt-reserve", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            os.ftruncate(self._fd, self.nbytes)
            for start in range(0, self.nbytes, CHUNK_BYTES):
                if self._closing.is_set():
                    return
                _fallocate(self._fd, start, min(CHUNK_BYTES, self.nbytes - start))
                self.reserved = min(start + CHUNK_BYTES, self.nbytes)
        except OSError as error:  # raised by `take`
            self._problem = error

    @property
    def over(self) -> bool:
        """Whether the reservation has succeeded or failed."""
        return not self._thread.is_alive()

    def take(self) -> Region:
        """The region, owned by the caller from now on; waits until the reservation is :attr:`over`.

        Raises:
            MemoryBudgetError: the kernel has no room for it.
        """
        self._thread.join()
        fd, self._fd = self._fd, -1
        try:
            if self._problem is not None:
                raise no_room(self._name, self.nbytes, self._problem) from self._problem
            return Region(fd, self.nbytes)
        except BaseException:  # raised again; the descriptor has no other owner
            os.close(fd)
            raise

    def close(self) -> None:
        """Stop after the chunk in progress, and free the memory unless it was taken. Idempotent."""
        self._closing.set()
        self._thread.join()
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
