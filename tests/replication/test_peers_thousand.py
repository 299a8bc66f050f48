"""A replicator among 1,000 peers, as far as its sockets go: all of them meet, and each message arrives once."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection

import pytest
import zmq

from memckpt.protocol.descriptors import LANE_DESCRIPTORS, PEER_DESCRIPTORS, raise_limit
from memckpt.protocol.replication import PeerKeys
from memckpt.replication.transport.directory import make_keys, make_password
from memckpt.replication.transport.transport import Delivery, Met, Transport

#: A stand-in has a context of its own, of some 25 descriptors, so they are spread over several processes.
_STAND_INS_EACH = 200
_HEARTBEAT_SECONDS = 5.0


def stand_ins(channel: Connection, names: list[str], leader: str, keys: PeerKeys | str) -> None:
    """Be so many peers until somebody says that it is over; each answers with its name and what it has got."""
    raise_limit()
    with ExitStack() as stack:
        transports = {
            name: Transport(name, "127.0.0.1", keys=keys, heartbeat_seconds=_HEARTBEAT_SECONDS) for name in names
        }
        for one in transports.values():
            stack.callback(one.close)
            one.connect("leader", leader)
        channel.send({name: one.address for name, one in transports.items()})
        while not channel.poll(0.02):
            for name, one in transports.items():
                while (event := one.receive()) is not None:
                    if isinstance(event, Delivery):
                        one.send("leader", name.encode() + b":" + event.body, bytes(event.payload))
                one.tend(time.monotonic())


@contextmanager
def peers(count: int, leader: Transport, keys: PeerKeys | str) -> Iterator[dict[str, str]]:
    """So many stand-ins run; their addresses by name."""
    spawn = multiprocessing.get_context("spawn")
    with ExitStack() as stack:
        channels: list[Connection] = []
        for first in range(0, count, _STAND_INS_EACH):
            names = [f"peer{number}" for number in range(first, min(first + _STAND_INS_EACH, count))]
            ours, theirs = spawn.Pipe()
            process = spawn.Process(target=stand_ins, args=(theirs, names, leader.address, keys))
            process.start()
            stack.callback(process.join)
            stack.callback(ours.close)  # its end is the end of the process
            stack.callback(process.terminate)
            theirs.close()
            channels.append(ours)
        yield {name: address for channel in channels for name, address in channel.recv().items()}


@pytest.mark.parametrize(
    ("count", "payload"),
    [
        pytest.param(40, b"", id="40"),
        pytest.param(40, bytes(1 << 10), id="40-lanes"),
        pytest.param(1000, b"", id="1000", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("encrypted", [False, True], ids=["plain", "curve"])
def test_all_meet_and_each_message_arrives_once(count: int, payload: bytes, encrypted: bool) -> None:
    raise_limit()
    keys = make_keys() if encrypted else make_password()
    leader = Transport("leader", "127.0.0.1", keys=keys, heartbeat_seconds=_HEARTBEAT_SECONDS)
    try:
        poller = zmq.Poller()
        leader.register(poller)
        before = len(os.listdir("/proc/self/fd"))
        with peers(count, leader, keys) as addresses:
            for name, address in addresses.items():
                leader.connect(name, address)
            met: set[str] = set()
            answers: Counter[bytes] = Counter()
            end = time.monotonic() + 300
            while time.monotonic() < end and (len(met) < count or sum(answers.values()) < count):
                event = leader.receive()
                if isinstance(event, Met) and event.peer not in met:
                    met.add(event.peer)
                    leader.send(event.peer, b"who?", payload)
                elif isinstance(event, Delivery):
                    assert bytes(event.payload) == payload
                    answers[event.body] += 1
                wait = leader.tend(time.monotonic())
                if event is None:
                    poller.poll(int(min(wait, 0.1) * 1000))
            opened = len(os.listdir("/proc/self/fd")) - before
        assert met == set(addresses)
        assert answers == Counter(f"{name}:who?".encode() for name in addresses)
        assert not leader.refused
        most = PEER_DESCRIPTORS + (LANE_DESCRIPTORS if payload else 0)
        assert (most - 1) * count < opened <= most * count + 64
    finally:
        leader.close()
