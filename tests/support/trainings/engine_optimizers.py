"""Optimizers of torch and of users, some of which have hidden inputs to their steps, and trainings with them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from tests.support.trainings.engine_training import CLASSES, INPUTS, Case, MakeOptimizer, Training, case_of


class Own(Optimizer):
    """A user-defined optimizer, which steps one parameter after the other."""

    def __init__(self, params: Iterable[Any], lr: float = 0.05, **settings: Any) -> None:
        super().__init__(params, {"lr": lr, **settings})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self.step_one(param, group)

    def step_one(self, param: Any, group: dict[str, Any]) -> None:
        raise NotImplementedError


class Momentum(Own):
    """Importable by name, with plain values in its state."""

    def __init__(self, params: Iterable[Any], lr: float = 0.05) -> None:
        super().__init__(params, lr, momentum=0.9)

    def step_one(self, param: Any, group: dict[str, Any]) -> None:
        state = self.state[param]
        state["count"] = state.get("count", 0) + 1
        state["norm"] = float(param.grad.norm())
        velocity = state.setdefault("velocity", torch.zeros_like(param))
        velocity.mul_(group["momentum"]).add_(param.grad)
        param.sub_(velocity / (1 + state["norm"] / state["count"]), alpha=group["lr"])


class Rebinding(Momentum):
    """Gives parameters and state other memory at each step, in place of writing to theirs."""

    def step_one(self, param: Any, group: dict[str, Any]) -> None:
        state = self.state[param]
        state["velocity"] = state.get("velocity", torch.zeros_like(param)) * 0.9 + param.grad
        param.data = param.data - group["lr"] * state["velocity"]


class LatePhase(Momentum):
    """Counts in its groups, acts every sixth step, and changes its gradients from the sixth step on."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["taken"] = group.get("taken", 0) + 1
        super().step(closure)

    def step_one(self, param: Any, group: dict[str, Any]) -> None:
        slow = self.state[param].setdefault("slow", param.clone())
        if group["taken"] > 5:
            param.grad.div_(param.grad.abs().add(0.1))
        param.sub_(param.grad, alpha=group["lr"])
        if group["taken"] % 6 == 0:
            param.copy_(slow.add_(param - slow, alpha=0.5))


class Products(Momentum):
    """Multiplies matrices, whose rounding depends on autocast and on torch's settings."""

    def step_one(self, param: Any, group: dict[str, Any]) -> None:
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


# With hidden inputs


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


class OnParameters(Own):
    """Its state is in attributes of the parameters."""

    def step_one(self, param: Any, group: dict[str, Any]) -> None:
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


# Trainings


def muon(params: list[nn.Parameter]) -> list[Optimizer]:
    """Muon for matrices, AdamW for the rest: two optimizers that step one after the other."""
    matrices, rest = [p for p in params if p.ndim == 2], [p for p in params if p.ndim != 2]
    return [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(rest, lr=0.01)]


class SparseEmbedding(Training):
    """An embedding with sparse gradients; with SparseAdam a second optimizer steps the rest."""

    kind = "sparse-sgd"

    def make_model(self) -> nn.Module:
        return nn.Sequential(nn.Embedding(300, 20, sparse=True), nn.Flatten(), nn.Linear(100, CLASSES))

    def make_optimizers(self) -> list[Optimizer]:
        parameters = list(self.model.parameters())
        if self.kind == "sparse-adam":
            return [torch.optim.SparseAdam(parameters[:1], lr=0.01), torch.optim.AdamW(parameters[1:], lr=0.01)]
        kind = torch.optim.Adagrad if self.kind == "sparse-adagrad" else torch.optim.SGD
        return [kind(parameters, lr=0.05)]

    def inputs(self) -> tuple[Tensor, Tensor]:
        # The number of rows that occur grows and shrinks from batch to batch.
        rows = int(torch.randint(5, 300, ()))
        return torch.randint(0, rows, (16, 5)), torch.randint(0, CLASSES, (16,))


class SparseOrDense(SparseEmbedding):
    """In some steps all of the embedding is used, and its gradient is dense: larger than the sparse ones."""

    def inputs(self) -> tuple[Tensor, Tensor]:
        return torch.randint(0, 40, (16, 5)), torch.randint(0, CLASSES, (16,))

    def loss(self, step: int) -> Tensor:
        self.model[0].sparse = step % 3 > 0
        return super().loss(step)


def quasi(name: str, line_search: str | None) -> Case:
    """LBFGS: the loss is evaluated several times within a step."""

    def net() -> nn.Module:
        return nn.Sequential(nn.Linear(INPUTS, 64), nn.Tanh(), nn.Linear(64, CLASSES))

    def make(params: Any) -> Optimizer:
        return torch.optim.LBFGS(params, lr=0.1, max_iter=4, history_size=5, line_search_fn=line_search)

    return case_of(name, net=net, make=make, closure=True, steps=12)


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


# Cases


def _torch_optimizers() -> Iterator[tuple[str, MakeOptimizer]]:
    """Optimizers of torch, by name."""
    settings: list[tuple[str, Any, dict[str, Any]]] = [
        ("sgd", torch.optim.SGD, {"lr": 0.05}),
        ("sgd-momentum", torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "dampening": 0.1, "weight_decay": 0.01}),
        ("sgd-nesterov", torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True, "foreach": True}),
        ("sgd-fused", torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "fused": True}),
        ("adam", torch.optim.Adam, {"lr": 0.01, "weight_decay": 0.01}),
        ("adamw", torch.optim.AdamW, {"lr": 0.01, "foreach": False}),
        ("adamw-foreach", torch.optim.AdamW, {"lr": 0.01, "foreach": True}),
        ("adamw-fused", torch.optim.AdamW, {"lr": 0.01, "fused": True}),
        ("adamw-amsgrad", torch.optim.AdamW, {"lr": 0.01, "amsgrad": True, "maximize": True}),
        ("adagrad", torch.optim.Adagrad, {"lr": 0.05, "lr_decay": 0.01}),
        ("adagrad-fused", torch.optim.Adagrad, {"lr": 0.05, "fused": True}),
        ("rmsprop", torch.optim.RMSprop, {"lr": 0.005}),
        ("rmsprop-centered", torch.optim.RMSprop, {"lr": 0.005, "centered": True, "momentum": 0.5}),
        ("nadam", torch.optim.NAdam, {"lr": 0.01}),
        ("radam", torch.optim.RAdam, {"lr": 0.01, "weight_decay": 0.01}),
        ("adadelta", torch.optim.Adadelta, {}),
        ("adamax", torch.optim.Adamax, {"lr": 0.01}),
        ("asgd", torch.optim.ASGD, {"lr": 0.05, "t0": 5.0}),
        ("rprop", torch.optim.Rprop, {"lr": 0.005}),
        ("adafactor", torch.optim.Adafactor, {"lr": 0.05}),
        # Some of these change the gradients in place, inside their step.
        ("adagrad-foreach", torch.optim.Adagrad, {"lr": 0.05}),
        ("rmsprop-foreach", torch.optim.RMSprop, {"lr": 0.005, "maximize": True, "weight_decay": 0.01}),
        ("nadam-foreach", torch.optim.NAdam, {"lr": 0.01, "weight_decay": 0.01}),
        ("radam-foreach", torch.optim.RAdam, {"lr": 0.01}),
        ("adadelta-foreach", torch.optim.Adadelta, {}),
        ("adamax-foreach", torch.optim.Adamax, {"lr": 0.01}),
        ("asgd-foreach", torch.optim.ASGD, {"lr": 0.05, "t0": 5.0}),
        ("rprop-foreach", torch.optim.Rprop, {"lr": 0.005}),
        ("own", Momentum, {}),
        ("local", lambda params: local_momentum()(params), {}),
    ]
    for name, kind, given in settings:
        more = {"foreach": True} if name.endswith("-foreach") else {}
        yield name, lambda params, kind=kind, all_given={**given, **more}: kind(params, **all_given)


OPTIMIZER_CASES = [case_of(name, make=make) for name, make in _torch_optimizers()]
OPTIMIZER_CASES += [case_of("muon", make=muon), case_of("sparse-or-dense", SparseOrDense)]
OPTIMIZER_CASES += [
    case_of(each, SparseEmbedding, kind=each) for each in ("sparse-adam", "sparse-adagrad", "sparse-sgd")
]
COUNTING = case_of("counting", make=Counting)
HONEST = case_of("honest", make=Momentum)
HIDDEN_CASES = [
    COUNTING,
    case_of("global-noise", make=GlobalNoise),
    case_of("own-noise", make=OwnNoise),
    case_of("norm", make=Norm),
    case_of("on-parameters", make=OnParameters),
    case_of("inner", make=Inner),
]
QUASI_CASES = [quasi("lbfgs", None), quasi("lbfgs-wolfe", "strong_wolfe")]
UNFREEZING = case_of("unfreezing", Unfreezing)
