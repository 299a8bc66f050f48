"""Trainings that take turns: each in a process of its own, which is let go for a block of steps and then stops.

Frameworks own their loops, so a training is stopped from within its data loader: every loop comes by there once a
step. Whoever waits there is blocked in a read, and takes nothing of the machine.

The processes are forked by a server that has imported the frameworks, once, and has never trained.
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

#: What is done at every step beside training: the framework's own checkpoint, memckpt, or nothing.
Side = Literal["own", "memckpt", "nothing"]


@dataclass(frozen=True)
class Task:
    """What to train.

    Attributes:
        framework: a name in `benchmarks.frameworks.LOOPS`.
        size: a name in `benchmarks.frameworks.SHAPES`.
        side: what is done at every step beside training.
        threads: compute threads; None: torch's choice.
    """

    framework: str
    size: str
    side: Side
    threads: int | None = None


@dataclass(frozen=True)
class Model:
    """What a training says of itself when it is ready: parameters, and the tensors that they are in."""

    numel: int
    tensors: int


@dataclass(frozen=True)
class Block:
    """A block of steps.

    Attributes:
        seconds: for one step.
        stall: of these, what memckpt counts in the training thread, by cause; empty without it.
    """

    seconds: float
    stall: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Failure:
    """A training that this machine has no memory for."""

    reason: str


class TrainingFailed(RuntimeError):
    """A training has not begun, or broke off."""


class Ended(BaseException):
    """Nobody wants further steps; no framework handles it."""


class Gate:
    """Collates samples, and stops there where a block of steps is over. The process's own end of the protocol.

    Args:
        orders: how many steps to take comes from here, what they took goes there.

    Attributes:
        model: what is trained; set before the first batch is asked for.
        session: finds the session that protects the training; None while there is none.
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
        """One more step is over; wait here if it was the last of its block.

        Raises:
            Ended: no further step is wanted.
        """
        now = time.perf_counter()
        if self._left > 1:
            self._left -= 1
            if self._left == self._steps:  # the first step is not timed: it has to fill the caches
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
        """The training is over: its agent is not needed."""
        if self._agent is not None:
            end_agent(self._agent)


def _train(task: Task, directory: Path, orders: Connection) -> None:
    """The whole life of a process."""
    from benchmarks.frameworks import train  # the server has imported it, and the one who measures does without

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
    """A process that does what it is ordered to, one order after the other. Owns the process.

    Args:
        name: for errors.
        work: the process's whole life; the other end of the pipe follows its arguments. Without an end of file there
            it goes on.
        arguments: of `work`.
    """

    def __init__(self, name: str, work: Callable[..., None], *arguments: Any) -> None:
        self._name = name
        self._orders, theirs = _CONTEXT.Pipe()
        self._process = _CONTEXT.Process(target=work, args=(*arguments, theirs))
        self._process.start()
        theirs.close()

    def send(self, order: Any) -> None:
        """Give it an order.

        Raises:
            TrainingFailed: it has ended.
        """
        try:
            self._orders.send(order)
        except ConnectionError:
            raise TrainingFailed(f"{self._name}: the process has ended") from None

    def receive(self) -> Any:
        """What it says next.

        Raises:
            TrainingFailed: it ended, or said nothing for minutes.
            MemoryError: this machine has no memory for it.
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
        """Say that no order will follow; :meth:`close` waits for what it does then."""
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
    """A training in a process of its own, that waits until it is let go. Owns the process."""

    def __init__(self, task: Task, directory: Path) -> None:
        self._worker = Worker(f"{task.framework} with {task.side}", _train, task, directory)

    def wait_ready(self) -> Model:
        """Wait until it stands before its first step; errors as for a worker."""
        model: Model = self._worker.receive()
        return model

    def take(self, steps: int) -> Block:
        """Let it go for one step that does not count and for so many that do; errors as for a worker."""
        self._worker.send(steps)
        block: Block = self._worker.receive()
        return block

    def close(self) -> None:
        """End it."""
        self._worker.close()


def start_server(*modules: str) -> None:
    """Say what the processes have in common, so that it is imported once."""
    _CONTEXT.set_forkserver_preload(list(modules))


@contextlib.contextmanager
def training(task: Task) -> Iterator[Training]:
    """A training that has begun to start, and is ended at the end."""
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
        """Let it go for one step that does not count and for so many that do."""


def take_turns(trainings: Sequence[TakesTurns[B_co]], rounds: int, steps: int) -> list[list[B_co]]:
    """For each round a block of each training, in their order; the order of turns changes from round to round."""
    found = []
    for number in range(rounds):
        shift = number // 2 % len(trainings)
        order = [*range(shift, len(trainings)), *range(shift)]
        blocks = {index: trainings[index].take(steps) for index in (reversed(order) if number % 2 else order)}
        found.append([blocks[index] for index in range(len(trainings))])
    return found
