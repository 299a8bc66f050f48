"""CUDA graphs, as far as a CPU can tell: what is recorded runs no hooks later. Devices: one for each process."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from memckpt.capture.copier import HostCopier, device_of
from memckpt.capture.recorder import GraphNotes
from memckpt.errors import UnsupportedError, UsageError
from memckpt.session import session
from tests.support.trainings.engine_child import config
from tests.support.trainings.engine_harness import Lab
from tests.support.trainings.engine_training import Case, Training


class Recording(HostCopier):
    """A copier under which work can be said to be recorded."""

    now = False

    def recording_graph(self) -> bool:
        return Recording.now


class Graphed(Training):
    """A backward that is recorded once; its replays write into the same gradients, unseen by hooks and counters."""

    def begin(self, step: int) -> None:
        Recording.now = True
        state = torch.get_rng_state()
        super().loss(step).backward()
        torch.set_rng_state(state)
        Recording.now = False

    def batch(self, step: int) -> float:
        loss = self.loss(step)
        params = list(self.model.parameters())
        for param, gradient in zip(params, torch.autograd.grad(loss, params), strict=True):
            assert param.grad is not None
            param.grad.data.copy_(gradient)
        self.at("before step")
        self.optimizers[0].step()
        self.schedulers[0].step()
        return float(loss)


class GraphedStep(Graphed):
    """The step is recorded, too."""

    def begin(self, step: int) -> None:
        super().begin(step)
        Recording.now = True
        self.optimizers[0].step()


@pytest.fixture(autouse=True)
def recording(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "copier_for", lambda device: Recording())


class Still(Graphed):
    """Without buffers and generators that recording moves."""

    def make_model(self) -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(40, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))

    def inputs(self) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(16, 40), torch.randint(0, 10, (16,))


@pytest.mark.parametrize("redo", ["lazy", "snapshot"])
def test_a_backward_in_a_graph_is_taken_after_the_step(lab: Lab, redo: str) -> None:
    lab.survives(Case("graphed", Still), config(redo), [("after commit", 7), ("before step", 12)])


def test_a_step_in_a_graph_is_refused(lab: Lab) -> None:
    child, _ = lab.begin(Case("graphed-step", GraphedStep), config("lazy"))
    assert child.wait() == 3
    assert "an optimizer's step is being recorded into a CUDA graph" in child.log.read_text()
    lab.stop()


@pytest.mark.parametrize(
    ("world_size", "told", "stepped", "refused"),
    [(1, False, False, UsageError), (1, True, False, None), (1, False, True, None), (2, True, True, UnsupportedError)],
)
def test_commits_that_nothing_is_known_of(world_size: int, told: bool, stepped: bool, refused: Any) -> None:
    notes = GraphNotes()
    notes.refuse_hidden_backward(world_size, told)
    notes.backward, notes.stepped = True, stepped
    if refused is None:
        notes.refuse_hidden_backward(world_size, told)
        assert not notes.stepped
    else:
        with pytest.raises(refused, match="recorded into a CUDA graph"):
            notes.refuse_hidden_backward(world_size, told)


def test_one_device_for_each_process() -> None:
    def on(*devices: str) -> dict[str, Any]:
        return {f"tensor {index}": SimpleNamespace(device=torch.device(one)) for index, one in enumerate(devices)}

    assert device_of(on("cpu", "cpu")) == torch.device("cpu")
    assert device_of(on("cpu", "cuda:1", "cpu", "cuda:1")) == torch.device("cuda:1")
    with pytest.raises(UnsupportedError, match="tensor 1 is on cuda:0 and tensor 2 on cuda:1"):
        device_of(on("cpu", "cuda:0", "cuda:1"))
