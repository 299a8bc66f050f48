"""Trainings whose optimizers have hidden inputs to their steps, so that no step can be redone."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

from tests.support.trainings.engine_optimizers import Momentum, OneOptimizer
from tests.support.trainings.engine_training import CLASSES, INPUTS, Case, Training


class Plain(Optimizer, ABC):
    """SGD with a step size scaled by the subclass."""

    def __init__(self, params: Iterable[Any], lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})

    @abstractmethod
    def factor(self) -> Tensor | float:
        """Factor of this step."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        factor = self.factor()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self.state[param]["velocity"] = self.state[param].get("velocity", 0.0) * 0.9 + param.grad
                    param.sub_(self.state[param]["velocity"] * factor, alpha=group["lr"])


class Counting(Plain):
    """Its rate falls with a count in an attribute; a tensor and a list hold further state."""

    def __init__(self, params: Iterable[Any]) -> None:
        super().__init__(params)
        self.count = 0
        self.decay = torch.ones(3)
        self.history: list[Any] = []
        self.first = [self.param_groups[0]["params"][0], {"seen": 0}]

    def factor(self) -> Tensor | float:
        self.count += 1
        self.decay *= 0.97
        self.history.append(torch.full((2,), float(self.count)))
        self.first[1]["seen"] += 1
        # It also reads the first parameter, by identity.
        size = self.first[0].detach().abs().mean().clamp(max=1.0)
        return self.decay.sum() / (3 + len(self.history) + self.first[1]["seen"]) * (1 + size)


class OnParameters(Optimizer):
    """Its state is in attributes of the parameters."""

    def __init__(self, params: Iterable[Any]) -> None:
        super().__init__(params, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.velocity = getattr(param, "velocity", 0.0) * 0.9 + param.grad
                    param.sub_(param.velocity, alpha=group["lr"])


class Agreeing(Plain):
    """Its rate is agreed on by all ranks at each step; on one rank alone nobody would answer."""

    def factor(self) -> Tensor | float:
        first = self.param_groups[0]["params"][0].detach().abs().mean().reshape(1)
        dist.all_reduce(first)
        return first.clamp(max=1.0) + 0.5


class GlobalNoise(Plain):
    """Draws from torch's global generator."""

    def factor(self) -> Tensor | float:
        return torch.rand(()) + 0.5


class OwnNoise(Plain):
    """Draws from a generator of its own."""

    def __init__(self, params: Iterable[Any]) -> None:
        super().__init__(params)
        self.generator = torch.Generator().manual_seed(7)

    def factor(self) -> Tensor | float:
        return torch.rand((), generator=self.generator) + 0.5


class Norm(Plain):
    """Scales all tensors by the norm of all gradients, which a redo of some of them would not know."""

    def factor(self) -> Tensor | float:
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        return 1 / (1 + torch.stack([gradient.norm() for gradient in gradients]).norm())


class Inner(Plain):
    """Another optimizer inside takes every third step, with private state."""

    def __init__(self, params: Iterable[Any]) -> None:
        super().__init__(params)
        self.inner = torch.optim.Adam(self.param_groups[0]["params"], lr=0.003)
        self.taken = 0

    def factor(self) -> Tensor | float:
        self.taken += 1
        if self.taken % 3 == 0:
            self.inner.step()
        return 0.5


class Quasi(Training):
    """LBFGS: the loss is evaluated several times within a step."""

    def __init__(self, line_search: str | None) -> None:
        self._line_search = line_search
        super().__init__()

    def make_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(INPUTS, 64), nn.Tanh(), nn.Linear(64, CLASSES))

    def make_optimizers(self) -> list[Optimizer]:
        return [
            torch.optim.LBFGS(
                self.model.parameters(), lr=0.1, max_iter=4, history_size=5, line_search_fn=self._line_search
            )
        ]

    def batch(self, step: int) -> float:
        x, y = self.inputs()

        def closure() -> Tensor:
            self.optimizers[0].zero_grad()
            loss = functional.cross_entropy(self.model(x), y)
            loss.backward()
            return loss

        self.at("before step")
        loss = self.optimizers[0].step(closure)
        self.at("after step")
        self.schedulers[0].step()
        return float(loss)


class Unfreezing(Training):
    """A layer is unfrozen, and added to the optimizer, in the middle."""

    def make_optimizers(self) -> list[Optimizer]:
        self.model[0].requires_grad_(False)
        return [Counting([p for p in self.model.parameters() if p.requires_grad])]

    def begin(self, step: int) -> None:
        self._added = len(self.optimizers[0].param_groups) > 1

    def batch(self, step: int) -> float:
        if step >= 9 and not self._added:
            self._added = True
            self.model[0].requires_grad_(True)
            self.optimizers[0].add_param_group({"params": list(self.model[0].parameters()), "lr": 0.01})
        return super().batch(step)


COUNTING = Case("counting", lambda: OneOptimizer(Counting))
HONEST = Case("honest", lambda: OneOptimizer(Momentum))
HIDDEN_CASES = [
    COUNTING,
    Case("global-noise", lambda: OneOptimizer(GlobalNoise)),
    Case("own-noise", lambda: OneOptimizer(OwnNoise)),
    Case("norm", lambda: OneOptimizer(Norm)),
    Case("on-parameters", lambda: OneOptimizer(OnParameters)),
    Case("inner", lambda: OneOptimizer(Inner)),
]
QUASI_CASES = [
    Case("lbfgs", lambda: Quasi(None), steps=12),
    Case("lbfgs-wolfe", lambda: Quasi("strong_wolfe"), steps=12),
]
UNFREEZING = Case("unfreezing", Unfreezing)
