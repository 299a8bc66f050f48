"""The metrics of an agent, as families of prometheus-client. `docs/reference/metrics.md` lists them.

Moments are shown as times (seconds since 1970), and not as ages: those are true of a scrape only, and never of a file.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
)
from prometheus_client.metrics_core import Metric

from memckpt.agent.metrics.figures import Snapshot
from memckpt.agent.status import STALL_BOUNDS_MS
from memckpt.protocol.status import PeersStatus, StorageStatus

_VERDICTS = ("equal", "rounding", "different", "none")


def families(snapshot: Snapshot, labels: Mapping[str, str]) -> Iterator[Metric]:
    """The families, each with at least one sample. What is not known is left out.

    Args:
        snapshot: what the agent knows.
        labels: of every sample: the run and the node.
    """
    maker = _Maker(labels)
    for made in _of(snapshot, maker):
        if made.samples:
            yield made


class _Maker:
    """Makes families whose samples have the same labels."""

    def __init__(self, labels: Mapping[str, str]) -> None:
        self._names = tuple(labels)
        self._values = tuple(labels.values())

    def gauge(self, name: str, text: str, value: float | None) -> GaugeMetricFamily:
        return self.gauges(name, text, "", {} if value is None else {"": value})

    def gauges(self, name: str, text: str, by: str, values: Mapping[str, float]) -> GaugeMetricFamily:
        family = GaugeMetricFamily(f"memckpt_{name}", text, labels=self._with(by))
        for key, value in values.items():
            family.add_metric([*self._values, *([key] if by else [])], float(value))
        return family

    def counter(self, name: str, text: str, value: float) -> CounterMetricFamily:
        return self.counters(name, text, "", {"": value})

    def counters(self, name: str, text: str, by: str, values: Mapping[str, float]) -> CounterMetricFamily:
        family = CounterMetricFamily(f"memckpt_{name}", text, labels=self._with(by))
        for key, value in values.items():
            family.add_metric([*self._values, *([key] if by else [])], float(value))
        return family

    def info(self, name: str, text: str, values: Mapping[str, str]) -> InfoMetricFamily:
        family = InfoMetricFamily(f"memckpt_{name}", text, labels=self._names)
        family.add_metric(self._values, dict(values))
        return family

    def stalls(self, snapshot: Snapshot) -> HistogramMetricFamily:
        text = "What a rank's steps have waited for protection"
        family = HistogramMetricFamily("memckpt_stall_seconds", text, labels=self._names)
        total, buckets = 0, []
        for bound, count in zip((*STALL_BOUNDS_MS, math.inf), snapshot.stalls, strict=True):
            total += count
            buckets.append((str(bound / 1e3) if math.isfinite(bound) else "+Inf", total))
        family.add_metric(self._values, buckets, snapshot.stalled_seconds)
        return family

    def _with(self, by: str) -> tuple[str, ...]:
        return (*self._names, by) if by else self._names


def _of(snapshot: Snapshot, make: _Maker) -> Iterator[Metric]:
    status = snapshot.status
    known = {"mode": status.mode, "peers": status.peers.scheme if status.peers is not None else ""}
    known["storage"] = status.storage.url if status.storage is not None else ""
    yield make.info("agent", "Kind of protection", known)
    yield make.gauge("agent_start_time_seconds", "When the agent started", snapshot.time - status.uptime_seconds)
    yield make.gauge("agent_resident_bytes", "The agent's own memory, without shared memory", snapshot.resident_bytes)
    yield make.counter("agent_cpu_seconds", "CPU time of the agent's process", snapshot.cpu_seconds)
    yield make.gauge("attempt", "Number of the attempt; 0 before the first", snapshot.attempt)
    yield make.gauge("trainers", "Trainers of this node that are connected", len(status.trainers))

    committed_at = None if status.seconds_since_commit is None else snapshot.time - status.seconds_since_commit
    yield make.gauge("committed_step", "Newest step in this node's memory", status.step)
    yield make.gauge("committed_record", "Newest record of this node's ranks", _newest(snapshot))
    yield make.gauge("committed_timestamp_seconds", "When the newest record came", committed_at)
    yield make.stalls(snapshot)
    yield make.gauge("slots", "Records that fit between training and the replica or peers", status.slots or None)
    yield make.gauge("held_bytes", "Shared memory of base and log", status.held_bytes)
    yield make.gauge("held_records", "Records whose tensors are in the log", status.records_held)
    yield make.gauge("generation", "Number of the generation", status.generation)
    if status.applied is not None:
        lag = max(0, (_newest(snapshot) or 0) - status.applied)
        yield make.gauge("replica_lag_records", "Records that the replica is behind training", lag)
        yield make.gauge("drift_ulp", "Largest difference found by the audit, in last places", status.max_drift_ulp)
        redo = status.redo_seconds_per_record
        yield make.gauge("redo_seconds", "What applying a record to the replica takes, on average", redo)
    if status.audit is not None:
        yield make.counter("audited_pieces", "Pieces that were redone and compared", status.audit.pieces)
        yield make.counter("audit_findings", "Pieces that differed", status.audit.findings)
        yield make.counter("audit_cpu_seconds", "CPU time of the auditor's process", status.audit.cpu_seconds)
    if status.storage is not None:
        yield from _of_storage(status.storage, snapshot, make)
    if status.peers is not None:
        yield from _of_peers(status.peers, snapshot, make)

    alarms = {name: float(on) for name, on in snapshot.alarms.items()}
    yield make.gauges("alarm", "Whether this kind of alarm is on", "kind", alarms)
    verdicts = {name: float(snapshot.verdict == name) for name in _VERDICTS} if snapshot.verdict else {}
    yield make.gauges("resume_check", "Verdict of the attempt's resume check", "verdict", verdicts)
    yield make.counters("recoveries", "States restored, as this agent was told", "tier", snapshot.recoveries)
    yield make.counter("recovery_seconds", "What these restores took", snapshot.recovery_seconds)
    yield make.counter("lost_steps", "Committed steps that these restores went back", snapshot.steps_lost)
    yield make.counters("events", "Events of the run's journal", "event", snapshot.events)
    yield make.counter("events_lost", "Events that could not be written to the journal", snapshot.events_lost)


def _of_storage(storage: StorageStatus, snapshot: Snapshot, make: _Maker) -> Iterator[Metric]:
    yield make.gauge("stored_step", "Newest step that storage can produce", storage.step)
    yield make.gauge("stored_timestamp_seconds", "When storage got it", snapshot.stored_at)
    yield make.counter("stored_bytes", "Bytes of checkpoints that were written", snapshot.stored_bytes)
    yield make.gauge("storage_write_rate", "Bytes per second of the last write", storage.bytes_per_second)
    at_risk = storage.loses_at_most
    yield make.gauge("storage_at_risk_steps", "Steps lost at most if memory is lost", at_risk)
    yield make.gauge("storage_saving", "Whether a checkpoint is being written", storage.saving)


def _of_peers(peers: PeersStatus, snapshot: Snapshot, make: _Maker) -> Iterator[Metric]:
    newest = _newest(snapshot)
    lag = None if newest is None or peers.watermark is None else max(0, newest - peers.watermark)
    yield make.gauge("peers_record", "Newest record that peers have acknowledged for every node", peers.watermark)
    yield make.gauge("peers_lag_records", "Records that they are behind training", lag)
    yield make.gauge("peers_protected", "Whether the tolerated number of nodes can be lost", peers.protected)
    yield make.gauge("peers_every_steps", "Steps from one state that is sent to the next; 1: every record", peers.every)
    yield make.gauge("peers_every_steps_needed", "The same, as links would carry it; 0: not measured", peers.needed)
    yield make.gauge("peers_held_bytes", "Memory of other nodes' records here", peers.held_bytes)
    yield make.counter("peers_sent_bytes", "Bytes sent to peers in this attempt", peers.bytes_sent)
    refused = "Messages of strangers and of replaced processes, and damaged ones"
    yield make.counter("peers_refused_messages", refused, peers.refused)
    up = {link.node: float(link.connected) for link in peers.links}
    yield make.gauges("peer_connected", "Whether another node answers", "peer", up)
    behind = {link.node: float(link.behind_bytes) for link in peers.links}
    yield make.gauges("peer_behind_bytes", "What another node has not acknowledged yet", "peer", behind)


def _newest(snapshot: Snapshot) -> int | None:
    return max((record for _, record in snapshot.status.committed), default=None)
