"""How the nodes of an attempt get to know each other: messages of trainers, their agent and its replicator."""

from __future__ import annotations

import msgspec

from memckpt.state.records import HeldFragments, RankGroup


class PeerKeys(msgspec.Struct, frozen=True, array_like=True):
    """CURVE keys of one attempt, in printable form. Every agent of the job has all four, and nobody else."""

    server_public: str
    server_secret: str
    client_public: str
    client_secret: str

    def __repr__(self) -> str:
        return "PeerKeys(...)"  # not for logs


class Listen(msgspec.Struct, frozen=True, tag="listen"):
    """From a trainer to its agent, and from that to its replicator: listen for peers with these keys, or the password.

    Answer: Listening. Sockets of an earlier attempt are closed: who has only its keys is a stranger from now on.
    `memory_budget_bytes` and `threads` are the configured limit and the threads for redo. A replicator that shows no
    sign of life for `liveness_seconds` is killed and replaced.
    """

    attempt: str
    node: str
    host: str
    port: int
    keys: PeerKeys | str | None
    memory_budget_bytes: int | None = None
    threads: int = 1
    liveness_seconds: float = 15.0


class Listening(msgspec.Struct, frozen=True, tag="listening"):
    """Answer to Listen: where peers find this node's replicator, and what it keeps of others' records."""

    address: str
    fragments: tuple[HeldFragments, ...] = ()


class PeerNode(msgspec.Struct, frozen=True, array_like=True):
    """A node of the job: its name, where its replicator listens, and its failure domain, the widest first."""

    name: str
    address: str
    domain: tuple[str, ...]


class PeerUnit(msgspec.Struct, frozen=True, array_like=True):
    """Ranks that share a node (by its index) and its shards. `private`: only what is their own has to be sent, as
    enough other nodes hold the same shards."""

    node: int
    ranks: RankGroup
    private: bool


class PeerJob(msgspec.Struct, frozen=True):
    """Plan of an attempt's replication; the same on all nodes.

    Attributes:
        nodes: in the order of their first ranks; the first one is the leader.
        data, tolerate: k and m; copies where k is 1.
        wait: whether training waits for acknowledgements.
        record: the one behind which the attempt goes on; None: it starts over, or from storage.
        forget: a person wants it to start over, and nothing that is kept.
        ack_timeout_seconds: after which training does not wait for a node that acknowledges nothing.
        every_steps: N: the state after every N-th record is sent in place of records, if it is above 1; None: measured.
    """

    attempt: str
    nodes: tuple[PeerNode, ...]
    units: tuple[PeerUnit, ...]
    data: int
    tolerate: int
    backend: str
    wait: bool
    rate_bytes_per_second: float | None
    overhead: float
    record: int | None
    forget: bool = False
    ack_timeout_seconds: float = 15.0
    every_steps: int | None = 1


class Join(msgspec.Struct, frozen=True, tag="join"):
    """The attempt's plan is made: connect to its peers. `rejoin`: a trainer has lost its agent, and found another."""

    job: PeerJob
    rejoin: bool = False


class AskPhases(msgspec.Struct, frozen=True, tag="phases?"):
    """From a trainer: where do I mark the phases of my steps? Answer: PhasesAre."""


class PhasesAre(msgspec.Struct, frozen=True, tag="phases"):
    """Answer to AskPhases, and to the replicator: the page comes along as a descriptor; `position` is the rank's in
    it.
    """

    position: int = 0


TrainerToAgent = Listen | Join | AskPhases
AgentToTrainer = Listening | PhasesAre
AgentToReplicator = Listen | Join | PhasesAre
ReplicatorToAgent = Listening
