"""Copies from live tensors into slots: synchronous on a CPU, on a side stream from an accelerator.

Contract: :meth:`Copier.copy` may return before the copy is done. The source must not change before the current stream
has passed :meth:`Copier.wait_before_changes`. The destination must not be read before a token taken after the copy has
been waited for. What is copied at a commit is read inside :meth:`Copier.behind_training`, whichever stream is current.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import torch

from memckpt.errors import UnsupportedError
from memckpt.memory.region import Region
from memckpt.state.layout import ALIGN, SMALL_GRADIENT_BYTES
from memckpt.user_messages import nbytes_text

_log = logging.getLogger("memckpt")
#: Offset in a region, and length, in bytes.
Part: TypeAlias = "tuple[int, int]"
#: Destination and source.
Copy: TypeAlias = "tuple[torch.Tensor, torch.Tensor]"


class Copier(Protocol):
    """Copies into slots. One per session.

    Attributes:
        asynchronous: whether copies may still be in flight when :meth:`copy` returns.
        caveat: why they are not where they could be, in words; empty if they are, or need not be.
    """

    asynchronous: bool
    caveat: str

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        """Start a copy of `source` into host memory `destination` of the same shape and dtype."""

    def copy_as_they_are(self, destinations: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        """As :meth:`copy` of each, but whatever the current stream does later may change the sources at once.

        A destination has its source's elements in row-major order, in any shape.
        """

    def fetch(self, source: torch.Tensor) -> torch.Tensor:
        """Start a copy of a small tensor into new host memory and return it; readable under the same rule as a slot."""

    def wait_before_changes(self) -> None:
        """Let later work on the current stream change sources. The device waits for the copies; the host does not."""

    def behind_training(self) -> contextlib.AbstractContextManager[None]:
        """Order the current stream behind those that training runs on, and at the end these behind it.

        A training may run on a stream of its own and commit outside of it.
        """

    def token(self) -> Callable[[], None]:
        """A function that blocks until every copy started before this call is done."""

    def recording_graph(self) -> bool:
        """Whether work is being recorded into a graph, not executed: nothing may be copied meanwhile."""

    def ticket(self) -> int:
        """A ticket number for the copies started before this call; never decreases."""

    def done(self) -> int:
        """The highest ticket whose copies are known to be done. Never blocks."""

    def time_copies(self, on: bool = True) -> CopyTimes | None:
        """Time copies from now on, or no longer. Returns the times; None where there is nothing to time, or not yet."""

    def adopt(self, region: Region, parts: Sequence[Part] = (), at_once: int | None = None) -> None:
        """Prepare a region as a destination of copies, until it is closed; beforehand they are slower.

        Args:
            region: the region.
            parts: offsets and lengths of what is copied to, in whole pages, those that are due first first; each copy
                goes to one of them. Empty: one part, all of it.
            at_once: bytes to prepare before this returns; None: all.
        """


class HostCopier:
    """Synchronous copies in the calling thread: training on a CPU leaves nothing to overlap with."""

    asynchronous = False

    def __init__(self, caveat: str = "") -> None:
        self.caveat = caveat

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        destination.copy_(source)

    def copy_as_they_are(self, destinations: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        for destination, source in zip(destinations, sources, strict=True):
            destination.view(source.shape).copy_(source)

    def fetch(self, source: torch.Tensor) -> torch.Tensor:
        return source.detach().to("cpu", copy=True)

    def wait_before_changes(self) -> None:
        return

    def behind_training(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def token(self) -> Callable[[], None]:
        return lambda: None

    def recording_graph(self) -> bool:
        return False

    def ticket(self) -> int:
        return 0

    def done(self) -> int:
        return 0

    def time_copies(self, on: bool = True) -> CopyTimes | None:
        return None

    def adopt(self, region: Region, parts: Sequence[Part] = (), at_once: int | None = None) -> None:
        return


@dataclass
class CopyTimes:
    """Times of copies on the device, and of what its compute waits for them; read them once the copies are done."""

    nbytes: int = 0
    #: Events before and after.
    copies: list[tuple[Any, Any]] = field(default_factory=list)
    waits: list[tuple[Any, Any]] = field(default_factory=list)

    @property
    def copy_seconds(self) -> float:
        return _between(self.copies)

    @property
    def wait_seconds(self) -> float:
        return _between(self.waits)


def _between(events: Sequence[tuple[Any, Any]]) -> float:
    return sum(float(before.elapsed_time(after)) for before, after in events) / 1e3


class AcceleratorCopier:
    """Copies on a side stream into page-locked slots.

    Tensors are gathered into buckets of :attr:`BUCKET_BYTES` before they are launched, so that the streams synchronize
    once per layer and not once per parameter (REFT's tiny buckets). A launch takes 50 us of the host, and so does
    each copy. Small tensors whose places lie side by side are copied together, by way of memory of the device that is
    laid out like the places. What the last bucket delays is 0.6 ms at 50 GB/s. Large tensors are cut: what the user's
    program reads from the device meanwhile waits for one part only.

    Until a stream has been made to wait for the copies of what was made on it, references keep its memory from being
    used for anything else there. Then no ``record_stream`` is needed, which would keep the memory for longer: until
    the copies have ended, and the host is a step ahead of them. What another stream frees, it has waited for the
    copies, too: they come before whatever it does with the source behind :meth:`wait_before_changes`.

    Args:
        device: device of the sources.
        module: torch's module of such devices, whose own events let a waiting host sleep, where those of
            ``torch.Event`` spin; a test passes a stand-in that tracks the order of events.
    """

    asynchronous = True
    caveat = ""
    BUCKET_BYTES = 32 << 20
    PART_BYTES = 32 << 20
    #: Most memory of the device that is taken at once for tensors that may change.
    RUN_BYTES = 256 << 20
    SMALL_BYTES = SMALL_GRADIENT_BYTES
    #: Fewest small tensors that are worth a launch of their own; fewer wait for the next one, or so many at most.
    FEWEST, PARTIAL = 32, 4

    def __init__(self, device: torch.device, module: Any = None) -> None:
        self._device = device
        #: Torch takes twice as long to find the stream of a device that is given as an object.
        self._index = device.index
        self._module = module = torch.get_device_module(device) if module is None else module
        self._stream = module.Stream(device)
        #: Makes the device the current one: leaving a stream would open a context on one that has none.
        self._at = functools.partial(getattr(module, "device", contextlib.nullcontext), device)
        #: Whether a graph is recorded on the current device; None: on such devices none is.
        self._is_capturing = getattr(module, "is_current_stream_capturing", None)
        #: XPU has but one kind of event.
        self._event_options = {} if device.type == "xpu" else {"blocking": True}
        #: Asked for each tensor: torch's functions for users take several times as long.
        self._current_device = getattr(torch._C, f"_{device.type}_getDevice", module.current_device)
        self._raw_stream = getattr(torch._C, f"_{device.type}_getCurrentRawStream", None)
        #: The current stream as it was last, and its address: torch takes microseconds to make the object.
        self._current: tuple[int, Any] = (-1, None)
        #: Copies that are not launched; their bytes, without those left by launches, and the number of these launches.
        self._bucket: list[Copy] = []
        self._bucket_bytes = self._partial = 0
        #: Streams that produced the tensors in the bucket: fully_shard reduces gradients on a stream of its own.
        self._sources: set[Any] = set()
        #: Sources of launched copies, and the streams that produced them, until these have been made to wait.
        self._held: list[torch.Tensor] = []
        self._made_on: set[Any] = set()
        #: Streams that have changed sources since the last commit, or, until one does, before it.
        self._changing: set[Any] = set()
        self._is_committed = False
        self._locks: weakref.WeakKeyDictionary[Region, PageLock] = weakref.WeakKeyDictionary()
        self._page_locks = getattr(module, "cudart", None) is not None
        if not self._page_locks:
            self.caveat = f"copies from {device.type} wait for it, as torch page-locks no shared memory for it"
        #: Events recorded after each launch whose copies are not known to be done, oldest first; each with its ticket.
        self._launched: deque[tuple[Any, int]] = deque()
        #: Tickets of the last launch that left nothing in the bucket, and of the last one that is known to be done.
        self._ticket = self._done = 0
        self._times: CopyTimes | None = None
        #: Hooks of one backward may run in several threads.
        self._lock = threading.RLock()

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        if source.device.type != self._device.type:
            destination.copy_(source)
            return
        with self._lock:
            self._bucket.append((destination, source))
            self._sources.add(self._current_stream())
            self._bucket_bytes += source.nbytes
            if self._bucket_bytes >= self.BUCKET_BYTES:
                self._launch(whole=False)

    def _current_stream(self) -> Any:
        if self._raw_stream is None:
            return self._module.current_stream(self._index)
        known, stream = self._current
        raw = self._raw_stream(self._index)
        if raw != known:
            stream = self._module.current_stream(self._index)
            self._current = raw, stream
        return stream

    def copy_as_they_are(self, destinations: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        """Copies within the device first, at fifty times the link's rate; where it has no memory left it waits."""
        here: list[Copy] = []
        for destination, source in zip(destinations, sources, strict=True):
            if source.device.type == self._device.type:
                here.append((destination, source))
            else:
                destination.view(source.shape).copy_(source)
        for run in _runs(here, self.RUN_BYTES):
            gathered = _gathered(run)
            if gathered is not None:
                self.copy(*gathered)
                continue
            for place, source in run:
                self.copy(place.view(source.shape), source)
            self.wait_before_changes()

    def fetch(self, source: torch.Tensor) -> torch.Tensor:
        source = source.detach()
        if source.device.type != self._device.type:
            return source.to("cpu", copy=True)
        host = torch.empty(source.shape, dtype=source.dtype, device="cpu", pin_memory=True)
        self.copy(host, source)
        return host

    def _launch(self, whole: bool = True) -> None:
        """Launch what is in the bucket; unless it is to be `whole`, mostly without small tensors that are few."""
        with self._lock:
            small = [each for each in self._bucket if each[1].nbytes <= self.SMALL_BYTES]
            large = [each for each in self._bucket if each[1].nbytes > self.SMALL_BYTES]
            left = [] if whole or len(small) >= self.FEWEST or self._partial == self.PARTIAL else small
            launched = large if left else large + small
            if not launched:
                return
            sources, self._sources = self._sources, set(self._sources) if left else set()
            for made_on in sources:
                self._stream.wait_stream(made_on)
            times, began = self._times, self._mark_time(self._stream)
            with contextlib.nullcontext() if self._current_device() == self._index else self._at(), torch.no_grad():
                current = self._current_stream()
                torch.accelerator.set_stream(self._stream)  # a tenth of the context's time, some dozen times a step
                try:
                    for destination, source in large:
                        _copy_in_parts(destination, source, self.PART_BYTES)
                    for run in _runs(launched[len(large) :], self.RUN_BYTES):
                        gathered = _gathered(run) if len(run) > 3 else None
                        for destination, source in run if gathered is None else [gathered]:
                            _copy_in_parts(destination, source, self.PART_BYTES)
                finally:
                    torch.accelerator.set_stream(current)
                    self._bucket, self._bucket_bytes, self._partial = left, 0, self._partial + 1 if left else 0
                    self._held += [source for _, source in launched]
                    self._made_on |= sources
            self._ticket += not left
            self._launched.append((self._mark(), self._ticket))
            if times is not None:
                times.nbytes += sum(source.nbytes for _, source in launched)
                times.copies.append((began, self._mark_time(self._stream)))

    def _mark(self) -> Any:
        event = self._module.Event(**self._event_options)
        event.record(self._stream)
        return event

    def time_copies(self, on: bool = True) -> CopyTimes | None:
        locked = all(lock.is_over for lock in self._locks.values())  # copies to other memory are slower
        self._times = CopyTimes() if on and locked else None
        return self._times

    def _mark_time(self, stream: Any) -> Any:
        """An event at this point of the stream, if copies are timed."""
        if self._times is None:
            return None
        event = self._module.Event(enable_timing=True)
        event.record(stream)
        return event

    def wait_before_changes(self) -> None:
        if self.recording_graph():
            return  # recorded work runs later, and a graph cannot wait for streams outside of it
        with self._lock:
            self._launch()
            current = self._current_stream()
            times, began = self._times, self._mark_time(current)
            for stream in self._made_on | {current}:
                stream.wait_stream(self._stream)
            if times is not None:
                times.waits.append((began, self._mark_time(current)))
            self._held.clear()
            self._made_on.clear()
            if self._is_committed:
                self._changing, self._is_committed = set(), False
            self._changing.add(current)

    @contextlib.contextmanager
    def behind_training(self) -> Iterator[None]:
        current = self._current_stream()
        others = self._changing - {current}
        for other in others:
            current.wait_stream(other)
        try:
            yield
        finally:
            for other in others:
                other.wait_stream(current)
            self._is_committed = True

    def token(self) -> Callable[[], None]:
        self._launch()
        self.done()  # drops finished events: no other caller may do so
        synchronize: Callable[[], None] = self._mark().synchronize
        return synchronize

    def recording_graph(self) -> bool:
        if self._is_capturing is None:
            return False
        # As in hooks; a change of devices takes microseconds, for each tensor.
        if self._current_device() == self._index:
            return bool(self._is_capturing())
        with self._at():
            return bool(self._is_capturing())

    def ticket(self) -> int:
        with self._lock:
            return self._ticket + bool(self._bucket)

    def done(self) -> int:
        with self._lock:
            # A query would break a graph that is being recorded.
            while self._launched and not self.recording_graph() and self._launched[0][0].query():
                _, self._done = self._launched.popleft()
            return self._done

    def adopt(self, region: Region, parts: Sequence[Part] = (), at_once: int | None = None) -> None:
        """Page-lock the region, in a thread: copies to other memory are right, and block their caller."""
        if not self._page_locks:
            return
        lock = self._locks.get(region)
        if lock is None:
            cudart = self._module.cudart()
            self._locks[region] = lock = PageLock(cudart, self._at, region, parts or [(0, region.nbytes)])
            region.before_close.append(lock.undo)
        lock.wait(region.nbytes if at_once is None else at_once)


class PageLock:
    """Page-locked parts of a region: a thread locks them one by one, and unlocks them at the end.

    A second and more for 10 GB is too long for the training thread. CUDA keeps errors for the thread that made them:
    those of this one reach no launch of the user's.

    Args:
        cudart: torch's CUDA or HIP runtime.
        at: makes the device the current one: that of a new thread is the first one.
        region: the region.
        parts: as in :meth:`Copier.adopt`; CUDA refuses copies to what is locked only in part.
    """

    _told = False

    def __init__(self, cudart: Any, at: Callable[[], Any], region: Region, parts: Sequence[Part]) -> None:
        self._cudart, self._at = cudart, at
        self._address = torch.frombuffer(region.map, dtype=torch.uint8).data_ptr()
        self._parts = parts
        self._changed = threading.Condition()
        #: Bytes that were locked; or all, where locking was refused.
        self._locked_bytes = 0.0
        self._ended = False
        self._thread = threading.Thread(target=self._run, name="memckpt-page-lock", daemon=True)
        self._thread.start()

    def wait(self, nbytes: int) -> None:
        """Wait until so many bytes are locked, or all of them, or the rest is refused."""
        with self._changed:
            self._changed.wait_for(lambda: self._locked_bytes >= min(nbytes, sum(length for _, length in self._parts)))

    @property
    def is_over(self) -> bool:
        """Whether all bytes are locked, or the rest is refused."""
        return self._locked_bytes >= sum(length for _, length in self._parts)

    def undo(self) -> None:
        """Unlock all parts; nothing may be copied to them any more."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        locked = []
        try:
            with self._at():
                for start, length in self._parts:
                    if self._ended or not self._lock(start, length):
                        break
                    locked.append(start)
        finally:
            self._advance(math.inf)
        with self._changed:
            self._changed.wait_for(lambda: self._ended)
        with self._at():
            for start in locked:
                result = self._cudart.cudaHostUnregister(self._address + start)
                if int(result) != 0:
                    _log.warning("memckpt: %s", self._refusal("cudaHostUnregister", result))

    def _lock(self, start: int, length: int) -> bool:
        result = self._cudart.cudaHostRegister(self._address + start, length, 0)
        if int(result) == 0:
            self._advance(length)
        elif not PageLock._told:
            PageLock._told = True
            _log.warning(
                "memckpt: %s of host memory could not be page-locked: %s. Steps wait for copies to it, which are "
                "slower, and as exact",
                nbytes_text(length),
                self._refusal("cudaHostRegister", result),
            )
        return int(result) == 0

    def _refusal(self, function: str, result: Any) -> str:
        name = getattr(self._cudart, "cudaGetErrorString", lambda result: "without a name")(result)
        return f"{function} failed with error {int(result)} ({name})"

    def _advance(self, nbytes: float) -> None:
        with self._changed:
            self._locked_bytes += nbytes
            self._changed.notify_all()


def _copy_in_parts(destination: torch.Tensor, source: torch.Tensor, part_bytes: int) -> None:
    """Copy as several launches, where it is large; then `destination` is contiguous."""
    if source.nbytes <= part_bytes:
        destination.copy_(source, non_blocking=True)
        return
    elements = part_bytes // source.itemsize
    for to, part in zip(destination.view(-1).split(elements), source.reshape(-1).split(elements), strict=True):
        to.copy_(part, non_blocking=True)


def _runs(copies: Sequence[Copy], most_bytes: int) -> Iterator[list[Copy]]:
    """Copies by runs of places that lie side by side, but for padding, in one tensor; each of at most so many bytes."""
    run: list[Copy] = []
    first = end = 0
    for address, number in sorted((place.data_ptr(), number) for number, (place, _) in enumerate(copies)):
        place, _ = copies[number]
        beside = run and 0 <= address - end < ALIGN and address + place.nbytes - first <= most_bytes
        if run and not (beside and place._base is run[0][0]._base is not None and place.dtype == run[0][0].dtype):
            yield run
            run = []
        first, end = first if run else address, address + place.nbytes
        run.append(copies[number])
    if run:
        yield run


def _gathered(run: Sequence[Copy]) -> Copy | None:
    """A copy of the run's sources on their device, laid out like their places; and the place of all of them.

    None: the device has no memory for it.
    """
    first, source = run[0]
    sizes: list[int] = []
    start = end = first.data_ptr()
    for place, _ in run:
        address = place.data_ptr()
        sizes += (address - end) // first.itemsize, place.numel()
        end = address + place.nbytes
    total = (end - start) // first.itemsize
    try:
        # What lies between places is padding, and remains zero.
        made = (torch.zeros if any(sizes[::2]) else torch.empty)(total, dtype=first.dtype, device=source.device)
    except torch.OutOfMemoryError:
        return None
    rows = made.split_with_sizes(sizes)[1::2]
    with torch.no_grad():
        shaped = [row if each.ndim == 1 else row.view(each.shape) for row, (_, each) in zip(rows, run, strict=True)]
        torch._foreach_copy_(shaped, [each for _, each in run])
    return first.as_strided((total,), (1,)), made


def device_of(tensors: Mapping[str, torch.Tensor]) -> torch.device:
    """The accelerator that some of the tensors are on, or the CPU.

    Raises:
        UnsupportedError: the tensors are on several accelerators.
    """
    on: dict[torch.device, str] = {}
    for name, tensor in tensors.items():
        if tensor.device.type not in ("cpu", "meta"):
            on.setdefault(tensor.device, name)
    if len(on) > 1:
        (first, one), (second, other), *_ = on.items()
        raise UnsupportedError(
            f"{one} is on {first} and {other} on {second}: expected one device for each process; start a process for "
            "each device (torchrun), with fully_shard or tensor parallelism where one is too small for the model"
        )
    return next(iter(on), torch.device("cpu"))


def copier_for(device: torch.device) -> Copier:
    """The copier for gradients on `device`."""
    if device.type == "cpu":
        return HostCopier()
    current = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if current is None or current.type != device.type or not hasattr(torch.get_device_module(device), "Stream"):
        return HostCopier(f"each copy from {device.type} waits for the device, as torch has no streams for it")
    return AcceleratorCopier(device)
