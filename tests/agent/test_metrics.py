"""Metrics of an agent: what they say, the ways in which they are shown, and those of real trainings."""

from __future__ import annotations

import json
import math
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse

import memckpt
from memckpt.agent import metrics as shown_metrics
from memckpt.agent.metrics import Collector, Exporter, Measured, Metrics
from memckpt.config import AgentConfig, MemckptConfig
from memckpt.errors import ConfigurationError
from memckpt.processes.address import AgentAddress
from memckpt.protocol.status import MetricsSettings
from tests.support.cluster.waiting import until
from tests.support.monitoring.shown_metrics import LABELS, get, measured_of, now, samples_in, text_of
from tests.support.monitoring.statuses import an_agent, some_peers
from tests.support.trainings.engine_cases import PLAIN
from tests.support.trainings.engine_child import Control, config, kill_self
from tests.support.trainings.engine_harness import Lab


def samples_of(text: str) -> dict[str, float]:
    """Samples by name and by the labels beside the run's."""
    found = {}
    for family in parse(text):
        for sample in family.samples:
            rest = {name: value for name, value in sample.labels.items() if name not in LABELS}
            assert {name: sample.labels[name] for name in LABELS} == LABELS
            found[sample.name + "".join(f" {value}" for value in rest.values())] = sample.value
    return found


def test_what_the_metrics_say(tmp_path: Path) -> None:
    now = time.time()
    found = samples_of(text_of(measured_of(tmp_path, an_agent(peers=some_peers(), slots=4))))
    expected = {
        "memckpt_committed_step": 10,
        "memckpt_committed_record": 10,
        "memckpt_trainers": 2,
        "memckpt_replica_lag_records": 3,
        "memckpt_slots": 4,
        "memckpt_drift_ulp": 1,
        "memckpt_audited_pieces_total": 16,
        "memckpt_audit_findings_total": 1,
        "memckpt_audit_cpu_seconds_total": 0.5,
        "memckpt_held_bytes": 3 << 20,
        "memckpt_stored_step": 8,
        "memckpt_alarm storage": 1,
        "memckpt_alarm peers": 0,
        "memckpt_alarm memory": 0,
        "memckpt_peers_record": 9,
        "memckpt_peers_lag_records": 1,
        "memckpt_peers_protected": 1,
        "memckpt_peer_behind_bytes c": 3 << 20,
        "memckpt_stall_seconds_bucket 0.0001": 2,
        "memckpt_stall_seconds_bucket 0.005": 3,
        "memckpt_stall_seconds_bucket 30.0": 3,
        "memckpt_stall_seconds_bucket +Inf": 4,
        "memckpt_stall_seconds_count": 4,
        "memckpt_recoveries_total local memory": 1,
        "memckpt_recoveries_total storage": 1,
        "memckpt_recovery_seconds_total": 0.75,
        "memckpt_lost_steps_total": 1,
        "memckpt_events_total stalled": 1,
        "memckpt_resume_check equal": 1,
        "memckpt_resume_check different": 0,
    }
    assert {name: found.get(name) for name in expected} == expected
    assert math.isclose(found["memckpt_stall_seconds_sum"], 40.00315)
    assert now <= found["memckpt_committed_timestamp_seconds"] + 0.25 <= time.time()
    assert now <= found["memckpt_agent_start_time_seconds"] + 7200 <= time.time()
    # What is not known is left out, and no family is empty.
    less = samples_of(text_of(measured_of(tmp_path, an_agent(storage=None, step=None, applied=None, committed=()))))
    assert not [name for name in less if "stored" in name or "peers_" in name or "committed_step" in name]


def test_the_openmetrics_format_says_the_same(tmp_path: Path) -> None:
    measured = measured_of(tmp_path, an_agent(peers=some_peers()))
    text = text_of(measured, generate_openmetrics)
    strict = {
        sample.name: sample.value
        for family in parse_openmetrics(text)  # refuses what the standard does
        for sample in family.samples
        if set(sample.labels) == set(LABELS)
    }
    plain = samples_of(text_of(measured))
    assert strict == {name: plain[name] for name in strict}
    assert len(strict) > 25


# Ways in which they are shown


class Shown:
    """An exporter of a made-up agent."""

    def __init__(self, run_dir: Path) -> None:
        self.address = AgentAddress(run_dir, "node")
        self.measured = measured_of(run_dir, an_agent())
        self._made: list[Exporter] = []

    def __call__(self, post: Callable[[Callable[[], None]], None] = now, **settings: Any) -> Exporter:
        made = Exporter(MetricsSettings(**settings), self.address, post, lambda: self.measured)
        self._made.append(made)
        until(lambda: made.state != "about to be shown")
        return made

    def close(self) -> None:
        for each in self._made:
            each.close()


@pytest.fixture
def shown(tmp_path: Path) -> Iterator[Shown]:
    shown = Shown(tmp_path)
    yield shown
    shown.close()


def test_prometheus_is_answered_and_finds_out_where(shown: Shown, tmp_path: Path) -> None:
    made = shown(port=0)
    assert made.state.startswith("http://127.0.0.1:")
    assert f'memckpt_committed_step{{node="node",run="{tmp_path}"}} 10.0' in get(made.state)
    assert get(made.state, "application/openmetrics-text; version=1.0.0").endswith("# EOF\n")
    (targets,) = json.loads((tmp_path / "metrics-node.json").read_text())
    assert made.state == f"http://{targets['targets'][0]}/metrics"
    assert targets["labels"] == {"run": str(tmp_path), "node": "node"}
    # One that connects and says nothing keeps nobody from it.
    port = int(targets["targets"][0].rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port)):
        assert "memckpt_committed_step" in get(made.state)
    made.close()
    assert list(tmp_path.glob("metrics-*")) == []
    with pytest.raises(urllib.error.URLError):
        get(made.state)
    assert not [each for each in threading.enumerate() if each.name == "memckpt-metrics"]


def test_an_event_loop_that_hangs_is_seen(shown: Shown, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shown_metrics, "_ANSWER_SECONDS", 0.01)
    made = shown(lambda call: None, port=0)
    with pytest.raises(urllib.error.HTTPError, match="500"):
        get(made.state)


def test_a_port_that_is_taken_is_said_and_nothing_else_happens(shown: Shown, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        made = shown(port=port, file="m.prom")
        assert made.state.startswith(f"not served at 127.0.0.1, port {port}: Address already in use")
        until((tmp_path / "m.prom").exists)


def test_a_file_is_written_again_and_again_and_removed_at_the_end(
    shown: Shown, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shown_metrics, "_FILE_SECONDS", 0.01)
    made = shown(file="here-{run}-{node}.prom")
    path = tmp_path / f"here-{tmp_path.name}-node.prom"
    assert made.state == str(path)
    assert "# TYPE memckpt_events counter" not in path.read_text()
    assert samples_in(path)["memckpt_committed_step"] == 10
    shown.measured = measured_of(tmp_path, an_agent(step=11))
    until(lambda: samples_in(path)["memckpt_committed_step"] == 11)
    made.close()
    assert list(tmp_path.glob("*here*")) == []


def test_a_file_of_a_successor_stays(shown: Shown, tmp_path: Path) -> None:
    made = shown(file=str(tmp_path / "metrics.txt"))
    path = tmp_path / "metrics.txt"
    path.with_name("other").write_text("another agent's\n")
    path.with_name("other").replace(path)
    made.close()
    assert path.read_text() == "another agent's\n"


def test_a_file_that_cannot_be_written_is_said(shown: Shown) -> None:
    assert "no/such.prom cannot be written: No such file" in shown(file="no/such.prom").state


def test_settings_of_the_trainers_are_followed_unless_an_operator_has_decided(tmp_path: Path) -> None:
    def state_of(fixed: MetricsSettings | None, *configured: MetricsSettings) -> str:
        metrics = Metrics(AgentAddress(tmp_path, "node"), fixed, now, lambda: measured)
        try:
            metrics.configure()
            for each in configured:
                metrics.configure(each)
            until(lambda: metrics.state != "about to be shown")
            return metrics.state
        finally:
            metrics.close()

    measured = measured_of(tmp_path, an_agent())
    off, first, second = MetricsSettings(), MetricsSettings(file="first"), MetricsSettings(file="second")
    assert state_of(None, off) == ""
    assert state_of(None, first).endswith("first")
    assert state_of(None, first, first, second).endswith("second")
    assert state_of(None, first, off) == ""
    assert state_of(first, second).endswith("first")
    assert state_of(first, off).endswith("first")


def test_what_cannot_be_measured_does_not_end_the_loop(tmp_path: Path) -> None:
    def fail() -> list[Measured]:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        Collector(LABELS, now, fail).collect()


@pytest.mark.parametrize(("field", "value"), [("metrics_port", 70000), ("metrics_host", ""), ("metrics_file", "")])
def test_settings_that_cannot_be_are_refused(field: str, value: Any) -> None:
    with pytest.raises(ConfigurationError, match=f"agent.{field}: expected"):
        AgentConfig(**{field: value})


# Real trainings


def test_a_training_that_is_killed_and_resumed(lab: Lab) -> None:
    settings = config("lazy", agent=AgentConfig(linger_seconds=60, metrics_port=0))

    def scrape(control: Control) -> None:
        (targets,) = json.loads((lab.run_dir / "metrics-node.json").read_text())
        scraped = lab.directory / f"scraped-{control.step}"

        def is_told() -> bool:  # commit() does not wait for the agent, which may be busy
            scraped.write_text(get(f"http://{targets['targets'][0]}/metrics"))
            return bool(samples_in(scraped)["memckpt_committed_step"] == control.step)

        until(is_told)
        control.journal.note("logged", **control.session.metrics())

    died = lab.train(PLAIN, settings, actions={("backward", 9): kill_self})
    until((lab.run_dir / "metrics-node.json").exists)
    (targets,) = json.loads((lab.run_dir / "metrics-node.json").read_text())
    assert lab.status().metrics == f"http://{targets['targets'][0]}/metrics", "it outlives the trainer"
    again = lab.train(PLAIN, settings, seed=2, actions={("after commit", 12): scrape})
    lab.check_same(PLAIN, died, again)
    found = samples_in(lab.directory / "scraped-12")
    assert found["memckpt_committed_step"] == 12
    assert found["memckpt_attempt"] == 2
    assert found["memckpt_recoveries_total"] == 1
    assert found["memckpt_stall_seconds_count"] >= 8
    assert found["memckpt_trainers"] == 1
    (logged,) = again.of("logged")
    assert (logged["step"], logged["attempt"], logged["steps_lost"], logged["alarms"]) == (12, 2, 0, 0)
    assert logged["recovery_s"] > 0
    assert 0 < logged["held_bytes"] <= found["memckpt_held_bytes"]
    assert list(lab.run_dir.glob("metrics-*")) == [], "the agent has left, as training has finished"


def test_metrics_without_their_package_are_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memckpt.session.entry.importlib.util.find_spec", lambda name: None)
    model = torch.nn.Linear(2, 2)
    wanted = MemckptConfig(agent=AgentConfig(metrics_port=0))
    with pytest.raises(ConfigurationError, match=r"expected the package prometheus-client.*memckpt\[metrics\]"):
        memckpt.attach(model, torch.optim.SGD(model.parameters()), run_dir=tmp_path, config=wanted)
