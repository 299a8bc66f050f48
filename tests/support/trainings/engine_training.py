"""The small training that every case varies."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

STEPS = 24
INPUTS, CLASSES = 40, 10


@dataclass(frozen=True)
class Case:
    """A training by name. `build` makes model and optimizers anew, drawing from the global generators."""

    name: str
    build: Callable[[], Training]
    steps: int = STEPS


class Training:
    """A classifier trained with AdamW; subclasses change the feature that their case is about.

    `at` is called at the named points of a batch: "forward", "backward" (in the middle of each), "before step" and
    "after step" of the optimizers. All tensors are made on torch's default device.
    """

    def __init__(self) -> None:
        self.device_type = torch.get_default_device().type
        self.at: Callable[[str], None] = lambda point: None
        #: Argument of the session's announce_accumulation().
        self.accumulates: Callable[[], bool] | None = None
        self.registered: dict[str, Any] = {}
        self.extra_modules: dict[str, nn.Module] = {}
        self.model = self.make_model()
        self.optimizers = self.make_optimizers()
        self.schedulers = self.make_schedulers()
        for index, scheduler in enumerate(self.schedulers):
            self.registered[f"scheduler {index}"] = scheduler
        self.watch_points()

    def make_model(self) -> nn.Module:
        # The first weight is large enough to be anchored in pieces.
        return nn.Sequential(
            nn.Linear(INPUTS, 256), nn.BatchNorm1d(256), nn.ReLU(), nn.Dropout(0.2), nn.Linear(256, CLASSES)
        )

    def make_optimizers(self) -> list[Optimizer]:
        return [torch.optim.AdamW(self.model.parameters(), lr=1e-2)]

    def make_schedulers(self) -> list[Any]:
        return [torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizers[0], 2 * STEPS)]

    def watch_points(self) -> None:
        """Add hooks to the last layer: its parameters' gradients precede its input's, the other layers' follow."""

        def entering(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            self.at("forward")
            if inputs[0].requires_grad:
                inputs[0].register_hook(lambda gradient: self.at("backward"))

        list(self.model.modules())[-1].register_forward_pre_hook(entering)

    def begin(self, step: int) -> None:
        """Called once before the loop, after a restore if there was one."""

    def inputs(self) -> tuple[Tensor, Tensor]:
        noise = random.random() + float(np.random.rand())
        return torch.randn(16, INPUTS) + noise, torch.randint(0, CLASSES, (16,))

    def loss(self, step: int) -> Tensor:
        x, y = self.inputs()
        return functional.cross_entropy(self.model(x), y)

    def change_gradients(self, step: int) -> None:
        """Called between backward and the optimizers' steps."""

    def batch(self, step: int) -> float:
        """Train one batch; returns its loss."""
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        loss = self.loss(step)
        loss.backward()
        self.change_gradients(step)
        self.at("before step")
        for optimizer in self.optimizers:
            optimizer.step()
        self.at("after step")
        for scheduler in self.schedulers:
            scheduler.step()
        return float(loss)

    def commit_arguments(self, step: int) -> dict[str, Any]:
        """Keyword arguments for the session's commit()."""
        return {}
