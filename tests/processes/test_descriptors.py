"""Descriptors: those above 1,023 work like any other, and agents and replicators may have as many as the system
allows.
"""

from __future__ import annotations

import os
import resource
import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from memckpt.processes.event_loop import EventLoop
from memckpt.processes.handles import ProcessHandle, start_ticks
from memckpt.processes.helper_process import HelperProcess
from memckpt.protocol.channel import Channel
from memckpt.protocol.replication import Fragments, ListFragments
from memckpt.protocol.trainer import Credit
from tests.support.trainings.engine_harness import Lab


@pytest.fixture
def many_open() -> Iterator[None]:
    """So many descriptors are open that the next ones are above 1,023."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 1200:
        pytest.skip("this user may not have 1,200 open files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 1200), hard))
    with ExitStack() as stack:
        while True:
            stack.callback(os.close, fd := os.open("/dev/null", os.O_RDONLY))
            if fd >= 1024:
                break
        yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("many_open")
def test_a_channel_and_a_process_handle_work_above_the_first_1024() -> None:
    ours, theirs = (Channel(one) for one in socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET))
    assert ours.fileno() >= 1024
    assert ours.poll(0.0) is None
    theirs.send(Credit(7))
    assert ours.receive(5)[0] == Credit(7)
    handle = ProcessHandle.of(os.getpid(), start_ticks(os.getpid()))
    assert handle.alive()
    handle.close()
    for one in (ours, theirs):
        one.close()


def limits_of(pid: int) -> tuple[str, str]:
    """Soft and hard limit of a process on open files."""
    [line] = [line for line in Path(f"/proc/{pid}/limits").read_text().splitlines() if "open files" in line]
    soft, hard = line.split()[3:5]
    return soft, hard


@pytest.fixture
def low_limit() -> Iterator[None]:
    """The soft limit that many systems give to processes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(512, hard), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("low_limit")
def test_a_replicator_has_as_many_as_the_system_allows() -> None:
    with closing(EventLoop()) as loop:
        process = HelperProcess(
            "memckpt.replication.process.replicator", loop, lambda message: None, lambda reason: None
        )
        try:
            process.ask(ListFragments({}), Fragments, 20)
            soft, hard = limits_of(process._process.pid)
        finally:
            process.close()
    assert soft == hard


@pytest.mark.usefixtures("low_limit")
def test_an_agent_has_as_many_as_the_system_allows(lab: Lab) -> None:
    agent = lab.start_agent()
    soft, hard = limits_of(agent.pid)
    lab.stop()
    assert soft == hard
