"""CPU seconds that a GB takes between two replicators, sealed and in plain, beside ZeroMQ's own encryption."""

from __future__ import annotations

import math
import multiprocessing
import statistics
import time
from multiprocessing.connection import Connection
from typing import NamedTuple

import zmq

from benchmarks.harness.command import Options, run
from benchmarks.harness.report import Report
from memckpt.protocol.replication import PeerKeys
from memckpt.replication.transport.directory import make_keys, make_password
from memckpt.replication.transport.transport import Delivery, Limits, Transport

TITLE = "What a GB costs between two replicators"
METHOD = """\
One process sends messages with payloads to another one over loopback. CPU time is that of a process with all its
threads, and the kernel's for it, from behind the first message until all are acknowledged. *AES-GCM* and *plain* are
transports with `security="curve"` and `"plain"`. *ZeroMQ, CURVE* is a DEALER and a ROUTER with frames of the same sizes
that do nothing else: no acknowledgements, no order after a loss. All in turn; medians of the repetitions."""
_PATIENCE_SECONDS = 120.0
_WINDOW_BYTES = 32 << 20
_BODY = bytes(400)  # as large as of a message that names four fragments


class Task(NamedTuple):
    """Payloads to send; `bare`: with ZeroMQ alone."""

    keys: PeerKeys | str
    bare: bool
    messages: int
    payload_bytes: int


def receive_tasks(link: Connection) -> None:
    """Receive what each task announces, and report CPU seconds."""
    while (task := link.recv()) is not None:
        (_receive_bare if task.bare else _receive)(task, link)


def _receive(task: Task, link: Connection) -> None:
    transport = Transport("receiver", "127.0.0.1", keys=task.keys, limits=Limits(window_bytes=_WINDOW_BYTES))
    poller, received = zmq.Poller(), 0
    transport.register(poller)
    link.send(transport.address)
    cpu = 0.0
    while received < task.messages:
        while (event := transport.receive()) is not None:
            received += isinstance(event, Delivery) and len(event.payload) == task.payload_bytes
            cpu = cpu or (received and time.process_time())
        poller.poll(math.ceil(transport.tend(time.monotonic()) * 1000))
    link.send(time.process_time() - cpu)
    while not link.poll():  # until the sender knows of all
        while transport.receive() is not None:
            pass
        poller.poll(math.ceil(min(transport.tend(time.monotonic()), 0.01) * 1000))
    link.recv()
    transport.close()


def _send(task: Task, address: str, payload: memoryview) -> tuple[float, float]:
    transport = Transport("sender", "127.0.0.1", keys=task.keys, limits=Limits(window_bytes=_WINDOW_BYTES))
    transport.connect("receiver", address)
    poller, sent, began = zmq.Poller(), 0, (0.0, 0.0)
    transport.register(poller)
    while sent < task.messages or transport.progress("receiver")[0]:
        while transport.receive() is not None:
            pass
        if sent == 1 and began == (0.0, 0.0) and not transport.progress("receiver")[0]:
            began = time.process_time(), time.perf_counter()
        most = task.messages if began[0] else 1
        while sent < most and transport.room("receiver") >= len(payload) + len(_BODY):
            transport.send("receiver", _BODY, payload)
            sent += 1
        if sent or not transport.room("receiver"):
            poller.poll(math.ceil(transport.tend(time.monotonic()) * 1000))
    transport.close()
    return began


def _bare(context: zmq.Context[zmq.Socket[bytes]], kind: int, task: Task) -> zmq.Socket[bytes]:
    socket = context.socket(kind)
    socket.sndhwm = socket.rcvhwm = max(1, _WINDOW_BYTES // task.payload_bytes // 2)  # those of both ends add up
    assert isinstance(task.keys, PeerKeys)
    if kind == zmq.ROUTER:
        socket.curve_server = True
        socket.curve_secretkey = task.keys.server_secret.encode()
    else:
        socket.curve_publickey = task.keys.client_public.encode()
        socket.curve_secretkey = task.keys.client_secret.encode()
        socket.curve_serverkey = task.keys.server_public.encode()
    return socket


def _receive_bare(task: Task, link: Connection) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = _bare(context, zmq.ROUTER, task)
    socket.bind("tcp://127.0.0.1:*")
    link.send(socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0"))
    socket.recv_multipart(copy=False)
    cpu = time.process_time()
    for _ in range(task.messages - 1):
        socket.recv_multipart(copy=False)
    link.send(time.process_time() - cpu)
    link.recv()
    context.destroy(linger=0)


def _send_bare(task: Task, address: str, payload: memoryview) -> tuple[float, float]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = _bare(context, zmq.DEALER, task)
    socket.connect(address)
    began = 0.0, 0.0
    for number in range(task.messages):
        socket.send(_BODY, zmq.SNDMORE)
        socket.send(payload, copy=False)
        if number == 0:
            began = time.process_time(), time.perf_counter()
    socket.close()
    context.term()
    return began


def measure(link: Connection, task: Task, payload: memoryview) -> tuple[float, float, float]:
    """CPU seconds a GB of sender and receiver, and GB a second, of one task."""
    link.send(task)
    address = link.recv()
    cpu, began = (_send_bare if task.bare else _send)(task, address, payload)
    sending, seconds = time.process_time() - cpu, time.perf_counter() - began
    if not link.poll(_PATIENCE_SECONDS):
        raise RuntimeError("the receiving process does not answer")
    receiving = link.recv()
    link.send(None)
    gigabytes = task.messages * task.payload_bytes / 1e9
    return sending / gigabytes, receiving / gigabytes, gigabytes / seconds


def compare(report: Report, link: Connection, payload_bytes: int, nbytes: int, repetitions: int) -> None:
    """Rows of one size of payloads."""
    payload = memoryview(bytes(payload_bytes))
    keys, messages = make_keys(), nbytes // payload_bytes
    arms = {
        "AES-GCM": Task(keys, False, messages, payload_bytes),
        "plain": Task(make_password(), False, messages, payload_bytes),
        "ZeroMQ, CURVE": Task(keys, True, messages, payload_bytes),
    }
    taken: dict[str, list[tuple[float, float, float]]] = {name: [] for name in arms}
    for _ in range(repetitions):
        for name, task in arms.items():
            taken[name].append(measure(link, task, payload))
    for name, found in taken.items():
        sends, receives, rate = (statistics.median(each) for each in zip(*found, strict=True))
        report.add(
            name, f"{payload_bytes >> 10}", f"{sends:.2f}", f"{receives:.2f}", f"{rate:.2f}",
            what=name, payload_bytes=payload_bytes, nbytes=nbytes, taken=found,
        )  # fmt: skip


def main(options: Options) -> None:
    repetitions, nbytes = (2, 64 << 20) if options.quick else (5, 256 << 20)
    report = options.report(TITLE, METHOD, "wire", "payload KiB", "CPU s a GB: sends", "receives", "GB/s")
    report.notes.append(f"{nbytes >> 20} MiB in each repetition.")
    context = multiprocessing.get_context("spawn")
    link, other = context.Pipe()
    receiver = context.Process(target=receive_tasks, args=(other,))
    receiver.start()
    try:
        for payload_bytes in (128 << 10, 1 << 20):
            compare(report, link, payload_bytes, nbytes, repetitions)
    finally:
        link.send(None)
        receiver.join(_PATIENCE_SECONDS)
        link.close()
    report.write()


if __name__ == "__main__":
    run("wire", main)
