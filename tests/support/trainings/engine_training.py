"""The small training that every case varies."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR

STEPS = 24
INPUTS, CLASSES = 40, 10

MakeOptimizer = Callable[[list[nn.Parameter]], Optimizer | list[Optimizer]]
Hook = Callable[[Any, int], Any]


@dataclass(frozen=True)
class Case:
    """A training by name. `build` makes model and optimizers anew, drawing from the global generators."""

    name: str
    build: Callable[[], Training]
    steps: int = STEPS


def case_of(name: str, kind: type[Training] | None = None, /, *, steps: int = STEPS, **settings: Any) -> Case:
    """The case of a training whose attributes have these values."""
    return Case(name, partial(kind or Training, **settings), steps)


class Training:
    """A classifier trained with AdamW; a subclass, or a setting, changes the feature that a case is about.

    Settings are attributes that the constructor sets before anything is made. All tensors are made on torch's default
    device. `at` is called at the named points of a batch: "forward", "backward" (in the middle of each), "before step"
    and "after step" of the optimizers.

    Attributes:
        net: makes the model; None: a small classifier.
        make: makes the optimizer of all parameters, or several.
        before, change, behind: called with training and step: at the begin of a batch, between backward and the
            optimizers' steps, and at the end of the batch.
        schedule: makes the schedule of the first optimizer's rate, if that is `scheduled`.
        closure: whether the optimizer evaluates the loss inside its step.
    """

    net: Callable[[], nn.Module] | None = None
    make: MakeOptimizer = staticmethod(lambda params: torch.optim.AdamW(params, lr=1e-2))
    before: Hook = staticmethod(lambda training, step: None)
    change: Hook = staticmethod(lambda training, step: None)
    behind: Hook = staticmethod(lambda training, step: None)
    schedule: Callable[[Optimizer], Any] = staticmethod(lambda optimizer: CosineAnnealingLR(optimizer, 2 * STEPS))
    scheduled = True
    closure = False

    def __init__(self, **settings: Any) -> None:
        vars(self).update(settings)
        #: Number of the step that is trained; its loop sets it.
        self.number = 0
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
        if self.net is not None:
            return self.net()
        # The first weight is large enough to be anchored in pieces.
        return nn.Sequential(
            nn.Linear(INPUTS, 256), nn.BatchNorm1d(256), nn.ReLU(), nn.Dropout(0.2), nn.Linear(256, CLASSES)
        )

    def make_optimizers(self) -> list[Optimizer]:
        made = self.make(list(self.model.parameters()))
        return made if isinstance(made, list) else [made]

    def make_schedulers(self) -> list[Any]:
        return [self.schedule(self.optimizers[0])] if self.scheduled else []

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

    def loss_of(self, x: Tensor, y: Tensor) -> Tensor:
        return functional.cross_entropy(self.model(x), y)

    def loss(self, step: int) -> Tensor:
        return self.loss_of(*self.inputs())

    def change_gradients(self, step: int) -> None:
        self.change(self, step)

    def stepping(self, step: int) -> Sequence[Optimizer]:
        """Optimizers that step in this batch."""
        return self.optimizers

    def zero(self, to_none: bool = True) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=to_none)

    def batch(self, step: int) -> float:
        """Train one batch; returns its loss."""
        self.before(self, step)
        if self.closure:
            return self._batch_in_closure(step)
        self.zero()
        loss = self.loss(step)
        loss.backward()
        self.change_gradients(step)
        self.take_step(step)
        self.behind(self, step)
        return float(loss)

    def take_step(self, step: int) -> None:
        self.at("before step")
        for optimizer in self.stepping(step):
            optimizer.step()
        self.at("after step")
        for scheduler in self.schedulers:
            scheduler.step()

    def _batch_in_closure(self, step: int) -> float:
        x, y = self.inputs()

        def closure() -> Tensor:
            self.zero()
            loss = self.loss_of(x, y)
            loss.backward()
            self.change_gradients(step)
            return loss

        self.at("before step")
        loss: Any = self.optimizers[0].step(closure)
        self.at("after step")
        self.schedulers[0].step()
        self.behind(self, step)
        return float(loss)

    def commit_arguments(self, step: int) -> dict[str, Any]:
        """Keyword arguments for the session's commit()."""
        return {}
