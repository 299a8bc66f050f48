"""Messages between the command line and an agent."""

from __future__ import annotations

import msgspec

from memckpt.state.records import RankGroup


class StatusRequest(msgspec.Struct, frozen=True, tag="status?"):
    """What the command line asks."""


class MetricsSettings(msgspec.Struct, frozen=True):
    """Where an agent shows its metrics: `metrics_port`, `metrics_host` and `metrics_file` of ``AgentConfig``."""

    port: int | None = None
    host: str = "127.0.0.1"
    file: str | None = None

    @property
    def on(self) -> bool:
        return self.port is not None or self.file is not None


class PeerLinkStatus(msgspec.Struct, frozen=True):
    """The connection to one other node; `behind_bytes`: not acknowledged yet; `problem`: why it cannot be used."""

    node: str
    connected: bool
    behind_bytes: int
    seconds_silent: float | None
    problem: str = ""


class PeersStatus(msgspec.Struct, frozen=True):
    """The peers tier, as its agent sees it."""

    scheme: str  #: ``"erasure code, k=4, m=2"`` or ``"2 copies"``
    security: str  #: ``"curve"`` or ``"plain"``
    ack: str  #: what is done where peers fall behind, ``"wait"`` or ``"proceed"``
    watermark: int | None  #: the newest record that is acknowledged for every node; None before the first
    acknowledged: tuple[tuple[RankGroup, int], ...]  #: ranks of a set of shards, and its newest acknowledged record
    protected: bool  #: whether the tolerated number of nodes can be lost now
    problem: str  #: why not, or what else is not as it was configured, in words
    held_bytes: int  #: of other nodes' records here
    kept: tuple[tuple[str, RankGroup, int], ...]  #: node, ranks, and the newest record that is kept of them here
    links: tuple[PeerLinkStatus, ...]  #: to the other nodes
    bytes_sent: int  #: to all of them since the attempt began
    bytes_per_record: float | None  #: of them, for one record; None before the first
    rate_limit_bytes_per_second: float | None  #: what may be sent now; None: no limit
    pace: str  #: what the governor does, in words
    #: messages and connections of strangers and of processes that were replaced, damaged ones, those beyond a limit
    refused: int
    gap: tuple[int, int] | None  #: the records from..to that no peer had, the last such gap; None if there was none
    recovering: str = ""  #: what is being restored, with progress; empty if nothing is
    every: int = 1  #: N; 1: every record is sent; else the state after every N-th, in place of records
    needed: int = 0  #: the smallest N that the links would carry; 0: not measured


class StorageStatus(msgspec.Struct, frozen=True):
    """The storage tier, as its agent sees it."""

    url: str  #: where it is
    step: int | None  #: the newest that this agent has made restorable; None before the first
    interval_seconds: float | None  #: the least time from one checkpoint to the next; None where steps decide
    every_steps: int | None  #: the configured interval in steps
    bytes_per_second: float | None  #: of the last write
    saving: bool  #: whether one is being written
    alarm: str  #: why the last one failed; empty if it did not
    mode: str = "replica"  #: what it holds: ``"replica"`` checkpoints, ``"log"`` also the records since
    reason: str = ""  #: why records are not logged though that is configured; empty otherwise
    batch_steps: int | None = None  #: records in one batch, where they are logged
    logged: int | None = None  #: the newest record that has been taken for the log
    loses_at_most: int | None = None  #: steps that are lost if memory is lost, at most; None while that is not known
    untidy: str = ""  #: what the last one's writer could not tidy up (a delete that is refused), in words


class AuditStatus(msgspec.Struct, frozen=True):
    """What the audit of lazy redo has done in this agent's life."""

    pieces: int  #: of parameters, that were redone and compared
    record: int | None  #: newest that was redone; None before the first
    findings: int  #: pieces that differed
    cpu_seconds: float  #: of the auditor's process
    late: int = 0  #: pieces whose slots were filled anew before they were read
    backlog: int = 0  #: pieces of which all records are there, and that are not compared yet
    problem: str = ""  #: why steps are not audited, in words; empty if they are


class Status(msgspec.Struct, frozen=True, tag="status"):
    """What the command line shows."""

    pid: int
    run_dir: str
    node: str
    mode: str  #: of redo; empty while nothing is held
    trainers: tuple[tuple[int, int], ...]  #: rank and pid of each that is connected
    committed: tuple[tuple[int, int], ...]  #: rank and newest record of each
    applied: int | None  #: the newest record that the replica has (eager)
    step: int | None  #: the newest that is held
    held_bytes: int  #: of all regions, those of a generation that is being written too
    generation: int
    max_drift_ulp: float
    redo_seconds_per_record: float | None
    storage: StorageStatus | None = None
    records_held: int = 0  #: records whose tensors are still in the log
    seconds_since_commit: float | None = None  #: how long ago the newest record came; None before the first
    uptime_seconds: float = 0.0  #: how long the agent has been here
    #: how long protection keeps a rank from training at a step, a moving average; None before the first.
    stall_ms: float | None = None
    by_operator: bool = False  #: whether it was started beside the job, and not by a trainer
    mode_reason: str = ""  #: why it is that one
    every: int = 1  #: N where the state is captured at every N-th step; else 1
    peers: PeersStatus | None = None  #: None where records are not kept in other nodes' memory
    check: str = ""  #: what the attempt's resume check has found, in one line; empty before it has
    slots: int = 0  #: D, records in flight
    #: what the newest 64 commits of this node's ranks have waited, in milliseconds, oldest first.
    recent_stalls: tuple[float, ...] = ()
    journal: str = ""  #: why the run's journal cannot be written; empty if it can
    metrics: str = ""  #: where the agent's metrics are, or why they are not; empty if none are asked for
    unprotected: str = ""  #: why memory does not hold the steps that trainers take now; empty if it does
    advice: str = ""  #: line of a setting that would pay from the next start on; empty if there is none
    advice_reason: str = ""  #: why it would
    accelerators: int = 0  #: number of those that train on one
    audit: AuditStatus | None = None  #: None where nothing has been audited

    @property
    def newest_committed(self) -> int | None:
        """The newest record that some rank has committed; None before the first."""
        return max((record for _, record in self.committed), default=None)


class StopRequest(msgspec.Struct, frozen=True, tag="stop"):
    """Leave, and let go of everything that is held; with `save` once what storage lacks is written there."""

    save: bool = False


class PeersReport(msgspec.Struct, frozen=True, tag="peers"):
    """From the replicator, every second or so while something happens."""

    status: PeersStatus


TrainerToAgent = StatusRequest | StopRequest
AgentToTrainer = Status
ReplicatorToAgent = PeersReport
