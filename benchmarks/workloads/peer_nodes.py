"""A training whose ranks are nodes on this machine: processes with own node names, agents and replicators."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.harness.processes import children, cpu_seconds, end_agent
from benchmarks.harness.turns import Worker, Workers
from benchmarks.workloads.peer_ranks import PATIENCE, NodesBlock, Order, Started, Task, run_rank
from memckpt.processes.control import ask_status
from memckpt.protocol.status import PeersStatus
from memckpt.storage.catalog import read_catalog
from memckpt.storage.local_store import LocalStore

_LOOK_AGAIN_SECONDS = 0.05


class Nodes:
    """One attempt of a training. Owns the processes of its ranks; :meth:`close` ends their agents, too."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self._ranks = Workers(
            [Worker(f"{task.node(rank)} of {task.nodes}", run_rank, task, rank) for rank in range(task.nodes)]
        )
        self.started: list[Started] = []

    def wait_ready(self) -> list[Started]:
        """Wait until all ranks are ready; errors as for workers."""
        self.started = self._ranks.receive()
        return self.started

    @property
    def numel(self) -> int:
        """Number of elements of all parameters, counted once."""
        each = [started.numel for started in self.started]
        return sum(each) if self.task.kind == "fsdp" else each[0]

    def take(self, steps: int, untimed: int = 1) -> NodesBlock:
        """Run untimed and timed steps; returns the slowest rank's block.

        With peers it ends when all records are acknowledged.
        """
        replicators = [pid for started in self.started if (pid := _replicator(started.agent)) is not None]
        before = sum(map(cpu_seconds, replicators))
        blocks: list[NodesBlock] = self._ranks.execute(Order(steps, untimed))
        used = sum(map(cpu_seconds, replicators)) - before
        slower = max(blocks, key=lambda block: block.seconds)
        behind = max(block.behind for block in blocks)
        return replace(slower, behind=behind, replicator_seconds=used / (steps + untimed))

    def save(self) -> None:
        """Have each rank write a plain checkpoint."""
        self._ranks.execute(Order(save=True))

    def peers_status(self, record: int) -> list[PeersStatus]:
        """Each agent's status of its peers, once it knows that `record` is acknowledged for all nodes.

        Raises:
            RuntimeError: an agent does not know it within minutes.
        """
        return [self._peers_status(rank, record) for rank in range(self.task.nodes)]

    def _peers_status(self, rank: int, record: int) -> PeersStatus:
        patience = time.monotonic() + PATIENCE.total_seconds()
        while time.monotonic() < patience:
            status = ask_status(self.task.address(rank))
            found = None if status is None else status.peers
            if found is not None and (found.watermark or 0) >= record:
                return found
            time.sleep(_LOOK_AGAIN_SECONDS)  # an agent answers questions, and tells nobody by itself
        raise RuntimeError(f"expected record {record} to be acknowledged, found {found} on {self.task.node(rank)}")

    def held_bytes(self) -> tuple[int, int]:
        """Bytes that all nodes hold: of their own states and records, and of other nodes' records."""
        found = [ask_status(self.task.address(rank)) for rank in range(self.task.nodes)]
        there = [status for status in found if status is not None and status.peers is not None]
        if len(there) < len(found):
            raise RuntimeError(f"expected an answer of {len(found)} agents with peers, found {len(there)}")
        return sum(one.held_bytes for one in there), sum(one.peers.held_bytes for one in there if one.peers)

    def take_until_stored(self, steps: int) -> None:
        """Take blocks of steps until storage has a checkpoint of all nodes that this attempt has written.

        A node whose order came late takes part in a later checkpoint only, and steps lead to that.

        Raises:
            RuntimeError: there is none within minutes.
        """
        store, resumed = LocalStore(self.task.directory / "storage"), self.started[0].step
        patience = time.monotonic() + PATIENCE.total_seconds()
        found: list[int] = []
        while time.monotonic() < patience:
            self.take(steps)
            while any(self._saves(rank) for rank in range(self.task.nodes)) and time.monotonic() < patience:
                time.sleep(_LOOK_AGAIN_SECONDS)  # an agent answers questions, and tells nobody by itself
            found = [each.step for each in read_catalog(store).complete]
            if any(each > resumed for each in found):
                return
        raise RuntimeError(f"expected a checkpoint of a step after {resumed}, found those of {found}")

    def _saves(self, rank: int) -> bool:
        status = ask_status(self.task.address(rank))
        return status is not None and status.storage is not None and status.storage.saving

    def kill(self, nodes: Sequence[int]) -> None:
        """Kill all ranks, as a launcher does when a node is lost, and the agents of the given nodes."""
        agents = [agent for node in nodes if (agent := self.started[node].agent) is not None]
        handles = []
        for pid in (*self._ranks.pids, *agents):
            with contextlib.suppress(ProcessLookupError):  # it has failed by itself
                handles.append(os.pidfd_open(pid))
        for handle in handles:
            signal.pidfd_send_signal(handle, signal.SIGKILL)
        for handle in handles:
            select.select([handle], [], [])
            os.close(handle)
        self._ranks.close()

    def close(self) -> None:
        """End the ranks and their agents, and free their memory."""
        self._ranks.close()
        for started in self.started:
            if started.agent is not None:
                end_agent(started.agent)


def _replicator(agent: int | None) -> int | None:
    """Pid of an agent's replicator."""
    if agent is None:
        return None
    for child in children(agent):
        if b"memckpt.replication.process" in Path(f"/proc/{child}/cmdline").read_bytes():
            return child
    return None
