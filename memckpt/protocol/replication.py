"""What trainers, their agent and its replicator say to each other about peers: typed, validated, no pickle."""

from __future__ import annotations

from typing import Literal

import msgspec

from memckpt.state.records import Branch, HeldPieces, RankGroup
from memckpt.state.spec import StateSpec


class PeerKeys(msgspec.Struct, frozen=True, array_like=True):
    """One attempt's, in CURVE's printable form. Every agent of the job has all four, and nobody else."""

    server_public: str
    server_secret: str
    client_public: str
    client_secret: str

    def __repr__(self) -> str:
        return "PeerKeys(...)"  # not for logs


class Listen(msgspec.Struct, frozen=True, tag="listen"):
    """A trainer's, and the agent's to its replicator: be there for peers that have these keys, or the password.

    Answer: Listening. What an earlier attempt had opened is closed: who has only its keys is a stranger from now on.
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
    pieces: tuple[HeldPieces, ...] = ()


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
    """What the agents of an attempt have to know of each other; the same on all nodes.

    Attributes:
        attempt: its nonce.
        nodes: in the order of their first ranks; the first one is the leader.
        units: all of the job.
        scheme: how records are kept.
        data, tolerate: k and m; for standby replicas 1 and M - 1.
        backend: of the code.
        wait: whether training waits for acknowledgements.
        rate_bytes_per_second, overhead: of the traffic budget.
        record: the one behind which the attempt goes on; None: it starts over, or from storage.
        forget: a person wants it to start over, and nothing that is kept.
        ack_timeout_seconds: after which training does not wait for a node that acknowledges nothing.
        cadence: where links do not carry every record, the state after every N-th is sent instead.
    """

    attempt: str
    nodes: tuple[PeerNode, ...]
    units: tuple[PeerUnit, ...]
    scheme: Literal["erasure", "mirror"]
    data: int
    tolerate: int
    backend: str
    wait: bool
    rate_bytes_per_second: float | None
    overhead: float
    record: int | None
    forget: bool = False
    ack_timeout_seconds: float = 15.0
    cadence: bool = False


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


class FromNode(msgspec.Struct, frozen=True, tag="node"):
    """Source of a state: all of it from a node that holds it, its own or as a standby replica."""

    node: str


class FromFragments(msgspec.Struct, frozen=True, tag="fragments"):
    """Source of a state: decoded from fragments, and what these leave out from a replica.

    Attributes:
        generation: generation of the fragments.
        pieces: (node, index) of all fragments that hold some of what is needed, ascending; more than are needed, so
            that damaged ones can be skipped.
        data: k, the number of different fragments needed.
        period: T, the number of records that make a state; 1 where there is a replica.
        replica: node and ranks of a replica with the state that is shared with it: only what is private to the ranks is
            decoded then. None: all is decoded.
    """

    generation: str
    pieces: tuple[tuple[str, int], ...]
    data: int
    period: int
    replica: tuple[str, RankGroup] | None = None


class WantedState(msgspec.Struct, frozen=True):
    """State of some ranks after a record, to be fetched. `before`: the state before that record is wanted, too."""

    ranks: RankGroup
    record: int
    source: FromNode | FromFragments
    before: bool = False


class Recover(msgspec.Struct, frozen=True, tag="recover"):
    """From a trainer, for its node: fetch what is missing here, hand out what others miss. Answer: Recovered.

    Attributes:
        record: the one that the plan chose.
        serve: sets of ranks whose state after it is handed out from here.
        fetch: what this node is to get.
        memory_budget_bytes: the configured limit.
        history: timelines up to that record, oldest first.
        before: hand out the state before it as well.
        adopt: what is fetched may be of ranks that this attempt does not have: it goes to storage from here.
    """

    record: int
    serve: tuple[RankGroup, ...]
    fetch: tuple[WantedState, ...]
    memory_budget_bytes: int | None
    history: tuple[Branch, ...] = ()
    before: bool = False
    adopt: bool = False


class BadSourceSeen(msgspec.Struct, frozen=True, array_like=True):
    """A source from which nothing, or nothing right, could be read.

    Attributes:
        node, ranks, generation: as in BadSource.
        silent: it has not answered, and may do so later.
    """

    node: str
    ranks: RankGroup
    generation: str
    silent: bool = False


class Recovered(msgspec.Struct, frozen=True, tag="recovered"):
    """Answer to Recover. `problem`: why it failed, in words; `bad`: sources to be left out when it is tried again.

    With a problem and nothing bad the reason lies in the node itself, and no source is to blame.
    """

    problem: str = ""
    bad: tuple[BadSourceSeen, ...] = ()
    nbytes: int = 0
    seconds: float = 0.0


class RecoveryProgress(msgspec.Struct, frozen=True, tag="progress"):
    """From the replicator, passed on to the trainers: bytes more of what is missing are here."""

    nbytes: int


class Describe(msgspec.Struct, frozen=True, tag="describe"):
    """To the replicator: of which layout is that state? Answer: Described.

    `recovery` numbers those of an agent: once a new one has begun, what the replicator reads for others is given up.
    """

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
    """Answer to Fill: the records that make the state, by number.

    Attributes:
        metas: their scalars.
        step: of the record itself.
        rank_states: after it.
        before: step and rank states of the record before it; None where that was not asked for.
        nbytes: that were read.
        problem, bad: as in Recovered.
        recovery: for which it was read, as in Describe.
    """

    ranks: RankGroup
    metas: dict[int, bytes] = {}
    step: int = 0
    rank_states: dict[int, bytes] = {}
    nbytes: int = 0
    problem: str = ""
    bad: tuple[BadSourceSeen, ...] = ()
    recovery: int = 0
    before: tuple[int, dict[int, bytes]] | None = None


class SendGeneration(msgspec.Struct, frozen=True, tag="send generation"):
    """To the replicator: a generation is complete; its regions come along: slots, then static and replica where
    present.

    Attributes:
        ranks: the owner.
        generation: its name, no two alike; `number` is what its slots are stamped with.
        base: the record that it begins with.
        records: with what belongs to each: virtual ones and the base.
        missing, plain: of the replica's state at `base` (eager).
        history: timelines, oldest first.
        serve: for readers only: send nothing, hand it out.
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


class TakeState(msgspec.Struct, frozen=True, tag="take state"):
    """From the replicator: have the state after a record, which lies a little ahead, copied for peers.

    Answer: StateTaken or StateMissed, for each set of ranks that share their shards.
    """

    record: int


class StateMissed(msgspec.Struct, frozen=True, tag="state missed"):
    """To the replicator: the state after that record has not been copied, as the order came too late, or something else
    is being copied."""

    record: int


class StateTaken(msgspec.Struct, frozen=True, tag="state taken"):
    """To the replicator: the state after a record; its copy comes along, laid out as a snapshot, then the static region
    where there is one.

    Attributes:
        ranks: whose it is.
        record: after which.
        generation: its name, no two alike.
        step: the framework's.
        rank_states: after it.
        missing, plain: as in RecordMeta, of all optimizer state.
        history: timelines, oldest first.
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
    """To the replicator: what base, log and standby replicas take of this node's memory now, those that are being
    written too.
    """

    nbytes: int


class Halt(msgspec.Struct, frozen=True, tag="halt"):
    """To the replicator: the attempt is over; nothing is sent or taken until the next one. What is kept stays.

    Answer: Halted.
    """


class Halted(msgspec.Struct, frozen=True, tag="halted"):
    """Answer to Halt: of the attempt nothing more comes from the replicator."""


class ListPieces(msgspec.Struct, frozen=True, tag="pieces?"):
    """To the replicator. Answer: Pieces; what belongs to another model than this fingerprint's has a problem."""

    fingerprints: dict[int, tuple[str, ...]]


class Pieces(msgspec.Struct, frozen=True, tag="pieces"):
    """Answer to ListPieces."""

    pieces: tuple[HeldPieces, ...]


class KeepRoom(msgspec.Struct, frozen=True, tag="keep room"):
    """From the replicator: memory in which it keeps pieces; its descriptor comes along. The agent has it as long as the
    replicator does not let go of it, and hands it to the next replicator with this very message, before Listen.

    Attributes:
        owner, generation: of the window whose pieces lie there.
        window: what its owner has said of it, encoded.
        unit, slot: as in Place.
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
    """To the replicator: training is over here. What peers still wait for goes out, nothing else. Answer: Drained."""


class Drained(msgspec.Struct, frozen=True, tag="drained"):
    """Answer to Drain: peers have all of it, or do not take it."""


class WatermarkAdvanced(msgspec.Struct, frozen=True, tag="passed"):
    """From the replicator, and to trainers where they wait for it: the watermark has got to `record`.

    `whole`: all nodes are protected: up to the tolerated number of them may be lost. `waits_suspended`: nobody is to
    wait, since some node has lost all that it had and can begin anew only if training goes on, or stands still for too
    long; or links do not carry every record.
    """

    record: int
    whole: bool
    waits_suspended: bool = False


class ReplicatorLost(msgspec.Struct, frozen=True, tag="courier lost"):
    """To trainers: their node has no replicator for a while, so that peers get nothing from it; why, and for how
    long.
    """

    reason: str


class PeerLinkStatus(msgspec.Struct, frozen=True):
    """The connection to one other node.

    Attributes:
        node: its name.
        connected: whether it answers.
        behind_bytes: what it has not acknowledged yet.
        seconds_silent: since it was last heard; None before the first word.
        problem: why it cannot be used; empty if it can.
    """

    node: str
    connected: bool
    behind_bytes: int
    seconds_silent: float | None
    problem: str = ""


class PeersStatus(msgspec.Struct, frozen=True):
    """The peers tier, as its agent sees it.

    Attributes:
        scheme: ``"erasure code, k=4, m=2"`` or ``"mirror, 2 copies"``.
        security: ``"curve"`` or ``"plain"``.
        ack: what is done where peers fall behind, ``"wait"`` or ``"proceed"``.
        watermark: the newest record that is acknowledged for every node; None before the first.
        acknowledged: ranks of a set of shards, and its newest acknowledged record.
        protected: whether the tolerated number of nodes can be lost now.
        problem: why not, or what else is not as it was configured, in words.
        held_bytes: of other nodes' records here.
        kept: node, ranks, and the newest record that is kept of them here.
        links: to the other nodes.
        bytes_sent: to all of them since the attempt began.
        bytes_per_record: of them, for one record; None before the first.
        rate_limit_bytes_per_second: what may be sent now; None: no limit.
        pace: what the governor does, in words.
        refused: messages of strangers, and damaged ones.
        gap: the records from..to that no peer had, the last such gap; None if there was none.
        recovering: what is being restored, with progress; empty if nothing is.
        every: N, where the links do not carry every record and the state after every N-th is sent instead; else 0.
    """

    scheme: str
    security: str
    ack: str
    watermark: int | None
    acknowledged: tuple[tuple[RankGroup, int], ...]
    protected: bool
    problem: str
    held_bytes: int
    kept: tuple[tuple[str, RankGroup, int], ...]
    links: tuple[PeerLinkStatus, ...]
    bytes_sent: int
    bytes_per_record: float | None
    rate_limit_bytes_per_second: float | None
    pace: str
    refused: int
    gap: tuple[int, int] | None
    recovering: str = ""
    every: int = 0


class PeersReport(msgspec.Struct, frozen=True, tag="peers"):
    """From the replicator, every second or so while something happens."""

    status: PeersStatus
