"""What trainers and their agent say to each other: typed, validated, no pickle.

A trainer rank's life: Hello -> Inventory; then Prepare or Resume -> Prepared; then Commit after Commit (and
GenerationCommit where a new generation begins), with Credit and Notice coming back; at the end Goodbye.
"""

from __future__ import annotations

from typing import Union

import msgspec

from memckpt.config import StorageConfig
from memckpt.protocol.replication import (
    AskPhases,
    Describe,
    Described,
    Deserted,
    Drain,
    Drained,
    Fill,
    Filled,
    GivenUp,
    GiveUp,
    Halt,
    Halted,
    Holds,
    Join,
    KeepRoom,
    LetGoOfRoom,
    Listen,
    Listening,
    ListPieces,
    PeersReport,
    PeersStatus,
    PhasesAre,
    Pieces,
    Recover,
    Recovered,
    RecoveryProgress,
    ReplicatorLost,
    SendGeneration,
    SendRecord,
    StateMissed,
    StateTaken,
    TakeState,
    WatermarkAdvanced,
)
from memckpt.protocol.standby import (
    CloseStandby,
    OpenStandby,
    StandbyApplied,
    StandbyFailed,
    StandbyOpened,
    StandbyRecord,
    StandbyRefused,
    StandbySkip,
)
from memckpt.protocol.writer import (
    Announce,
    Announced,
    Append,
    Appended,
    LookForAnnounced,
    LookForRoom,
    OpenLog,
    Room,
    Save,
)
from memckpt.state.layout import StateSpec
from memckpt.state.records import HeldRecords, Timeline

#: Bumped whenever a message changes; both sides refuse another one.
PROTOCOL_VERSION = 19


class Launcher(msgspec.Struct, frozen=True, array_like=True):
    """The process that started the trainers of an attempt: how an orphan is told from a rival.

    `pid` is 0 when the trainer was started by hand and has no launcher that would restart it.
    """

    pid: int
    start_ticks: int
    restarts: int


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """First message of a rank. `nonce` is the attempt's, equal on all ranks; `next_record` is what it commits next.

    `local_ranks` are all ranks of the node, `unit` those among them that hold the same shards as this one. For at most
    `fence_seconds` the agent waits for killed trainers of an earlier attempt to end. An agent that shows no sign of
    life for `liveness_seconds` is not waited for.
    """

    version: int
    nonce: str
    rank: int
    world_size: int
    local_ranks: tuple[int, ...]
    unit: tuple[int, ...]
    launcher: Launcher
    fingerprint: tuple[str, ...]
    rejoining: bool = False
    next_record: int = 1
    fence_seconds: float = 60.0
    liveness_seconds: float = 15.0


class Fencing(msgspec.Struct, frozen=True, tag="fencing"):
    """Before the answer to Hello, every few seconds: trainers of an earlier attempt are dead, and have not ended."""

    reason: str


class Inventory(msgspec.Struct, frozen=True, tag="inventory"):
    """Answer to Hello: what this node can produce of each set of shards that it holds.

    The page in which the agent shows that it lives comes along as a descriptor.
    """

    held: tuple[HeldRecords, ...]
    agent_pid: int


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


class Resume(msgspec.Struct, frozen=True, tag="resume"):
    """Produce the state after `record`, which the plan chose; `timeline` is the attempt's new one.

    `repeat`: produce the state after the record before it as well, from which its step is taken once more.
    """

    record: int
    timeline: Timeline
    linger_seconds: float
    repeat: bool = False


class Before(msgspec.Struct, frozen=True, array_like=True):
    """The state after the record before the one that is resumed.

    Attributes:
        metas: the records to redo for it (lazy); empty where the replica stands there (eager).
        meta: the resumed record's own scalars, with which the repeated step is compared.
        rank_states: those of that record, by rank.
        step: the framework's number of that record.
    """

    metas: tuple[bytes, ...]
    meta: bytes
    rank_states: dict[int, bytes]
    step: int


class Prepared(msgspec.Struct, frozen=True, tag="prepared"):
    """Answer to Prepare and Resume. Regions come along as descriptors: slots, then static and replica where present.

    For Resume: `metas` are the records to redo (lazy), `rank_states` those of `record` by rank, and `missing` and
    `plain` describe the replica's state (eager) as in RecordMeta.

    Where the step of `record` can be repeated, `before` is what it is repeated from, and an eager replica stands there
    until all local ranks have asked to advance. Otherwise `not_repeated` says why. `following` are the rank states of
    later records, by record and rank, of which a captured state has nothing else.

    `whole`: all slots are reserved. Where they are not, no record may be begun before they are (NeedSlots).
    """

    generation: int
    spec: StateSpec
    record: int = 0
    metas: tuple[bytes, ...] = ()
    rank_states: dict[int, bytes] = {}
    missing: tuple[tuple[int, int, str], ...] = ()
    plain: bytes = b""
    before: Before | None = None
    not_repeated: str = ""
    following: dict[int, dict[int, bytes]] = {}
    whole: bool = True


class NeedSlots(msgspec.Struct, frozen=True, tag="slots?"):
    """A rank has written its part of a generation's start, and has let go of the generation before: reserve the rest.

    Answer: SlotsMade, once all local ranks have asked. `now`: without waiting for that, or for other ranks.
    """

    generation: int
    now: bool = False


class SlotsMade(msgspec.Struct, frozen=True, tag="slots"):
    """Answer to NeedSlots. `dropped`: nobody has that generation any more, another one follows.

    `problem`: why there is no room, in words; what the start takes is kept.
    """

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


class Configure(msgspec.Struct, frozen=True, tag="configure"):
    """Settings of the agent that the run's configuration decides.

    `compute_threads` are the trainer's: in half precision the bits of a redo depend on their number. The attempt goes
    on behind record `after`, which is of the timeline `follows` (None: it starts over). `search_path`: where the
    trainers find the user's modules, an optimizer's class among them. `claimed`: the run has claimed its store, so
    that one without a claim is not it.
    """

    linger_seconds: float
    timeline: Timeline | None = None
    storage: StorageConfig | None = None
    compute_threads: int = 1
    follows: Timeline | None = None
    after: int = 0
    search_path: tuple[str, ...] = ()
    claimed: bool = False


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
    """A rank asks for a new generation after `record`; the agent tells its other local ranks before it answers.

    `changing`: as in the order.
    """

    record: int
    reason: str
    changing: frozenset[str] = frozenset()


class Begin(msgspec.Struct, frozen=True, tag="begin"):
    """Order to all local ranks: begin a new generation after `record`.

    `changing`: tensors that some rank has seen to change; all of them copy these with every record from then on.
    `apart`: tensors of which some rank knows that they differ from rank to rank; none of them is held once.
    """

    record: int
    reason: str
    changing: frozenset[str] = frozenset()
    apart: frozenset[str] = frozenset()


class TakeSnapshot(msgspec.Struct, frozen=True, tag="snapshot?"):
    """Order to all local ranks: copy the state after `record` into the region whose descriptor comes along (lazy)."""

    record: int


class SnapshotTaken(msgspec.Struct, frozen=True, tag="snapshot"):
    """A rank's part of a snapshot is copied; or `missed`: the order came when the record had passed.

    `missing` and `plain` describe the optimizer state as in RecordMeta; only the first local rank sends them.
    `rank_state`: where state is captured, one with what is captured beside tensors; else empty: the commit's counts.
    """

    record: int
    seconds: float
    missed: bool = False
    missing: tuple[tuple[int, int, str], ...] = ()
    plain: bytes = b""
    rank_state: bytes = b""


class ReplicaCopied(msgspec.Struct, frozen=True, tag="copied"):
    """From the redo thread: the replica after `record` has been copied into the snapshot; or why it has not been."""

    record: int
    seconds: float
    missing: tuple[tuple[int, int, str], ...] = ()
    plain: bytes = b""
    problem: str = ""


class SaveTo(msgspec.Struct, frozen=True, tag="save to"):
    """From the command line: write the newest record as a checkpoint to another place. Answer: Saved or SaveFailed."""

    url: str


class SaveRecord(msgspec.Struct, frozen=True, tag="save record"):
    """From a trainer at its start: write all that the node holds of one record. Answer: RecordSaved.

    The attempt's ranks hold other shards than those of the last one, so that memory cannot go straight back into them.
    """

    record: int
    url: str


class RecordSaved(msgspec.Struct, frozen=True, tag="record saved"):
    """All that the node holds of a record is in storage; `problem`: why it is not, empty if it is.

    Not Saved: that is told of any checkpoint, and one that a snapshot of the dead attempt has begun may be of the same
    record, and of one unit only.
    """

    record: int
    problem: str = ""


class Saved(msgspec.Struct, frozen=True, tag="saved"):
    """A checkpoint is in storage, whole and verified. `untidy`: what else could not be done there, in words."""

    step: int
    record: int
    nbytes: int
    seconds: float
    cpu_seconds: float
    timeline: Timeline | None = None
    untidy: str = ""


class SaveFailed(msgspec.Struct, frozen=True, tag="unsaved"):
    """A checkpoint could not be written; training goes on and a later one will be tried.

    `missing`: bytes that have to be free there before it is of use to try again; None: something else is wrong.
    """

    step: int
    reason: str
    missing: int | None = None


class Logged(msgspec.Struct, frozen=True, tag="logged"):
    """To the trainers: storage can produce every record up to this one, from a checkpoint and logged records."""

    step: int
    record: int


class Credit(msgspec.Struct, frozen=True, tag="credit"):
    """The replica has applied every record up to `applied`: older slots are free."""

    applied: int


class Protected(msgspec.Struct, frozen=True, tag="protected"):
    """The generation that begins after `record` is complete on this node."""

    generation: int
    record: int


class Drift(msgspec.Struct, frozen=True, tag="drift"):
    """An anchor differed from the replica that it overwrote: by how many ulps at most, and where first."""

    record: int
    max_ulp: float
    tensor: str


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
    """Last message of an agent: it has let go of everything and ends."""


class HoldingOn(msgspec.Struct, frozen=True, tag="holding"):
    """Training has finished, but its final step could not be brought to storage: the agent stays, and tries again."""

    reason: str
    linger_seconds: float


class StatusRequest(msgspec.Struct, frozen=True, tag="status?"):
    """What the command line asks."""


class StorageStatus(msgspec.Struct, frozen=True):
    """The storage tier, as its agent sees it.

    Attributes:
        url: where it is.
        mode: what it holds: ``"replica"`` checkpoints, ``"log"`` also the records since.
        reason: why it is that one.
        step: the newest that this agent has made restorable; None before the first.
        batch_steps: records in one batch, where they are logged.
        logged: the newest record that has been taken for the log.
        loses_at_most: steps that are lost if memory is lost, at most; None while that is not known.
        interval_seconds: the least time from one checkpoint to the next; None where steps decide.
        every_steps: the configured interval in steps.
        bytes_per_second: of the last write.
        saving: whether one is being written.
        alarm: why the last one failed; empty if it did not.
        untidy: what the last one's writer could not tidy up (a delete that is refused), in words.
    """

    url: str
    step: int | None
    interval_seconds: float | None
    every_steps: int | None
    bytes_per_second: float | None
    saving: bool
    alarm: str
    mode: str = "replica"
    reason: str = ""
    batch_steps: int | None = None
    logged: int | None = None
    loses_at_most: int | None = None
    untidy: str = ""


class Status(msgspec.Struct, frozen=True, tag="status"):
    """What the command line shows.

    Attributes:
        mode: of redo; empty while nothing is held.
        mode_reason: why it is that one.
        every: N where the state is captured at every N-th step; else 1.
        trainers: rank and pid of each that is connected.
        committed: rank and newest record of each.
        applied: the newest record that the replica has (eager).
        step: the newest that is held.
        held_bytes: of all regions, those of a generation that is being written too.
        records_held: records whose tensors are still in the log.
        seconds_since_commit: how long ago the newest record came; None before the first.
        uptime_seconds: how long the agent has been here.
        stall_ms: how long protection keeps a rank from training at a step, a moving average; None before the first.
        by_operator: whether it was started beside the job, and not by a trainer.
        peers: None where records are not kept in other nodes' memory.
        check: what the attempt's resume check has found, in one line; empty before it has.
    """

    pid: int
    run_dir: str
    node: str
    mode: str
    trainers: tuple[tuple[int, int], ...]
    committed: tuple[tuple[int, int], ...]
    applied: int | None
    step: int | None
    held_bytes: int
    generation: int
    max_drift_ulp: float
    redo_seconds_per_record: float | None
    storage: StorageStatus | None = None
    records_held: int = 0
    seconds_since_commit: float | None = None
    uptime_seconds: float = 0.0
    stall_ms: float | None = None
    by_operator: bool = False
    mode_reason: str = ""
    every: int = 1
    peers: PeersStatus | None = None
    check: str = ""


class StopRequest(msgspec.Struct, frozen=True, tag="stop"):
    """Leave, and let go of everything that is held."""

    reason: str = ""


Message = Union[  # noqa: UP007  msgspec reads the union at run time, on Python 3.10 too
    Hello,
    Fencing,
    Inventory,
    Prepare,
    Resume,
    Prepared,
    NeedSlots,
    SlotsMade,
    Advance,
    Advanced,
    Checked,
    Configure,
    GenerationCommit,
    Commit,
    Void,
    NeedGeneration,
    Begin,
    TakeSnapshot,
    SnapshotTaken,
    ReplicaCopied,
    Save,
    SaveTo,
    SaveRecord,
    RecordSaved,
    Saved,
    SaveFailed,
    Announce,
    LookForAnnounced,
    Announced,
    LookForRoom,
    Room,
    OpenLog,
    Append,
    Appended,
    Logged,
    Credit,
    Protected,
    Drift,
    Gap,
    Alarm,
    Refused,
    Preempted,
    Goodbye,
    OthersStay,
    Leaving,
    HoldingOn,
    StatusRequest,
    Status,
    StopRequest,
    Listen,
    Listening,
    Join,
    KeepRoom,
    LetGoOfRoom,
    Recover,
    Recovered,
    RecoveryProgress,
    Describe,
    Described,
    Fill,
    Filled,
    SendGeneration,
    SendRecord,
    TakeState,
    StateMissed,
    StateTaken,
    GiveUp,
    GivenUp,
    Holds,
    Halt,
    ListPieces,
    Pieces,
    WatermarkAdvanced,
    ReplicatorLost,
    PeersReport,
    AskPhases,
    PhasesAre,
    Halted,
    OpenStandby,
    StandbyOpened,
    StandbyRefused,
    StandbySkip,
    StandbyRecord,
    StandbyApplied,
    StandbyFailed,
    CloseStandby,
    Deserted,
    Drain,
    Drained,
]
