"""The log of an agent never blocks its loop, whatever it is written to; what recurs is told, then told seldom."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from memckpt.config import AgentConfig
from memckpt.processes.address import AgentAddress
from memckpt.processes.control import ask_status, stop_agent
from memckpt.processes.launch import spawn_agent
from memckpt.processes.log import QueuedLines, Seldom
from tests.support.cluster.full_log import fill
from tests.support.cluster.waiting import until


def logger_to(handler: logging.Handler) -> logging.Logger:
    logger = logging.Logger("test")
    logger.addHandler(handler)
    return logger


def test_what_finds_no_room_is_dropped_and_counted() -> None:
    read_fd, write_fd = os.pipe()
    fill(write_fd)
    handler = QueuedLines(write_fd, most_waiting=10)
    logger = logger_to(handler)
    logger.info("that the thread hangs with")
    until(handler._lines.empty)
    for number in range(1000):
        logger.info("line %d", number)
    assert handler.dropped == 990
    with open(read_fd) as stream:
        while not stream.readline().endswith("line 9\n"):  # now there is room
            pass
        logger.info("after")
        handler.stop()
        os.close(write_fd)
        rest = stream.read()
    assert rest == "(the log was blocked: 990 lines were dropped here)\nafter\n"


def test_a_log_that_takes_nothing_holds_no_agent_up(tmp_path: Path) -> None:
    """As on a disk that hangs. (A full pipe in the place of the file.)"""
    address = AgentAddress.of(tmp_path, "node")
    os.mkfifo(address.log_path)
    reader = os.open(address.log_path, os.O_RDWR)
    fill(reader)
    pid = spawn_agent(address, AgentConfig(linger_seconds=60.0, start_seconds=20.0))
    status = ask_status(address)
    assert status.pid == pid
    assert stop_agent(address) == pid
    os.close(reader)


def test_the_first_times_are_told_then_one_in_a_while_with_the_number_of_those_left_out() -> None:
    now = [0.0]
    seldom = Seldom(first=3, seconds=60.0, clock=lambda: now[0])
    told = []
    for second in range(200):
        now[0] = float(second)
        if (more := seldom.count()) is not None:
            told.append((second, more))
    assert told[:3] == [(0, ""), (1, ""), (2, "")]
    assert told[3:] == [(second, " (59 more since the last line)") for second in (62, 122, 182)]
