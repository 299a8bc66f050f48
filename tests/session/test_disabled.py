"""MEMCKPT_DISABLE=1: a script trains as it is, and memckpt does nothing."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import memckpt
from memckpt.config.arguments import DISABLE, disabled_by_environment
from memckpt.errors import ConfigurationError, UsageError
from memckpt.session.entry import DisabledSession


def test_every_member_of_a_session_is_there_without_the_parts_of_one() -> None:
    public = {name for kind in memckpt.Session.__mro__[:-1] for name in vars(kind) if not name.startswith("_")}
    assert {"commit", "restore", "metrics", "describe"} <= public
    assert public <= set(vars(DisabledSession))


def test_a_loop_trains_and_nothing_is_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(DISABLE, "1")
    caplog.set_level(logging.INFO)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    with memckpt.attach(model, optimizer, run_dir=tmp_path / "run", resume="require") as session:
        session.register("model", model)
        session.provide("place", lambda: 1 / 0)
        loader = session.loader(DataLoader(torch.randn(6, 3), batch_size=1))
        assert session.restore() is None
        committed, epochs = [], []
        for epoch in session.epochs(2):
            epochs.append((epoch, session.epoch, session.batch))
            for number, batch in enumerate(loader):
                model(batch).sum().backward()
                if number % 2:  # gradients of two batches are accumulated
                    optimizer.step()
                    optimizer.zero_grad()
                committed.append(session.commit())
        assert session.commit(gradients_pending=False)  # a scaler skipped the step
        assert (session.agent_pid, session.held, session.metrics()) == (None, None, {})
        assert session.describe() == "memckpt: protecting nothing: disabled by MEMCKPT_DISABLE"
    assert committed == [False, True] * 6
    assert epochs == [(0, 0, 0), (1, 1, 0)]
    with pytest.raises(UsageError, match="after close"):
        session.commit()
    assert not (tmp_path / "run").exists()
    assert not optimizer._optimizer_step_post_hooks
    assert caplog.messages == [
        "memckpt: disabled by MEMCKPT_DISABLE: this training is not protected; it starts over, and nothing is held"
    ]


@pytest.mark.parametrize(("value", "disabled"), [("1", True), ("true", True), ("0", False)])
def test_the_variable_is_one_or_zero(value: str, disabled: bool) -> None:
    assert disabled_by_environment({DISABLE: value}) == disabled
    assert not disabled_by_environment({})
    with pytest.raises(ConfigurationError, match="MEMCKPT_DISABLE: expected 1 or 0, found 'maybe'"):
        disabled_by_environment({DISABLE: "maybe"})
