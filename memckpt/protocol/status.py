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
        """Whether they are shown anywhere."""
        return self.port is not None or self.file is not None


class PeerLinkStatus(msgspec.Struct, frozen=True):
    """The connection to one other node; `behind_bytes`: not acknowledged yet; `problem`: why it cannot be used."""

    node: str
    connected: bool
    behind_bytes: int
    seconds_silent: float | None
    problem: str = ""


class PeersStatus(msgspec.Struct, frozen=True):
    """The peers tier, as its agent sees it.

    Attributes:
        scheme: ``"erasure code, k=4, m=2"`` or ``"2 copies"``.
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
        refused: messages of strangers and of processes that were replaced, and damaged ones.
        gap: the records from..to that no peer had, the last such gap; None if there was none.
        recovering: what is being restored, with progress; empty if nothing is.
        every: N; 1: every record is sent; else the state after every N-th, in place of records.
        needed: the smallest N that the links would carry; 0: not measured.
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
    every: int = 1
    needed: int = 0


class StorageStatus(msgspec.Struct, frozen=True):
    """The storage tier, as its agent sees it.

    Attributes:
        url: where it is.
        mode: what it holds: ``"replica"`` checkpoints, ``"log"`` also the records since.
        reason: why records are not logged though that is configured; empty otherwise.
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


class AuditStatus(msgspec.Struct, frozen=True):
    """What the audit of lazy redo has done in this agent's life.

    Attributes:
        pieces: of parameters, that were redone and compared.
        record: newest that was redone; None before the first.
        findings: pieces that differed.
        cpu_seconds: of the auditor's process.
        late: pieces whose slots were filled anew before they were read.
        problem: why steps are not audited, in words; empty if they are.
    """

    pieces: int
    record: int | None
    findings: int
    cpu_seconds: float
    late: int = 0
    problem: str = ""


class Status(msgspec.Struct, frozen=True, tag="status"):
    """What the command line shows.

    Attributes:
        mode: of redo; empty while nothing is held.
        mode_reason: why it is that one.
        every: N where the state is captured at every N-th step; else 1.
        trainers: rank and pid of each that is connected.
        accelerators: number of those that train on one.
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
        slots: D, records in flight.
        recent_stalls: what the newest 64 commits of this node's ranks have waited, in milliseconds, oldest first.
        advice: line of a setting that would pay from the next start on; empty if there is none.
        advice_reason: why it would.
        journal: why the run's journal cannot be written; empty if it can.
        metrics: where the agent's metrics are, or why they are not; empty if none are asked for.
        unprotected: why memory does not hold the steps that trainers take now; empty if it does.
        audit: None where nothing has been audited.
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
    slots: int = 0
    recent_stalls: tuple[float, ...] = ()
    journal: str = ""
    metrics: str = ""
    unprotected: str = ""
    advice: str = ""
    advice_reason: str = ""
    accelerators: int = 0
    audit: AuditStatus | None = None


class StopRequest(msgspec.Struct, frozen=True, tag="stop"):
    """Leave, and let go of everything that is held."""

    reason: str = ""


class PeersReport(msgspec.Struct, frozen=True, tag="peers"):
    """From the replicator, every second or so while something happens."""

    status: PeersStatus


# This file's part of what is said on each connection

TrainerToAgent = StatusRequest | StopRequest
AgentToTrainer = Status
ReplicatorToAgent = PeersReport
