"""The event loop that agents and replicators have in common, with a clock of the tests' where time matters."""

from __future__ import annotations

import os
import select
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial

import pytest
import zmq

from memckpt.memory.pages import LifePage
from memckpt.processes.event_loop import EventLoop
from tests.support.cluster.made_up_time import MadeUp

Sockets = tuple[socket.socket, socket.socket]


@pytest.fixture(params=[select.poll, zmq.Poller])
def loop(request: pytest.FixtureRequest) -> Iterator[EventLoop]:
    before = len(os.listdir("/proc/self/fd"))
    with closing(EventLoop(poller=request.param())) as loop:
        yield loop
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.fixture
def pair() -> Iterator[Sockets]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


def receive(sock: socket.socket, into: list[bytes]) -> None:
    into.append(sock.recv(10))


def test_a_function_is_called_while_there_is_something_to_read(loop: EventLoop, pair: Sockets) -> None:
    read: list[bytes] = []
    loop.attend(pair[0], partial(receive, pair[0], read))
    for word in (b"one", b"two"):
        pair[1].send(word)
        loop.turn()
    assert read == [b"one", b"two"]
    loop.attend(pair[0], lambda: read.append(pair[0].recv(10).upper()))
    pair[1].send(b"three")
    loop.turn()
    assert read[2:] == [b"THREE"]
    loop.unregister(pair[0])
    loop.unregister(pair[0])
    pair[1].send(b"four")
    loop.beat_seconds = 0.0
    loop.turn()
    assert len(read) == 3


def test_what_is_forgotten_in_a_turn_is_not_called_in_it_nor_what_takes_its_descriptor(
    loop: EventLoop, pair: Sockets
) -> None:
    others = socket.socketpair()
    called: list[str] = []

    def replace(ours: socket.socket, other: socket.socket) -> None:
        called.append("first")
        loop.unregister(ours)
        loop.unregister(other)
        os.dup2(pair[1].fileno(), other.fileno())  # where nothing is to be read
        loop.attend(other, lambda: called.append("new"))

    for ours, other in ((pair[0], others[0]), (others[0], pair[0])):
        loop.attend(ours, partial(replace, ours, other))
    pair[1].send(b"x")
    others[1].send(b"x")
    loop.turn()
    assert called == ["first"]
    for sock in (pair[0], *others):
        loop.unregister(sock)
        sock.close()


def test_other_threads_and_signal_handlers_are_heard_in_order(loop: EventLoop) -> None:
    heard: list[object] = []

    def post_all() -> None:
        for number in range(100_000):  # more than a pipe holds
            loop.post(partial(heard.append, number))

    thread = threading.Thread(target=post_all)
    thread.start()
    while len(heard) < 100_000:
        loop.turn()
    thread.join()
    assert heard == list(range(100_000))

    before = signal.signal(signal.SIGUSR1, lambda *_: loop.post(lambda: heard.append("signal")))
    try:
        sender = threading.Thread(target=os.kill, args=(os.getpid(), signal.SIGUSR1))
        sender.start()
        loop.turn()
        sender.join()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert heard[-1] == "signal"


def test_what_comes_after_the_end_is_dropped() -> None:
    loop = EventLoop()
    loop.close()
    loop.post(lambda: None)


def test_an_error_ends_the_turn_and_what_waits_is_done_in_the_next(loop: EventLoop) -> None:
    done: list[str] = []

    def fail() -> None:
        raise ValueError("no")

    loop.post(fail)
    loop.post(lambda: done.append("next"))
    with pytest.raises(ValueError, match="no"):
        loop.turn()
    assert not done
    loop.post(lambda: done.append("last"))
    loop.turn()
    assert done == ["next", "last"]


def test_a_turn_ends_at_the_earliest_deadline() -> None:
    clock = MadeUp()
    due: dict[str, float | None] = {"a": None, "b": None}
    done: list[tuple[str, float]] = []
    with closing(EventLoop(clock=clock, poller=clock)) as loop:

        def add(name: str) -> None:
            def work() -> None:
                at = due[name]
                if at is not None and clock.now >= at:
                    done.append((name, clock.now))
                    due[name] = None

            loop.each_turn(work, lambda: due[name])

        add("a")
        add("b")
        loop.turn()
        assert clock.waits == [None], "nothing is due: it waits until something happens"
        due.update(a=103.0, b=101.5)
        assert loop.deadline() == 101.5
        loop.turn()
        due["b"] = 102.0
        loop.turn()
        loop.turn()
        assert done == [("b", 101.5), ("b", 102.0), ("a", 103.0)]
        due["a"] = 1.0
        loop.turn()
        assert clock.waits[-1] == 0
        loop.beat_seconds = 0.25
        loop.turn()
        due["a"] = clock.now + 0.1
        loop.turn()
        assert clock.waits[-2:] == [250, 100]


def test_each_turn_is_a_sign_of_life() -> None:
    clock = MadeUp()
    page = LifePage.create()
    with closing(page), closing(EventLoop(page, clock, clock)) as loop:
        beats = page.beats
        loop.turn()
        loop.turn()
        assert page.beats == beats + 2


def test_sockets_that_others_register_wake_it_and_are_theirs_to_read() -> None:
    poller = zmq.Poller()
    found: list[bytes] = []
    context = zmq.Context()
    ours, theirs = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
    with context, ours, theirs, closing(EventLoop(poller=poller)) as loop:
        ours.bind("inproc://loop")
        theirs.connect("inproc://loop")
        poller.register(ours, zmq.POLLIN)
        read: Callable[[], None] = lambda: found.append(ours.recv(zmq.NOBLOCK))  # noqa: E731
        loop.each_turn(read, lambda: None)
        theirs.send(b"x")
        loop.turn()
    assert found == [b"x"]
