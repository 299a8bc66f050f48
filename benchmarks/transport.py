"""Throughput between replicators, compared to ZeroMQ without acknowledgements, order and bounds."""

from __future__ import annotations

import math
import multiprocessing
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Literal, NamedTuple

import zmq
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from benchmarks.harness.command import Options, run
from benchmarks.harness.report import Report, median_and_spread
from memckpt.replication.transport.keys import Keys
from memckpt.replication.transport.transport import Delivery, Endpoint, Limits, Transport

TITLE = "The transport between replicators"
METHOD = """\
One process sends messages with payloads to another one over loopback; the rate is that at which they arrive, between
the first and the last. Beside `memckpt.replication.transport.transport` a DEALER and a ROUTER with frames of the same
sizes, which may hold as many bytes on their way and do nothing else: no acknowledgements, no sending again, no
envelopes. In turn; medians of the repetitions, and of the ratios of pairs. CPU time is that of a process with all its
threads: the sender's and the receiver's."""
THREADS_TITLE = "The transport between replicators with several I/O threads in ZeroMQ's context, beside one"
THREADS_METHOD = """\
Measured as in `transport`, in turn, with CURVE; medians of the repetitions, and of the ratios of pairs."""
AES_TITLE = "AES-GCM, 256 bits, in one thread"
AES_METHOD = """\
CPU time that encryption with the processor's own instructions would take in the place of CURVE's XSalsa20 and Poly1305,
as `cryptography` (OpenSSL) seals and opens the payloads of `transport`; copies and sockets come on top."""

PATIENCE_SECONDS = 120.0
WINDOW_BYTES = 32 << 20
LIMITS = Limits(window_bytes=WINDOW_BYTES)
BODY = bytes(64)
ENVELOPE = bytes(60)

Side = Literal["transport", "bare"]


@dataclass(frozen=True)
class Task:
    """Messages to send."""

    side: Side
    keys: Keys | None
    count: int
    payload_bytes: int
    io_threads: int = 1


class Received(NamedTuple):
    """Seconds from the first to the last message, and CPU seconds of the receiving process."""

    seconds: float
    cpu_seconds: float


class Taken(NamedTuple):
    """Seconds from the first to the last message, and CPU seconds of both processes."""

    seconds: float
    sending_cpu_seconds: float
    receiving_cpu_seconds: float


def bare_socket(context: zmq.Context[zmq.Socket[bytes]], kind: int, task: Task) -> zmq.Socket[bytes]:
    socket = context.socket(kind)
    socket.linger = 0
    # The limits of both ends add up.
    socket.sndhwm = socket.rcvhwm = max(1, WINDOW_BYTES // task.payload_bytes // 2)
    if task.keys is not None and kind == zmq.ROUTER:
        socket.curve_server = True
        socket.curve_secretkey = task.keys.server_secret.encode()
    elif task.keys is not None:
        socket.curve_publickey = task.keys.client_public.encode()
        socket.curve_secretkey = task.keys.client_secret.encode()
        socket.curve_serverkey = task.keys.server_public.encode()
    return socket


# The receiving process


def receive_tasks(link: Connection) -> None:
    """Receive the announced messages of each task."""
    while (task := link.recv()) is not None:
        receive = receive_bare if task.side == "bare" else receive_with_transport
        link.send(receive(task, link.send))


def receive_bare(task: Task, tell: Callable[[str], None]) -> Received:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        socket = bare_socket(context, zmq.ROUTER, task)
        socket.bind("tcp://127.0.0.1:*")
        tell(socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0"))
        began = 0.0
        cpu = time.process_time()
        for number in range(task.count):
            socket.recv()
            socket.recv()
            socket.recv()
            payload = socket.recv(copy=False)
            assert len(payload.buffer) == task.payload_bytes
            if number == 0:
                began = time.perf_counter()
        return Received(time.perf_counter() - began, time.process_time() - cpu)
    finally:
        context.destroy(linger=0)


def receive_with_transport(task: Task, tell: Callable[[str], None]) -> Received:
    transport = Transport("receiver", Endpoint("127.0.0.1"), keys=task.keys, limits=LIMITS, io_threads=task.io_threads)
    try:
        tell(transport.address)
        poller = zmq.Poller()
        transport.register(poller)
        began = last = 0.0
        received = 0
        cpu = time.process_time()
        while received < task.count:
            while (event := transport.receive()) is not None:
                if isinstance(event, Delivery):
                    assert len(event.payload) == task.payload_bytes
                    received += 1
                    last = time.perf_counter()
                    began = began or last
            if received < task.count:
                poller.poll(math.ceil(transport.tend(time.monotonic()) * 1000))
        taken = Received(last - began, time.process_time() - cpu)
        tell("all")
        return taken
    finally:
        transport.close()


# The sending process


def send_bare(task: Task, address: str, payload: memoryview) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        socket = bare_socket(context, zmq.DEALER, task)
        socket.linger = -1
        socket.connect(address)
        for _ in range(task.count):
            socket.send(ENVELOPE, zmq.SNDMORE)
            socket.send(BODY, zmq.SNDMORE)
            socket.send(payload, 0, len(payload) < 64 << 10)
        socket.close()
    finally:
        context.term()


def send_with_transport(task: Task, address: str, payload: memoryview, link: Connection) -> None:
    transport = Transport("sender", Endpoint("127.0.0.1"), keys=task.keys, limits=LIMITS, io_threads=task.io_threads)
    try:
        transport.connect("receiver", address)
        poller = zmq.Poller()
        transport.register(poller)
        sent = 0
        while not link.poll():
            while transport.receive() is not None:
                pass
            while sent < task.count and transport.room("receiver") >= len(payload) + len(BODY):
                transport.send("receiver", BODY, payload)
                sent += 1
            poller.poll(math.ceil(min(transport.tend(time.monotonic()), 0.01) * 1000))
        link.recv()
    finally:
        transport.close()


def measure(link: Connection, task: Task, payload: memoryview) -> Taken:
    """Send a task's messages to the receiving process."""
    link.send(task)
    address = link.recv()
    cpu = time.process_time()
    if task.side == "bare":
        send_bare(task, address, payload)
    else:
        send_with_transport(task, address, payload, link)
    if not link.poll(PATIENCE_SECONDS):
        raise RuntimeError("the receiving process does not answer")
    taken = link.recv()
    return Taken(taken.seconds, time.process_time() - cpu, taken.cpu_seconds)


def cpu_a_gb(side: list[Taken], nbytes: int) -> list[float]:
    """Median CPU seconds per GB of sender and receiver."""
    return [
        statistics.median(one.sending_cpu_seconds / nbytes * 1e9 for one in side),
        statistics.median(one.receiving_cpu_seconds / nbytes * 1e9 for one in side),
    ]


def compare(link: Connection, report: Report, keys: Keys | None, size: int, nbytes: int, repetitions: int) -> None:
    """Measure both sides in turn, with payloads of one size."""
    payload = memoryview(bytes(size))
    ours: list[Taken] = []
    bare: list[Taken] = []
    for _ in range(repetitions):
        bare.append(measure(link, Task("bare", keys, nbytes // size, size), payload))
        ours.append(measure(link, Task("transport", keys, nbytes // size, size), payload))
    ratio, spread = median_and_spread([other.seconds / one.seconds for one, other in zip(ours, bare, strict=True)])
    rates = [statistics.median(nbytes / one.seconds / 1e9 for one in side) for side in (ours, bare)]
    cpus = [*cpu_a_gb(ours, nbytes), *cpu_a_gb(bare, nbytes)]
    security = "plain" if keys is None else "curve"
    report.add(
        security, f"{size >> 10}", *(f"{rate:.2f}" for rate in rates), f"{ratio:.2f} ± {spread:.2f}",
        *(f"{cpu:.2f}" for cpu in cpus),
        security=security, payload_bytes=size, nbytes=nbytes, ratio=ratio, transport=ours, bare=bare,
    )  # fmt: skip


def compare_threads(link: Connection, report: Report, keys: Keys, size: int, nbytes: int, repetitions: int) -> None:
    """Measure several I/O threads in turn with one."""
    payload = memoryview(bytes(size))
    one = Task("transport", keys, nbytes // size, size)
    for threads in (2, 4):
        alone: list[Taken] = []
        several: list[Taken] = []
        for _ in range(repetitions):
            alone.append(measure(link, one, payload))
            several.append(measure(link, replace(one, io_threads=threads), payload))
        pairs = zip(alone, several, strict=True)
        ratio, spread = median_and_spread([first.seconds / other.seconds for first, other in pairs])
        rates = [statistics.median(nbytes / taken.seconds / 1e9 for taken in side) for side in (several, alone)]
        report.add(
            str(threads), *(f"{rate:.2f}" for rate in rates), f"{ratio:.2f} ± {spread:.2f}",
            *(f"{cpu:.2f}" for cpu in cpu_a_gb(several, nbytes)),
            threads=threads, payload_bytes=size, nbytes=nbytes, ratio=ratio, several=several, alone=alone,
        )  # fmt: skip


def measure_aes(report: Report, size: int, nbytes: int, repetitions: int) -> None:
    """Encrypt and decrypt payloads of one size, each with its own nonce."""
    cipher = AESGCM(AESGCM.generate_key(bit_length=256))
    payload = bytes(size)
    sealing: list[float] = []
    opening: list[float] = []
    for _ in range(repetitions):
        seal = unseal = 0.0
        for number in range(nbytes // size):
            nonce = number.to_bytes(12, "big")
            began = time.process_time()
            sealed = cipher.encrypt(nonce, payload, ENVELOPE)
            middle = time.process_time()
            cipher.decrypt(nonce, sealed, ENVELOPE)
            seal, unseal = seal + middle - began, unseal + time.process_time() - middle
        sealing.append(seal / nbytes * 1e9)
        opening.append(unseal / nbytes * 1e9)
    report.add(
        f"{size >> 10}", f"{statistics.median(sealing):.2f}", f"{statistics.median(opening):.2f}",
        payload_bytes=size, nbytes=nbytes, sealing=sealing, opening=opening,
    )  # fmt: skip


def main(options: Options) -> None:
    repetitions, nbytes = (2, 64 << 20) if options.quick else (7, 512 << 20)
    sizes = (128 << 10,) if options.quick else (16 << 10, 128 << 10, 1 << 20)
    report = options.report(
        TITLE, METHOD, "security", "payload KiB", "transport GB/s", "bare ZeroMQ GB/s", "ratio",
        "CPU s a GB, transport: sends", "receives", "bare: sends", "receives",
    )  # fmt: skip
    threads = options.report(
        THREADS_TITLE, THREADS_METHOD, "I/O threads", "GB/s", "with one", "ratio", "CPU s a GB: sends", "receives",
        part="threads",
    )  # fmt: skip
    threads.notes.append("Payloads of 128 KiB.")
    aes = options.report(AES_TITLE, AES_METHOD, "payload KiB", "CPU s a GB: seals", "opens", part="aes")
    reports = (report, threads, aes)
    for each in reports:
        each.notes.append(f"{nbytes >> 20} MiB in each repetition.")
    context = multiprocessing.get_context("spawn")
    link, other = context.Pipe()
    receiver = context.Process(target=receive_tasks, args=(other,))
    receiver.start()
    try:
        for keys in (None, Keys.make()):
            for size in sizes:
                compare(link, report, keys, size, nbytes, repetitions)
        compare_threads(link, threads, Keys.make(), 128 << 10, nbytes, repetitions)
    finally:
        link.send(None)
        receiver.join(PATIENCE_SECONDS)
        link.close()
    for size in sizes:
        measure_aes(aes, size, nbytes, repetitions)
    for each in reports:
        each.write()


if __name__ == "__main__":
    run("transport", main)
