"""The status of an agent for the command line: figures of the running attempt, and its groups as one."""

from __future__ import annotations

import os
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence

import msgspec

from memckpt.agent.group import Group
from memckpt.agent.lifetime import Lifetime
from memckpt.journal.events import Advised
from memckpt.processes.address import AgentAddress
from memckpt.processes.attempt import TrainerHandle
from memckpt.protocol.status import AuditStatus, PeersStatus, Status, StorageStatus
from memckpt.protocol.trainer import Commit, Drift

#: Weight of a new sample in the average stall.
_STALL_WEIGHT = 0.05
#: Number of commits whose stalls are shown.
_RECENT = 64
#: Bounds of the classes in which stalls are counted, in milliseconds.
STALL_BOUNDS_MS = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 1_000.0, 5_000.0, 30_000.0)


class Figures:
    """What an agent has seen of training.

    Attributes:
        check: the finding of the attempt's resume check, in one line.
        max_drift_ulp: the largest that was seen.
        stall_ms: moving average of what a step waits for us; None before the first commit.
        stalls: what the newest commits have waited, in milliseconds.
        advice: the setting that would pay, and why; None if no other one would.
        commits, stalled_ms: number of commits of records, and the sum of what they have waited.
        stall_counts: number of them by stall: at most each of ``STALL_BOUNDS_MS``, and more.
    """

    def __init__(self) -> None:
        self.check = ""
        self.advice: Advised | None = None
        self.max_drift_ulp = 0.0
        self.stall_ms: float | None = None
        self.stalls: deque[float] = deque(maxlen=_RECENT)
        self.commits = 0
        self.stalled_ms = 0.0
        self.stall_counts = [0] * (len(STALL_BOUNDS_MS) + 1)
        self._committed_at: float | None = None

    def committed(self) -> None:
        """A rank has committed something."""
        self._committed_at = time.monotonic()

    def note_stall(self, message: Commit) -> None:
        """Count how long a step has waited."""
        before = message.stall_ms if self.stall_ms is None else self.stall_ms
        self.stall_ms = before + _STALL_WEIGHT * (message.stall_ms - before)
        self.stalls.append(message.stall_ms)
        self.commits += 1
        self.stalled_ms += message.stall_ms
        self.stall_counts[bisect_left(STALL_BOUNDS_MS, message.stall_ms)] += 1

    def note_advice(self, advised: Advised) -> None:
        """Keep what a trainer advises in the place of what it has advised before."""
        self.advice = advised if advised.line else None

    def note_drift(self, message: Drift) -> None:
        """Count how far a replica is off."""
        self.max_drift_ulp = max(self.max_drift_ulp, message.max_ulp)

    @property
    def seconds_since_commit(self) -> float | None:
        """None before the first one."""
        return time.monotonic() - self._committed_at if self._committed_at is not None else None


def describe(
    address: AgentAddress,
    trainers: Sequence[TrainerHandle],
    groups: Sequence[Group],
    lifetime: Lifetime,
    figures: Figures,
    peers: PeersStatus | None,
    journal: str,
    metrics: str,
    unprotected: str,
    audit: AuditStatus | None = None,
) -> Status:
    """Describe an agent; of several sets of shards the least that is true of all.

    Args:
        address: where it is found.
        trainers: living ones of the attempt.
        groups: of the ranks that it holds, in the order of their ranks.
        lifetime: of the agent.
        figures: that it has seen.
        peers: status of replication; None without peers.
        journal: why the journal cannot be written; empty if it can.
        metrics: where metrics are shown, or why not; empty if none are asked for.
        unprotected: why memory does not hold what trainers do; empty if it does.
        audit: what the audit has done; None: nothing.
    """
    generations = [one.held for one in groups if one.held is not None]
    replicas = [one.replica for one in generations if one.replica is not None]
    steps = [step for one in generations if (step := one.newest_step) is not None]
    rates = [one.seconds_applying / one.records_applied for one in replicas if one.records_applied]
    first = generations[0] if generations else None
    return Status(
        pid=os.getpid(),
        run_dir=str(address.run_dir),
        node=address.node,
        mode=first.spec.mode if first is not None else "",
        mode_reason=first.reason if first is not None else "",
        every=first.spec.every if first is not None else 1,
        trainers=tuple((trainer.rank, trainer.process.pid) for trainer in trainers),
        accelerators=sum(trainer.accelerated for trainer in trainers),
        committed=tuple(sorted((rank, record) for one in generations for rank, record in one.ledger.committed.items())),
        applied=min((one.applied for one in replicas), default=None),
        step=min(steps, default=None),
        held_bytes=sum(one.nbytes for one in groups),
        generation=first.number if first is not None else 0,
        max_drift_ulp=figures.max_drift_ulp,
        redo_seconds_per_record=max(rates, default=None),
        seconds_since_commit=figures.seconds_since_commit,
        uptime_seconds=time.monotonic() - lifetime.started,
        stall_ms=figures.stall_ms,
        by_operator=lifetime.by_operator,
        storage=_storage([one for one in groups if one.held is not None] or groups),
        records_held=min((one.records_held for one in generations), default=0),
        peers=peers,
        check=figures.check,
        advice="" if figures.advice is None else figures.advice.line,
        advice_reason="" if figures.advice is None else figures.advice.reason,
        slots=first.spec.slots if first is not None else 0,
        recent_stalls=tuple(figures.stalls),
        journal=journal,
        metrics=metrics,
        unprotected=unprotected,
        audit=audit,
    )


def _storage(groups: Sequence[Group]) -> StorageStatus | None:
    parts = []
    for one in groups:
        part = one.saver.status(one.held.newest_step if one.held is not None else None)
        if part is not None:
            parts.append(part)
    if not parts:
        return None

    def least(values: list[int | None]) -> int | None:
        """None, which is no checkpoint at all, is the least."""
        known = [value for value in values if value is not None]
        return min(known) if len(known) == len(values) else None

    losses = [part.loses_at_most for part in parts]
    rates = [part.bytes_per_second for part in parts if part.bytes_per_second is not None]
    return msgspec.structs.replace(
        parts[0],
        step=least([part.step for part in parts]),
        bytes_per_second=sum(rates) if rates else None,
        saving=any(part.saving for part in parts),
        alarm=next((part.alarm for part in parts if part.alarm), ""),
        logged=least([part.logged for part in parts]),
        loses_at_most=None if None in losses else max(loss for loss in losses if loss is not None),
    )
