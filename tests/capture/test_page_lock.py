"""Page-locking of what copies go to: what is due first at first, and training goes on where it is refused."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from memckpt.capture.copier import AcceleratorCopier, PageLock, copier_for
from memckpt.memory.region import Region
from memckpt.state.layout import PAGE

PARTS = [(4 * PAGE, 2 * PAGE), (6 * PAGE, 2 * PAGE), (0, 4 * PAGE)]


class Runtime:
    """A device's runtime that locks as many parts as it is let, and none of more than so many bytes."""

    def __init__(self, room: int, most_bytes: int = 1 << 40) -> None:
        self.registered: dict[int, int] = {}
        self.room = threading.Semaphore(room)
        self.most_bytes = most_bytes

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        self.room.acquire()
        if nbytes > self.most_bytes:
            return 2
        self.registered[address] = nbytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        del self.registered[address]
        return 0

    def cudaGetErrorString(self, error: int) -> str:
        return {2: "out of memory"}[error]


@pytest.fixture
def region() -> Iterator[Region]:
    region = Region.create("test", 8 * PAGE)
    yield region
    region.close()


def test_what_is_due_first_is_locked_first_and_the_rest_meanwhile(region: Region) -> None:
    runtime = Runtime(room=2)
    lock = PageLock(runtime, contextlib.nullcontext, region, PARTS)
    lock.wait(3 * PAGE)  # the last part is not locked yet
    start = min(runtime.registered) - 4 * PAGE
    assert list(runtime.registered.items()) == [(start + offset, length) for offset, length in PARTS[:2]]
    runtime.room.release()
    lock.wait(8 * PAGE)
    assert list(runtime.registered.items()) == [(start + offset, length) for offset, length in PARTS]
    lock.undo()
    assert runtime.registered == {}


def test_training_goes_on_where_locking_is_refused(
    region: Region, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PageLock, "_told", False)
    for _ in range(2):
        runtime, again = Runtime(room=3, most_bytes=3 * PAGE), Region.open(os.dup(region.fd))
        lock = PageLock(runtime, contextlib.nullcontext, again, PARTS)
        lock.wait(8 * PAGE)
        assert len(runtime.registered) == 2  # these are of use all the same
        lock.undo()
        again.close()
    (told,) = caplog.messages  # once
    assert "16.0 KiB of host memory could not be page-locked: cudaHostRegister failed with error 2 (out of mem" in told


def test_unlocking_that_fails_is_told(region: Region, caplog: pytest.LogCaptureFixture) -> None:
    """And no error is left for the next launch of the user's: CUDA keeps it for the thread that unlocked."""
    runtime, threads = Runtime(room=3), []
    unregister = runtime.cudaHostUnregister

    def fail_once(address: int) -> int:
        threads.append(threading.current_thread().name)
        return unregister(address) if len(threads) > 1 else 2

    runtime.cudaHostUnregister = fail_once  # type: ignore[method-assign]
    lock = PageLock(runtime, contextlib.nullcontext, region, PARTS)
    lock.wait(8 * PAGE)
    lock.undo()
    assert len(runtime.registered) == 1
    assert threads == ["memckpt-page-lock"] * 3
    assert caplog.messages == ["memckpt: cudaHostUnregister failed with error 2 (out of memory)"]


def test_devices_without_streams_or_page_locking_are_named() -> None:
    module: Any = SimpleNamespace(Stream=lambda device: None, current_device=lambda: 0, cudart=Runtime)
    assert AcceleratorCopier(torch.device("cuda", 0), module).caveat == ""
    module.cudart = None
    assert "page-locks no shared memory" in AcceleratorCopier(torch.device("cuda", 0), module).caveat
    assert "torch has no streams for it" in copier_for(torch.device("meta")).caveat
    assert copier_for(torch.device("cpu")).caveat == ""
