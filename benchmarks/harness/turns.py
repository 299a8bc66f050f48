"""Trainings that take turns: each in processes of its own, which run a block of steps and then stop.

A stopped training is blocked in a read and uses no core. The processes are forked by a server that has imported what
they need once and has never trained.
"""

from __future__ import annotations

import multiprocessing
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, Generic, TypeVar

from benchmarks.harness.processes import PATIENCE_SECONDS
from memckpt.errors import MemoryBudgetError

_CONTEXT: Any = multiprocessing.get_context("forkserver")


@dataclass(frozen=True)
class Block:
    """A block of steps.

    Attributes:
        seconds: mean seconds per step.
        stall: of these, memckpt's seconds in the training thread, by cause; empty without it.
    """

    seconds: float
    stall: dict[str, float] = field(default_factory=dict)


B = TypeVar("B", bound=Block)


@dataclass(frozen=True)
class Failure:
    """This machine has too little memory for the training."""

    reason: str


class TrainingFailed(RuntimeError):
    """A training did not start, or failed."""


class Worker:
    """A process that executes orders one after the other. Owns the process.

    Args:
        name: name in error messages.
        work: main function of the process; called with `arguments` and the other end of the pipe. It runs until that
            is at its end of file.
        arguments: arguments of `work`.
    """

    def __init__(self, name: str, work: Callable[..., None], *arguments: Any) -> None:
        self._name = name
        self._orders, theirs = _CONTEXT.Pipe()
        self._process = _CONTEXT.Process(target=work, args=(*arguments, theirs))
        self._process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        """Pid of the process."""
        pid: int = self._process.pid
        return pid

    def send(self, order: Any) -> None:
        """Send an order.

        Raises:
            TrainingFailed: it has ended.
        """
        try:
            self._orders.send(order)
        except ConnectionError:
            raise TrainingFailed(f"{self._name}: the process has ended") from None

    def receive(self) -> Any:
        """Receive the next message.

        Raises:
            TrainingFailed: the process ended, or sent nothing for minutes.
            MemoryError: this machine has too little memory for the training.
        """
        if not self._orders.poll(PATIENCE_SECONDS):
            raise TrainingFailed(f"{self._name}: says nothing")
        try:
            said = self._orders.recv()
        except (EOFError, ConnectionError):
            raise TrainingFailed(f"{self._name}: the process has ended") from None
        if isinstance(said, Failure):
            raise MemoryError(f"{self._name}: {said.reason}")
        return said

    def execute(self, order: Any) -> Any:
        """Send an order; returns the answer. Errors as for :meth:`receive`."""
        self.send(order)
        return self.receive()

    def dismiss(self) -> None:
        """Announce that no order will follow; :meth:`close` waits for the process to end."""
        self._orders.close()

    def close(self) -> None:
        """End it."""
        self.dismiss()
        self._process.join(PATIENCE_SECONDS)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._process.close()


class Workers:
    """Processes that execute the same orders together: the ranks of a training. Owns them."""

    def __init__(self, workers: Sequence[Worker]) -> None:
        self._workers = list(workers)

    def receive(self) -> list[Any]:
        """The next message of each. If one is out of memory, that error is raised, not the others'.

        Raises:
            TrainingFailed: a process ended, or sent nothing for minutes.
            MemoryError: this machine has too little memory for the training.
        """
        said, failures = [], []
        for worker in self._workers:
            try:
                said.append(worker.receive())
            except (MemoryError, TrainingFailed) as error:
                failures.append(error)
        if failures:
            raise next((error for error in failures if isinstance(error, MemoryError)), failures[0])
        return said

    @property
    def pids(self) -> list[int]:
        """Pids of the processes."""
        return [worker.pid for worker in self._workers]

    def send(self, order: Any) -> None:
        """Send all an order. Errors as for a worker."""
        for worker in self._workers:
            worker.send(order)

    def execute(self, order: Any) -> list[Any]:
        """Send all an order; returns their answers. Errors as for :meth:`receive`."""
        self.send(order)
        return self.receive()

    def close(self) -> None:
        """End them."""
        for worker in self._workers:
            worker.dismiss()  # all of them first, as they leave together
        for worker in self._workers:
            worker.close()
        self._workers.clear()


@contextmanager
def telling_failure(orders: Connection) -> Iterator[None]:
    """In a worker's process: tell the measuring process that there is too little memory."""
    try:
        yield
    except (MemoryBudgetError, MemoryError) as error:
        orders.send(Failure(str(error)))


def orders_of(orders: Connection) -> Iterator[Any]:
    """In a worker's process: the orders, until there are no more."""
    while True:
        try:
            order = orders.recv()
        except EOFError:
            return
        yield order


def start_server(*modules: str) -> None:
    """Make the fork server preload the modules that all processes need."""
    _CONTEXT.set_forkserver_preload(list(modules))


@dataclass(frozen=True)
class Scale:
    """A model's size, and numbers of rounds and of steps in a block."""

    size: str
    rounds: int
    steps: int


@dataclass(frozen=True)
class Rounds(Generic[B]):
    """The blocks of each round, in the order of the trainings."""

    blocks: list[list[B]]

    def of(self, side: int) -> list[B]:
        return [blocks[side] for blocks in self.blocks]

    def pairs(self, side: int, other: int) -> list[tuple[float, float]]:
        """Seconds per step of two trainings in each round."""
        return [(blocks[side].seconds, blocks[other].seconds) for blocks in self.blocks]

    def stall_ms(self, side: int) -> float:
        """Median milliseconds per step that memckpt takes in the training thread."""
        return statistics.median(sum(block.stall.values()) for block in self.of(side)) * 1e3


def take_turns(trainings: Sequence[Callable[[int], B]], rounds: int, steps: int) -> Rounds[B]:
    """Let trainings run blocks of steps in turn; each is called with their number.

    The order of turns changes from round to round.
    """
    found = []
    for number in range(rounds):
        shift = number // 2 % len(trainings)
        order = [*range(shift, len(trainings)), *range(shift)]
        blocks = {index: trainings[index](steps) for index in (reversed(order) if number % 2 else order)}
        found.append([blocks[index] for index in range(len(trainings))])
    return Rounds(found)
