"""Replicators' transports driven by one loop, and a TCP proxy between them that cuts connections and logs traffic."""

from __future__ import annotations

import contextlib
import os
import random
import secrets
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import zmq

from memckpt.protocol.replication import PeerKeys
from memckpt.replication.transport.transport import Delivery, Limits, Met, Transport
from tests.support.cluster.waiting import until

PATIENCE_SECONDS = 60.0


class Node:
    """A transport and its received messages. It reads only while `reads`; its clock is `ahead` seconds ahead."""

    def __init__(self, name: str, keys: PeerKeys | str | None, **options: Any) -> None:
        limits = {name: options.pop(name) for name in ("max_body", "max_payload", "window_bytes") if name in options}
        options = {"host": "127.0.0.1", "heartbeat_seconds": 0.1, **options}
        self.transport = Transport(name, keys=keys, limits=Limits(**limits), **options)
        self.name = name
        self.reads = True
        self.ahead = 0.0
        self.met: list[Met] = []
        self.received: list[Delivery] = []

    @property
    def port(self) -> int:
        """The port that it listens on, whatever it tells others."""
        return int(self.transport._router.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0").rpartition(":")[2])

    @property
    def bulk_port(self) -> int:
        """The same for payloads."""
        return int(self.transport._bulk.listener.getsockname()[1])

    def bodies(self, peer: str | None = None) -> list[bytes]:
        return [each.body for each in self.received if peer in (None, each.peer)]

    def tend(self) -> float:
        return self.transport.tend(time.monotonic() + self.ahead)

    def read(self) -> None:
        while (event := self.transport.receive()) is not None:
            if isinstance(event, Met):
                self.met.append(event)
            else:
                # The payload's memory is used again.
                self.received.append(event._replace(payload=bytes(event.payload)))


def drive(*nodes: Node, until: Callable[[], bool]) -> None:
    """Run the nodes' loops until a condition holds."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    poller = zmq.Poller()
    reading = [node for node in nodes if node.reads]
    for node in reading:
        node.transport.register(poller)
    try:
        while not until():
            now = time.monotonic()
            if now > deadline:
                raise TimeoutError(f"not within {PATIENCE_SECONDS} s: {[describe(node) for node in nodes]}")
            for node in reading:
                node.read()
            wait = min(node.tend() for node in reading)
            if not until():
                poller.poll(int(min(wait, 0.1) * 1000))
    finally:
        for node in reading:
            node.transport.unregister(poller)


def describe(node: Node) -> str:
    transport = node.transport
    return f"{node.name}: {len(node.received)} received, {dict(transport.refused)}, {transport.peers()}"


@contextlib.contextmanager
def nodes_of(*nodes: Node) -> Iterator[tuple[Node, ...]]:
    """Nodes that are closed at the end."""
    try:
        yield nodes
    finally:
        for node in nodes:
            node.transport.close()


def acquaint(*nodes: Node) -> None:
    """Introduce all nodes to each other."""
    for node in nodes:
        for other in nodes:
            if other is not node:
                node.transport.connect(other.name, other.transport.address)
    drive(*nodes, until=lambda: all(len(node.met) == len(nodes) - 1 for node in nodes))


def free_port() -> int:
    """A port that is free, as is the one above it, and that no connection gets as its own end in the meantime."""
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = secrets.choice(range(lowest // 2, lowest - 1))
        with (
            contextlib.suppress(OSError),
            socket.create_server(("127.0.0.1", port)),
            socket.create_server(("127.0.0.1", port + 1)),
        ):
            return port


def open_things() -> tuple[int, int]:
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


def assert_nothing_is_left_beyond(before: tuple[int, int]) -> None:
    """Check for leaked threads and descriptors. A joined thread stays listed for an instant."""
    until(
        lambda: all(now <= then for now, then in zip(open_things(), before, strict=True)),
        f"threads and descriptors as before: {before}",
    )


class Proxy:
    """Forwards TCP connections to a port of this host. What is done to it is done to the one `beside` it, too."""

    def __init__(self, port: int, target: int, beside: Proxy | None = None) -> None:
        self.beside = beside
        self.change: Callable[[bytes], bytes] = bytes  # of what clients sent
        self.captured: list[bytearray] = []  # what clients sent, by connection
        self.cuts = 0  # connections that were cut
        self._stopped = False
        self._target = target
        self._server = socket.create_server(("127.0.0.1", port))
        self.address = f"tcp://127.0.0.1:{self._server.getsockname()[1]}"
        self._selector = selectors.DefaultSelector()
        self._waker, self._woken = socket.socketpair()
        self._selector.register(self._server, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._other: dict[socket.socket, tuple[socket.socket, bytearray | None]] = {}
        self._orders: list[str] = []
        self._thread = threading.Thread(target=self._run, name="proxy")
        self._thread.start()

    @property
    def stopped(self) -> bool:
        """It forwards and accepts nothing."""
        return self._stopped

    @stopped.setter
    def stopped(self, stopped: bool) -> None:
        self._stopped = stopped
        if self.beside is not None:
            self.beside.stopped = stopped

    def cut(self) -> None:
        """End all connections at once; undelivered data is lost."""
        if self.beside is not None:
            self.beside.cut()
        self._orders.append("cut")
        self._waker.send(b".")

    def close(self) -> None:
        if self.beside is not None:
            self.beside.close()
        self._orders.append("close")
        self._waker.send(b".")
        self._thread.join(PATIENCE_SECONDS)
        for sock in (self._server, self._waker, self._woken):
            sock.close()
        self._selector.close()

    def _run(self) -> None:
        while True:
            for key, _ in self._selector.select():
                sock = key.fileobj
                assert isinstance(sock, socket.socket)
                if sock is self._woken:
                    sock.recv(4096)
                elif self.stopped:
                    continue
                elif sock is self._server:
                    self._accept()
                elif sock in self._other:
                    self._forward(sock)
            while self._orders:
                order = self._orders.pop(0)
                self._cut_all()
                if order == "close":
                    return

    def _accept(self) -> None:
        client, _ = self._server.accept()
        try:
            server = socket.create_connection(("127.0.0.1", self._target))
        except OSError:
            client.close()
            return
        capture = bytearray()
        self.captured.append(capture)
        self._other[client] = (server, capture)
        self._other[server] = (client, None)
        for sock in (client, server):
            # Little is buffered, and a client that does not read must not block the proxy for ever.
            sock.settimeout(5.0)
            self._selector.register(sock, selectors.EVENT_READ)

    def _forward(self, sock: socket.socket) -> None:
        other, capture = self._other[sock]
        try:
            data = sock.recv(1 << 16)
            if data:
                if capture is not None and len(capture) < 1 << 20:
                    capture += data
                other.sendall(data if capture is None else self.change(data))
                return
        except OSError:
            pass
        self._end(sock)

    def _cut_all(self) -> None:
        while self._other:
            self._end(next(iter(self._other)))
            self.cuts += 1

    def _end(self, sock: socket.socket) -> None:
        other, _ = self._other.pop(sock)
        self._other.pop(other, None)
        for each in (sock, other):
            self._selector.unregister(each)
            # A reset: buffered data is not delivered.
            each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            each.close()


PAYLOAD = 128 << 10
RANDOM = random.Random(0).randbytes(1 << 20)


def payload_of(number: int) -> memoryview:
    at = number * 7919 % (len(RANDOM) - PAYLOAD)
    return memoryview(RANDOM)[at : at + PAYLOAD]


class Sender:
    """Sends numbered messages as room allows, every fourth one without a payload."""

    def __init__(self, node: Node, peer: str, count: int) -> None:
        self.node = node
        self.peer = peer
        self.count = count
        self.sent = 0

    def send(self) -> None:
        transport = self.node.transport
        while self.sent < self.count and transport.room(self.peer) >= PAYLOAD:
            payload = payload_of(self.sent) if self.sent % 4 else b""
            transport.send(self.peer, b"%d" % self.sent, payload)
            self.sent += 1

    def done(self, node: Node) -> bool:
        """Send what may be sent; whether all has arrived."""
        self.send()
        return len(node.bodies(self.node.name)) >= self.count

    def check(self, node: Node) -> None:
        received = [each for each in node.received if each.peer == self.node.name]
        assert [int(each.body) for each in received] == list(range(self.count))
        for number, each in enumerate(received):
            assert bytes(each.payload) == (bytes(payload_of(number)) if number % 4 else b"")
