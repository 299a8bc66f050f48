"""Memory that is reserved while a loop goes on."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from contextlib import closing

import pytest

from memckpt.errors import MemoryBudgetError
from memckpt.memory import region as region_module
from memckpt.memory.region import Reservation
from memckpt.replication.keeping import fragment_store
from memckpt.replication.transport.wire import AskManifest, GotNone, NotStored, Open, Stored
from tests.support.cluster.peers_harness import wait_for
from tests.support.cluster.replicator_node import Node

CHUNK = 4096


class Kernel:
    """Reserves a chunk whenever it is let go on, and has so many bytes."""

    def __init__(self) -> None:
        self.steps = threading.Semaphore(0)
        self.room = 1 << 40
        self.asked = threading.Event()
        self.chunks: list[tuple[int, int]] = []

    def fallocate(self, fd: int, start: int, nbytes: int) -> None:
        self.asked.set()
        assert self.steps.acquire(timeout=60)
        if start + nbytes > self.room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.chunks.append((start, nbytes))

    def go_on(self, chunks: int = 1000) -> None:
        self.steps.release(chunks)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[Kernel]:
    kernel = Kernel()
    monkeypatch.setattr(region_module, "_fallocate", kernel.fallocate)
    monkeypatch.setattr(region_module, "CHUNK_BYTES", CHUNK)
    yield kernel
    kernel.go_on()


@pytest.mark.promise(
    "a replicator keeps answering its peers while it reserves much memory, or while its agent makes a replica"
)
def test_memory_comes_in_chunks_and_says_how_far_it_is(kernel: Kernel) -> None:
    made = Reservation("x", 5 * CHUNK + 1)
    with closing(made):
        kernel.go_on(2)
        wait_for(lambda: made.reserved == 2 * CHUNK, "two chunks are there")
        assert not made.over
        kernel.go_on()
        wait_for(lambda: made.over, "all of it is there")
        assert made.reserved == 5 * CHUNK + 1
        assert kernel.chunks == [*((number * CHUNK, CHUNK) for number in range(5)), (5 * CHUNK, 1)]
        with closing(made.take_region()) as region:
            assert region.nbytes == 5 * CHUNK + 1


def test_what_the_kernel_does_not_have_is_an_error_when_it_is_taken(kernel: Kernel) -> None:
    before = set(os.listdir("/proc/self/fd"))
    kernel.room = 3 * CHUNK
    kernel.go_on()
    made = Reservation("fragments", 5 * CHUNK)
    wait_for(lambda: made.over, "the kernel has said no")
    with pytest.raises(MemoryBudgetError, match="of memory for fragments"):
        made.take_region()
    made.close()
    assert set(os.listdir("/proc/self/fd")) == before


def test_one_that_is_not_wanted_any_more_ends(kernel: Kernel) -> None:
    before = set(os.listdir("/proc/self/fd"))
    made = Reservation("x", 100 * CHUNK)
    assert kernel.asked.wait(60)
    closer = threading.Thread(target=made.close)
    closer.start()
    wait_for(made._closing.is_set, "it is to end")
    kernel.go_on(1)
    closer.join()
    assert len(kernel.chunks) == 1
    assert set(os.listdir("/proc/self/fd")) == before


def test_a_replicator_speaks_with_peers_while_it_reserves(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fragment_store, "_AT_ONCE_BYTES", 0)
    with closing(Node()) as node:
        node.fragment_store._rooms = node.replicator._memory
        opened = Open(node.window("a"))
        [refused] = node.says("a", opened)
        assert isinstance(refused, NotStored)
        assert "is being reserved: 0.0 of" in refused.reason
        [answer] = node.says("c", AskManifest(1, (0,), "ga", 3))
        assert isinstance(answer, GotNone)
        [again] = node.says("a", opened)
        assert isinstance(again, NotStored)
        assert len(node.replicator._memory._reserving) == 1
        kernel.go_on()
        wait_for(lambda: node.replicator._memory._reserving[0].over, "it is there")
        assert node.says("a", opened) == []
        assert node.keep("a", 3) == [Stored((0,), "ga", 3)]
        assert not node.replicator._memory._reserving


def test_what_a_replicator_reserves_ends_with_the_attempt(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fragment_store, "_AT_ONCE_BYTES", 0)
    with closing(Node()) as node:
        node.fragment_store._rooms = node.replicator._memory
        node.says("a", Open(node.window("a")))
        kernel.go_on()
        node.replicator._leave_attempt()
        assert not node.replicator._memory._reserving
