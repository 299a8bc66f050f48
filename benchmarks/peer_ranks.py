"""A rank that is a node of its own: its training, protection and orders."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from time import perf_counter
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import memckpt
from benchmarks.turns import Block, Failure
from benchmarks.workloads import OPTIMIZERS
from examples.gpt import GPT, SIZES, Corpus
from memckpt import AgentConfig, MemckptConfig, Session
from memckpt.errors import MemoryBudgetError
from memckpt.processes.address import NODE_VARIABLE, AgentAddress
from memckpt.protocol.recovery import Recover, Recovered
from memckpt.session.agent_client import AgentClient
from memckpt.state.tensors import local

#: FSDP2, block by block, or DDP.
Kind = Literal["fsdp", "ddp"]
#: Time limit for any action of ranks or agents.
PATIENCE = timedelta(seconds=120)

# The first optimizer of a process imports torch's compiler: do it before processes are forked.
torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])


@dataclass(frozen=True)
class Task:
    """A training, its nodes and its protection.

    Attributes:
        size: a name in `examples.gpt.SIZES`.
        directory: the run directory.
        config: None to train without memckpt.
        hosts: address of each node in its own network namespace; empty: all are on this host's loopback.
        attempt: number of the attempt.
        load: whether ranks load saved plain checkpoints instead of resuming with memckpt.
    """

    kind: Kind
    size: str
    nodes: int
    directory: Path
    config: MemckptConfig | None
    hosts: tuple[str, ...] = ()
    attempt: int = 0
    load: bool = False

    def node(self, rank: int) -> str:
        return f"node{rank}"

    def address(self, rank: int) -> AgentAddress:
        """Address of a node's agent."""
        return AgentAddress.of(self.directory, self.node(rank))

    def file(self, rank: int) -> Path:
        """Path of a rank's plain checkpoint."""
        return self.directory / f"rank{rank}.pt"

    def config_of(self, rank: int) -> MemckptConfig | None:
        """The configuration with the node's address; its agent soon leaves if the measuring process is killed."""
        if self.config is None:
            return None
        peers = self.config.peers
        if peers is not None:
            peers = replace(peers, host=self.hosts[rank] if self.hosts else "127.0.0.1")
        return replace(self.config, peers=peers, agent=AgentConfig(linger_seconds=30.0))


@dataclass(frozen=True)
class Order:
    """An order: run steps, of which `untimed` do not count; or save a plain checkpoint."""

    steps: int = 0
    untimed: int = 0
    save: bool = False


@dataclass(frozen=True)
class Started:
    """A rank is ready for its first step.

    Attributes:
        pid: pid of the rank.
        agent: pid of its agent; None: no agent.
        numel: number of elements of its parameter shards.
        step: step that it resumes from; 0: a fresh start.
        tier: source of that step; empty: a fresh start.
        attaching: seconds from a barrier of all ranks until memckpt had the state at hand.
        fetching: of these, seconds of fetching and decoding on this node; None: nothing was fetched.
        fetched_bytes: bytes of decoded records.
        restoring: seconds until the state was in the live tensors.
    """

    pid: int
    agent: int | None
    numel: int
    step: int = 0
    tier: str = ""
    attaching: float = 0.0
    fetching: float | None = None
    fetched_bytes: int = 0
    restoring: float = 0.0


@dataclass(frozen=True)
class NodesBlock(Block):
    """A block of steps.

    Attributes:
        behind: seconds after its last step until its records were acknowledged for all nodes; 0 without peers.
        replicator_seconds: CPU seconds of all nodes' replicators per step, until then.
    """

    behind: float = 0.0
    replicator_seconds: float = 0.0


# In a rank


class Trainee:
    """A GPT, its optimizer and a sequence for each rank; :meth:`step` is one training step."""

    def __init__(self, task: Task) -> None:
        torch.manual_seed(0)
        self.model = GPT(replace(SIZES[task.size], dropout=0.0))
        self._called: torch.nn.Module = self.model
        if task.kind == "ddp":
            self._called = DistributedDataParallel(self.model)
        else:
            for block in self.model.blocks:
                fully_shard(block)
            fully_shard(self.model)
        self.protected = self._called
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, **OPTIMIZERS["fused"])
        torch.manual_seed(1 + dist.get_rank())
        self._tokens, self._targets = Corpus(self.model.config.context).sample(1)
        self.numel = sum(local(param).numel() for param in self.model.parameters())

    def step(self) -> None:
        logits: Tensor = self._called(self._tokens)
        functional.cross_entropy(logits.flatten(0, 1), self._targets.flatten()).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def _tensors(self) -> dict[str, Tensor]:
        """Parameters and optimizer state of this rank."""
        held = {name: local(param.detach()) for name, param in self.model.named_parameters()}
        for name, param in self.model.named_parameters():
            held |= {f"{name}/{key}": local(value) for key, value in self.optimizer.state.get(param, {}).items()}
        return held

    def save(self, file: Path) -> None:
        torch.save(self._tensors(), file)

    def load(self, file: Path) -> None:
        """Load a plain checkpoint into the live tensors."""
        loaded = torch.load(file, weights_only=True)
        for name, tensor in self._tensors().items():
            tensor.copy_(loaded[name])


class _Rank:
    """One rank. Owns its session."""

    def __init__(self, task: Task, rank: int) -> None:
        self._task, self._rank = task, rank
        self._session: Session | None = None
        self._trainee = Trainee(task)

    def start(self) -> Started:
        config = self._task.config_of(self._rank)
        if self._task.load:
            self._trainee.step()  # makes the optimizer's state
        dist.barrier()
        began = perf_counter()
        if self._task.load:
            self._trainee.load(self._task.file(self._rank))
            return Started(os.getpid(), None, self._trainee.numel, tier="file", restoring=perf_counter() - began)
        if config is None:
            return Started(os.getpid(), None, self._trainee.numel)
        with _timed_recovery() as recovery:
            self._session = session = memckpt.attach(
                self._trainee.protected, self._trainee.optimizer, run_dir=self._task.directory, config=config
            )
        attaching = perf_counter() - began
        report = session.restore()
        started = Started(os.getpid(), session.agent_pid, self._trainee.numel)
        if report is None:
            return started
        return replace(
            started, step=report.step, tier=report.tier, attaching=attaching, restoring=report.seconds, **recovery
        )  # fmt: skip

    def take(self, order: Order) -> NodesBlock | None:
        """Execute orders until there are no more."""
        if order.save:
            self._trainee.save(self._task.file(self._rank))
            return None
        for _ in range(order.untimed):
            self._step()
        stalled = self._stall()
        began = perf_counter()
        for _ in range(order.steps):
            self._step()
        ended = perf_counter()
        stall = {part: (spent - stalled[part]) / order.steps for part, spent in self._stall().items()}
        self._wait_acknowledged()
        return NodesBlock((ended - began) / order.steps, stall, perf_counter() - ended)

    def _step(self) -> None:
        self._trainee.step()
        if self._session is not None:
            self._session.commit()

    def _stall(self) -> dict[str, float]:
        return {} if self._session is None else asdict(self._session.stall)

    def _wait_acknowledged(self) -> None:
        session = self._session
        if session is not None and self._task.config is not None and self._task.config.peers is not None:
            session._link.client.wait_for_watermark(int(session.metrics()["step"]))

    def close(self) -> None:
        if self._session is not None:
            self._session.close()


@contextmanager
def _timed_recovery() -> Iterator[dict[str, Any]]:
    """Measures the fetches of a rank's agent in the block: seconds and bytes."""
    found: dict[str, Any] = {}
    client_class: Any = AgentClient
    recover = client_class.recover

    def timed(client: AgentClient, message: Recover, progress: Any) -> Recovered:
        began = perf_counter()
        answer: Recovered = recover(client, message, progress)
        if message.fetch:
            found.update(fetching=perf_counter() - began, fetched_bytes=answer.nbytes)
        return answer

    client_class.recover = timed
    try:
        yield found
    finally:
        client_class.recover = recover


def run_rank(task: Task, rank: int, orders: Connection) -> None:
    """Main function of a process."""
    logging.basicConfig(level=logging.ERROR)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.environ[NODE_VARIABLE] = task.node(rank)
    os.environ["TORCHELASTIC_RESTART_COUNT"] = str(task.attempt)
    rendezvous = f"file://{task.directory / f'rendezvous{task.attempt}'}"
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=task.nodes, timeout=PATIENCE)
    try:
        trainee = _Rank(task, rank)
        orders.send(trainee.start())
        while (order := _next(orders)) is not None:
            orders.send(trainee.take(order))
        trainee.close()
    except (MemoryBudgetError, MemoryError) as error:
        orders.send(Failure(str(error)))
    os._exit(0)  # destroying gloo's groups has been seen to hang


def _next(orders: Connection) -> Order | None:
    try:
        order: Order = orders.recv()
    except EOFError:
        return None
    return order
