"""Messages of the peers tier: of trainers, their agent and its replicator. Typed, validated, no pickle.

In order: how nodes get to know each other; how a state is fetched from peers; how records get to them, and how far.
"""

from __future__ import annotations

import msgspec

from memckpt.state.records import Branch, HeldFragments, RankGroup
from memckpt.state.spec import StateSpec


class PeerKeys(msgspec.Struct, frozen=True, array_like=True):
    """CURVE keys of one attempt, in printable form, and a secret for payloads. All agents of the job have them."""

    server_public: str
    server_secret: str
    client_public: str
    client_secret: str
    bulk: str

    def __repr__(self) -> str:
        return "PeerKeys(...)"  # not for logs


class Listen(msgspec.Struct, frozen=True, tag="listen"):
    """To the agent, and on to its replicator: listen for peers with these keys, or the password. Answer: Listening.

    Sockets of an earlier attempt are closed. A replicator that shows no life for `liveness_seconds` is replaced.
    """

    attempt: str
    node: str
    host: str
    port: int
    keys: PeerKeys | str | None
    memory_budget_bytes: int | None = None
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
    """Ranks that share a node (by its index) and its shards. `private`: other nodes hold the rest of it."""

    node: int
    ranks: RankGroup
    private: bool


class PeerJob(msgspec.Struct, frozen=True):
    """Plan of an attempt's replication; the same on all nodes. The first of `nodes` leads.

    `data`, `tolerate`: k and m. `wait`: training waits for acknowledgements. `record`: behind which the attempt goes
    on; None: over, or from storage. `forget`: nothing that is kept is wanted. `every_steps`: N; None: measured.
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
    """The attempt's plan is made: connect to its peers.

    `rejoin`: the node has taken part before, with a replicator that is gone. `records`: all that the agent has sent of
    the attempt follows at once; without them the agent is another one, and has to wait for its trainers' next record.
    """

    job: PeerJob
    rejoin: bool = False
    records: bool = False


class AskPhases(msgspec.Struct, frozen=True, tag="phases?"):
    """From a trainer: where do I mark the phases of my steps? Answer: PhasesAre."""


class PhasesAre(msgspec.Struct, frozen=True, tag="phases"):
    """Answer to AskPhases, and to the replicator: the page comes along; `position` is the rank's in it."""

    position: int = 0


class FromNode(msgspec.Struct, frozen=True, tag="node"):
    """Source of a state: all of it from a node that holds it."""

    node: str


class FromFragments(msgspec.Struct, frozen=True, tag="fragments"):
    """Source of a state: decoded from fragments, and what these leave out from a replica."""

    generation: str
    #: (node, index) of all that hold some of it, ascending; more than are needed, so that damaged ones can be skipped.
    fragments: tuple[tuple[str, int], ...]
    data: int  #: k, the number of different fragments needed
    period: int  #: T, the number of records that make a state; 1 where there is a replica
    replica: tuple[str, RankGroup] | None = None  #: node and ranks with what is not private; None: all is decoded


class WantedState(msgspec.Struct, frozen=True):
    """State of some ranks after a record, to be fetched. `before`: the state before that record is wanted, too."""

    ranks: RankGroup
    record: int
    source: FromNode | FromFragments
    before: bool = False


class Recover(msgspec.Struct, frozen=True, tag="recover"):
    """From a trainer, for its node: fetch what is missing here, hand out what others miss. Answer: Recovered."""

    record: int  #: the one that the plan chose
    serve: tuple[RankGroup, ...]  #: sets of ranks whose state after it is handed out from here
    fetch: tuple[WantedState, ...]  #: what this node is to get
    memory_budget_bytes: int | None
    history: tuple[Branch, ...] = ()  #: timelines up to that record, oldest first
    before: bool = False  #: hand out the state before it as well
    adopt: bool = False  #: what is fetched may be of ranks that this attempt has not: it goes to storage from here


class BadSourceSeen(msgspec.Struct, frozen=True, array_like=True):
    """A source, as in BadSource, from which nothing right could be read; `silent`: it may answer later."""

    node: str
    ranks: RankGroup
    generation: str
    silent: bool = False


class Recovered(msgspec.Struct, frozen=True, tag="recovered"):
    """Answer to Recover. With a problem and nothing bad the reason lies in the node itself, and not in a source."""

    problem: str = ""  #: why it failed, in words
    bad: tuple[BadSourceSeen, ...] = ()  #: sources to be left out when it is tried again
    nbytes: int = 0
    seconds: float = 0.0


class RecoveryProgress(msgspec.Struct, frozen=True, tag="progress"):
    """From the replicator, passed on to the trainers: bytes more of what is missing are here."""

    nbytes: int


class Describe(msgspec.Struct, frozen=True, tag="describe"):
    """To the replicator: report the layout of a state. Answer: Described. A new `recovery` ends earlier reads."""

    wanted: WantedState
    recovery: int = 0


class Described(msgspec.Struct, frozen=True, tag="described"):
    """Answer to Describe; `problem`: why there is no answer."""

    ranks: RankGroup
    spec: StateSpec | None = None
    problem: str = ""
    bad: tuple[BadSourceSeen, ...] = ()
    recovery: int = 0


class Fill(msgspec.Struct, frozen=True, tag="fill"):
    """To the replicator: fetch a state into the regions that come along: slots, then static. Answer: Filled."""

    wanted: WantedState
    spec: StateSpec
    recovery: int = 0


class Filled(msgspec.Struct, frozen=True, tag="filled"):
    """Answer to Fill: the records that make the state, by number."""

    ranks: RankGroup
    metas: dict[int, bytes] = {}  #: their scalars
    step: int = 0  #: of the record itself
    rank_states: dict[int, bytes] = {}  #: after it
    nbytes: int = 0  #: that were read
    problem: str = ""  #: as in Recovered
    bad: tuple[BadSourceSeen, ...] = ()  #: the same
    recovery: int = 0  #: for which it was read, as in Describe
    before: tuple[int, dict[int, bytes]] | None = None  #: step and rank states of the record before it, if asked for


class SendGeneration(msgspec.Struct, frozen=True, tag="send generation"):
    """To the replicator: a generation is complete. Regions come along: slots, then static and replica if present.

    `generation`: a unique name; `number` stamps its slots. `records`: virtual ones and the base. `missing`, `plain`: of
    the replica at `base`. `serve`: hand it out to readers, and send nothing.
    """

    ranks: RankGroup
    generation: str
    number: int
    spec: StateSpec
    base: int
    records: dict[int, tuple[int, bytes, dict[int, bytes]]]
    missing: tuple[tuple[int, int, str], ...]
    plain: bytes
    history: tuple[Branch, ...]
    serve: bool = False


class SendRecord(msgspec.Struct, frozen=True, tag="send record"):
    """To the replicator: a record is whole on this node."""

    ranks: RankGroup
    generation: str
    record: int
    step: int
    meta: bytes
    rank_states: dict[int, bytes]


class CopyState(msgspec.Struct, frozen=True, tag="copy state"):
    """From the replicator: have the state after a record a little ahead copied, for StateCopied or StateNotCopied."""

    record: int


class StateNotCopied(msgspec.Struct, frozen=True, tag="state not copied"):
    """To the replicator: that state was not copied: the order came too late, or another copy is being made."""

    record: int


class StateCopied(msgspec.Struct, frozen=True, tag="state copied"):
    """To the replicator: the state after a record; its copy comes along, then the static region if present.

    `missing`, `plain`: as in RecordMeta, of all optimizer state.
    """

    ranks: RankGroup
    record: int
    generation: str
    spec: StateSpec
    step: int
    rank_states: dict[int, bytes]
    missing: tuple[tuple[int, int, str], ...]
    plain: bytes
    history: tuple[Branch, ...]


class GiveUp(msgspec.Struct, frozen=True, tag="give up"):
    """To the replicator: send no more of what the generation begins with, the replica has to go on. Answer: GivenUp."""

    ranks: RankGroup
    generation: str


class GivenUp(msgspec.Struct, frozen=True, tag="given up"):
    """Answer to GiveUp."""

    ranks: RankGroup
    generation: str


class Holds(msgspec.Struct, frozen=True, tag="holds"):
    """To the replicator: bytes of this node's memory in base and log, those being written too."""

    nbytes: int


class Halt(msgspec.Struct, frozen=True, tag="halt"):
    """To the replicator: the attempt is over. Nothing is sent or taken until the next one; what is kept stays."""


class Halted(msgspec.Struct, frozen=True, tag="halted"):
    """Answer to Halt: of the attempt nothing more comes from the replicator."""


class ListFragments(msgspec.Struct, frozen=True, tag="fragments?"):
    """To the replicator. Answer: Fragments; what belongs to another model than this fingerprint's has a problem."""

    fingerprints: dict[int, tuple[str, ...]]


class Fragments(msgspec.Struct, frozen=True, tag="fragments"):
    """Answer to ListFragments."""

    fragments: tuple[HeldFragments, ...]


class KeepRoom(msgspec.Struct, frozen=True, tag="keep room"):
    """From the replicator: memory for fragments of a window comes along.

    The agent keeps it, and hands it to the next replicator with this message, before Listen. `window`: encoded.
    """

    owner: RankGroup
    generation: str
    window: bytes
    unit: int
    slot: int


class LetGoOfRoom(msgspec.Struct, frozen=True, tag="let go of room"):
    """From the replicator: this memory is not needed any more."""

    owner: RankGroup
    generation: str
    slot: int


class Deserted(msgspec.Struct, frozen=True, tag="deserted"):
    """To the replicator: a trainer of this node goes on without its agent, so that no record becomes whole here."""


class Drain(msgspec.Struct, frozen=True, tag="drain"):
    """To the replicator: leave the attempt once peers have what is on its way, and send nothing else. Answer: Drained.

    `finished`: training is over here, and no node is to wait for this one. Else another replicator takes its place.
    """

    finished: bool = True


class Drained(msgspec.Struct, frozen=True, tag="drained"):
    """Answer to Drain: peers have all of it, or do not take it."""


class WatermarkAdvanced(msgspec.Struct, frozen=True, tag="watermark advanced"):
    """From the replicator, and to trainers that wait: the watermark has got to `record`.

    `whole`: the tolerated number of nodes may be lost. `waits_suspended`: no rank is to wait, since a node begins anew
    or stands still, or links do not carry every record.
    """

    record: int
    whole: bool
    waits_suspended: bool = False


class ReplicatorLost(msgspec.Struct, frozen=True, tag="replicator lost"):
    """To trainers: their node has no replicator, and peers get nothing from it; why, and for how long."""

    reason: str


TrainerToAgent = Listen | Join | AskPhases | Recover
AgentToTrainer = Listening | PhasesAre | Recovered | RecoveryProgress | WatermarkAdvanced | ReplicatorLost
AgentToReplicator = (
    KeepRoom | Listen | ListFragments | Join | PhasesAre | SendGeneration | SendRecord | Deserted | StateCopied |
    StateNotCopied | GiveUp | Holds | Describe | Fill | Drain | Halt
)  # fmt: skip
ReplicatorToAgent = (
    Listening | Fragments | Halted | Drained | KeepRoom | LetGoOfRoom | WatermarkAdvanced | CopyState | GivenUp |
    Described | Filled | RecoveryProgress
)  # fmt: skip
