"""Messages between the command line and an agent."""

from __future__ import annotations

import msgspec

from memckpt.protocol.replication import PeersStatus


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
