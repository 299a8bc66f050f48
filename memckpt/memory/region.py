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
import platform
import resource
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from memckpt.errors import MemoryBudgetError
from memckpt.memory.budget import check_budget
from memckpt.state.layout import PAGE, Layout, aligned
from memckpt.user_messages import nbytes_text, short_number

_MADV_POPULATE_WRITE, _MADV_COLLAPSE = 23, 25  # Linux 5.14 and 6.1; mmap has no names for them
#: Bytes that are touched in one call, which holds the lock of the process's memory map: training that allocates waits.
_POPULATE_CHUNK = 2 << 20

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.mmap.restype = ctypes.c_void_p
_live: weakref.WeakSet[Region] = weakref.WeakSet()


def no_room(name: str, nbytes: int, error: OSError) -> OSError | MemoryBudgetError:
    """The exception for memory that the kernel has refused: MemoryBudgetError for want of something, else `error`."""
    expected = f"expected {nbytes_text(nbytes)} of memory for {name}"
    match error.errno:
        case errno.ENOMEM | errno.ENOSPC | errno.EDQUOT:
            return MemoryBudgetError(
                f"{expected}, found less ({error.strerror}); "
                "lower anchor_period_steps or slots, choose redo='eager', or give the job more memory"
            )
        case errno.EFBIG:
            limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
            return MemoryBudgetError(
                f"{expected}, found a limit of {nbytes_text(limit)} on the size of files, which counts for shared "
                "memory, too; raise it (ulimit -f unlimited) before the agent is started"
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
        #: Called by :meth:`close` before the memory is unmapped.
        self.before_close: list[Callable[[], object]] = []
        _live.add(self)

    @classmethod
    def lay_out(cls, name: str, nbytes: int) -> Region:
        """Map anonymous memory, to be touched once a :class:`Reservation` has reserved it.

        Raises MemoryBudgetError: a limit forbids it.
        """
        fd = -1
        try:
            fd = os.memfd_create(f"memckpt:{name}", os.MFD_CLOEXEC)
            os.ftruncate(fd, nbytes)
            region = cls(fd, nbytes)
        except OSError as error:
            if fd >= 0:
                os.close(fd)
            raise no_room(name, nbytes, error) from error
        _interleave(region)
        return region

    @classmethod
    def create(cls, name: str, nbytes: int) -> Region:
        """Reserve anonymous memory. Raises MemoryBudgetError: the kernel has no room for it."""
        region = cls.lay_out(name, nbytes)
        try:
            os.posix_fallocate(region.fd, 0, nbytes)
        except OSError as error:
            region.close()
            raise no_room(name, nbytes, error) from error
        return region

    @classmethod
    def open(cls, fd: int) -> Region:
        """Map a region that was received over a socket; takes ownership of the descriptor.

        Raises MemoryBudgetError: a limit of this process forbids it (``ulimit -v``).
        """
        nbytes = os.fstat(fd).st_size
        try:
            return cls(fd, nbytes)
        except OSError as error:
            os.close(fd)
            raise no_room("what the agent holds", nbytes, error) from error
        except ValueError:  # it is empty
            os.close(fd)
            raise

    @classmethod
    def open_all(cls, fds: Sequence[int]) -> list[Region]:
        """Map several regions, or none; takes ownership of the descriptors in either case."""
        opened: list[Region] = []
        try:
            for fd in fds:
                opened.append(cls.open(fd))
        except BaseException:  # raised again; they have no other owner
            for region in opened:
                region.close()
            for fd in fds[len(opened) + 1 :]:  # the first one that was not opened is closed
                os.close(fd)
            raise
        return opened

    @property
    def address(self) -> int:
        return ctypes.addressof(ctypes.c_char.from_buffer(self.map))

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
        address = self.address
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
        while self.before_close:
            self.before_close.pop()()
        fd, self.fd = self.fd, -1
        os.close(fd)
        # A tensor may still view the mapping; the mmap object then unmaps with the last of them.
        with contextlib.suppress(BufferError):
            self.map.close()


#: Numbers of the system calls mbind and get_mempolicy, which libc has no names for, and of two policies.
_MBIND, _GET_MEMPOLICY = {"x86_64": (237, 239), "aarch64": (235, 236)}.get(platform.machine(), (0, 0))
_BY_DEFAULT, _INTERLEAVE = 0, 3


def _memory_nodes() -> int:
    """The NUMA nodes that this process may take memory of, as bits."""
    with open("/proc/self/status") as status:
        found = next((line.split()[1] for line in status if line.startswith("Mems_allowed:")), "1")
    return int(found.replace(",", ""), 16)


def _interleave(region: Region) -> None:
    """Spread the memory over the NUMA nodes, unless the process was started with another policy (numactl).

    Else all of it lies on the node of the thread that reserves it, and copies of all accelerators go there. Advice
    only: a container may forbid it.
    """
    nodes, own = _memory_nodes(), ctypes.c_int(_BY_DEFAULT)
    if not _MBIND or nodes & (nodes - 1) == 0:
        return
    _libc.syscall(_GET_MEMPOLICY, ctypes.byref(own), None, ctypes.c_ulong(0), None, ctypes.c_ulong(0))
    if own.value == _BY_DEFAULT:
        mask = nodes.to_bytes(nodes.bit_length() // 64 * 8 + 8, sys.byteorder)
        where = ctypes.c_void_p(region.address), ctypes.c_ulong(region.nbytes)
        _libc.syscall(_MBIND, *where, _INTERLEAVE, mask, ctypes.c_ulong(8 * len(mask) + 1), 0)


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


HUGE_PAGE = 2 << 20


@contextlib.contextmanager
def mapped_for_huge_pages(fd: int, start: int, nbytes: int) -> Iterator[int]:
    """Map a range of a file, and give its address, a multiple of a huge page's size as `start` is.

    Raises OSError: a limit of the process forbids it.
    """
    with mmap.mmap(-1, nbytes + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as room:
        address = -(-ctypes.addressof(ctypes.c_char.from_buffer(room)) // HUGE_PAGE) * HUGE_PAGE
        flags, map_fixed = mmap.MAP_SHARED, 0x10
        found = _libc.mmap(address, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags | map_fixed, fd, start)
        if found != address:
            raise OSError(ctypes.get_errno(), "mmap")
        _libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), mmap.MADV_DONTFORK)
        yield address


def _take_huge_pages(fd: int, start: int, nbytes: int) -> bool:
    """Reserve a range of a file in huge pages, as far as the kernel has some; the rest remains to be reserved.

    Returns False if it gives none at all on request.

    A process that maps them pays for fewer faults, and locks them ten times as fast. The kernel is asked for each, as
    shared memory gets none by default.
    """
    first, end = aligned(start, HUGE_PAGE), (start + nbytes) // HUGE_PAGE * HUGE_PAGE
    if end <= first:
        return True
    try:
        with mapped_for_huge_pages(fd, first, end - first) as address:
            for offset in range(first, end, HUGE_PAGE):
                # The kernel makes one where there is a page, and on that one's node: by turns, where they are spread.
                os.posix_fallocate(fd, offset + offset // HUGE_PAGE % (HUGE_PAGE // PAGE) * PAGE, 1)
            # In one call: each waits for all processors. It ends where the kernel has none left.
            refused = _libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(end - first), _MADV_COLLAPSE) != 0
            return not (refused and ctypes.get_errno() == errno.EINVAL)
    except OSError:  # for want of memory: it is reserved in pages of the usual size, or that says what is lacking
        return True


#: The largest memory that is reserved while the caller waits, in bytes; it takes some milliseconds.
AT_ONCE_BYTES = 64 << 20
#: Bytes that a reservation asks for in one call.
CHUNK_BYTES = 64 << 20
#: A reservation takes no more huge pages once they have come slower than at this rate, by so many seconds: the kernel
#: may have to move others' memory for each.
HUGE_PAGES_PER_SECOND, PATIENCE_SECONDS = 512, 0.5
_fallocate = os.posix_fallocate
_in_progress: weakref.WeakSet[Reservation] = weakref.WeakSet()


def bytes_being_reserved() -> int:
    """Bytes that reservations of this process are yet to take: the available memory still counts them."""
    return sum(one.nbytes - one.reserved for one in list(_in_progress) if not one.over)


class Reservation:
    """Reserves parts of regions (offset and length in bytes), in a thread. :meth:`close` it before the regions.

    `name`: what the memory is for. `ended` is called in the thread at the end, unless it was closed.
    """

    def __init__(
        self, name: str, parts: Sequence[tuple[Region, int, int]], ended: Callable[[], None] = lambda: None
    ) -> None:
        self.nbytes = sum(length for _, _, length in parts)
        #: Bytes reserved so far.
        self.reserved = 0
        #: Whether the reservation has succeeded or failed.
        self.over = False
        self._name, self._parts, self._ended = name, parts, ended
        self._problem: OSError | None = None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="memckpt-reserve", daemon=True)
        _in_progress.add(self)
        self._thread.start()

    def _run(self) -> None:
        patience = PATIENCE_SECONDS if self.nbytes > AT_ONCE_BYTES else 0.0
        try:
            for region, offset, length in self._parts:
                for start in range(offset, offset + length, CHUNK_BYTES):
                    if self._closing.is_set():
                        return
                    chunk = min(CHUNK_BYTES, offset + length - start)
                    if patience > 0:
                        began = time.monotonic()
                        is_given = _take_huge_pages(region.fd, start, chunk)
                        spare = chunk / HUGE_PAGE / HUGE_PAGES_PER_SECOND - (time.monotonic() - began)
                        patience = min(patience + spare, PATIENCE_SECONDS) if is_given else 0.0
                    _fallocate(region.fd, start, chunk)
                    self.reserved += chunk
        except OSError as error:  # raised by `finish`
            self._problem = error
        self.over = True
        self._ended()

    def finish(self) -> None:
        """Wait for the end. Raises MemoryBudgetError: the kernel has no room for it."""
        self._thread.join()
        if self._problem is not None:
            raise no_room(self._name, self.nbytes, self._problem) from self._problem

    def close(self) -> None:
        """Stop after the chunk in progress. Idempotent."""
        self._closing.set()
        self._thread.join()


# A generation


@dataclass(frozen=True)
class Allowance:
    """Memory that a generation may take."""

    held_bytes: int = 0  #: held on this node beside it
    budget: int | None = None  #: limit on all of that, in bytes; None: what the machine has
    given_back: int = 0  #: bytes among `held_bytes` that are let go of before the rest of the slots is reserved


class GenerationRegions:
    """The ring of records, tensors that never change, and the eagerly redone state: the last two where there are any.

    The creator owns the memory, every opener its mappings; each calls :meth:`close` on its own.
    """

    def __init__(self, layout: Layout, slots: Region, static: Region | None, replica: Region | None) -> None:
        self.layout = layout
        self.slots, self.static, self.replica = slots, static, replica
        #: Bytes of the slots that are not reserved yet, nor being reserved.
        self._later_bytes = 0
        #: Bytes among them before the reservation in progress.
        self._before_bytes = 0
        self._reservation: Reservation | None = None
        self._budget: int | None = None

    @classmethod
    def create(
        cls,
        layout: Layout,
        allowance: Allowance,
        begins: int | None = None,
        reserved: Callable[[], None] = lambda: None,
    ) -> GenerationRegions:
        """Reserve the memory, or only what a start after `begins` takes. Raises MemoryBudgetError: there is no room.

        A thread reserves much of it, calls `reserved` at its end, and is :attr:`reserving` until then.
        """
        start = [(0, layout.slots_bytes)] if begins is None else layout.start_ranges(begins)
        later = layout.slots_bytes - sum(length for _, length in start)
        detail = _in_words(layout)
        if later:
            after = allowance.held_bytes - allowance.given_back
            _check_budget(layout.total_bytes, after, allowance.budget, detail, allowance.given_back)
        _check_budget(layout.total_bytes - later, allowance.held_bytes, allowance.budget, detail)
        regions = cls(layout, Region.lay_out("slots", layout.slots_bytes), None, None)
        regions._later_bytes = regions._before_bytes = later
        regions._budget = allowance.budget
        try:
            regions.static = Region.lay_out("static", layout.static_bytes) if layout.static_bytes else None
            regions.replica = Region.lay_out("replica", layout.replica_bytes) if layout.replica_bytes else None
            parts = [(regions.slots, *each) for each in start]
            regions._reserve(parts + [(one, 0, one.nbytes) for one in regions if one is not regions.slots], reserved)
        except BaseException:  # raised again; they have no other owner
            regions.close()
            raise
        return regions

    @classmethod
    def of(cls, layout: Layout, regions: Sequence[Region]) -> GenerationRegions:
        """Take over regions that were handed over. Raises ValueError: they are not as many as the layout has."""
        rest = list(regions)
        replica = rest.pop() if layout.replica_bytes else None
        static = rest.pop() if layout.static_bytes else None
        (slots,) = rest
        return cls(layout, slots, static, replica)

    def __iter__(self) -> Iterator[Region]:
        """The regions that there are, in the order in which they are handed over."""
        return (region for region in (self.slots, self.static, self.replica) if region is not None)

    @property
    def nbytes(self) -> int:
        """Bytes of memory that are reserved, or being reserved."""
        return self.layout.total_bytes - self._later_bytes

    @property
    def whole(self) -> bool:
        """Whether all of the slots are there, and not only what the start takes."""
        return not self._later_bytes

    @property
    def reserving(self) -> bool:
        """Whether a thread reserves them, so that they must not be touched before :meth:`finish_reserving`."""
        return self._reservation is not None

    def _reserve(self, parts: Sequence[tuple[Region, int, int]], reserved: Callable[[], None]) -> None:
        at_once = sum(length for _, _, length in parts) <= AT_ONCE_BYTES
        self._reservation = Reservation("base and log", parts, (lambda: None) if at_once else reserved)
        if at_once:
            self.finish_reserving()

    def finish_reserving(self) -> None:
        """Wait until the memory is reserved, if it is not yet. Raises MemoryBudgetError: the kernel has no room."""
        reservation, self._reservation = self._reservation, None
        if reservation is None:
            return
        try:
            reservation.finish()
        except MemoryBudgetError:
            self._later_bytes = self._before_bytes
            raise
        # From a thread, so that no step pays for a first touch.
        for region in self:
            if self.whole or region is not self.slots:
                region.populate_in_background()

    def make_whole(self, held_bytes: int, reserved: Callable[[], None] = lambda: None) -> None:
        """Reserve the rest of the slots beside `held_bytes` of the node, as :meth:`create` does."""
        if self.whole:
            return
        _check_budget(self._later_bytes, held_bytes + self.nbytes, self._budget, _in_words(self.layout))
        self._before_bytes, self._later_bytes = self._later_bytes, 0
        self._reserve([(self.slots, 0, self.slots.nbytes)], reserved)

    def close(self) -> None:
        """Unmap and close them. Idempotent."""
        reservation, self._reservation = self._reservation, None
        if reservation is not None:
            reservation.close()
        for region in self:
            region.close()


def _check_budget(needed: int, held: int, budget: int | None, detail: str, given_back: int = 0) -> None:
    check_budget(needed, held, budget, detail, given_back, bytes_being_reserved())


def _in_words(layout: Layout) -> str:
    """Parts of a generation's memory, for the message where there is not enough."""
    spec = layout.spec
    detail = (
        f"redo={spec.mode}, T={spec.period}, D={spec.slots}, {short_number(layout.numel)} parameters: "
        f"{layout.total_bytes / max(layout.numel, 1):.0f} bytes each"
    )
    by_value = layout.by_value_slot_bytes * layout.by_value_ring
    if by_value > layout.total_bytes // 10:
        detail += (
            f"; of these {nbytes_text(by_value)} are averages, buffers and the like, held after "
            f"{layout.by_value_ring} records"
        )
        own = len(spec.by_value) - len(layout.shared)
        detail += f", {own} tensors by each of {len(spec.local_ranks)} ranks" if own else ""
        detail += f", {len(layout.shared)} tensors once for them" if layout.shared else ""
    return detail
