"""``redo="auto"`` on an accelerator: lazy wherever the memory for it is there, and eager with a word about it else."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from memckpt.capture.live_state import LiveState
from memckpt.config import AgentConfig, MemckptConfig
from memckpt.session import mode
from memckpt.session.mode import ModeChoice
from memckpt.session.ranks import Ranks
from tests.support.trainings.engine_optimizers import Momentum

CUDA = torch.device("cuda", 0)  # nothing is made there


def live_state(own: bool = False) -> LiveState:
    model = nn.Linear(1000, 1000)
    params = model.parameters()
    return LiveState(model, [Momentum(params) if own else torch.optim.AdamW(params)], {})


def choose(own: bool = False, config: MemckptConfig | None = None) -> ModeChoice:
    return ModeChoice(config or MemckptConfig(), live_state(own), Ranks(), CUDA)


def test_lazy_where_the_memory_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mode, "available_bytes", lambda: 1 << 30)
    choice = choose()
    assert (choice.mode, choice.reason) == ("lazy", "exact on an accelerator, and takes no core")


@pytest.mark.parametrize("budget", [None, 40 << 20])
def test_eager_where_it_is_not(monkeypatch: pytest.MonkeyPatch, budget: int | None) -> None:
    """A million parameters: 11 slots of a gradient and an eighth of 12 bytes each."""
    available = 50 << 20 if budget is None else 1 << 30
    monkeypatch.setattr(mode, "available_bytes", lambda: available)
    config = MemckptConfig(agent=AgentConfig(memory_budget_bytes=budget))
    choice = choose(config=config)
    assert choice.mode == "eager"
    assert "lazy redo, which is exact on an accelerator, would take 57.9 MiB" in choice.reason
    assert ("agent.memory_budget_bytes" if budget else "75% of the available memory") in choice.reason


@pytest.mark.parametrize("own", [False, True])
def test_what_is_held_already_needs_no_other_room(monkeypatch: pytest.MonkeyPatch, own: bool) -> None:
    """The agent of the last attempt has what is short now; an optimizer of the user's own is tested before."""
    monkeypatch.setattr(mode, "available_bytes", lambda: 50 << 20)
    choice = choose(own)
    assert choice.mode == ("snapshot" if own else "eager")
    choice.resume("lazy", "")
    assert (choice.mode, choice.reason) == ("lazy", "as before: what it takes is held already")
    choice = choose()
    choice.resume("eager", "")
    assert choice.mode == "eager"


def test_whoever_asks_for_a_mode_gets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mode, "available_bytes", lambda: 50 << 20)
    assert choose(config=MemckptConfig(redo="lazy")).mode == "lazy"
    on_host = ModeChoice(MemckptConfig(redo="auto"), live_state(), Ranks(), torch.device("cpu"))
    # Memory for a window is no question there.
    assert on_host.reason == "the model is small: the records that lazy redo holds take 57.8 MiB"
