"""The measured training: a GPT with AdamW on fixed batches, with different protection."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import memckpt
from benchmarks.harness.scratch import scratch_directory
from examples.gpt import GPT, SIZES, Corpus
from memckpt import MemckptConfig, Session

#: Sequences in a batch: 512 tokens.
BATCH = 4
NO_AUDIT = ", no audit"
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "fused": {"fused": True},
    "single-tensor": {"foreach": False, "fused": False},
}


class Training:
    """A model, its optimizer and a batch; :meth:`step` is one training step."""

    def __init__(self, model: Any, batch: tuple[Tensor, ...], optimizer: str = "fused") -> None:
        self.model = model
        self.batch = batch
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, **OPTIMIZERS[optimizer])

    def loss(self) -> Tensor:
        loss: Tensor = self.model.loss(*self.batch)
        return loss

    def step(self) -> None:
        self.loss().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        """The tensors of a checkpoint."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def tensors(self) -> list[Tensor]:
        """Parameters and element-wise optimizer state: 12 bytes a parameter."""
        tensors = [param.detach() for param in self.model.parameters()]
        for state in self.optimizer.state.values():
            tensors += [value for value in state.values() if isinstance(value, Tensor) and value.dim() > 0]
        return tensors


class Trainee(Training):
    """A training of a whole model, of a size of the examples."""

    def __init__(self, size: str, optimizer: str = "fused") -> None:
        model = make_model(size)
        super().__init__(model, Corpus(model.config.context).sample(BATCH), optimizer)


def make_model(size: str) -> GPT:
    torch.manual_seed(0)
    # No dropout: it would only add noise.
    return GPT(replace(SIZES[size], dropout=0.0))


def redo_config(mode: str) -> MemckptConfig:
    """`"lazy T=8"`, `"lazy T=16"` or `"eager"`; with `", no audit"` behind it redo is not audited."""
    if mode.endswith(NO_AUDIT):
        return replace(redo_config(mode.removesuffix(NO_AUDIT)), audit_budget=0.0)
    if mode == "eager":
        return MemckptConfig(redo="eager", storage=None)
    period = int(mode.removeprefix("lazy T="))
    return MemckptConfig(redo="lazy", anchor_period_steps=period, storage=None)


def train(training: Training, session: Session, steps: int) -> None:
    """Run protected steps."""
    for _ in range(steps):
        training.step()
        session.commit()


def catch_up(session: Session) -> None:
    """Wait until an eager agent has applied all records. Uses a private interface."""
    if session.mode == "eager" and session._link.up:
        session._link.wait_applied(int(session.metrics()["step"]))


@contextmanager
def protected(trainee: Training, mode: str) -> Iterator[Session]:
    """A trainee with a session attached, a generation written and all slots touched."""
    with scratch_directory() as directory:
        session = memckpt.attach(trainee.model, trainee.optimizer, run_dir=directory, config=redo_config(mode))
        try:
            session.restore()
            yield session
        finally:
            session.close()
            gc.collect()
