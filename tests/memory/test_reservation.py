"""Memory that is reserved while a loop goes on."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from types import SimpleNamespace

import pytest

import memckpt
from benchmarks.gpu.page_locks import huge_bytes
from memckpt.config import AgentConfig
from memckpt.errors import MemoryBudgetError
from memckpt.memory import region as region_module
from memckpt.memory.region import HUGE_PAGE, Region, Reservation, bytes_being_reserved
from memckpt.processes.address import AgentAddress
from memckpt.processes.control import ask_status
from memckpt.replication.keeping import fragment_store
from memckpt.replication.transport.messages import AskManifest, GotNone, NotStored, Open, Stored
from tests.support.cluster.replicator_node import Node
from tests.support.cluster.waiting import until
from tests.support.trainings.engine_cases import PLAIN
from tests.support.trainings.engine_child import config
from tests.support.trainings.engine_harness import Lab

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


def reserve(region: Region, nbytes: int) -> Reservation:
    return Reservation("x", [(region, 0, nbytes)])


def test_memory_comes_in_huge_pages_where_the_kernel_has_some(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(region_module, "AT_ONCE_BYTES", 0)
    monkeypatch.setattr(region_module, "PATIENCE_SECONDS", 60.0)
    size, part = 8 * HUGE_PAGE, 3 * HUGE_PAGE // 2
    with closing(Region.lay_out("x", size)) as region:
        held = b"start" * 100
        region.map[:500] = held  # as the start of a training, which is there when the rest is reserved
        for parts in ([(region, part, size - part)], [(region, 0, size)]):
            with closing(Reservation("x", parts)) as made:
                made.finish()
        assert region.taken_bytes == size
        assert region.map[:500] == held
        huge = huge_bytes(region)
    with closing(Region.lay_out("x", size)) as region:
        monkeypatch.setattr(region_module, "_MADV_COLLAPSE", -1)  # a kernel without it
        with closing(reserve(region, size)) as made:
            made.finish()
        assert region.taken_bytes == size
        assert huge_bytes(region) == 0
    with closing(Region.lay_out("x", size)) as region:
        monkeypatch.undo()  # so little memory is no reason to wait for huge pages
        with closing(reserve(region, size)) as made:
            made.finish()
        assert huge_bytes(region) == 0
    if not huge:
        pytest.skip("this kernel gives no huge pages on request (Linux 6.1 does)")
    assert huge == size


def test_huge_pages_that_come_slowly_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    clock = iter(range(100))
    monkeypatch.setattr(region_module, "AT_ONCE_BYTES", 0)
    monkeypatch.setattr(region_module, "CHUNK_BYTES", HUGE_PAGE)
    monkeypatch.setattr(region_module, "PATIENCE_SECONDS", 2.5)
    monkeypatch.setattr(region_module, "time", SimpleNamespace(monotonic=lambda: next(clock)))  # each takes a second
    monkeypatch.setattr(region_module, "_take_huge_pages", lambda fd, start, nbytes: asked.append(start) is None)
    with closing(Region.lay_out("x", 8 * HUGE_PAGE)) as region, closing(reserve(region, 8 * HUGE_PAGE)) as made:
        made.finish()
        assert region.taken_bytes == 8 * HUGE_PAGE
    assert asked == [0, HUGE_PAGE, 2 * HUGE_PAGE]


@pytest.mark.promise(
    "a replicator keeps answering its peers while it reserves much memory, or while its agent makes a replica"
)
def test_memory_comes_in_chunks_and_says_how_far_it_is(kernel: Kernel) -> None:
    with (
        closing(Region.lay_out("x", 6 * CHUNK)) as region,
        closing(Reservation("x", [(region, 0, 5 * CHUNK + 1)])) as made,
    ):
        kernel.go_on(2)
        until(lambda: made.reserved == 2 * CHUNK, "two chunks are there")
        assert not made.over
        assert bytes_being_reserved() == 3 * CHUNK + 1
        kernel.go_on()
        until(lambda: made.over, "all of it is there")
        assert made.reserved == 5 * CHUNK + 1
        assert bytes_being_reserved() == 0
        assert kernel.chunks == [*((number * CHUNK, CHUNK) for number in range(5)), (5 * CHUNK, 1)]
        made.finish()


def test_what_the_kernel_does_not_have_is_an_error_at_the_end(kernel: Kernel) -> None:
    kernel.room = 3 * CHUNK
    kernel.go_on()
    with closing(Region.lay_out("x", 5 * CHUNK)) as region:
        made = reserve(region, region.nbytes)
        with pytest.raises(MemoryBudgetError, match="of memory for x"):
            made.finish()


def test_one_that_is_not_wanted_any_more_ends(kernel: Kernel) -> None:
    with closing(Region.lay_out("x", 100 * CHUNK)) as region:
        made = reserve(region, region.nbytes)
        assert kernel.asked.wait(60)
        closer = threading.Thread(target=made.close)
        closer.start()
        until(made._closing.is_set, "it is to end")
        kernel.go_on(1)
        closer.join()
        assert len(kernel.chunks) == 1


def test_a_replicator_speaks_with_peers_while_it_reserves(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fragment_store, "AT_ONCE_BYTES", 0)
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
        until(lambda: node.replicator._memory._reserving[0][1].over, "it is there")
        assert node.says("a", opened) == []
        assert node.keep("a", 3) == [Stored((0,), "ga", 3)]
        assert not node.replicator._memory._reserving


def test_what_a_replicator_reserves_ends_with_the_attempt(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fragment_store, "AT_ONCE_BYTES", 0)
    with closing(Node()) as node:
        node.fragment_store._rooms = node.replicator._memory
        node.says("a", Open(node.window("a")))
        kernel.go_on()
        node.replicator._leave_attempt()
        assert not node.replicator._memory._reserving


@pytest.mark.promise("memory for a generation, which a thread of the agent reserves")
def test_an_agent_answers_while_it_reserves_and_a_training_waits_for_it(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Longer than an answer may take: first the memory of a start, then that of the other slots."""
    steps_read, steps_write = os.pipe()
    asked_read, asked_write = os.pipe()

    def fallocate(fd: int, start: int, nbytes: int) -> None:
        os.write(asked_write, b"x")
        os.read(steps_read, 1)
        os.posix_fallocate(fd, start, nbytes)

    monkeypatch.setattr(region_module, "AT_ONCE_BYTES", 0)
    monkeypatch.setattr(region_module, "_fallocate", fallocate)
    lab.start_agent()

    def body() -> None:
        training = PLAIN.build()
        settings = config("lazy", agent=AgentConfig(start_seconds=2.0))
        session = memckpt.attach(training.model, training.optimizers, run_dir=lab.run_dir, config=settings)
        session.restore()
        for step in (1, 2):
            training.batch(step)
            assert session.commit(step)
        session.close()

    child = lab.fork(body, "training")
    os.read(asked_read, 1)
    time.sleep(2.5)  # longer than start_seconds
    assert ask_status(AgentAddress.of(lab.run_dir)) is not None
    os.write(steps_write, b"x" * 1000)
    assert child.wait() == 0, child.log.read_text()
    assert "trying again" not in child.log.read_text()
    for fd in (steps_read, steps_write, asked_read, asked_write):
        os.close(fd)
