"""What an agent shows: its status for the command line, and its metrics for Prometheus.

The event loop measures at each scrape. A thread of prometheus-client serves and writes: that may take long.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import itertools
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import msgspec

from memckpt.agent.lifetime import Lifetime
from memckpt.agent.observer import STALL_BOUNDS_MS, Observer, resident_bytes
from memckpt.agent.unit import Unit
from memckpt.errors import AgentGoneError
from memckpt.processes.address import AgentAddress
from memckpt.processes.attempt import TrainerHandle
from memckpt.protocol.status import AuditStatus, MetricsSettings, PeersStatus, Status, StorageStatus

if TYPE_CHECKING:  # imported in the thread, where metrics are asked for
    from prometheus_client import CollectorRegistry
    from prometheus_client.metrics_core import Metric

_log = logging.getLogger("memckpt.agent")
#: Seconds from one file to the next.
_FILE_SECONDS = 15.0
#: Longest wait, in seconds, for the event loop's answer, for a client's request, and for the thread at the end.
_ANSWER_SECONDS, _CLIENT_SECONDS, _END_SECONDS = 5.0, 10.0, 2.0
_VERDICTS = ("equal", "rounding", "different", "none")


class Measured(NamedTuple):
    """A metric and its samples: one, or one for each value of the label `by`; none where nothing is known."""

    kind: Literal["gauge", "counter", "info", "histogram"]
    name: str
    text: str
    by: str
    samples: Mapping[str, Any]


def _gauge(name: str, text: str, value: float | Mapping[str, float] | None, by: str = "") -> Measured:
    values = value if isinstance(value, Mapping) else {} if value is None else {"": value}
    return Measured("gauge", name, text, by, {key: float(one) for key, one in values.items()})


def _counter(name: str, text: str, value: float | Mapping[str, float], by: str = "") -> Measured:
    return _gauge(name, text, value, by)._replace(kind="counter")


def measure(status: Status, observer: Observer) -> list[Measured]:
    """Measure all that is known now, in the event loop. Moments are times since 1970: ages in a file grow old."""
    return [one for one in _measure(status, observer, time.time()) if one.samples]


def _measure(status: Status, observer: Observer, now: float) -> Iterator[Measured]:
    figures, storage, peers = observer.figures, status.storage, status.peers
    newest = status.newest_committed
    known = {
        "mode": status.mode,
        "peers": peers.scheme if peers is not None else "",
        "storage": storage.url if storage is not None else "",
    }
    yield Measured("info", "agent", "Kind of protection", "", known)
    yield _gauge("agent_start_time_seconds", "When the agent started", now - status.uptime_seconds)
    yield _gauge("agent_resident_bytes", "The agent's own memory, without shared memory", resident_bytes())
    yield _counter("agent_cpu_seconds", "CPU time of the agent's process", time.process_time())
    yield _gauge("attempt", "Number of the attempt; 0 before the first", observer.journal.attempt)
    yield _gauge("trainers", "Trainers of this node that are connected", len(status.trainers))

    committed_at = None if status.seconds_since_commit is None else now - status.seconds_since_commit
    yield _gauge("committed_step", "Newest step in this node's memory", status.step)
    yield _gauge("committed_record", "Newest record of this node's ranks", newest)
    yield _gauge("committed_timestamp_seconds", "When the newest record came", committed_at)
    stalls = {"sum": figures.stalled_ms / 1e3, "counts": tuple(figures.stall_counts)}
    yield Measured("histogram", "stall_seconds", "What a rank's steps have waited for protection", "", stalls)
    yield _gauge("slots", "Records that fit between training and the replica or peers", status.slots or None)
    yield _gauge("held_bytes", "Shared memory of base and log", status.held_bytes)
    yield _gauge("held_records", "Records whose tensors are in the log", status.records_held)
    yield _gauge("generation", "Number of the generation", status.generation)
    if status.applied is not None:
        lag = max(0, (newest or 0) - status.applied)
        yield _gauge("replica_lag_records", "Records that the replica is behind training", lag)
        yield _gauge("drift_ulp", "Largest difference found by the audit, in last places", status.max_drift_ulp)
        redo = status.redo_seconds_per_record
        yield _gauge("redo_seconds", "What applying a record to the replica takes, on average", redo)
    if status.audit is not None:
        yield _counter("audited_pieces", "Pieces that were redone and compared", status.audit.pieces)
        yield _counter("audit_findings", "Pieces that differed", status.audit.findings)
        yield _counter("audit_cpu_seconds", "CPU time of the auditor's process", status.audit.cpu_seconds)
    if storage is not None:
        yield from _measure_storage(storage, observer)
    if peers is not None:
        yield from _measure_peers(peers, newest)

    alarms = {
        "memory": bool(status.unprotected),
        "storage": storage is not None and bool(storage.alarm),
        "untidy": storage is not None and bool(storage.untidy),
        "peers": peers is not None and not peers.protected,
        "resume": figures.verdict == "different",
        "journal": bool(status.journal),
    }
    yield _gauge("alarm", "Whether this kind of alarm is on", alarms, "kind")
    verdicts = {name: name == figures.verdict for name in _VERDICTS} if figures.verdict else {}
    yield _gauge("resume_check", "Verdict of the attempt's resume check", verdicts, "verdict")
    yield _counter("recoveries", "States restored, as this agent was told", figures.recoveries, "tier")
    yield _counter("recovery_seconds", "What these restores took", figures.recovery_seconds)
    yield _counter("lost_steps", "Committed steps that these restores went back", figures.steps_lost)
    yield _counter("events", "Events of the run's journal", figures.events, "event")
    yield _counter("events_lost", "Events that could not be written to the journal", observer.journal.lost)


def _measure_storage(storage: StorageStatus, observer: Observer) -> Iterator[Measured]:
    yield _gauge("stored_step", "Newest step of which this node's part is in storage", storage.step)
    yield _gauge("stored_timestamp_seconds", "When storage got it", observer.figures.stored_at)
    yield _counter("stored_bytes", "Bytes of checkpoints that were written", observer.figures.stored_bytes)
    yield _gauge("storage_write_rate", "Bytes per second of the last write", storage.bytes_per_second)
    yield _gauge("storage_at_risk_steps", "Steps lost at most if memory is lost", storage.loses_at_most)
    yield _gauge("storage_saving", "Whether a checkpoint is being written", storage.saving)


def _measure_peers(peers: PeersStatus, newest: int | None) -> Iterator[Measured]:
    lag = None if newest is None or peers.watermark is None else max(0, newest - peers.watermark)
    yield _gauge("peers_record", "Newest record that peers have acknowledged for every node", peers.watermark)
    yield _gauge("peers_lag_records", "Records that they are behind training", lag)
    yield _gauge("peers_protected", "Whether the tolerated number of nodes can be lost", peers.protected)
    yield _gauge("peers_every_steps", "Steps from one state that is sent to the next; 1: every record", peers.every)
    yield _gauge("peers_every_steps_needed", "The same, as links would carry it; 0: not measured", peers.needed)
    yield _gauge("peers_held_bytes", "Memory of other nodes' records here", peers.held_bytes)
    yield _counter("peers_sent_bytes", "Bytes sent to peers in this attempt", peers.bytes_sent)
    refused = "Messages and connections of strangers and of replaced processes, damaged ones, and those beyond a limit"
    yield _counter("peers_refused_messages", refused, peers.refused)
    up = {link.node: link.connected for link in peers.links}
    yield _gauge("peer_connected", "Whether another node answers", up, "peer")
    behind = {link.node: link.behind_bytes for link in peers.links}
    yield _gauge("peer_behind_bytes", "What another node has not acknowledged yet", behind, "peer")


def families(measured: list[Measured], labels: Mapping[str, str]) -> Iterator[Metric]:
    """Make families of prometheus-client, whose samples all have these labels."""
    from prometheus_client import core

    kinds: dict[str, Any] = {"gauge": core.GaugeMetricFamily, "counter": core.CounterMetricFamily}
    kinds |= {"info": core.InfoMetricFamily, "histogram": core.HistogramMetricFamily}
    values = tuple(labels.values())
    for kind, name, text, by, samples in measured:
        family = kinds[kind](f"memckpt_{name}", text, labels=(*labels, by) if by else tuple(labels))
        if kind == "info":
            family.add_metric(values, samples)
        elif kind == "histogram":
            bounds = [*(str(bound / 1e3) for bound in STALL_BOUNDS_MS), "+Inf"]
            totals = itertools.accumulate(samples["counts"])
            family.add_metric(values, list(zip(bounds, totals, strict=True)), samples["sum"])
        else:
            for key, value in samples.items():
                family.add_metric([*values, *([key] if by else [])], value)
        yield family


#: Hands the event loop a call; safe to call from any thread.
Post = Callable[[Callable[[], None]], None]


class Collector:
    """What prometheus-client asks; safe to call from any thread. `take` measures, in the event loop."""

    def __init__(self, labels: dict[str, str], post: Post, take: Callable[[], list[Measured]]) -> None:
        self._labels, self._post, self._take = labels, post, take

    def collect(self) -> Iterator[Metric]:
        """The families now. Raises AgentGoneError where the event loop has not answered in time."""
        answer: concurrent.futures.Future[list[Measured]] = concurrent.futures.Future()

        def take() -> None:
            try:
                answer.set_result(self._take())
            except Exception as error:  # raised to who asks; the agent's loop goes on
                answer.set_exception(error)

        self._post(take)
        try:
            measured = answer.result(_ANSWER_SECONDS)
        except concurrent.futures.TimeoutError:
            raise AgentGoneError(f"the agent has not answered within {_ANSWER_SECONDS:g} s") from None
        return families(measured, self._labels)


class Exporter:
    """Owns a thread, its server and its files; :meth:`close` it. `predecessor` may have the same port and files."""

    def __init__(
        self,
        settings: MetricsSettings,
        address: AgentAddress,
        post: Post,
        take: Callable[[], list[Measured]],
        predecessor: Exporter | None = None,
    ) -> None:
        self.settings, self._address = settings, address
        self._labels = {"run": str(address.run_dir), "node": address.node}
        self._collector = Collector(self._labels, post, take)
        #: Where metrics are shown, or why not, by the way in which they are.
        self._states: dict[str, str] = {}
        #: Files that were written, and the inode and time of each.
        self._written: dict[Path, tuple[int, int]] = {}
        self._stop = threading.Event()
        self._predecessor = predecessor
        self._thread = threading.Thread(target=self._run, name="memckpt-metrics", daemon=True)
        self._thread.start()

    @property
    def stopped(self) -> bool:
        return self._stop.is_set()

    @property
    def state(self) -> str:
        """Where metrics are shown, or why they are not, in words."""
        return "; ".join(dict(self._states).values()) or "about to be shown"

    def stop(self) -> None:
        """Have the thread end within half a second, and remove the files. Idempotent."""
        self._stop.set()

    def close(self) -> None:
        self.stop()
        self._thread.join(_END_SECONDS)

    # The thread

    def _run(self) -> None:
        if self._predecessor is not None:
            self._predecessor._thread.join()
            self._predecessor = None
        try:
            from prometheus_client import CollectorRegistry
        except ImportError as error:
            self._say("server", f"not shown ({error}): pip install 'lightning-memckpt[metrics]'", warn=True)
            return
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self._collector)
        with contextlib.ExitStack() as stack:
            if self.settings.port is not None:
                self._serve(self.settings.host, self.settings.port, registry, stack)
            stack.callback(self._remove_files)
            file = self._file()
            while file is not None and not self._stop.is_set():
                self._write_metrics(file, registry)
                self._stop.wait(_FILE_SECONDS)
            self._stop.wait()

    def _serve(self, host: str, port: int, registry: CollectorRegistry, stack: contextlib.ExitStack) -> None:
        """Serve, and say where, also in a file for Prometheus; `stack` ends it."""
        from prometheus_client import start_http_server

        try:
            server, thread = start_http_server(port, host, registry)
        except OSError as error:
            self._say("server", f"not served at {host}, port {port}: {error.strerror or error}", warn=True)
            return
        stack.callback(thread.join)
        stack.callback(server.server_close)
        stack.callback(server.shutdown)
        handler: Any = server.RequestHandlerClass  # it would wait for ever for what a client asks
        server.RequestHandlerClass = type("Handler", (handler,), {"timeout": _CLIENT_SECONDS})
        shown = f"[{host}]" if ":" in host else host
        self._say("server", f"http://{shown}:{server.server_port}/metrics")
        reachable = socket.gethostname() if host in ("0.0.0.0", "::") else shown
        found = [{"targets": [f"{reachable}:{server.server_port}"], "labels": self._labels}]
        path = self._address.run_dir / f"metrics-{self._address.node}.json"
        part = path.with_name(f".{path.name}.{self._address.node}")
        try:
            part.write_bytes(msgspec.json.encode(found) + b"\n")
            part.replace(path)
        except OSError as error:
            self._say("file", f"{path} cannot be written: {error.strerror or error}", warn=True)
            return
        self._note_written(path)

    def _file(self) -> Path | None:
        if self.settings.file is None:
            return None
        name = self.settings.file.replace("{node}", self._address.node).replace("{run}", self._address.run_dir.name)
        return self._address.run_dir / Path(name).expanduser()

    def _write_metrics(self, path: Path, registry: CollectorRegistry) -> None:
        from prometheus_client import write_to_textfile

        try:
            write_to_textfile(str(path), registry)
        except AgentGoneError as error:
            self._say("file", f"{path} is out of date: {error}", warn=True)
        except OSError as error:
            self._say("file", f"{path} cannot be written: {error.strerror or error}", warn=True)
        else:
            self._note_written(path)
            self._say("file", str(path))

    def _note_written(self, path: Path) -> None:
        with contextlib.suppress(OSError):
            found = path.stat()
            self._written[path] = found.st_ino, found.st_mtime_ns

    def _remove_files(self) -> None:
        """Remove what no other process has written since: an agent that takes over has the same files."""
        for path, written in self._written.items():
            with contextlib.suppress(OSError):
                found = path.stat()
                if (found.st_ino, found.st_mtime_ns) == written:
                    path.unlink()

    def _say(self, way: str, state: str, warn: bool = False) -> None:
        if self._states.get(way) != state:
            _log.log(logging.WARNING if warn else logging.INFO, "metrics: %s", state)
        self._states[way] = state


class Metrics:
    """Shows the agent's metrics. Owns an exporter. `fixed`: where, against what trainers say; None: where they say."""

    def __init__(
        self, address: AgentAddress, fixed: MetricsSettings | None, post: Post, take: Callable[[], list[Measured]]
    ) -> None:
        self._address, self._fixed = address, fixed
        self._post, self._take = post, take
        self._exporter: Exporter | None = None

    @property
    def state(self) -> str:
        return "" if self._exporter is None or self._exporter.stopped else self._exporter.state

    def configure(self, settings: MetricsSettings | None = None) -> None:
        """Show them where the operator has said, else where trainers say with `settings`."""
        settings = self._fixed or settings
        former = self._exporter
        if settings is None or (former is not None and former.settings == settings and not former.stopped):
            return
        if former is not None:
            former.stop()
        if settings.on:
            self._exporter = Exporter(settings, self._address, self._post, self._take, former)

    def close(self) -> None:
        if self._exporter is not None:
            self._exporter.close()
        self._exporter = None


def describe(
    address: AgentAddress,
    trainers: Sequence[TrainerHandle],
    units: Sequence[Unit],
    lifetime: Lifetime,
    observer: Observer,
    peers: PeersStatus | None,
    metrics: str,
    audit: AuditStatus | None,
) -> Status:
    """Describe an agent and its living trainers: of several units the least that is true of all."""
    figures = observer.figures
    generations = [one.held for one in units if one.held is not None]
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
        held_bytes=sum(one.nbytes for one in units),
        generation=first.number if first is not None else 0,
        max_drift_ulp=figures.max_drift_ulp,
        redo_seconds_per_record=max(rates, default=None),
        seconds_since_commit=figures.seconds_since_commit,
        uptime_seconds=time.monotonic() - lifetime.started,
        stall_ms=figures.stall_ms,
        by_operator=lifetime.by_operator,
        storage=_storage([one for one in units if one.held is not None] or units),
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


def _storage(units: Sequence[Unit]) -> StorageStatus | None:
    found = (one.saver.status(one.held.newest_step if one.held is not None else None) for one in units)
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
