"""A training of one process whose settings the tuner may change, and an agent whose redo is held to a slow rate."""

from __future__ import annotations

import itertools
import logging
import os
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

import memckpt
from benchmarks.harness.turns import orders_of, telling_failure
from benchmarks.workloads.gpt import Trainee
from memckpt import MemckptConfig, Session
from memckpt.agent.serve import serve
from memckpt.node.replica import Replica
from memckpt.processes.address import AgentAddress
from memckpt.session import mode, tuning

_LINGER_SECONDS = 120.0
#: Least records between two looks where their time is not the product's.
_QUICK_LEAST_RECORDS = 8

# The first optimizer of a process imports torch's compiler: do it before processes are forked.
torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])


@dataclass(frozen=True)
class TunedTask:
    """A training and its tuner.

    Attributes:
        size: a name in `examples.gpt.SIZES`.
        directory: the run directory.
        look_seconds: time between two looks of the tuner; None: as in the product.
        eager: whether the automatic choice is eager redo on any machine.
        device_seconds: part of each step that uses no core.
        attempt: number of the attempt.
    """

    size: str
    directory: Path
    config: MemckptConfig
    look_seconds: float | None
    eager: bool
    device_seconds: float
    attempt: int = 0


@dataclass(frozen=True)
class Section:
    """Consecutive steps with the same settings; the first few of an attempt or of new settings are left out.

    Attributes:
        settings: mode, T and D.
        steps: number of steps.
        seconds: seconds of all of them.
        stall: of these, seconds in which memckpt kept the thread from training, waits for redo included.
        wait: of these, seconds in which it waited for the agent's redo.
    """

    settings: str
    steps: int
    seconds: float
    stall: float
    wait: float


@dataclass(frozen=True)
class _Step:
    settings: str
    seconds: float
    stall: float
    wait: float


#: First steps with other settings, in which a generation is written.
_UNSETTLED_STEPS = 10


class _Run:
    """The training of one attempt. Uses private parts of a session: its settings, and its waits for redo."""

    def __init__(self, task: TunedTask) -> None:
        self._task = task
        self._trainee = Trainee(task.size)
        self._session: Session = memckpt.attach(
            self._trainee.model, self._trainee.optimizer, run_dir=task.directory, config=task.config
        )
        self._session.restore()

    @property
    def settings(self) -> str:
        return str(self._session._mode.settings)

    @property
    def agent(self) -> int | None:
        return self._session.agent_pid

    def train(self, seconds: float) -> list[Section]:
        """Train for so long."""
        steps: list[_Step] = []
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            steps.append(self._step())
        return [_section(settings, list(group)) for settings, group in itertools.groupby(steps, lambda s: s.settings)]

    def _step(self) -> _Step:
        session, settings = self._session, self.settings
        began, stalled, waited = time.perf_counter(), session.stall.total, session._link.waited_for_redo
        if self._task.device_seconds:
            time.sleep(self._task.device_seconds)  # stands for an accelerator's work, which uses no core
        self._trainee.step()
        session.commit()
        return _Step(
            settings, time.perf_counter() - began, session.stall.total - stalled,
            session._link.waited_for_redo - waited,
        )  # fmt: skip

    def close(self) -> None:
        self._session.close()


def _section(settings: str, steps: list[_Step]) -> Section:
    counted = steps[_UNSETTLED_STEPS:]
    return Section(
        settings, len(counted), sum(one.seconds for one in counted), sum(one.stall for one in counted),
        sum(one.wait for one in counted),
    )  # fmt: skip


def run_tuned(task: TunedTask, orders: Connection) -> None:
    """Main function of a training process: an order is a number of seconds to train for."""
    logging.basicConfig(level=logging.ERROR)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.environ["TORCHELASTIC_RESTART_COUNT"] = str(task.attempt)
    product: Any = tuning
    if task.look_seconds is not None:
        product.LOOK_SECONDS, product.LEAST_RECORDS = task.look_seconds, _QUICK_LEAST_RECORDS
    if task.eager:
        choice: Any = mode
        choice.choose_redo = lambda *arguments: ("eager", "a core is free")
    with telling_failure(orders):
        training = _Run(task)
        orders.send((training.settings, training.agent))
        for seconds in orders_of(orders):
            orders.send(training.train(seconds))
        training.close()


def run_slow_agent(directory: Path, record_seconds: float, orders: Connection) -> None:
    """Main function of an agent that redoes a record in so many seconds or more; sends its pid when it answers."""
    replica: Any = Replica
    replica._apply = _slowly(replica._apply, record_seconds)
    serve(AgentAddress.of(directory), _LINGER_SECONDS, lambda: orders.send(os.getpid()))


def _slowly(apply: Callable[..., None], record_seconds: float) -> Callable[..., None]:
    def applied(*arguments: Any) -> None:
        until = time.perf_counter() + record_seconds
        apply(*arguments)
        time.sleep(max(0.0, until - time.perf_counter()))  # stands for redo that is as slow

    return applied
