"""A scheme of protection, as planner and simulator see it: its costs, and what it brings back after which failure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

#: What is lost at once: a process (the node's memory stays), one or more nodes with their memory, or every node.
Failure = Literal["process", "nodes", "cluster"]


@dataclass(frozen=True, kw_only=True)
class Tier:
    """A place that a state is brought back from.

    Attributes:
        name: name of the tier, as in reports.
        every_steps: interval of the states that it holds, in steps.
        lag_steps: number of the newest steps that are on their way to it, and lost with what they come from.
        restore_seconds: time from the start of processes to the first new step, in seconds.
        group_nodes: nodes of a group that protects its members; 0 where nodes do not matter.
        tolerates: nodes of a group that may be lost at once; 0: none, the tier is the node's own memory.
        survives_cluster: whether it survives the loss of all nodes.
        rebuild_seconds: time from the first new step until a node that was replaced holds its part of it again, in
            seconds; until then it counts as lost.
    """

    name: str
    every_steps: float
    lag_steps: float
    restore_seconds: float
    group_nodes: int = 0
    tolerates: int = 0
    survives_cluster: bool = False
    rebuild_seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """A way to protect a training.

    Attributes:
        name: its name, as in reports.
        overhead: time that it adds to training, as a share of undisturbed training time.
        tiers: its tiers, nearest first; a recovery takes the tier with the newest state that survived, and of equal
            ones the nearest.
        memory_bytes: host memory for each node, in bytes.
        wire_bytes: bytes that a node sends for each step.
        disk_bytes: bytes that the job writes for each step.
    """

    name: str
    overhead: float
    tiers: tuple[Tier, ...]
    memory_bytes: float = 0.0
    wire_bytes: float = 0.0
    disk_bytes: float = 0.0
