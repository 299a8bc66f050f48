"""The event loop of agents beside one of asyncio that does the same."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import select
import statistics
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any

from benchmarks.harness.command import Options, run
from benchmarks.harness.copies import best_of
from benchmarks.harness.report import Ratio, Report
from benchmarks.harness.scratch import scratch_directory
from memckpt.agent.connections import Connection, Connections
from memckpt.memory.life import LifePage, LifeWatch
from memckpt.processes.address import AgentAddress
from memckpt.processes.event_loop import EventLoop
from memckpt.protocol.channel import TrainerChannel
from memckpt.protocol.messages import TrainerToAgent
from memckpt.protocol.status import StatusRequest
from memckpt.protocol.trainer import Commit, Credit

TITLE = "The event loop: ours, and asyncio's"
METHOD = """\
Processes serve an agent's connections (`Connections`, `Channel`, a pidfd for each of 8 trainers) and differ in the
loop: ours (`memckpt/processes/event_loop.py`, over `poll`), the same over `epoll`, and one of asyncio with
`add_reader`, `call_at` and `call_soon_threadsafe`. Each turn of each asks four deadlines, does what is due and moves
the counter that shows that it lives. They take turns, in an order that changes; one that waits uses no core, and the
second has the same loop as the first. *Round trips*: a commit of 5 kB, answered with a credit, one after the other;
the time as the trainer sees it. *Commits*: 1,000 a second, not answered; the time from before the trainer's `send`
until the agent handles the decoded message. CPU time is that of the serving process, for each message. Ratios are to
our loop: medians over the rounds, with half the distance between the quartiles."""
IMPORT_TITLE = "What asyncio adds to a process that does without it"
IMPORT_METHOD = """\
Time and memory of the import, in a fresh process that has imported its own modules; medians."""

TRAINERS = 8
_STATE = os.urandom(5000)
_RATE = 1000


class AsyncioLoop:
    """What :class:`EventLoop` offers, by asyncio, and as cheap as that goes: work directly follows each callback, and
    a timer is set anew only where an earlier one is needed.
    """

    def __init__(self, life: LifePage | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self.life = life
        self.clock = clock
        self.beat_seconds: float | None = None
        self._loop = asyncio.SelectorEventLoop()
        self._loop.set_exception_handler(self._failed)
        self._work: list[tuple[Callable[[], None], Callable[[], float | None]]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._error: BaseException | None = None

    def attend(self, source: Any, callback: Callable[[], None], to_write: bool = False) -> None:
        self._loop.add_reader(source, self._then_work, callback)
        if to_write:
            self._loop.add_writer(source, self._then_work, callback)
        else:
            self._loop.remove_writer(source)

    def forget(self, source: Any) -> None:
        self._loop.remove_reader(source)
        self._loop.remove_writer(source)

    def each_turn(self, work: Callable[[], None], deadline: Callable[[], float | None]) -> None:
        self._work.append((work, deadline))

    def post(self, call: Callable[[], None]) -> None:
        self._loop.call_soon_threadsafe(self._then_work, call)

    def _then_work(self, callback: Callable[[], None]) -> None:
        callback()
        self._do_work()

    def _do_work(self) -> None:
        if self.life is not None:
            self.life.beat()
        for work, _ in self._work:
            work()
        limits = [at for _, deadline in self._work if (at := deadline()) is not None]
        if self.beat_seconds is not None:
            limits.append(self.clock() + self.beat_seconds)
        due = min(limits, default=None)
        if due is not None and (self._timer is None or due < self._timer.when()):
            if self._timer is not None:
                self._timer.cancel()
            self._timer = self._loop.call_at(due, self._wake)

    def _wake(self) -> None:
        self._timer = None
        self._do_work()

    def _failed(self, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self._error = context.get("exception") or RuntimeError(context["message"])
        self._loop.stop()

    def run(self) -> None:
        """Run until a callback raises, and raise that."""
        self._do_work()
        self._loop.run_forever()
        if self._error is not None:
            raise self._error


class Epoll:
    """epoll as a poller of :class:`EventLoop`."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._known: set[int] = set()

    def register(self, source: int, flags: int, /) -> None:
        (self._epoll.modify if source in self._known else self._epoll.register)(source, flags)
        self._known.add(source)

    def unregister(self, source: int, /) -> None:
        self._epoll.unregister(source)
        self._known.discard(source)

    def poll(self, milliseconds: int | None, /) -> list[tuple[int, int]]:
        return self._epoll.poll(None if milliseconds is None else milliseconds / 1000)


class OurLoop(EventLoop):
    def run(self) -> None:
        while True:
            self.turn()


OURS, AGAIN, EPOLL, ASYNCIO = "ours", "ours (null pair)", "ours, over epoll", "asyncio"
_LOOPS: dict[str, Callable[[LifePage], Any]] = {
    OURS: OurLoop,
    AGAIN: OurLoop,
    EPOLL: lambda life: OurLoop(life, poller=Epoll()),
    ASYNCIO: AsyncioLoop,
}


def _serve(arm: str, directory: Path, report: Pipe) -> None:
    """Main function of a serving process; it ends with a signal."""
    life = LifePage.create()
    loop = _LOOPS[arm](life)
    came: list[float] = []

    def handle(connection: Connection, message: TrainerToAgent) -> None:
        match message:
            case Commit(generation=0):
                connections.answer(connection, Credit(message.record))
            case Commit():
                came.append(time.monotonic() - struct.unpack("d", message.meta)[0])
            case StatusRequest():
                report.send((came.copy(), life.beats))
                came.clear()
                loop.beat_seconds = 1.0

    connections = Connections(AgentAddress.of(directory, str(list(_LOOPS).index(arm))), loop, handle, print)
    for seconds in (3600.0, 7200.0, 86400.0, None):
        due = None if seconds is None else time.monotonic() + seconds
        loop.each_turn(lambda: None, lambda due=due: due)
    with connections._address.starting():
        connections.listen()
    report.send(connections._address)
    loop.run()


@dataclass
class Figures:
    """Seconds of each message in each round, and CPU seconds of the serving process for each of them."""

    latencies: list[list[float]]
    cpu: list[float]

    @property
    def medians(self) -> list[float]:
        return [statistics.median(one) for one in self.latencies]

    @property
    def slowest(self) -> float:
        """The median of the rounds' 99th percentiles, in seconds."""
        return statistics.median(statistics.quantiles(one, n=100)[98] for one in self.latencies)


class Server:
    """A serving process with its trainers, all of which are this process. Owns it; :meth:`close` it."""

    def __init__(self, arm: str, directory: Path) -> None:
        self._report, theirs = multiprocessing.Pipe()
        self._process = multiprocessing.get_context("fork").Process(target=_serve, args=(arm, directory, theirs))
        self._process.start()
        address: AgentAddress = self._report.recv()
        self._channels = [TrainerChannel(sock) for _ in range(TRAINERS) if (sock := address.connect()) is not None]
        self.round_trips, self.commits = Figures([], []), Figures([], [])
        self.turns = 0
        self._order()

    def _order(self) -> list[float]:
        """Latencies since the last time, in seconds."""
        self._channels[0].send(StatusRequest())
        found: list[float]
        found, self.turns = self._report.recv()
        return found

    def _cpu(self) -> float:
        pid = self._process.pid
        assert pid is not None
        return time.clock_gettime((~pid << 3) | 2)  # the kernel's number for the CPU clock of a process

    def turns_in(self, seconds: float) -> int:
        """Number of turns in a time without messages."""
        self._order()
        before = self.turns
        time.sleep(seconds)  # the idle time that is measured
        self._order()
        return self.turns - before - 1  # that of the question

    def measure_round_trips(self, number: int) -> None:
        channel, times = self._channels[-1], []
        before = self._cpu()
        for record in range(number):
            started = time.perf_counter()
            channel.send(Commit(generation=0, record=record, step=record, meta=b"", rank_state=_STATE))
            channel.receive(10.0)
            times.append(time.perf_counter() - started)
        self.round_trips.cpu.append((self._cpu() - before) / number)
        self.round_trips.latencies.append(times)

    def measure_commits(self, number: int) -> None:
        before, began = self._cpu(), time.monotonic()
        for record in range(number):
            time.sleep(max(0.0, began + record / _RATE - time.monotonic()))  # the rate that is measured
            now = struct.pack("d", time.monotonic())
            self._channels[record % TRAINERS].send(
                Commit(generation=1, record=record, step=record, meta=now, rank_state=_STATE)
            )
        times = self._order()
        while len(times) < number:  # those of other connections may come later
            times += self._order()
        self.commits.cpu.append((self._cpu() - before) / number)
        self.commits.latencies.append(times)

    def close(self) -> None:
        for channel in self._channels:
            channel.close()
        self._process.kill()
        self._process.join()


@contextlib.contextmanager
def _servers() -> Iterator[list[Server]]:
    with scratch_directory() as directory, contextlib.ExitStack() as stack:
        servers = []
        for arm in _LOOPS:
            servers.append(Server(arm, directory))
            stack.callback(servers[-1].close)
        yield servers


def add_latencies(report: Report, messages: str, measured: Sequence[Figures]) -> None:
    for arm, figures in zip(_LOOPS, measured, strict=True):
        latency = Ratio.of(list(zip(figures.medians, measured[0].medians, strict=True)))
        cpu = Ratio.of(list(zip(figures.cpu, measured[0].cpu, strict=True)))
        report.add(
            messages, arm, f"{latency.with_ms * 1e3:.0f}", f"{figures.slowest * 1e6:.0f}", f"{cpu.with_ms * 1e3:.1f}",
            *(f"{one.ratio:.2f} ± {one.spread:.2f}" for one in (latency, cpu)),
            messages=messages, arm=arm, medians=figures.medians, slowest=figures.slowest, cpu=figures.cpu,
        )  # fmt: skip


def add_idle(report: Report, servers: Sequence[Server], seconds: float) -> None:
    found = [f"{arm} {server.turns_in(seconds)}" for arm, server in zip(_LOOPS, servers, strict=True)]
    report.notes.append(f"Turns in {seconds:g} s without messages, with a beat each second: {'; '.join(found)}.")


_FRESH = """
import sys, time
def rss(): return int(open("/proc/self/status").read().split("VmRSS:")[1].split()[0])
import {module}
before, modules, began = rss(), len(sys.modules), time.perf_counter()
import {imported}
print(time.perf_counter() - began, rss() - before, len(sys.modules) - modules, before)
"""


def add_imports(report: Report, repetitions: int) -> None:
    """What asyncio adds to processes that start without it."""
    for name, module, imported in [
        ("agent", "memckpt.agent.server", "asyncio"),
        ("replicator", "memckpt.replication.process.replicator", "asyncio, zmq.asyncio"),
        ("writer of records", "memckpt.checkpointing.writer.records", "asyncio"),
    ]:
        code = _FRESH.format(module=module, imported=imported)
        found = [
            tuple(map(float, subprocess.check_output([sys.executable, "-c", code], text=True).split()))
            for _ in range(repetitions)
        ]
        seconds, more, modules, before = (statistics.median(values) for values in zip(*found, strict=True))
        report.add(
            name, imported, f"{seconds * 1e3:.0f}", f"{modules:.0f}", f"{more / 1024:.1f}", f"{before / 1024:.1f}",
            process=name, seconds=seconds, kib=more, kib_before=before, modules=modules,
        )  # fmt: skip


def add_looks(report: Report, repetitions: int) -> None:
    """Cost of a look at another process's signs of life in each turn, and of a turn in which none is due."""
    life = LifePage.create()
    with contextlib.closing(life):
        watch = LifeWatch(life, os.getpid(), 15.0, "main")
        look, not_due = (best_of(action, repetitions) * 1e6 for action in (watch.look, watch.stands_still))
    report.notes.append(
        f"A look for signs of life of another process takes {look:.0f} us, and {not_due:.1f} us where none is due."
    )


def main(options: Options) -> None:
    report = options.report(
        TITLE,
        METHOD,
        "messages",
        "loop",
        "median us",
        "99th percentile us",
        "CPU us",
        "ratio of medians",
        "ratio of CPU",
    )
    imports = options.report(
        IMPORT_TITLE, IMPORT_METHOD, "process", "import of", "ms", "modules", "MiB more", "MiB before", part="import"
    )
    rounds, round_trips, commits = (3, 100, 100) if options.quick else (24, 2000, 500)
    with _servers() as servers:
        for turn in range(rounds + 1):
            order = servers[turn % len(servers) :] + servers[: turn % len(servers)]
            for server in order if turn % 2 else reversed(order):
                server.measure_round_trips(round_trips)
                server.measure_commits(commits)
        for server in servers:
            for figures in (server.round_trips, server.commits):
                del figures.latencies[0], figures.cpu[0]  # the first round fills the caches
        add_latencies(report, "round trips", [server.round_trips for server in servers])
        add_latencies(report, f"commits, {_RATE:,} a second", [server.commits for server in servers])
        add_idle(report, servers, 1.5 if options.quick else 3.5)
    report.notes.append(f"{rounds} rounds of {round_trips:,} round trips and of {commits} commits.")
    add_looks(report, 100 if options.quick else 5000)
    add_imports(imports, 1 if options.quick else 15)
    for each in (report, imports):
        each.write()


if __name__ == "__main__":
    run("event_loop", main)
