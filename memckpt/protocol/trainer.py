"""What trainers and their agent say to each other: typed, validated, no pickle.

A rank's life: Hello -> Inventory; Prepare or Resume -> Prepared; Commit after Commit (GenerationCommit where a
generation begins), while Credit and news come (`Notice` in `session/connection.py`); Goodbye.
"""

from __future__ import annotations

import msgspec

from memckpt.config import StorageConfig
from memckpt.journal.events import TrainerEvent
from memckpt.protocol.status import MetricsSettings
from memckpt.state.records import HeldRecords, RankGroup, Timeline
from memckpt.state.spec import StateSpec

#: Bumped whenever a message changes; both sides refuse another one.
PROTOCOL_VERSION = 33


class Launcher(msgspec.Struct, frozen=True, array_like=True):
    """What started the trainers of an attempt, by which an orphan is told from a rival; pid 0: a person did."""

    pid: int
    start_ticks: int
    restarts: int


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """First message of a rank."""

    version: int
    nonce: str  #: the attempt's, equal on all ranks
    rank: int
    world_size: int
    local_ranks: tuple[int, ...]  #: all ranks of the node
    unit: RankGroup  #: those among them that hold the same shards as this one
    launcher: Launcher
    fingerprint: tuple[str, ...]
    rejoining: bool = False
    next_record: int = 1  #: what it commits next
    fence_seconds: float = 60.0  #: longest wait for killed trainers of an earlier attempt to end
    liveness_seconds: float = 15.0  #: an agent without a sign of life for so long is not waited for
    accelerated: bool = False  #: it trains on an accelerator


class Fencing(msgspec.Struct, frozen=True, tag="fencing"):
    """Before the answer to Hello, every few seconds: trainers of an earlier attempt are dead, and have not ended."""

    reason: str


class Inventory(msgspec.Struct, frozen=True, tag="inventory"):
    """Answer to Hello, with the page in which the agent shows that it lives, as a descriptor."""

    held: tuple[HeldRecords, ...]  #: what this node can produce of each set of shards
    agent_pid: int
    attempt: int = 0  #: number of the newest attempt that this node knows of


class Prepare(msgspec.Struct, frozen=True, tag="prepare"):
    """Allocate for a new generation with this layout, to begin after `record`. Every local rank sends the same one."""

    spec: StateSpec
    timeline: Timeline
    threads: int
    memory_budget_bytes: int | None
    discard: bool  #: what is held is not wanted and may go first
    record: int
    reason: str = ""  #: why the spec's mode, for the status
    whole: bool = False  #: reserve all of it at once; else only what its start takes, until NeedSlots of all ranks


class Observed(msgspec.Struct, frozen=True, tag="observed"):
    """What the running job has measured, for the interval of checkpoints; `redo_seconds`: per record at a restore."""

    failures_per_second: float
    redo_seconds: float


class Resume(msgspec.Struct, frozen=True, tag="resume"):
    """Produce the state after `record`, which the plan chose; `timeline` is the attempt's new one."""

    record: int
    timeline: Timeline
    before: bool = False  #: also produce the state before it, from which its step is taken once more


class Before(msgspec.Struct, frozen=True, array_like=True):
    """A state before the resumed one, and what redoes the next step."""

    metas: tuple[bytes, ...]  #: the records to redo for it (lazy); empty where the replica stands there (eager)
    meta: bytes  #: scalars of the record behind it, with which a repeated step is compared
    rank_states: dict[int, bytes]  #: its own, by rank
    step: int  #: the framework's number of its record


class Prepared(msgspec.Struct, frozen=True, tag="prepared"):
    """Answer to Prepare and Resume. Regions come along: slots, then static and replica where present.

    Where the step of `record` can be repeated, an eager replica stands at `before` until the next commits.
    """

    generation: int
    spec: StateSpec
    record: int = 0
    metas: tuple[bytes, ...] = ()  #: the records to redo
    rank_states: dict[int, bytes] = {}  #: those of `record`, by rank
    missing: tuple[tuple[int, int, str], ...] = ()  #: of the replica's state (eager), as in RecordMeta
    plain: bytes = b""  #: the same
    before: Before | None = None  #: what the step of `record` is repeated from
    earlier: tuple[Before, ...] = ()  #: no replica: of records before, newest first, for a failed proof
    not_repeated: str = ""  #: why its step cannot be repeated
    following: dict[int, dict[int, bytes]] = {}  #: rank states of later records, all that a captured state has of them
    whole: bool = True  #: all slots are reserved; else no record may be begun before they are (NeedSlots)
    begins: int = 0  #: the record of the Prepare that this answers
    drift: Drift | None = None  #: what the audit has found in this generation


class NeedSlots(msgspec.Struct, frozen=True, tag="slots?"):
    """A rank has written its part of a start, and let go of the generation before: reserve the rest for SlotsMade."""

    generation: int
    now: bool = False  #: without waiting until all local ranks have asked


class SlotsMade(msgspec.Struct, frozen=True, tag="slots"):
    """Answer to NeedSlots."""

    generation: int
    dropped: bool = False  #: another generation follows
    problem: str = ""  #: why there is no room, in words; what the start takes is kept


class Checked(msgspec.Struct, frozen=True, tag="checked"):
    """From rank 0: what the resume check has found, as one line for the status."""

    verdict: str
    line: str


class Note(msgspec.Struct, frozen=True, tag="note"):
    """Something for the run's journal that only a trainer knows of."""

    event: TrainerEvent


class TrainingFigures(msgspec.Struct, frozen=True, tag="figures"):
    """From rank 0, each second at most: learning rate (``lr``) and losses, by name."""

    values: dict[str, float]


class Arithmetic(msgspec.Struct, frozen=True, array_like=True):
    """Settings of torch in a trainer that decide what a step rounds to, of those that another process may have else."""

    capability: str = ""  #: instruction set of its kernels; empty: not known
    matmul_precision: str = "highest"
    deterministic: bool = False
    default_dtype: str = "float32"


class Configure(msgspec.Struct, frozen=True, tag="configure"):
    """Settings of the agent that the run's configuration decides."""

    linger_seconds: float
    timeline: Timeline | None = None
    storage: StorageConfig | None = None
    compute_threads: int = 1  #: the trainer's: in half precision the bits of a redo depend on their number
    search_path: tuple[str, ...] = ()  #: where the trainers find the user's modules, an optimizer's class among them
    claimed: bool = False  #: the run has claimed its store, so that one without a claim is not it
    metrics: MetricsSettings = MetricsSettings()
    audit: float = 0.0  #: the share of a core that audits may take; 0: there are none
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
    """A rank's part of a record is whole."""

    generation: int
    record: int
    step: int
    rank_state: bytes
    meta: bytes = b""  #: from the first local rank only
    stall_ms: float = 0.0  #: how long protection has kept the rank from training since its last commit


class Void(msgspec.Struct, frozen=True, tag="void"):
    """A rank went through `record` but could not stage it; a new generation is needed."""

    record: int
    reason: str


class NeedGeneration(msgspec.Struct, frozen=True, tag="need"):
    """A rank asks for a new generation after `record`; the agent orders it (Begin) before it answers."""

    record: int
    reason: str
    changing: frozenset[str] = frozenset()
    at_step_because: str = ""


class Begin(msgspec.Struct, frozen=True, tag="begin"):
    """Order to all local ranks: begin a new generation after `record`, the same one, as they share slots."""

    record: int
    reason: str
    changing: frozenset[str] = frozenset()  #: tensors seen to change: all ranks copy them with every record then
    apart: frozenset[str] = frozenset()  #: tensors known to differ from rank to rank: none of them is held once
    at_step_because: str = ""  #: why gradients are taken at the optimizer's step from then on; empty: they are not


class Credit(msgspec.Struct, frozen=True, tag="credit"):
    """The replica has applied every record up to `applied`: older slots are free."""

    applied: int


class Protected(msgspec.Struct, frozen=True, tag="protected"):
    """The generation that begins after `record` is complete on this node."""

    generation: int
    record: int


class Drift(msgspec.Struct, frozen=True, tag="drift"):
    """An anchor differed from what redo had made of an earlier one: by how many ulps at most, and where first."""

    record: int  #: that carries the anchor, of this `generation`
    max_ulp: float
    tensor: str
    generation: int = 0
    since: int = 0  #: record that carries the earlier anchor. In between redo has gone wrong.
    sure: bool = False  #: whether rounding does not explain it, on whatever device
    rounded: bool = False  #: whether the rounding of another device's kernels would explain it
    steps: tuple[int, int] = (0, 0)  #: the framework's numbers, about, of the first and the last step in between
    problem: str = ""  #: what redo has raised, in words; empty if it has not

    def __str__(self) -> str:
        first, last = self.steps
        if self.problem:
            return f"the audit found that steps {first} to {last} of {self.tensor} cannot be redone: {self.problem}"
        off = f"off by {self.max_ulp:g} units in the last place"
        return f"the audit found {self.tensor} {off} when steps {first} to {last} were redone"


class Cleared(msgspec.Struct, frozen=True, tag="cleared"):
    """The audit has redone all pieces of this generation that it can, and has found no difference."""

    generation: int
    whole: bool  #: whether that is all pieces


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
    """An agent keeps nothing that comes from now on, and ends: at once, or when what it holds is in storage."""

    last: bool = False  #: it ends now
    unsaved: str = ""  #: then, why what it held is not in storage; empty if it is, or nothing was to be


class HoldingOn(msgspec.Struct, frozen=True, tag="holding"):
    """Training has finished, but its final step could not be brought to storage: the agent stays, and tries again."""

    reason: str
    linger_seconds: float


TrainerToAgent = (
    Hello | Prepare | NeedSlots | Resume | Checked | Note | TrainingFigures | Observed | Configure | GenerationCommit |
    Commit | Void | NeedGeneration | Preempted | Goodbye
)  # fmt: skip
AgentToTrainer = (
    Fencing | Inventory | Prepared | SlotsMade | Begin | Credit | Protected | Drift | Cleared | Gap | Alarm |
    Refused | OthersStay | Leaving | HoldingOn
)  # fmt: skip
