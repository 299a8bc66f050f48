"""Trainings that stop in their data loader, which every loop calls once a step: frameworks own their loops."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Literal

import torch
from torch import Tensor
from torch.utils.data import default_collate

from benchmarks.harness.processes import end_agent
from benchmarks.harness.stall import stall_of, stall_per_step
from benchmarks.harness.turns import Block
from memckpt import Session

#: Protection of every step: none, memckpt, or the framework's own checkpoint.
Side = Literal["own", "memckpt", "nothing"]


@dataclass(frozen=True)
class Task:
    """A training to run.

    Attributes:
        framework: a name in `benchmarks.workloads.frameworks.LOOPS`.
        size: a name in `benchmarks.workloads.frameworks.SHAPES`.
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
                self._stalled = stall_of(self.session())
                self._began = time.perf_counter()
            return
        if self._steps:
            stall = stall_per_step(self._stalled, stall_of(self.session()), self._steps)
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

    def end_agent(self) -> None:
        """End the session, and with it the agent."""
        if self._agent is not None:
            end_agent(self._agent)
