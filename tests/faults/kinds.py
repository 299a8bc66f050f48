"""Vocabulary of faults: one word for each, used by the state machine, the soak and its table."""

from __future__ import annotations

from enum import Enum


class Kind(Enum):
    """A kind of fault; its value is what tables print."""

    KILL_TRAINER = "kill a trainer"
    KILL_TRAINERS = "kill all trainers"
    KILL_AGENT = "kill an agent"
    KILL_REPLICATOR = "kill a replicator"
    KILL_WRITER = "kill a storage writer"
    KILL_RESUMING = "kill a trainer that resumes"
    TERMINATE_AGENT = "terminate an agent (SIGTERM)"
    STOP_TRAINER = "stop a trainer, continue it"
    STOP_AGENT = "stop an agent, continue it"
    STOP_REPLICATOR = "stop a replicator, continue it"
    LOSE_NODE = "lose a node"
    LOSE_NODES = "lose more nodes than tolerated"
    CUT_NETWORK = "cut a node's network, mend it"
    SLOW_LINK = "slow a node's link"
    DISK_FULL = "full disk"
    DISK_SLOW = "slow disk"
    DISK_ERRORS = "disk that reports I/O errors"
    DAMAGE_STORED = "damage a stored file"
    DAMAGE_FRAGMENTS = "damage a peer's fragments"
    GARBAGE_TO_AGENT = "garbage to an agent's socket"
    GARBAGE_TO_REPLICATOR = "garbage to a replicator's port"
    #: Not of a process, a machine or bytes: the script does what memckpt must notice or refuse.
    SCRIPT = "script that breaks an assumption"


#: Kinds that the cluster of the state machine and the soak can inject.
INJECTED = tuple(kind for kind in Kind if kind is not Kind.SCRIPT)
#: Kinds that befall only jobs of several nodes.
OF_PEERS = (
    Kind.KILL_TRAINERS,
    Kind.LOSE_NODES,
    Kind.KILL_REPLICATOR,
    Kind.STOP_REPLICATOR,
    Kind.CUT_NETWORK,
    Kind.SLOW_LINK,
    Kind.DAMAGE_FRAGMENTS,
    Kind.GARBAGE_TO_REPLICATOR,
)
