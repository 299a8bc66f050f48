"""Trainings that take turns: each in a process of its own, which runs a block of steps and then stops.

Frameworks own their loops, so a training is stopped in its data loader, which every loop calls once a step. A stopped
training is blocked in a read and uses no core.

The processes are forked by a server that has imported the frameworks once and has never trained.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

import torch
from torch import Tensor
from torch.utils.data import default_collate

from benchmarks.processes import end_agent
from benchmarks.workloads import scratch_directory
from memckpt import Session
from memckpt.errors import MemoryBudgetError

_PATIENCE_SECONDS = 300.0
_CONTEXT: Any = multiprocessing.get_context("forkserver")

#: Protection of every step: none, memckpt, or the framework's own checkpoint.
Side = Literal["own", "memckpt", "nothing"]


@dataclass(frozen=True)
class Task:
    """A training to run.

    Attributes:
        framework: a name in `benchmarks.frameworks.LOOPS`.
        size: a name in `benchmarks.frameworks.SHAPES`.
        side: protection of every step.
        threads: compute threads; None: torch's choice.
    """

    framework: str
    size: str
    side: Side
    threads: int | None = None


@dataclass(frozen=True)
class Model:
    """A training is ready: numbers of its parameters and of their tensors."""

    numel: int
    tensors: int


@dataclass(frozen=True)
class Block:
    """A block of steps.

    Attributes:
        seconds: mean seconds per step.
        stall: of these, memckpt's seconds in the training thread, by cause; empty without it.
    """

    seconds: float
    stall: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Failure:
    """This machine has too little memory for the training."""

    reason: str


class TrainingFailed(RuntimeError):
    """A training did not start, or failed."""


class Ended(BaseException):
    """No further steps are wanted; no framework catches it."""


class Gate:
    """A collate function that stops the training after each block of steps. The process's end of the protocol.

    Args:
        orders: pipe from which numbers of steps are received, and to which blocks are sent.

    Attributes:
        model: the model; set before the first batch is requested.
        session: finds the session that protects the training; None: there is none.
    """

    def __init__(self, orders: Connection) -> None:
        self._orders = orders
        self._left = self._steps = 0
        self._began = 0.0
        self._stalled: dict[str, float] = {}
        self._agent: int | None = None
        self.model = torch.nn.Module()
        self.session: Callable[[], Session | None] = lambda: None

    def __call__(self, samples: Sequence[tuple[Tensor, Tensor]]) -> list[Tensor]:
        self._arrive()
        batch: list[Tensor] = default_collate(list(samples))
        return batch

    def _arrive(self) -> None:
        """Count a step, and wait here if it was the last of its block.

        Raises:
            Ended: no further step is wanted.
        """
        now = time.perf_counter()
        if self._left > 1:
            self._left -= 1
            if self._left == self._steps:  # the first step only fills the caches and is not timed
                self._stalled = self._stall()
                self._began = time.perf_counter()
            return
        if self._steps:
            stall = {part: (spent - self._stalled[part]) / self._steps for part, spent in self._stall().items()}
            self._orders.send(Block((now - self._began) / self._steps, stall))
        else:
            session = self.session()
            self._agent = session.agent_pid if session is not None else None
            sizes = [param.numel() for param in self.model.parameters()]
            self._orders.send(Model(sum(sizes), len(sizes)))
        try:
            self._steps = self._orders.recv()
        except EOFError:
            raise Ended from None
        self._left = self._steps + 1

    def _stall(self) -> dict[str, float]:
        session = self.session()
        return asdict(session.stall) if session is not None else {}

    def end_agent(self) -> None:
        """End the session, and with it the agent."""
        if self._agent is not None:
            end_agent(self._agent)


def _train(task: Task, directory: Path, orders: Connection) -> None:
    """Main function of a process."""
    from benchmarks.frameworks import train  # imported by the server already; the measuring process does not need it

    if task.threads is not None:
        torch.set_num_threads(task.threads)
    gate = Gate(orders)
    try:
        train(task, directory, gate)
    except Ended:
        pass
    except (MemoryBudgetError, MemoryError) as error:
        orders.send(Failure(str(error)))
    finally:
        gate.end_agent()


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
        if not self._orders.poll(_PATIENCE_SECONDS):
            raise TrainingFailed(f"{self._name}: says nothing")
        try:
            said = self._orders.recv()
        except (EOFError, ConnectionError):
            raise TrainingFailed(f"{self._name}: the process has ended") from None
        if isinstance(said, Failure):
            raise MemoryError(f"{self._name}: {said.reason}")
        return said

    def dismiss(self) -> None:
        """Announce that no order will follow; :meth:`close` waits for the process to end."""
        self._orders.close()

    def close(self) -> None:
        """End it."""
        self.dismiss()
        self._process.join(_PATIENCE_SECONDS)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._process.close()


class Training:
    """A training in a process of its own, which stops between blocks. Owns the process."""

    def __init__(self, task: Task, directory: Path) -> None:
        self._worker = Worker(f"{task.framework} with {task.side}", _train, task, directory)

    def wait_ready(self) -> Model:
        """Wait until it is ready for its first step; errors as for a worker."""
        model: Model = self._worker.receive()
        return model

    def take(self, steps: int) -> Block:
        """Run one untimed step and a block of timed ones; errors as for a worker."""
        self._worker.send(steps)
        block: Block = self._worker.receive()
        return block

    def close(self) -> None:
        """End it."""
        self._worker.close()


def start_server(*modules: str) -> None:
    """Make the fork server preload the modules that all processes need."""
    _CONTEXT.set_forkserver_preload(list(modules))


@contextlib.contextmanager
def training(task: Task) -> Iterator[Training]:
    """Start a training without waiting for it; it ends with the block."""
    with scratch_directory() as directory:
        started = Training(task, directory)
        try:
            yield started
        finally:
            started.close()


B_co = TypeVar("B_co", bound=Block, covariant=True)


class TakesTurns(Protocol[B_co]):
    """A training that stops after each block of steps."""

    def take(self, steps: int) -> B_co:
        """Run one untimed step and a block of timed ones."""


def take_turns(trainings: Sequence[TakesTurns[B_co]], rounds: int, steps: int) -> list[list[B_co]]:
    """The blocks of each round, in the order of the trainings; the order of turns changes from round to round."""
    found = []
    for number in range(rounds):
        shift = number // 2 % len(trainings)
        order = [*range(shift, len(trainings)), *range(shift)]
        blocks = {index: trainings[index].take(steps) for index in (reversed(order) if number % 2 else order)}
        found.append([blocks[index] for index in range(len(trainings))])
    return found
