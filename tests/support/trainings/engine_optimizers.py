"""Trainings with every torch optimizer, and some user-defined ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tests.support.trainings.engine_training import CLASSES, Training


class Momentum(Optimizer):
    """A user-defined optimizer, importable by name, with plain values in its state."""

    def __init__(self, params: Iterable[Any], lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr, "momentum": 0.9})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                state["count"] = state.get("count", 0) + 1
                state["norm"] = float(param.grad.norm())
                velocity = state.setdefault("velocity", torch.zeros_like(param))
                velocity.mul_(group["momentum"]).add_(param.grad)
                param.sub_(velocity / (1 + state["norm"] / state["count"]), alpha=group["lr"])


class Rebinding(Momentum):
    """Gives parameters and state other memory at each step, in place of writing to theirs."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                state["velocity"] = state.get("velocity", torch.zeros_like(param)) * 0.9 + param.grad
                param.data = param.data - group["lr"] * state["velocity"]


class LatePhase(Momentum):
    """Counts in its groups, acts every sixth step, and changes its gradients from the sixth step on."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["taken"] = group.get("taken", 0) + 1
            for param in group["params"]:
                slow = self.state[param].setdefault("slow", param.clone())
                if group["taken"] > 5:
                    param.grad.div_(param.grad.abs().add(0.1))
                param.sub_(param.grad, alpha=group["lr"])
                if group["taken"] % 6 == 0:
                    param.copy_(slow.add_(param - slow, alpha=0.5))


class Products(Momentum):
    """Multiplies matrices, whose rounding depends on autocast and on torch's settings."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                square = self.state[param].setdefault("square", torch.zeros(param.shape[0], param.shape[0]))
                gradient = param.grad.reshape(param.shape[0], -1)
                square.mul_(0.9).add_(gradient @ gradient.T)
                param.sub_((square @ gradient).view_as(param), alpha=group["lr"])


class Around(torch.optim.RMSprop):
    """A step around that of torch's class, which hooks see as well once torch has wrapped it."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def local_momentum() -> type[Optimizer]:
    """A class that no other process can import."""

    class LocalMomentum(Momentum):
        pass

    return LocalMomentum


MakeOptimizer = Callable[[list[nn.Parameter]], Optimizer]

OPTIMIZERS: dict[str, MakeOptimizer] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05),
    "sgd-momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, dampening=0.1, weight_decay=0.01),
    "sgd-nesterov": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, foreach=True),
    "sgd-fused": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, fused=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=False),
    "adamw-foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "adamw-fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "adamw-amsgrad": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True, maximize=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05, lr_decay=0.01),
    "adagrad-fused": lambda p: torch.optim.Adagrad(p, lr=0.05, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.005),
    "rmsprop-centered": lambda p: torch.optim.RMSprop(p, lr=0.005, centered=True, momentum=0.5),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.01, weight_decay=0.01),
    "adadelta": lambda p: torch.optim.Adadelta(p),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.05, t0=5.0),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.005),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.05),
    # Some of these change the gradients in place, inside their step.
    "adagrad-foreach": lambda p: torch.optim.Adagrad(p, lr=0.05, foreach=True),
    "rmsprop-foreach": lambda p: torch.optim.RMSprop(p, lr=0.005, foreach=True, maximize=True, weight_decay=0.01),
    "nadam-foreach": lambda p: torch.optim.NAdam(p, lr=0.01, foreach=True, weight_decay=0.01),
    "radam-foreach": lambda p: torch.optim.RAdam(p, lr=0.01, foreach=True),
    "adadelta-foreach": lambda p: torch.optim.Adadelta(p, foreach=True),
    "adamax-foreach": lambda p: torch.optim.Adamax(p, lr=0.01, foreach=True),
    "asgd-foreach": lambda p: torch.optim.ASGD(p, lr=0.05, t0=5.0, foreach=True),
    "rprop-foreach": lambda p: torch.optim.Rprop(p, lr=0.005, foreach=True),
    "own": lambda p: Momentum(p),
    "local": lambda p: local_momentum()(p),
}


class OneOptimizer(Training):
    """Any optimizer of the table."""

    def __init__(self, make: MakeOptimizer) -> None:
        self._make = make
        super().__init__()

    def make_optimizers(self) -> list[Optimizer]:
        return [self._make(list(self.model.parameters()))]


class Muon(Training):
    """Muon for matrices, AdamW for the rest: two optimizers that step one after the other."""

    def make_optimizers(self) -> list[Optimizer]:
        matrices = [p for p in self.model.parameters() if p.ndim == 2]
        rest = [p for p in self.model.parameters() if p.ndim != 2]
        return [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(rest, lr=0.01)]


class SparseEmbedding(Training):
    """An embedding with sparse gradients; with SparseAdam a second optimizer steps the rest."""

    def __init__(self, name: str) -> None:
        self._name = name
        super().__init__()

    def make_model(self) -> nn.Module:
        return nn.Sequential(nn.Embedding(300, 20, sparse=True), nn.Flatten(), nn.Linear(100, CLASSES))

    def make_optimizers(self) -> list[Optimizer]:
        parameters = list(self.model.parameters())
        if self._name == "sparse-adam":
            return [torch.optim.SparseAdam(parameters[:1], lr=0.01), torch.optim.AdamW(parameters[1:], lr=0.01)]
        if self._name == "sparse-adagrad":
            return [torch.optim.Adagrad(parameters, lr=0.05)]
        return [torch.optim.SGD(parameters, lr=0.05)]

    def inputs(self) -> tuple[Tensor, Tensor]:
        # The number of rows that occur grows and shrinks from batch to batch.
        rows = int(torch.randint(5, 300, ()))
        return torch.randint(0, rows, (16, 5)), torch.randint(0, CLASSES, (16,))


class SparseOrDense(SparseEmbedding):
    """In some steps all of the embedding is used, and its gradient is dense: larger than the sparse ones."""

    def __init__(self) -> None:
        super().__init__("sparse-sgd")

    def inputs(self) -> tuple[Tensor, Tensor]:
        return torch.randint(0, 40, (16, 5)), torch.randint(0, CLASSES, (16,))

    def loss(self, step: int) -> Tensor:
        embedding = self.model[0]
        assert isinstance(embedding, nn.Embedding)
        embedding.sparse = step % 3 > 0
        return super().loss(step)
