"""Data-parallel training with compressed gradients on two ranks, each in a process of its own, and its protection."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from time import perf_counter
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import memckpt
from benchmarks.harness.processes import PATIENCE_SECONDS, end_agent
from benchmarks.harness.scratch import scratch_directory
from benchmarks.harness.stall import stall_of, stall_per_step
from benchmarks.harness.turns import Block, Worker, Workers, orders_of, telling_failure
from benchmarks.workloads.gpt import BATCH, Training, make_model
from examples.gpt import GPT, Corpus
from memckpt import AgentConfig, MemckptConfig, Session, StorageConfig, compression
from memckpt.config import HalfPrecision, PowerSGD, Quantized8, RandomK, TopK
from memckpt.storage.catalog import read_catalog
from memckpt.storage.chain import stored_points
from memckpt.storage.local_store import LocalStore

RANKS = 2
Compressor = TopK | RandomK | Quantized8 | PowerSGD | HalfPrecision
#: Protection: none; memckpt's records in memory, and in a log as well; ``torch.save`` of the full state.
Protected = Literal["nothing", "memory", "log", "torch.save"]

# The first optimizer of a process imports torch's compiler: do it before processes are forked.
torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])


@dataclass(frozen=True)
class Arm:
    """A training.

    Attributes:
        compression: how gradients are averaged; None: uncompressed.
        protected: how it is protected.
        every: log: records in a batch; ``torch.save``: steps between checkpoints.
    """

    compression: Compressor | None
    protected: Protected
    every: int = 1

    @property
    def name(self) -> str:
        match self.protected:
            case "memory":
                return "memckpt, in memory"
            case "log":
                return f"memckpt, and in a log, batches of {self.every}"
            case "torch.save":
                return "torch.save, " + ("every step" if self.every == 1 else f"every {self.every} steps")
            case "nothing":
                return "nothing"


@dataclass(frozen=True)
class RankTask:
    """The training of one rank; `size` is a name in `examples.gpt.SIZES`, `directory` is equal on all ranks."""

    size: str
    arm: Arm
    rank: int
    directory: Path


@dataclass(frozen=True)
class Recorded:
    """Bytes of a record, of all parts that are in memory.

    Attributes:
        gradients: room for its gradients.
        anchors: its share of parameters and optimizer state, at most.
        by_value: tensors copied by value, of all ranks; among them what compression left out.
        period: T, the number of steps over which everything is copied once.
    """

    gradients: int
    anchors: int
    by_value: int
    period: int


@dataclass(frozen=True)
class Sent:
    """Bytes that a rank hands to the collectives at each step: to gather, and to sum."""

    gathered: float
    summed: float

    def on_wire(self, ranks: int) -> float:
        """Bytes that a rank sends with ring algorithms."""
        return (ranks - 1) * self.gathered + 2 * (ranks - 1) / ranks * self.summed


class CompressedTraining(Training):
    """A GPT in DistributedDataParallel, which is `replica`, with new data of the rank's own at each step."""

    def __init__(self, model: GPT) -> None:
        self.replica = DistributedDataParallel(model)
        self._corpus = Corpus(model.config.context)
        torch.manual_seed(1 + dist.get_rank())
        super().__init__(model, self._corpus.sample(BATCH))

    def loss(self) -> Tensor:
        tokens, targets = self._corpus.sample(BATCH)
        logits: Tensor = self.replica(tokens)
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


@dataclass
class Protection:
    """A way to protect a training; this one: not at all."""

    training: CompressedTraining
    reducer: Any = None
    agent: int | None = None

    def step(self) -> None:
        """A training step, protected."""
        self.training.step()

    def stall(self) -> dict[str, float]:
        """Seconds in the training thread, by cause."""
        return {}

    def recorded(self) -> Recorded | None:
        """Sizes of a record; None: there is none."""
        return None

    def stored(self) -> int:
        """The newest step in storage."""
        return 0


class Saving(Protection):
    """``torch.save`` of the full state by rank 0, synchronously, to the disk."""

    def __init__(self, training: CompressedTraining, path: Path, every: int) -> None:
        super().__init__(training)
        self._path, self._every, self._steps = path, every, 0

    def step(self) -> None:
        self.training.step()
        self._steps += 1
        if self._steps % self._every == 0 and dist.get_rank() == 0:
            with self._path.open("wb") as file:
                torch.save(self.training.state_dict(), file)
                file.flush()
                os.fsync(file.fileno())


class Memckpt(Protection):
    def __init__(self, training: CompressedTraining, session: Session) -> None:
        super().__init__(training, session._compression.reducer, session.agent_pid)
        self._session = session
        self._steps = 0

    def step(self) -> None:
        self.training.step()
        self._session.commit()
        self._steps += 1

    def stall(self) -> dict[str, float]:
        return stall_of(self._session)

    def recorded(self) -> Recorded:
        writer = self._session._staging.writer
        if writer is None:
            raise RuntimeError("expected a protected training, found one without a generation; see its warnings")
        layout = writer.layout
        return Recorded(layout.gradient_bytes, layout.anchor_bytes, layout.by_value_bytes, layout.spec.period)

    def stored(self) -> int:
        if select.select([self._session._link.client.channel], [], [], 1.0)[0]:
            self._session._protection.listen()
        return self._session.stored_step or 0


@contextlib.contextmanager
def protected(task: RankTask) -> Iterator[Protection]:
    training, arm = CompressedTraining(make_model(task.size)), task.arm
    if arm.protected in ("memory", "log"):
        storage = None
        if arm.protected == "log":
            storage = StorageConfig(mode="log", min_seconds=3600, batch_steps=arm.every)
        config = MemckptConfig(redo="lazy", storage=storage, compression=arm.compression)
        # The agent soon leaves by itself if the measuring process is killed.
        config = replace(config, agent=AgentConfig(linger_seconds=5.0))
        with memckpt.attach(training.replica, training.optimizer, run_dir=task.directory, config=config) as session:
            session.restore()
            yield Memckpt(training, session)
        return
    reducer = None
    if arm.compression is not None:
        reducer = compression.state(arm.compression, training.model.parameters())
        training.replica.register_comm_hook(reducer, compression.hook)
    found = Protection(training)
    if arm.protected == "torch.save":
        found = Saving(training, task.directory / "checkpoint.pt", arm.every)
    found.reducer = reducer
    yield found


# The processes


@dataclass(frozen=True)
class Order:
    """An order: `steps` timed after an untimed one, or what is named in `tell` instead.

    ``"recorded"``: sizes of a record. ``"sent"``: bytes handed to the collectives, of `steps`. ``"stored"``: the newest
    step in storage.
    """

    steps: int = 0
    tell: Literal["", "recorded", "sent", "stored"] = ""


def _timed(protection: Protection, steps: int) -> Block:
    protection.step()  # untimed: fills the caches
    stalled = protection.stall()
    began = perf_counter()
    for _ in range(steps):
        protection.step()
    seconds = (perf_counter() - began) / steps
    return Block(seconds, stall_per_step(stalled, protection.stall(), steps))


def _sent(protection: Protection, steps: int) -> Sent:
    """Count what a compressor hands to the collectives; without one DDP sums all gradients."""
    reducer = protection.reducer
    if reducer is None:
        return Sent(0.0, float(sum(param.nbytes for param in protection.training.model.parameters())))
    counts = {"gathered": 0, "summed": 0}
    gather, add = reducer._gather, reducer._sum

    def counting_gather(message: Tensor) -> Any:
        counts["gathered"] += message.nbytes
        return gather(message)

    def counting_sum(values: Tensor) -> Any:
        counts["summed"] += values.nbytes
        return add(values)

    reducer._gather, reducer._sum = counting_gather, counting_sum
    try:
        for _ in range(steps):
            protection.step()
    finally:
        del reducer._gather, reducer._sum
    return Sent(counts["gathered"] / steps, counts["summed"] / steps)


def _execute(protection: Protection, order: Order) -> object:
    match order.tell:
        case "recorded":
            return protection.recorded()
        case "sent":
            return _sent(protection, order.steps)
        case "stored":
            return protection.stored()
        case "":
            return _timed(protection, order.steps)


def run_rank(task: RankTask, orders: Connection) -> None:
    """Main function of a process."""
    logging.basicConfig(level=logging.ERROR)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rendezvous = f"file://{task.directory / 'rendezvous'}"
    dist.init_process_group("gloo", init_method=rendezvous, rank=task.rank, world_size=RANKS)
    try:
        with telling_failure(orders), protected(task) as protection:
            orders.send(protection.agent)
            for order in orders_of(orders):
                orders.send(_execute(protection, order))
    finally:
        dist.destroy_process_group()


class Ranks:
    """All ranks of a training. Owns their processes."""

    def __init__(self, size: str, arm: Arm, directory: Path) -> None:
        self.directory = directory
        tasks = [RankTask(size, arm, rank, directory) for rank in range(RANKS)]
        self._workers = Workers([Worker(f"rank {task.rank}, {arm.name}", run_rank, task) for task in tasks])
        self.agent: int | None = None

    def wait_ready(self) -> None:
        """Wait until all ranks are ready; errors as for workers."""
        self.agent = next((agent for agent in self._workers.receive() if agent is not None), None)

    def take(self, steps: int) -> Block:
        """Run one untimed step and a block of timed ones; returns the slower rank's block."""
        blocks: list[Block] = self._workers.execute(Order(steps))
        return max(blocks, key=lambda block: block.seconds)

    def recorded(self) -> Recorded | None:
        """Sizes of a record."""
        found: Recorded | None = self._workers.execute(Order(tell="recorded"))[0]
        return found

    def sent(self, steps: int) -> Sent:
        """Run steps in which bytes are counted."""
        found: Sent = self._workers.execute(Order(steps, "sent"))[0]
        return found

    def fill_log(self, records: int) -> None:
        """Train until so many records behind a checkpoint are in the log, without a hole.

        Steps begin one by one: a small model's training would outrun a writer that is starting.

        Raises:
            RuntimeError: they do not get there.
        """
        deadline = perf_counter() + PATIENCE_SECONDS
        while self._logged() < records:
            if perf_counter() > deadline:
                raise RuntimeError(f"{self.directory}: expected {records} records in the log, found {self._logged()}")
            stored: int = min(self._workers.execute(Order(tell="stored")))
            self.take(1 if stored == 0 else 4)

    def _logged(self) -> int:
        points = stored_points(read_catalog(LocalStore(self.directory / "storage")))
        return max((point.record - point.checkpoint.record for point in points), default=0)

    def close(self) -> None:
        """End them, and their agent: it would leave by itself, but its memory is needed now."""
        self._workers.close()
        if self.agent is not None:
            end_agent(self.agent)


@contextlib.contextmanager
def running(size: str, arms: Sequence[Arm], warm_up: int) -> Iterator[list[Ranks]]:
    """Trainings that are ready, a few steps in."""
    with contextlib.ExitStack() as stack:
        trainings = []
        for arm in arms:
            training = Ranks(size, arm, stack.enter_context(scratch_directory()))
            stack.callback(training.close)
            trainings.append(training)
        for training in trainings:
            training.wait_ready()
            training.take(warm_up)
        yield trainings


def logged_bytes(training: Ranks) -> float:
    """Mean bytes of a record in a training's log."""
    batches = read_catalog(LocalStore(training.directory / "storage")).batches
    return sum(batch.nbytes for batch in batches) / sum(batch.last - batch.first + 1 for batch in batches)
