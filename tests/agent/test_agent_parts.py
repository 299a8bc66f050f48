"""Parts that the agent is made of: channel, address, processes, regions, slots, budget, audit."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import resource
import signal
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from memckpt.errors import AgentError, AgentGoneError, ConfigurationError, DamagedStateError, MemoryBudgetError
from memckpt.memory.budget import available_bytes, check_budget
from memckpt.memory.pages import PhasesPage
from memckpt.memory.region import Region
from memckpt.memory.slots import SlotRing, max_local_ranks
from memckpt.processes import helper_process
from memckpt.processes.address import AgentAddress, Listener
from memckpt.processes.event_loop import EventLoop
from memckpt.processes.handles import ProcessHandle, start_ticks
from memckpt.processes.helper_process import HelperProcess
from memckpt.protocol.channel import INLINE_BYTES, Channel, Message
from memckpt.protocol.replication import Fragments, Halt, Halted, ListFragments, PhasesAre
from memckpt.protocol.trainer import Commit, Credit, Goodbye
from memckpt.state.layout import Layout
from memckpt.state.tensors import ulp_distance
from tests.support.cluster.waiting import until
from tests.support.trainings.engine_harness import Lab
from tests.support.trainings.specs import large_spec

Pair = tuple[Channel, Channel]
Replicator = tuple[HelperProcess, EventLoop, list[Message], list[str]]


@pytest.fixture
def pair() -> Iterator[Pair]:
    ours, theirs = (Channel(sock) for sock in socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET))
    yield ours, theirs
    ours.close()
    theirs.close()


# Channel


@pytest.mark.parametrize("size", [0, INLINE_BYTES - 100, INLINE_BYTES, INLINE_BYTES + 1, 5_000_000])
def test_messages_of_any_size_arrive_whole_and_in_order(pair: Pair, size: int) -> None:
    before = len(os.listdir("/proc/self/fd"))
    state = os.urandom(size)
    pair[0].send(Commit(1, 2, 3, state, b"meta"))
    pair[0].send(Credit(7))
    message, fds = pair[1].receive(5)
    assert message == Commit(1, 2, 3, state, b"meta")
    assert fds == []
    assert pair[1].receive(5)[0] == Credit(7)
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("size", [10, INLINE_BYTES + 1])
def test_descriptors_travel_along_and_keep_their_order(pair: Pair, size: int) -> None:
    files = [os.memfd_create(f"test{index}") for index in range(3)]
    for index, fd in enumerate(files):
        os.write(fd, bytes([index]) * 4)
    pair[0].send(Commit(1, 2, 3, bytes(size)), files)
    message, received = pair[1].receive(5)
    assert isinstance(message, Commit)
    assert [os.pread(fd, 9, 0) for fd in received] == [bytes([index]) * 4 for index in range(3)]
    assert not any(os.get_inheritable(fd) for fd in received)
    for fd in (*files, *received):
        os.close(fd)


def test_a_message_survives_its_sender(pair: Pair) -> None:
    pair[0].send(Commit(1, 2, 3, bytes(INLINE_BYTES * 2)))
    pair[0].close()
    assert pair[1].receive(5)[0] == Commit(1, 2, 3, bytes(INLINE_BYTES * 2))
    with pytest.raises(AgentGoneError, match="closed by the other end"):
        pair[1].receive(5)


def test_a_process_without_free_descriptors_says_so_and_leaks_nothing(pair: Pair) -> None:
    """Neither end of a large message ends with an error of the system's."""
    large = Commit(1, 2, 3, bytes(INLINE_BYTES * 2))
    with _without_descriptors(), pytest.raises(AgentGoneError, match="no room for a message"):
        pair[0].send(large)
    pair[0].send(large)
    with _without_descriptors(), pytest.raises(AgentError, match="too many open files"):
        pair[1].receive(5)
    pair[0].send(large)
    assert pair[1].receive(5)[0] == large


@contextlib.contextmanager
def _without_descriptors() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = os.dup(0)
    os.close(highest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_nothing_there_is_none_and_a_wait_has_a_limit(pair: Pair) -> None:
    assert pair[0].poll() is None
    with pytest.raises(AgentGoneError, match="no answer within"):
        pair[0].receive(0.01)


def test_a_receiver_that_takes_nothing_is_given_up(pair: Pair) -> None:
    def send_for_ever() -> None:
        while True:
            pair[0].send(Credit(1), timeout=0.01)

    with pytest.raises(AgentGoneError, match="took no message"):
        send_for_ever()


@pytest.mark.parametrize("packet", [b"i", b"i\xc1", b"inonsense", b"f", b"x", b"i\x81\xa4type\xa5other"], ids=repr)
def test_what_is_no_message_is_an_error_and_leaks_nothing(pair: Pair, packet: bytes) -> None:
    before = len(os.listdir("/proc/self/fd"))
    pair[0].sock.send(packet)
    with pytest.raises(AgentError):
        pair[1].receive(5)
    assert len(os.listdir("/proc/self/fd")) == before


def test_messages_are_validated(pair: Pair) -> None:
    pair[0].sock.send(b"i" + msgspec.msgpack.encode({"type": "goodbye", "finished": "yes"}))
    with pytest.raises(AgentError, match="do both ends run one version"):
        pair[1].receive(5)
    pair[0].send(Goodbye(True))
    assert pair[1].receive(5)[0] == Goodbye(True)


# Processes


def test_a_run_directory_whose_path_is_no_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"path is text in UTF-8, found the bytes b'.*\\xff'"):
        AgentAddress.of(tmp_path / os.fsdecode(b"x\xff"))


def test_start_ticks_tell_a_process_from_a_later_one_of_the_same_id() -> None:
    assert start_ticks(os.getpid()) > 0
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert start_ticks(pid) == 0  # a zombie is no process any more
    os.waitpid(pid, 0)
    assert start_ticks(pid) == 0


def test_a_process_whose_main_thread_has_ended_is_there_while_another_thread_listens() -> None:
    listener, (ours, theirs) = Listener(), socket.socketpair()
    pid = os.fork()
    if pid == 0:
        ours.close()
        threading.Thread(target=lambda: (theirs.recv(1), os._exit(0))).start()
        ctypes.CDLL(None).pthread_exit(None)
    theirs.close()
    serving = msgspec.structs.replace(listener.serving, pid=pid, start_ticks=start_ticks(pid))
    assert serving.start_ticks > 0
    until(lambda: ProcessHandle(pid, -1).state().startswith("Z"))
    assert not serving.ends(within=0.0)
    ours.close()
    assert serving.ends(within=60.0)
    os.waitpid(pid, 0)
    listener.close()


def test_a_process_handle_kills_and_sees_the_end(lab: Lab) -> None:
    read_fd, write_fd = os.pipe()
    child = lab.fork(lambda: os.read(read_fd, 1) and None, "waits")
    handle = ProcessHandle(child.pid, os.pidfd_open(child.pid))
    assert handle.alive()
    handle.kill()
    assert handle.wait(10)
    assert not handle.alive()
    handle.kill()
    handle.close()
    assert child.wait() == -9
    os.close(read_fd)
    os.close(write_fd)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_every_process_of_a_job_leaves_a_newborn_writer_alone(number: signal.Signals) -> None:
    """The agent starts it when it is told to end, and a scheduler may not be done with its list of processes yet."""
    ended: list[str] = []
    with closing(EventLoop()) as loop:
        writer = HelperProcess("memckpt.agent.saving.writer.record_writer", loop, lambda message: None, ended.append)
        process = writer._process
        try:
            process.send_signal(number)
            status = Path(f"/proc/{process.pid}/status")

            def ignores() -> bool:
                assert process.poll() is None, f"it died of {process.returncode}"
                sets = dict(line.split(":\t") for line in status.read_text().splitlines() if line.startswith("Sig"))
                bit = 1 << (number - 1)
                return bool(int(sets["SigIgn"], 16) & bit) and not int(sets["SigBlk"], 16) & bit

            until(ignores)
        finally:
            writer.close()
    assert process.returncode == -signal.SIGKILL
    assert ended == []
    assert signal.SIGTERM not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


@pytest.fixture
def replicator() -> Iterator[Replicator]:
    received: list[Message] = []
    ended: list[str] = []
    with closing(EventLoop()) as loop:
        process = HelperProcess("memckpt.replication.process.replicator", loop, received.append, ended.append)
        try:
            process.ask(ListFragments({}), Fragments, 20)
            yield process, loop, received, ended
        finally:
            process.close()


def test_what_a_process_that_stands_still_does_not_take_waits_for_it(replicator: Replicator) -> None:
    process, loop, received, ended = replicator
    process._process.send_signal(signal.SIGSTOP)
    before = len(os.listdir("/proc/self/fd"))
    page = PhasesPage.create(1)
    for _ in range(2000):
        process.send(ListFragments({0: ("x" * 100,)}), [])
    process.send(PhasesAre(), [page.fd])
    page.close()
    assert len(process._waiting) > 1000
    process._process.send_signal(signal.SIGCONT)

    while len(received) < 2000:
        loop.turn()
    while process._waiting:
        loop.turn()
    assert len(os.listdir("/proc/self/fd")) == before
    assert ended == []


def test_an_answer_comes_behind_what_waits(replicator: Replicator) -> None:
    process, _, received, _ = replicator
    process._process.send_signal(signal.SIGSTOP)
    while not process._waiting:
        process.send(ListFragments({}), [])
    process._process.send_signal(signal.SIGCONT)
    assert process.ask(Halt(), Halted, 20) == Halted()
    assert received
    assert not process._waiting


def test_no_more_than_so_much_waits_for_a_process(replicator: Replicator, monkeypatch: pytest.MonkeyPatch) -> None:
    process = replicator[0]
    monkeypatch.setattr(helper_process, "_MOST_WAITING_BYTES", 10_000)
    process._process.send_signal(signal.SIGSTOP)

    def send_for_ever() -> None:
        while True:
            process.send(ListFragments({}), [])

    with pytest.raises(AgentGoneError, match=r"reads nothing, and \d+ bytes wait"):
        send_for_ever()
    assert process._waiting_bytes <= 10_000


# Memory


def test_a_region_that_a_limit_of_this_process_forbids_is_refused_by_name(lab: Lab) -> None:
    def body() -> None:
        with open("/proc/self/statm") as file:
            mapped = int(file.read().split()[0]) * resource.getpagesize()
        files = [os.memfd_create("small"), os.memfd_create("large"), os.memfd_create("after")]
        for fd in files:
            os.ftruncate(fd, 64 << 20)
        os.ftruncate(files[0], 4096)
        resource.setrlimit(resource.RLIMIT_AS, (mapped + (32 << 20), resource.RLIM_INFINITY))
        with pytest.raises(MemoryBudgetError, match=r"expected 64\.0 MiB of memory for what the agent holds"):
            Region.open_all(files)
        for fd in files:
            with pytest.raises(OSError, match="Bad file descriptor"):
                os.fstat(fd)

    child = lab.fork(body, "limited")
    assert child.wait() == 0, child.log.read_text()


def test_a_forked_child_has_neither_mapping_nor_descriptor(lab: Lab) -> None:
    from tests.support.cluster.processes import memory_of_ours

    region = Region.create("forked", 8192)
    try:
        assert memory_of_ours("self")

        def body() -> None:
            found = memory_of_ours("self")
            if found:
                raise AssertionError(found)

        child = lab.fork(body, "fork")
        assert child.wait() == 0, child.log.read_text()
    finally:
        region.close()


def test_a_limit_on_files_is_one_on_memory_and_is_named() -> None:
    def limited(kind: int, soft: int) -> str:
        before = resource.getrlimit(kind)
        resource.setrlimit(kind, (soft, before[1]))
        try:
            with pytest.raises(MemoryBudgetError) as caught:
                Region.create("slots", 2 << 20)
        finally:
            resource.setrlimit(kind, before)
        return str(caught.value)

    assert "found a limit of 1.0 MiB on the size of files" in limited(resource.RLIMIT_FSIZE, 1 << 20)
    assert "found no descriptor left for it" in limited(resource.RLIMIT_NOFILE, 3)


def test_memory_that_is_not_there_is_an_error_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not tried in earnest: the kernel would look for that memory, and end other processes to find it."""
    before = len(os.listdir("/proc/self/fd"))

    def refuse(fd: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(MemoryBudgetError, match=r"expected 1\.0 MiB of memory for huge"):
        Region.create("huge", 2**20)
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.promise("a model that does not fit into memory is refused before the first step")
def test_a_budget_larger_than_the_machine_is_no_promise() -> None:
    """Reserving memory that is not there does not fail: the kernel ends a process to find it."""
    with pytest.raises(MemoryBudgetError):
        check_budget(2 * available_bytes(), 0, 2**60, "detail")


def test_the_budget_counts_what_is_held_already() -> None:
    check_budget(100, 100, 200, "detail")
    with pytest.raises(MemoryBudgetError, match=r"\(some detail\), found .*agent\.memory_budget_bytes"):
        check_budget(101 << 20, 100 << 20, 200 << 20, "some detail")
    with pytest.raises(MemoryBudgetError, match="available memory"):
        check_budget(2**60, 0, None, "detail")
    assert 0 < available_bytes() < 2**60


@pytest.mark.promise("an incomplete record")
def test_a_slot_that_is_not_sealed_is_not_read() -> None:
    layout = Layout(large_spec(4))
    region = Region.create("slots", layout.slots_bytes)
    ring, older = SlotRing(region, layout, 2), SlotRing(region, layout, 1)
    with pytest.raises(DamagedStateError):
        ring.check(9, [0])
    ring.open_for_writing(9, 0)
    with pytest.raises(DamagedStateError, match="is being written"):
        ring.check(9, [0])
    ring.seal(9, 0)
    ring.check(9, [0])
    with pytest.raises(DamagedStateError, match="holds record 9"):
        ring.check(9 + layout.ring, [0])
    with pytest.raises(DamagedStateError):
        older.check(9, [0])
    assert max_local_ranks() >= 16
    region.close()


# The audit's measure


def float_of(bits: int) -> float:
    return float(struct.unpack("f", struct.pack("i", bits))[0])


@given(st.integers(-0x7F7FFFFF, 0x7F7FFFFF), st.integers(-0x7F7FFFFF, 0x7F7FFFFF))
def test_ulp_distance_counts_the_floats_in_between(first: int, second: int) -> None:
    """Floats in order are numbered ..., -1, 0, 1, ...; both zeros are number 0, and differ by one bit pattern."""

    def nth(number: int) -> float:
        return float_of(number) if number >= 0 else -float_of(-number)

    a, b = torch.tensor([nth(first)]), torch.tensor([nth(second)])
    assert ulp_distance(a, b) == abs(first - second)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_neighbours_are_one_ulp_apart(dtype: torch.dtype) -> None:
    one = torch.ones(3, dtype=dtype)
    eps = torch.finfo(dtype).eps
    assert ulp_distance(one, one.clone()) == 0
    assert ulp_distance(one, one + eps) == 1
    assert ulp_distance(one, torch.tensor([1, 1, 1 + 4 * eps], dtype=dtype)) == 4


def test_ulp_distance_sees_any_difference_in_bits() -> None:
    one = torch.ones((), dtype=torch.float64)
    assert ulp_distance(one, one + torch.finfo(torch.float64).eps) == 1  # larger ones are counted roughly
    assert ulp_distance(torch.tensor([0.0]), torch.tensor([-0.0])) >= 1
    nan = torch.tensor([float("nan")])
    assert ulp_distance(nan, nan.clone()) == 0
    assert ulp_distance(nan, torch.tensor([1.0])) > 1
    assert ulp_distance(torch.tensor([3, 5]), torch.tensor([3, 9])) == 4
    assert ulp_distance(torch.tensor([True]), torch.tensor([False])) == 1
    assert ulp_distance(torch.zeros(0), torch.zeros(0)) == 0
    assert ulp_distance(torch.tensor([1 + 2j]), torch.tensor([1 + 3j])) > 0
