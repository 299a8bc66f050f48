"""How bytes get from live tensors into slots: at once on a CPU, on a side stream from a GPU.

Contract: :meth:`copy` may return before the copy is done. The source must not change before the current stream has
passed :meth:`wait_before_changes`, and nobody may read the destination before :meth:`finish` of a token that was
taken after the copy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from memckpt.errors import UnsupportedError
from memckpt.memory.region import Region


class Copier(Protocol):
    """Copies into slots. One per session."""

    asynchronous: bool

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        """Begin to copy `source` into host memory `destination` of the same shape and dtype."""

    def wait_before_changes(self) -> None:
        """From here on, work that is enqueued may change sources again."""

    def token(self) -> Callable[[], None]:
        """A function that waits until every copy that was begun before this call is done."""

    def adopt(self, region: Region) -> None:
        """Prepare a region as a destination."""

    def release(self, region: Region) -> None:
        """Undo :meth:`adopt`; before the region is closed."""


class HostCopier:
    """Plain copies in the calling thread: there is nothing to overlap with on a CPU that computes."""

    asynchronous = False

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        destination.copy_(source)

    def wait_before_changes(self) -> None:
        return

    def token(self) -> Callable[[], None]:
        return lambda: None

    def adopt(self, region: Region) -> None:
        return

    def release(self, region: Region) -> None:
        return


class CudaCopier:
    """Copies on a side stream into page-locked slots.

    Small tensors are gathered into buckets before they are launched, so that a layer costs one hand-over between
    streams and not one per parameter (REFT's tiny buckets).
    """

    asynchronous = True
    BUCKET_BYTES = 4 << 20

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._bucket: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._bucket_bytes = 0
        #: The streams on which what is in the bucket was made: fully_shard reduces gradients on one of its own.
        self._sources: set[torch.cuda.Stream] = set()
        self._registered: dict[int, int] = {}

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        if source.device.type != "cuda":
            destination.copy_(source)
            return
        self._bucket.append((destination, source))
        self._sources.add(torch.cuda.current_stream(self._device))
        self._bucket_bytes += source.nbytes
        if self._bucket_bytes >= self.BUCKET_BYTES:
            self._launch()

    def _launch(self) -> None:
        if not self._bucket:
            return
        bucket, self._bucket, self._bucket_bytes = self._bucket, [], 0
        sources, self._sources = self._sources, set()
        for made_on in sources:
            self._stream.wait_stream(made_on)
        with torch.cuda.stream(self._stream):
            for destination, source in bucket:
                destination.copy_(source, non_blocking=True)
                source.record_stream(self._stream)

    def wait_before_changes(self) -> None:
        self._launch()
        torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def token(self) -> Callable[[], None]:
        self._launch()
        event = torch.cuda.Event()
        event.record(self._stream)
        return event.synchronize

    def adopt(self, region: Region) -> None:
        """Page-lock the mapping: copies from the device to pageable memory would silently block."""
        address = torch.frombuffer(region.map, dtype=torch.uint8).data_ptr()
        result = torch.cuda.cudart().cudaHostRegister(address, region.nbytes, 0)
        if int(result) != 0:
            raise UnsupportedError(
                f"cudaHostRegister of {region.nbytes / 2**20:.0f} MiB failed with error {int(result)}; "
                "raise the locked-memory limit (ulimit -l) of this process"
            )
        self._registered[id(region)] = address

    def release(self, region: Region) -> None:
        address = self._registered.pop(id(region), None)
        if address is not None:
            self._stream.synchronize()
            torch.cuda.cudart().cudaHostUnregister(address)


def copier_for(device: torch.device) -> Copier:
    """The copier for gradients that live on `device`."""
    return CudaCopier(device) if device.type == "cuda" else HostCopier()
