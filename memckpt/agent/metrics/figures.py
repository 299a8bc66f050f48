"""Snapshot of what an agent knows, taken by its event loop: the source of its metrics."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

from memckpt.agent.observer import Observer, resident_bytes
from memckpt.agent.status import Figures
from memckpt.protocol.status import Status


@dataclass(frozen=True)
class Snapshot:
    """Everything that metrics show, at one moment; no other thread changes it.

    Attributes:
        status: of the agent.
        time: the moment, in seconds since 1970.
        attempt: number of the attempt; 0 before the first.
        stalls: number of commits by their stall: at most each of ``STALL_BOUNDS_MS``, and more.
        stalled_seconds: sum of all stalls.
        alarms: kinds of alarms, and whether they are on.
        verdict: of the attempt's resume check; empty before it has one.
        events: number of events since the agent's start, by name.
        events_lost: number of events that are not in the journal.
        recoveries: number of recoveries, by tier.
        recovery_seconds: their duration together.
        steps_lost: by them, as far as it is known.
        stored_bytes: written to storage as checkpoints.
        stored_at: when storage got its newest step, in seconds since 1970; None before the first.
        resident_bytes: the agent's own memory.
        cpu_seconds: CPU time of the agent's process.
    """

    status: Status
    time: float
    attempt: int
    stalls: tuple[int, ...]
    stalled_seconds: float
    alarms: Mapping[str, bool]
    verdict: str
    events: Mapping[str, int]
    events_lost: int
    recoveries: Mapping[str, int]
    recovery_seconds: float
    steps_lost: int
    stored_bytes: int
    stored_at: float | None
    resident_bytes: int
    cpu_seconds: float

    @classmethod
    def take_figures(cls, status: Status, figures: Figures, observer: Observer) -> Snapshot:
        """Called in the agent's event loop."""
        storage, peers = status.storage, status.peers
        alarms = {
            "memory": bool(status.unprotected),
            "storage": storage is not None and bool(storage.alarm),
            "untidy": storage is not None and bool(storage.untidy),
            "peers": peers is not None and not peers.protected,
            "resume": observer.verdict == "different",
            "journal": bool(status.journal),
        }
        return cls(
            status=status,
            time=time.time(),
            attempt=observer.journal.attempt,
            stalls=tuple(figures.stall_counts),
            stalled_seconds=figures.stalled_ms / 1e3,
            alarms=alarms,
            verdict=observer.verdict,
            events=dict(observer.counts),
            events_lost=observer.journal.lost,
            recoveries=dict(observer.recoveries),
            recovery_seconds=observer.recovery_seconds,
            steps_lost=observer.steps_lost,
            stored_bytes=observer.stored_bytes,
            stored_at=observer.stored_at,
            resident_bytes=resident_bytes(),
            cpu_seconds=time.process_time(),
        )
