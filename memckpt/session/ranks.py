"""The ranks of a job: their nodes, and how they agree at the start.

Nothing here runs during training, except the self-test of unknown optimizers in the first steps, and the question
whether redo is trusted, every 128 steps.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch.distributed as dist

from memckpt import errors
from memckpt.config.arguments import LAUNCHER, RESTART_COUNT
from memckpt.errors import MemckptError
from memckpt.processes.address import node_name
from memckpt.processes.handles import start_ticks
from memckpt.protocol.trainer import Launcher
from memckpt.state import rng

T = TypeVar("T")


class Ranks:
    """This rank's place in the job, and a Gloo group for small messages between ranks.

    Attributes:
        rank, world_size: rank and size of the default process group; 0 and 1 without one.
        node: name of this node.
        local_ranks: ranks on this node, ascending.
        unit: ranks on this node that hold the same shards as this one, as :meth:`share` has found.
        replicas: ranks of the job that hold the same shards as this one.
        groups: ranks of the job grouped by the shards that they hold, each group ascending.
        shares: whether ranks of some node hold the same shards, and thus share slots.
        nonce: random id of the attempt, equal on all ranks.
    """

    def __init__(self) -> None:
        self._group: Any = None
        self.rank, self.world_size = 0, 1
        if dist.is_available() and dist.is_initialized():
            self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        if self.world_size > 1 and dist.get_backend() != "gloo":
            self._group = dist.new_group(backend="gloo")
        self.node = node_name()
        nodes = self.gather((self.node, secrets.token_hex(8)))
        self._nodes = [node for node, _ in nodes]
        self.local_ranks = tuple(rank for rank, node in enumerate(self._nodes) if node == self.node)
        self.nonce = nodes[0][1]
        self.unit, self.replicas = self.local_ranks, tuple(range(self.world_size))
        self.groups = [self.replicas]

    def share(self, shards: str) -> None:
        """Set :attr:`unit`, :attr:`replicas` and :attr:`groups`; collective.

        Args:
            shards: key that is equal on two ranks exactly if they hold the same parameters and optimizer state.
        """
        everybody = self.gather(shards)
        groups: dict[str, list[int]] = {}
        for rank, each in enumerate(everybody):
            groups.setdefault(each, []).append(rank)
        self.groups = [tuple(ranks) for ranks in groups.values()]
        self.replicas = tuple(groups[shards])
        self.unit = tuple(rank for rank in self.local_ranks if rank in groups[shards])

    @property
    def shares(self) -> bool:
        places = [[self._nodes[rank] for rank in ranks] for ranks in self.groups]
        return any(len(set(nodes)) < len(nodes) for nodes in places)

    def gather(self, value: T) -> list[T]:
        """Values of all ranks, by rank; collective."""
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self._group)
        return values

    def by_node(self, values: Sequence[T]) -> list[list[T]]:
        """Values of all ranks, grouped by node."""
        found: dict[str, list[T]] = {}
        for node, value in zip(self._nodes, values, strict=True):
            found.setdefault(node, []).append(value)
        return list(found.values())

    def first_alike(self, state: rng.RngState) -> int:
        """The first rank whose torch generator is in the same state; collective. Python's differs in each process."""
        everybody = self.gather(hashlib.blake2b(state["torch"], digest_size=16).digest())
        return everybody.index(everybody[self.rank])

    def together(self, work: Callable[[], T]) -> list[T]:
        """Run `work` on every rank and gather the results; collective.

        If one rank raises a MemckptError, every rank raises it. Otherwise the others would wait in their next
        collective for a rank that has left.
        """
        result: tuple[str, Any]
        failure: MemckptError | None = None
        try:
            result = "", work()
        except MemckptError as error:
            failure = error
            result = type(error).__name__, str(error)
        results: list[tuple[str, Any]] = self.gather(result)
        if failure is not None:
            raise failure
        for rank, (kind, value) in enumerate(results):
            if kind:
                raise getattr(errors, kind, MemckptError)(f"rank {rank}: {value}")
        return [value for _, value in results]

    def open_replica_group(self) -> Any:
        """A process group of the ranks that hold the same shards as this one; collective over all ranks."""
        opened = [dist.new_group(list(ranks)) for ranks in self.groups]
        return opened[self.groups.index(self.replicas)]

    def broadcast_tensor(self, tensor: Any, group: Any) -> None:
        """Overwrite `tensor`, in place, with that of the first rank that holds the same shards."""
        dist.broadcast(tensor, self.replicas[0], group=group)


def find_launcher(world_size: int) -> Launcher:
    """The process that restarts this trainer when it dies: torchrun, `memckpt run`, or the parent of several ranks.

    It is the parent, but where `memckpt worker` stands between and names it.

    A single process that was started by hand has no launcher: its parent is a shell, which may end earlier.
    """
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT") or os.environ.get(RESTART_COUNT)
    parent = int(os.environ.get(LAUNCHER) or os.getppid())
    if restarts is None and world_size == 1:
        return Launcher(0, 0, 0)
    return Launcher(parent, start_ticks(parent), int(restarts or 0))
