"""The status of an agent for the command line: figures of the running attempt, and its groups as one."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

import msgspec

from memckpt.agent.group import Group
from memckpt.agent.lifetime import Lifetime
from memckpt.agent.observer import Observer
from memckpt.processes.address import AgentAddress
from memckpt.processes.attempt import TrainerHandle
from memckpt.protocol.status import AuditStatus, PeersStatus, Status, StorageStatus


def describe(
    address: AgentAddress,
    trainers: Sequence[TrainerHandle],
    groups: Sequence[Group],
    lifetime: Lifetime,
    observer: Observer,
    peers: PeersStatus | None,
    metrics: str,
    audit: AuditStatus | None,
) -> Status:
    """Describe an agent and its living trainers: of several groups the least that is true of all."""
    figures = observer.figures
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
        journal=observer.journal.problem,
        metrics=metrics,
        unprotected=observer.unprotected,
        audit=audit,
    )


def _storage(groups: Sequence[Group]) -> StorageStatus | None:
    found = (one.saver.status(one.held.newest_step if one.held is not None else None) for one in groups)
    parts = [part for part in found if part is not None]
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
