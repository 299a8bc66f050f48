"""Metrics of real trainings: of one that is killed and resumed, and one without the package."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import memckpt
from memckpt.config import AgentConfig, MemckptConfig
from memckpt.errors import ConfigurationError
from tests.support.cluster.waiting import until
from tests.support.monitoring.shown_metrics import get, samples_in
from tests.support.trainings.engine_cases import PLAIN
from tests.support.trainings.engine_child import Control, config, kill_self
from tests.support.trainings.engine_harness import Lab


def test_a_training_that_is_killed_and_resumed(lab: Lab) -> None:
    settings = config("lazy", agent=AgentConfig(linger_seconds=60, metrics_port=0))

    def scrape(control: Control) -> None:
        (targets,) = json.loads((lab.run_dir / "metrics-node.json").read_text())
        (lab.directory / f"scraped-{control.step}").write_text(get(f"http://{targets['targets'][0]}/metrics"))
        assert control.session is not None
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
