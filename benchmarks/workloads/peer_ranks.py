"""A rank that is a node of its own: its training, protection and orders."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from time import perf_counter
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

import memckpt
from benchmarks.harness.stall import stall_of, stall_per_step
from benchmarks.harness.turns import Block, orders_of, telling_failure
from benchmarks.workloads.gpt import Training, make_model
from benchmarks.workloads.rank_gpt import ReplicatedTraining, ShardedTraining
from memckpt import AgentConfig, MemckptConfig, Session
from memckpt.processes.address import NODE_VARIABLE, AgentAddress
from memckpt.protocol.replication import Recover, Recovered
from memckpt.session.link import AgentLink
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


class _Rank:
    """One rank. Owns its session."""

    def __init__(self, task: Task, rank: int) -> None:
        self._task, self._rank = task, rank
        self._session: Session | None = None
        model = make_model(task.size)
        self._training: Training
        self._protected: torch.nn.Module = model
        if task.kind == "ddp":
            self._training = replicated = ReplicatedTraining(model, batch=1)
            self._protected = replicated.replica
        else:
            self._training = ShardedTraining(model, batch=1)
        self._numel = sum(local(param).numel() for param in model.parameters())

    def _tensors(self) -> dict[str, Tensor]:
        """Parameters and optimizer state of this rank."""
        params = dict(self._training.model.named_parameters())
        held = {name: local(param.detach()) for name, param in params.items()}
        for name, param in params.items():
            held |= {
                f"{name}/{key}": local(value) for key, value in self._training.optimizer.state.get(param, {}).items()
            }
        return held

    def _load(self, file: Path) -> None:
        """Load a plain checkpoint into the live tensors."""
        loaded = torch.load(file, weights_only=True)
        for name, tensor in self._tensors().items():
            tensor.copy_(loaded[name])

    def start(self) -> Started:
        config = self._task.config_of(self._rank)
        if self._task.load:
            self._training.step()  # makes the optimizer's state
        dist.barrier()
        began = perf_counter()
        if self._task.load:
            self._load(self._task.file(self._rank))
            return Started(os.getpid(), None, self._numel, tier="file", restoring=perf_counter() - began)
        if config is None:
            return Started(os.getpid(), None, self._numel)
        with _timed_recovery() as recovery:
            self._session = session = memckpt.attach(
                self._protected, self._training.optimizer, run_dir=self._task.directory, config=config
            )
        attaching = perf_counter() - began
        report = session.restore()
        started = Started(os.getpid(), session.agent_pid, self._numel)
        if report is None:
            return started
        return replace(
            started, step=report.step, tier=report.tier, attaching=attaching, restoring=report.seconds, **recovery
        )  # fmt: skip

    def take(self, order: Order) -> NodesBlock | None:
        """Execute an order."""
        if order.save:
            torch.save(self._tensors(), self._task.file(self._rank))
            return None
        for _ in range(order.untimed):
            self._step()
        stalled = stall_of(self._session)
        began = perf_counter()
        for _ in range(order.steps):
            self._step()
        ended = perf_counter()
        stall = stall_per_step(stalled, stall_of(self._session), order.steps)
        self._wait_acknowledged()
        return NodesBlock((ended - began) / order.steps, stall, perf_counter() - ended)

    def _step(self) -> None:
        self._training.step()
        if self._session is not None:
            self._session.commit()

    def _wait_acknowledged(self) -> None:
        session = self._session
        if session is not None and self._task.config is not None and self._task.config.peers is not None:
            session._link.wait_for_watermark(int(session.metrics()["step"]))

    def close(self) -> None:
        if self._session is not None:
            self._session.close()


@contextmanager
def _timed_recovery() -> Iterator[dict[str, Any]]:
    """Measures the fetches of a rank's agent in the block: seconds and bytes."""
    found: dict[str, Any] = {}
    link_class: Any = AgentLink
    recover = link_class.recover

    def timed(link: AgentLink, message: Recover, progress: Any) -> Recovered:
        began = perf_counter()
        answer: Recovered = recover(link, message, progress)
        if message.fetch:
            found.update(fetching=perf_counter() - began, fetched_bytes=answer.nbytes)
        return answer

    link_class.recover = timed
    try:
        yield found
    finally:
        link_class.recover = recover


def run_rank(task: Task, rank: int, orders: Connection) -> None:
    """Main function of a process."""
    logging.basicConfig(level=logging.ERROR)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.environ[NODE_VARIABLE] = task.node(rank)
    os.environ["TORCHELASTIC_RESTART_COUNT"] = str(task.attempt)
    rendezvous = f"file://{task.directory / f'rendezvous{task.attempt}'}"
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=task.nodes, timeout=PATIENCE)
    with telling_failure(orders):
        training = _Rank(task, rank)
        orders.send(training.start())
        for order in orders_of(orders):
            orders.send(training.take(order))
        training.close()
    os._exit(0)  # destroying gloo's groups has been seen to hang
