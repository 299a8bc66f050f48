"""A job on four nodes that fails and is started again: each node with an agent, and a network namespace where allowed.

The parent stands for the launcher. It starts the agents, since those of nodes belong into the nodes' networks.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.harness.processes import end_agent
from benchmarks.harness.scratch import scratch_directory
from benchmarks.workloads.peer_nodes import Nodes
from benchmarks.workloads.peer_ranks import Task
from memckpt import AgentConfig, MemckptConfig
from memckpt.processes.launch import spawn_agent
from tests.support.cluster import netns

#: Nodes of the job, and of a rack of them.
NODES, RACK = 4, 2


@dataclass(frozen=True)
class Began:
    """A start of the job.

    Attributes:
        attempt: number of the attempt.
        began: when its processes were started, in seconds since 1970.
        step: step that it resumes from; 0: none.
        tier: source of that step, of several the farthest; empty: none.
    """

    attempt: int
    began: float
    step: int
    tier: str


@dataclass(frozen=True)
class Killed:
    """A failure of the job.

    Attributes:
        at: when, in seconds since 1970.
        steps: steps by then, the part of the one in progress included.
        ended: seconds until all processes had ended.
        spawning: seconds until the lost nodes had agents again.
    """

    at: float
    steps: float
    ended: float
    spawning: float


class FailingJob:
    """A training on four nodes, its attempts one after the other. Owns ranks and agents; :meth:`close` ends them.

    Args:
        network: network of the nodes; None: all are on this host's loopback.

    Attributes:
        task: the training, with the number of the attempt.
        begun: attempts that got ready, in order.
    """

    def __init__(self, task: Task, network: netns.Network | None) -> None:
        self.task = task if network is None else replace(task, hosts=tuple(network.addresses))
        self._network = network
        self._agents: dict[int, int] = {}
        self._nodes: Nodes | None = None
        self._began: Began | None = None
        self.begun: list[Began] = []
        self._spawn(range(task.nodes))

    def begin(self, deadline: float | None = None) -> Began | None:
        """Start the processes, and wait until they are ready; None: a time of the monotonic clock has passed before."""
        began = time.time()
        self._nodes = nodes = Nodes(self.task)
        self._began = None
        if deadline is None:
            nodes.wait_ready()
        elif not nodes.wait_ready_by(deadline):
            return None
        tiers = {started.tier for started in nodes.started}
        farthest = next((tier for tier in ("storage", "peers", "local memory") if tier in tiers), "")
        self._began = Began(self.task.attempt, began, max(started.step for started in nodes.started), farthest)
        self.begun.append(self._began)
        return self._began

    @property
    def nodes(self) -> Nodes:
        """The processes of this attempt."""
        assert self._nodes is not None
        return self._nodes

    def times(self, attempt: int | None = None) -> NDArray[np.float64]:
        """When the first step of an attempt began, and when each of its steps ended; None: of this attempt."""
        progress = replace(self.task, attempt=self.task.attempt if attempt is None else attempt).progress()
        return np.array(progress[: np.count_nonzero(progress)])

    def fail(self, lost: Sequence[int], step_seconds: float) -> Killed:
        """Kill all ranks, as launchers do, and the agents of the lost nodes; these get new ones."""
        at, before = time.time(), time.perf_counter()
        self.nodes.kill_with([self._agents[node] for node in lost])
        ended = time.perf_counter()
        steps = self._steps(at, step_seconds)
        self._nodes = None
        self._spawn(lost)
        self.task = replace(self.task, attempt=self.task.attempt + 1)
        return Killed(at, steps, ended - before, time.perf_counter() - ended)

    def _steps(self, at: float, step_seconds: float) -> float:
        if self._began is None:
            return 0.0
        times = self.times()
        # The kill takes a moment: a step may have ended meanwhile.
        part = min(1.0, max(0.0, (at - times[-1]) / step_seconds)) if len(times) else 0.0
        return self._began.step + max(0, len(times) - 1) + part

    def _spawn(self, nodes: Sequence[int]) -> None:
        """Start the agents of nodes, all at once."""
        with ThreadPoolExecutor(self.task.nodes) as threads:  # each thread moves into the network of its node
            self._agents |= dict(zip(nodes, threads.map(self._spawn_one, nodes), strict=True))

    def _spawn_one(self, node: int) -> int:
        network = self._network
        with contextlib.nullcontext() if network is None else network.inside(node):
            return spawn_agent(self.task.address(node), AgentConfig(linger_seconds=120.0))

    def close(self) -> None:
        """End the processes."""
        if self._nodes is not None:
            self._nodes.kill_with([])
        for agent in self._agents.values():
            end_agent(agent)


@contextlib.contextmanager
def failing_job(size: str, device_seconds: float, config: MemckptConfig) -> Iterator[FailingJob]:
    """A job in a directory of its own, in namespaces where that is allowed."""
    with contextlib.ExitStack() as stack:
        directory: Path = stack.enter_context(scratch_directory())
        network = stack.enter_context(netns.Network(NODES)) if netns.problem(as_root=True) is None else None
        job = FailingJob(Task("fsdp", size, NODES, directory, config, device_seconds=device_seconds), network)
        stack.callback(job.close)
        yield job
