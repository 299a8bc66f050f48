"""Training with fully_shard on two ranks, each in a process of its own, and its protection."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from time import perf_counter
from typing import Any, Literal
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import get_state_dict

import memckpt
from benchmarks.harness.processes import end_agent
from benchmarks.harness.stall import stall_of, stall_per_step
from benchmarks.harness.turns import Block, Worker, Workers, orders_of, telling_failure
from benchmarks.workloads.async_saver import AsyncSaver
from benchmarks.workloads.gpt import BATCH, make_model, redo_config
from benchmarks.workloads.rank_gpt import ShardedTraining
from memckpt import AgentConfig, Session
from memckpt.capture.by_value import Batch
from memckpt.state.codec import Packed
from memckpt.state.layout import HEADER_BYTES
from memckpt.state.tensors import local

RANKS = 2
MODES = {"lazy": "lazy T=8", "eager": "eager"}
#: Protection of every step.
Side = Literal["lazy", "eager", "nothing", "async_save"]
#: Areas of a slot, and data that go to the agent besides.
COPIED = ("gradients", "anchors", "by value", "rank state")

# The first optimizer of a process imports torch's compiler: do it before processes are forked.
torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])


@dataclass(frozen=True)
class RankTask:
    """The training of one rank.

    Attributes:
        size: a name in `examples.gpt.SIZES`.
        directory: the run directory, equal on all ranks.
    """

    size: str
    side: Side
    rank: int
    directory: Path


@dataclass(frozen=True)
class Order:
    """An order: run steps, timed after an untimed one, or with all copied bytes counted."""

    steps: int
    counted: bool = False


@dataclass(frozen=True)
class Counted:
    """Bytes that a rank has copied at each step, and sizes of its shards.

    Attributes:
        copied: bytes by kind.
        numel: number of elements of its parameter shards.
        parameters: bytes of its parameter shards.
        optimizer_state: bytes of their optimizer state.
    """

    copied: dict[str, float]
    numel: int
    parameters: int
    optimizer_state: int

    @property
    def total(self) -> float:
        return sum(self.copied.values())


def counted(trainee: ShardedTraining, copied: dict[str, float]) -> Counted:
    """The bytes that a rank has copied, with the sizes of its shards."""
    shards = [local(param.detach()) for param in trainee.model.parameters()]
    states = [value for state in trainee.optimizer.state.values() for value in state.values()]
    return Counted(copied, sum(shard.numel() for shard in shards), _nbytes(shards), _nbytes(map(local, states)))


def _nbytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


@dataclass
class Protection:
    """A way to protect a trainee; this one: not at all.

    Attributes:
        agent: pid of the agent; None: none.
    """

    trainee: ShardedTraining
    agent: int | None = None

    def step(self) -> None:
        """A training step, protected."""
        self.trainee.step()

    def settle(self) -> None:
        """Wait for background work of earlier steps."""

    def stall(self) -> dict[str, float]:
        """Seconds in the training thread, by cause."""
        return {}

    def counting(self) -> contextlib.AbstractContextManager[dict[str, int]]:
        """Count the bytes copied in the block."""
        return contextlib.nullcontext({})


class Memckpt(Protection):
    def __init__(self, trainee: ShardedTraining, session: Session) -> None:
        super().__init__(trainee, session.agent_pid)
        self.session = session

    def step(self) -> None:
        self.trainee.step()
        self.session.commit()

    def settle(self) -> None:
        """Wait until an eager agent has applied all records but the newest, which other ranks may lack."""
        if self.session.mode == "eager":
            self.session._link.wait_applied(int(self.session.metrics()["step"]) - 1)

    def stall(self) -> dict[str, float]:
        return stall_of(self.session)

    @contextlib.contextmanager
    def counting(self) -> Iterator[dict[str, int]]:
        """Count every copy into the slots by area, and the rank state.

        Raises:
            RuntimeError: a generation was written meanwhile, so not all copies went into slots.
        """
        writer = self.session._staging.writer
        if writer is None:
            raise RuntimeError("expected a protected training, found one without a generation; see its warnings")
        layout, sizes, elsewhere = writer.layout, dict.fromkeys(COPIED, 0), [0]
        first = torch.frombuffer(writer._slots.map, dtype=torch.uint8).data_ptr()
        copier: Any = self.session._copier
        rank_state: Any = self.session._rank_state
        copy, capture = copier.copy, rank_state.capture

        def counting_copy(destination: Tensor, source: Tensor) -> None:
            copy(destination, source)
            offset = destination.data_ptr() - first
            if not 0 <= offset < layout.slots_bytes:
                elsewhere[0] += destination.nbytes
                return
            within = offset % layout.slot_bytes - HEADER_BYTES
            kind = "gradients" if within < layout.gradient_bytes else "anchors"
            sizes["by value" if offset >= layout.slot_bytes * layout.ring else kind] += destination.nbytes

        def counting_capture(reduction: Any, pending: Any) -> Packed:
            packed: Packed = capture(reduction, pending)
            sizes["rank state"] += len(packed.encode())
            return packed

        together = Batch.copy

        def counting_anchors(batch: Batch, buffer: Any, base: int, sources: Sequence[Tensor], **how: Any) -> bool:
            if copied := together(batch, buffer, base, sources, **how):
                sizes["anchors" if how else "by value"] += sum(source.nbytes for source in sources)
            return copied

        as_they_are = copier.copy_as_they_are

        def counting_one_by_one(destinations: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
            as_they_are(destinations, sources)
            sizes["anchors"] += sum(source.nbytes for source in sources)

        copier.copy, rank_state.capture = counting_copy, counting_capture
        copier.copy_as_they_are = counting_one_by_one
        try:
            with mock.patch.object(Batch, "copy", counting_anchors):
                yield sizes
        finally:
            del copier.copy, copier.copy_as_they_are, rank_state.capture
        if elsewhere[0]:
            raise RuntimeError(
                f"expected copies into the slots only, found {elsewhere[0]} bytes of others: a generation was begun; "
                "its reason is among the warnings"
            )


class AsyncSave(Protection):
    """dcp.async_save of model and optimizer after each step; each waits for the one before.

    It has its own process group, as it communicates in a background thread, and keeps its stager, so that the memory
    for copies is allocated once.
    """

    def __init__(self, trainee: ShardedTraining, directory: Path) -> None:
        super().__init__(trainee)
        self.stager = DefaultStager(StagingOptions(False, False, False, False))
        group = dist.new_group(backend="gloo")
        targets = [directory / "0", directory / "1"]
        self.saver = AsyncSaver(targets, process_group=group, async_stager=self.stager)

    def step(self) -> None:
        self.trainee.step()
        self.settle()
        model, optimizer = get_state_dict(self.trainee.model, self.trainee.optimizer)
        self.saver.save({"model": model, "optimizer": optimizer})

    def settle(self) -> None:
        self.saver.wait()

    @contextlib.contextmanager
    def counting(self) -> Iterator[dict[str, int]]:
        """Bytes of every storage that the stager copies."""
        sizes = {"state": 0}
        inner: Any = self.stager._state_dict_stager
        stage = inner._stage_untyped_storage

        def counting_stage(storage: Any, non_blocking: bool = False) -> Any:
            sizes["state"] += storage.nbytes()
            return stage(storage, non_blocking)

        inner._stage_untyped_storage = counting_stage
        try:
            yield sizes
        finally:
            del inner._stage_untyped_storage


@contextlib.contextmanager
def protected(task: RankTask) -> Iterator[Protection]:
    trainee = ShardedTraining(make_model(task.size), BATCH // RANKS)
    if task.side == "nothing":
        yield Protection(trainee)
    elif task.side == "async_save":
        saving = AsyncSave(trainee, task.directory)
        try:
            yield saving
        finally:
            saving.settle()
            saving.stager.close()
    else:
        # The agent soon leaves by itself if the measuring process is killed.
        config = replace(redo_config(MODES[task.side]), agent=AgentConfig(linger_seconds=5.0))
        with memckpt.attach(trainee.model, trainee.optimizer, run_dir=task.directory, config=config) as session:
            session.restore()
            yield Memckpt(trainee, session)


# The processes


def _timed(protection: Protection, steps: int) -> Block:
    protection.step()  # untimed: fills the caches
    stalled = protection.stall()
    began = perf_counter()
    for _ in range(steps):
        protection.step()
    seconds = (perf_counter() - began) / steps
    stall = stall_per_step(stalled, protection.stall(), steps)
    protection.settle()
    return Block(seconds, stall)


def _counted(protection: Protection, steps: int) -> Counted:
    with protection.counting() as sizes:
        for _ in range(steps):
            protection.step()
    protection.settle()
    return counted(protection.trainee, {part: nbytes / steps for part, nbytes in sizes.items()})


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
                run = _counted if order.counted else _timed
                orders.send(run(protection, order.steps))
    finally:
        dist.destroy_process_group()


class Ranks:
    """All ranks of a training. Owns their processes."""

    def __init__(self, size: str, side: Side, directory: Path) -> None:
        self.directory = directory
        tasks = [RankTask(size, side, rank, directory) for rank in range(RANKS)]
        self._workers = Workers([Worker(f"rank {task.rank} with {side}", run_rank, task) for task in tasks])
        self.agent: int | None = None

    def wait_ready(self) -> None:
        """Wait until all ranks are ready; errors as for workers."""
        self.agent = next((agent for agent in self._workers.receive() if agent is not None), None)

    def take(self, steps: int) -> Block:
        """Run one untimed step and a block of timed ones; returns the slower rank's block."""
        blocks: list[Block] = self._workers.execute(Order(steps))
        return max(blocks, key=lambda block: block.seconds)

    def count(self, steps: int) -> list[Counted]:
        """Run steps in which each rank counts the bytes it copies."""
        return self._workers.execute(Order(steps, counted=True))

    def close(self) -> None:
        """End them, and their agent: it would leave by itself, but its memory is needed now."""
        self._workers.close()
        if self.agent is not None:
            end_agent(self.agent)
