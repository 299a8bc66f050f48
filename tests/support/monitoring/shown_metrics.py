"""Metrics of an agent, as they are shown."""

from __future__ import annotations

import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families as parse

from memckpt.agent.metrics import Collector, Measured, measure
from memckpt.agent.observer import Observer
from memckpt.journal.events import Recovered, Stalled
from memckpt.processes.address import AgentAddress
from memckpt.protocol.status import Status


def measured_of(run_dir: Path, status: Status, stored_at: float | None = None) -> list[Measured]:
    observer = Observer(AgentAddress(run_dir, "node"), False, lambda: status)
    for stall_ms in (0.05, 0.1, 3.0, 40_000.0):
        observer.figures.add_stall(stall_ms)
    observer.note_event(Recovered(7, 7, "local memory", 0.25, 1))
    observer.note_event(Recovered(9, 9, "storage", 0.5, None))
    observer.note_event(Stalled(9, 1500.0, 1))
    observer.figures.verdict, observer.figures.stored_at = "equal", stored_at
    try:
        return measure(status, observer)
    finally:
        observer.journal.close()


def text_of(measured: list[Measured], generate: Any = generate_latest) -> str:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(Collector(LABELS, now, lambda: measured))
    return str(generate(registry).decode())


def get(url: str, accept: str = "*/*") -> str:
    with urllib.request.urlopen(urllib.request.Request(url, headers={"Accept": accept}), timeout=20) as answer:
        return str(answer.read().decode())


def samples_in(path: Path) -> dict[str, float]:
    return {sample.name: sample.value for family in parse(path.read_text()) for sample in family.samples}


LABELS = {"run": '/runs/"one"\\', "node": "node"}


def now(call: Callable[[], None]) -> None:
    """An event loop that is always idle."""
    call()
