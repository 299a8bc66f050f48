"""Losses and the learning rate on their way to the run's journal."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import memckpt
from memckpt.processes.address import AgentAddress
from memckpt.processes.control import stop_agent
from memckpt.protocol.trainer import TrainingFigures
from memckpt.session.link import AgentLink, LoggedValues
from tests.support.trainings.engine_harness import Lab


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    own = Lab(tmp_path)
    yield own
    stop_agent(AgentAddress.of(own.run_dir))
    own.close()


def an_optimizer(lr: Any = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr)


def test_numbers_are_kept_and_what_is_on_a_device_is_not_read() -> None:
    sent: list[TrainingFigures] = []
    logged = LoggedValues(sent.append)
    logged.note_losses(
        {
            "loss": torch.tensor(2.5, requires_grad=True),
            "val_loss": np.float32(0.5),
            "loss_on_device": torch.zeros(1, device="meta"),
            "loss_per_token": torch.zeros(3),
            "loss_nan": math.nan,
            "loss_name": "cross entropy",
            "accuracy": 0.9,
            7: 1.0,
        }  # type: ignore[dict-item]
    )
    logged.send_if_due([an_optimizer()])
    assert [each.values for each in sent] == [{"loss": 2.5, "val_loss": 0.5, "lr": 0.1}]
    logged.note_losses({f"loss_{number}": 1.0 for number in range(20)})
    assert len(logged._values) == 8


def test_they_are_sent_once_a_second_the_newest_of_each(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 5.0
    monkeypatch.setattr("memckpt.session.link.time", SimpleNamespace(monotonic=lambda: now))
    sent: list[TrainingFigures] = []
    logged, optimizer = LoggedValues(sent.append), an_optimizer(torch.tensor(0.5))
    for step in range(40):
        logged.note_losses({"loss": float(step)})
        logged.send_if_due([optimizer])
        now += 0.125
    assert [each.values for each in sent] == [{"loss": float(step), "lr": 0.5} for step in (0, 8, 16, 24, 32)]


def test_a_session_tells_its_agent(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []
    tell = AgentLink.send_if_connected

    def note(link: AgentLink, message: Any) -> None:
        told.append(message)
        tell(link, message)

    def body() -> None:
        monkeypatch.setattr(AgentLink, "send_if_connected", note)
        net = torch.nn.Linear(3, 1)
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        config = memckpt.MemckptConfig(storage=None, agent=memckpt.AgentConfig(linger_seconds=60))
        session = memckpt.attach(net, optimizer, run_dir=lab.run_dir, config=config)
        session.restore()
        for _ in range(2):
            loss = net(torch.ones(2, 3)).sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            session.log({"loss": loss})
            session.commit()
        first = next(each for each in told if isinstance(each, TrainingFigures))
        assert first.values.keys() == {"loss", "lr"}
        session.close()

    child = lab.fork(body, "train")
    assert child.wait() == 0, child.log.read_text()
    assert "without protection" not in child.log.read_text()
