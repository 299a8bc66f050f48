"""What trainers and their agent say to each other: typed, validated, no pickle.

A trainer rank's life: Hello -> Inventory; then Prepare or Resume -> Prepared; then Commit after Commit (and
GenerationCommit where a new generation begins), with Credit and news coming back (`Notice` in
`session/connection.py`); at the end Goodbye.
"""

from __future__ import annotations

import msgspec

from memckpt.config import StorageConfig
from memckpt.journal.events import TrainerEvent
from memckpt.protocol.status import MetricsSettings
from memckpt.state.records import HeldRecords, RankGroup, Timeline
from memckpt.state.spec import StateSpec

#: Bumped whenever a message changes; both sides refuse another one.
PROTOCOL_VERSION = 27


class Launcher(msgspec.Struct, frozen=True, array_like=True):
    """What started the trainers of an attempt, by which an orphan is told from a rival; pid 0: a person did."""

    pid: int
    start_ticks: int
    restarts: int


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """First message of a rank. `nonce` is the attempt's, equal on all ranks; `next_record` is what it commits next.

    `local_ranks` are all ranks of the node, `unit` those among them that hold the same shards as this one. For at most
    `fence_seconds` the agent waits for killed trainers of an earlier attempt to end. An agent that shows no sign of
    life for `liveness_seconds` is not waited for. `accelerated`: it trains on an accelerator.
    """

    version: int
    nonce: str
    rank: int
    world_size: int
    local_ranks: tuple[int, ...]
    unit: RankGroup
    launcher: Launcher
    fingerprint: tuple[str, ...]
    rejoining: bool = False
    next_record: int = 1
    fence_seconds: float = 60.0
    liveness_seconds: float = 15.0
    accelerated: bool = False


class Fencing(msgspec.Struct, frozen=True, tag="fencing"):
    """Before the answer to Hello, every few seconds: trainers of an earlier attempt are dead, and have not ended."""

    reason: str


class Inventory(msgspec.Struct, frozen=True, tag="inventory"):
    """Answer to Hello: what this node can produce of each set of shards that it holds.

    `attempt`: number of the newest attempt that this node knows of. The page in which the agent shows that it lives
    comes along as a descriptor.
    """

    held: tuple[HeldRecords, ...]
    agent_pid: int
    attempt: int = 0


class Prepare(msgspec.Struct, frozen=True, tag="prepare"):
    """Allocate for a new generation with this layout, to begin after `record`. Every local rank sends the same one.

    `discard` says that what is held is not wanted and may go first. `reason`: why the spec's mode, for the status.
    `whole`: reserve all of it at once; otherwise only what its start takes is, until all local ranks ask for the rest
    (NeedSlots).
    """

    spec: StateSpec
    timeline: Timeline
    threads: int
    memory_budget_bytes: int | None
    discard: bool
    record: int
    reason: str = ""
    whole: bool = False


class Observed(msgspec.Struct, frozen=True, tag="observed"):
    """What the running job has measured, for the interval of checkpoints; `redo_seconds`: per record at a restore."""

    failures_per_second: float
    redo_seconds: float


class Resume(msgspec.Struct, frozen=True, tag="resume"):
    """Produce the state after `record`, which the plan chose; `timeline` is the attempt's new one.

    `repeat`: produce the state after the record before it as well, from which its step is taken once more.
    """

    record: int
    timeline: Timeline
    linger_seconds: float
    repeat: bool = False


class Before(msgspec.Struct, frozen=True, array_like=True):
    """The state after the record before the one that is resumed, and the framework's `step` of the latter.

    `metas`: the records to redo for it (lazy); empty where the replica stands there (eager). `meta`, `rank_states`:
    those of the resumed record, with which the repeated step is compared.
    """

    metas: tuple[bytes, ...]
    meta: bytes
    rank_states: dict[int, bytes]
    step: int


class Prepared(msgspec.Struct, frozen=True, tag="prepared"):
    """Answer to Prepare and Resume. Regions come along as descriptors: slots, then static and replica where present.

    For Resume: `metas` are the records to redo, `rank_states` those of `record` by rank, and `missing` and `plain`
    describe the replica's state (eager) as in RecordMeta.

    Where the step of `record` can be repeated, `before` is what it is repeated from, and an eager replica stands there
    until all local ranks have asked to advance. Otherwise `not_repeated` says why. Without a replica `earlier` is what
    the records before are made from, newest first: one is restored where this one does not prove itself. `following`:
    the rank states of later records, by record and rank, of which a captured state has nothing else.

    `whole`: all slots are reserved. Where they are not, no record may be begun before they are (NeedSlots).
    `begins`: the record of the Prepare that this answers. `drift`: what the audit has found in this generation.
    """

    generation: int
    spec: StateSpec
    record: int = 0
    metas: tuple[bytes, ...] = ()
    rank_states: dict[int, bytes] = {}
    missing: tuple[tuple[int, int, str], ...] = ()
    plain: bytes = b""
    before: Before | None = None
    earlier: tuple[Before, ...] = ()
    not_repeated: str = ""
    following: dict[int, dict[int, bytes]] = {}
    whole: bool = True
    begins: int = 0
    drift: Drift | None = None


class NeedSlots(msgspec.Struct, frozen=True, tag="slots?"):
    """A rank has written its part of a generation's start, and has let go of the generation before: reserve the rest.

    Answer: SlotsMade, once all local ranks have asked. `now`: without waiting for that, or for other ranks.
    """

    generation: int
    now: bool = False


class SlotsMade(msgspec.Struct, frozen=True, tag="slots"):
    """Answer to NeedSlots. `dropped`: another generation follows. `problem`: why there is no room; a start is kept."""

    generation: int
    dropped: bool = False
    problem: str = ""


class Advance(msgspec.Struct, frozen=True, tag="advance"):
    """A rank has repeated the step of `record`, or does not want to: let the replica go on to it. Answer: Advanced."""

    record: int


class Advanced(msgspec.Struct, frozen=True, tag="advanced"):
    """The replica stands at the record that is resumed; `missing` and `plain` describe its state as in RecordMeta."""

    missing: tuple[tuple[int, int, str], ...] = ()
    plain: bytes = b""


class Checked(msgspec.Struct, frozen=True, tag="checked"):
    """From rank 0: what the resume check has found, as one line for the status."""

    verdict: str
    line: str


class Note(msgspec.Struct, frozen=True, tag="note"):
    """Something for the run's journal that only a trainer knows of."""

    event: TrainerEvent


class Arithmetic(msgspec.Struct, frozen=True, array_like=True):
    """Settings of torch in a trainer that decide what a step rounds to, of those that another process may have else.

    `capability`: instruction set of its kernels; empty: not known.
    """

    capability: str = ""
    matmul_precision: str = "highest"
    deterministic: bool = False
    default_dtype: str = "float32"


class Configure(msgspec.Struct, frozen=True, tag="configure"):
    """Settings of the agent that the run's configuration decides.

    `compute_threads` are the trainer's: in half precision the bits of a redo depend on their number. `search_path`:
    where the trainers find the user's modules, an optimizer's class among them. `claimed`: the run has claimed its
    store, so that one without a claim is not it. `audit`: the share of a core that audits may take; 0: there are none.
    """

    linger_seconds: float
    timeline: Timeline | None = None
    storage: StorageConfig | None = None
    compute_threads: int = 1
    search_path: tuple[str, ...] = ()
    claimed: bool = False
    metrics: MetricsSettings = MetricsSettings()
    audit: float = 0.0
    arithmetic: Arithmetic = Arithmetic()


class GenerationCommit(msgspec.Struct, frozen=True, tag="generation"):
    """A rank's part of the generation that begins after `record` is written. `metas`: the virtual records' (lazy)."""

    generation: int
    record: int
    step: int
    rank_state: bytes
    metas: tuple[bytes, ...] = ()
    missing: tuple[tuple[int, int, str], ...] = ()
    plain: bytes = b""


class Commit(msgspec.Struct, frozen=True, tag="commit"):
    """A rank's part of a record is whole. Only the first local rank sends `meta`.

    `stall_ms`: how long protection has kept the rank from training since its last commit.
    """

    generation: int
    record: int
    step: int
    rank_state: bytes
    meta: bytes = b""
    stall_ms: float = 0.0


class Void(msgspec.Struct, frozen=True, tag="void"):
    """A rank went through `record` but could not stage it; a new generation is needed."""

    record: int
    reason: str


class NeedGeneration(msgspec.Struct, frozen=True, tag="need"):
    """A rank asks for a new generation after `record`; the agent orders it (Begin) before it answers."""

    record: int
    reason: str
    changing: frozenset[str] = frozenset()
    later: str = ""


class Begin(msgspec.Struct, frozen=True, tag="begin"):
    """Order to all local ranks: begin a new generation after `record`.

    `changing`: tensors that some rank has seen to change; all of them copy these with every record from then on.
    `apart`: tensors of which some rank knows that they differ from rank to rank; none of them is held once.
    `later`: why all ranks take gradients at the optimizer's step from then on, as they are; empty: they need not.
    Ranks that share slots must agree on it: one rank's record says which changes are redone on the gradients of all.
    """

    record: int
    reason: str
    changing: frozenset[str] = frozenset()
    apart: frozenset[str] = frozenset()
    later: str = ""


class Credit(msgspec.Struct, frozen=True, tag="credit"):
    """The replica has applied every record up to `applied`: older slots are free."""

    applied: int


class Protected(msgspec.Struct, frozen=True, tag="protected"):
    """The generation that begins after `record` is complete on this node."""

    generation: int
    record: int


class Drift(msgspec.Struct, frozen=True, tag="drift"):
    """An anchor differed from what redo had made of an earlier one: by how many ulps at most, and where first.

    Attributes:
        record: that carries the anchor, of this `generation`.
        since: record that carries the earlier anchor. In between redo has gone wrong.
        sure: whether rounding does not explain it.
        steps: the framework's numbers, about, of the first and the last step in between.
        problem: what redo has raised, in words; empty if it has not.
    """

    record: int
    max_ulp: float
    tensor: str
    generation: int = 0
    since: int = 0
    sure: bool = False
    steps: tuple[int, int] = (0, 0)
    problem: str = ""

    def __str__(self) -> str:
        first, last = self.steps
        if self.problem:
            return f"the audit found that steps {first} to {last} of {self.tensor} cannot be redone: {self.problem}"
        return f"the audit found {self.tensor} off by {self.max_ulp:g} ulp when steps {first} to {last} were redone"


class Gap(msgspec.Struct, frozen=True, tag="gap"):
    """Nothing is held until the generation that is being written is complete: two do not fit."""

    reason: str


class Alarm(msgspec.Struct, frozen=True, tag="alarm"):
    """The agent can no longer protect what it holds; training goes on, a new generation is needed."""

    reason: str


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """The request cannot be met. `kind` names the error class the trainer raises."""

    kind: str
    reason: str


class Preempted(msgspec.Struct, frozen=True, tag="preempted"):
    """The rank got SIGTERM: its machine may be about to go."""


class Goodbye(msgspec.Struct, frozen=True, tag="goodbye"):
    """The rank leaves. `finished`: training ended as it should, so that the final step goes to storage and all ends."""

    finished: bool


class OthersStay(msgspec.Struct, frozen=True, tag="others stay"):
    """Answer to a Goodbye after which other ranks are still there: the last one sees what becomes of the final step."""


class Leaving(msgspec.Struct, frozen=True, tag="leaving"):
    """An agent keeps nothing that comes from now on, and ends: at once, or when what it holds is in storage.

    `last`: whether this is its last message: it ends now. `unsaved`: then, why what it held is not in storage; empty if
    it is, or nothing was to be.
    """

    last: bool = False
    unsaved: str = ""


class HoldingOn(msgspec.Struct, frozen=True, tag="holding"):
    """Training has finished, but its final step could not be brought to storage: the agent stays, and tries again."""

    reason: str
    linger_seconds: float


# This file's part of what is said on each connection

TrainerToAgent = (
    Hello | Prepare | NeedSlots | Resume | Advance | Checked | Note | Observed | Configure | GenerationCommit |
    Commit | Void | NeedGeneration | Preempted | Goodbye
)  # fmt: skip
AgentToTrainer = (
    Fencing | Inventory | Prepared | SlotsMade | Advanced | Begin | Credit | Protected | Drift | Gap | Alarm |
    Refused | OthersStay | Leaving | HoldingOn
)  # fmt: skip
