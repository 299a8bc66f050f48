"""Small trainings, each with one thing that makes per-step recovery hard."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

STEPS = 24
INPUTS, CLASSES = 40, 10


@dataclass(frozen=True)
class Case:
    """A training by name. `build` makes model and optimizers anew, drawing from the global generators."""

    name: str
    build: Callable[[], Training]
    steps: int = STEPS


class Training:
    """A classifier trained with AdamW; subclasses change what their case is about.

    `at` is called at the named points of a batch: "forward", "backward" (in the middle of each), "before step" and
    "after step" of the optimizers.
    """

    def __init__(self) -> None:
        self.at: Callable[[str], None] = lambda point: None
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
        """Hooks on the last layer: its input's gradient is there when its parameters' are and the others' are not."""

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
        """Between backward and the optimizers' steps."""

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


# Optimizers


class Momentum(Optimizer):
    """An optimizer of the user's own, importable by name, with plain values in its state."""

    def __init__(self, params: Iterable[Any], lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr, "momentum": 0.9})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
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


def local_momentum() -> type[Optimizer]:
    """A class that no other process finds by name."""

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


# Which steps are taken


class Adversarial(Training):
    """Five critic steps and one generator step in each batch; the generator's backward reaches the critic, too."""

    def make_model(self) -> nn.Module:
        generator = nn.Sequential(nn.Linear(8, 130), nn.ReLU(), nn.Linear(130, INPUTS))
        critic = nn.Sequential(nn.Linear(INPUTS, 128), nn.LeakyReLU(), nn.Linear(128, 1))
        return nn.ModuleDict({"generator": generator, "critic": critic})

    def make_optimizers(self) -> list[Optimizer]:
        return [
            torch.optim.Adam(self.model["generator"].parameters(), lr=0.002, betas=(0.5, 0.9)),
            torch.optim.RMSprop(self.model["critic"].parameters(), lr=0.002),
        ]

    def make_schedulers(self) -> list[Any]:
        return [torch.optim.lr_scheduler.ExponentialLR(each, 0.99) for each in self.optimizers]

    def batch(self, step: int) -> float:
        generator, critic = self.model["generator"], self.model["critic"]
        for _ in range(5):
            self.optimizers[1].zero_grad()
            fake = generator(torch.randn(16, 8)).detach()
            loss = critic(fake).mean() - critic(self.inputs()[0]).mean()
            loss.backward()
            self.optimizers[1].step()
        self.at("before step")
        self.optimizers[0].zero_grad()
        generator_loss = -critic(generator(torch.randn(16, 8))).mean()
        generator_loss.backward()
        self.optimizers[0].step()
        self.at("after step")
        for scheduler in self.schedulers:
            scheduler.step()
        return float(loss) + float(generator_loss)


class KeptGradients(Adversarial):
    """The generator steps first, and what it leaves on the critic is set to zero in place, not taken away."""

    def batch(self, step: int) -> float:
        generator, critic = self.model["generator"], self.model["critic"]
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=False)
        generator_loss = -critic(generator(torch.randn(16, 8))).mean()
        generator_loss.backward()
        self.optimizers[0].step()
        self.at("before step")
        self.optimizers[1].zero_grad(set_to_none=False)
        # Every other batch reaches a part of the critic only: the rest steps with gradients of zero.
        part = critic[2:] if step % 2 else critic
        loss = part(torch.randn(16, 128 if step % 2 else INPUTS)).square().mean()
        loss.backward()
        self.optimizers[1].step()
        self.at("after step")
        for scheduler in self.schedulers:
            scheduler.step()
        return float(loss) + float(generator_loss)


class StepInBackward(Training):
    """An optimizer for each parameter, stepped by a hook as soon as its gradient is there."""

    def make_optimizers(self) -> list[Optimizer]:
        own = {param: torch.optim.AdamW([param], lr=0.01) for param in self.model.parameters()}

        def step(param: Tensor) -> None:
            own[param].step()  # type: ignore[index]
            own[param].zero_grad()  # type: ignore[index]

        for param in own:
            param.register_post_accumulate_grad_hook(step)
        return list(own.values())

    def make_schedulers(self) -> list[Any]:
        return []

    def batch(self, step: int) -> float:
        loss = self.loss(step)
        loss.backward()
        self.at("before step")
        return float(loss)


class Alternating(Training):
    """Two optimizers step the same parameters in turns."""

    def make_optimizers(self) -> list[Optimizer]:
        parameters = list(self.model.parameters())
        return [torch.optim.SGD(parameters, lr=0.05, momentum=0.9), torch.optim.Adam(parameters, lr=0.005)]

    def batch(self, step: int) -> float:
        optimizer = self.optimizers[step % 2]
        optimizer.zero_grad()
        loss = self.loss(step)
        loss.backward()
        self.at("before step")
        optimizer.step()
        self.at("after step")
        self.schedulers[0].step()
        return float(loss)


class Projection(Training):
    """A hook of the user's own on the optimizer keeps rows of weights at a length, after every step."""

    def make_optimizers(self) -> list[Optimizer]:
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)

        @torch.no_grad()
        def project(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            weight = self.model[0].weight
            weight.div_(weight.norm(dim=1, keepdim=True).clamp(min=0.5))

        optimizer.register_step_post_hook(project)
        return [optimizer]


class GradientPenalty(Training):
    """A second backward through the gradients of a first."""

    def loss(self, step: int) -> Tensor:
        x, y = self.inputs()
        x.requires_grad_()
        loss = functional.cross_entropy(self.model(x), y)
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        return loss + gradient.square().sum()


class Accumulation(Training):
    """An optimizer step every third micro-batch; commit() is called after each."""

    def batch(self, step: int) -> float:
        loss = self.loss(step) / 3
        loss.backward()
        if step % 3 == 0:
            self.at("before step")
            self.optimizers[0].step()
            self.at("after step")
            self.optimizers[0].zero_grad()
            self.schedulers[0].step()
        return float(loss)


class Idle(Training):
    """Two of three batches only look at data: buffers and generators move, no optimizer steps."""

    def batch(self, step: int) -> float:
        if step % 3 == 0:
            return super().batch(step)
        with torch.no_grad():
            return float(self.loss(step))


class Closure(Training):
    """The optimizer evaluates the loss inside its step."""

    def batch(self, step: int) -> float:
        losses = []

        def closure() -> Tensor:
            self.optimizers[0].zero_grad()
            loss = self.loss(step)
            loss.backward()
            losses.append(float(loss))
            return loss

        self.optimizers[0].step(closure)
        self.at("after step")
        self.schedulers[0].step()
        return losses[-1]


# What happens to gradients


class ClipNorm(Training):
    def change_gradients(self, step: int) -> None:
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.3)


class ClipNormParts(Training):
    """Parts are clipped on their own, one of them twice."""

    def change_gradients(self, step: int) -> None:
        nn.utils.clip_grad_norm_(self.model[0].parameters(), 0.2, norm_type=math.inf)
        nn.utils.clip_grad_norm_(self.model[4].parameters(), 0.2, foreach=False)
        nn.utils.clip_grad_norm_(self.model[4].weight, 0.1)


class ClipValue(Training):
    def change_gradients(self, step: int) -> None:
        nn.utils.clip_grad_value_(self.model.parameters(), 0.01)


class OwnClipping(Training):
    """Clipping that torch does not know, from `since` on."""

    def __init__(self, since: int = 1) -> None:
        self._since = since
        super().__init__()

    def change_gradients(self, step: int) -> None:
        if step < self._since:
            return
        for param in self.model.parameters():
            assert param.grad is not None
            param.grad.mul_(0.5 / (param.grad.norm() + 1e-3))


class MaskedRow(Training):
    """One row of one gradient is zeroed, from step 6 on: nothing that a look at a few values would show."""

    def change_gradients(self, step: int) -> None:
        if step >= 6:
            assert self.model[0].weight.grad is not None
            self.model[0].weight.grad[17] = 0.0


class ReplacedGradient(Training):
    """Gradients are replaced by other tensors, from step 6 on."""

    def change_gradients(self, step: int) -> None:
        if step >= 6:
            weight = self.model[0].weight
            changed = weight.grad.clone()
            changed[3, 5] += 1.0
            weight.grad = changed


class GradientNoise(Training):
    def change_gradients(self, step: int) -> None:
        for param in self.model.parameters():
            assert param.grad is not None
            param.grad.add_(torch.randn_like(param.grad), alpha=0.01)


class ManualScale(Training):
    """A loss scale of the user's own, divided out in place."""

    def loss(self, step: int) -> Tensor:
        return super().loss(step) * 1024

    def change_gradients(self, step: int) -> None:
        for param in self.model.parameters():
            assert param.grad is not None
            param.grad.div_(1024)


class Scaler(Training):
    """GradScaler with fp16 autocast; the gradients of step 6 overflow, so that its optimizer step is skipped."""

    def __init__(self, fused: bool, clip: bool) -> None:
        self._fused, self._clip = fused, clip
        super().__init__()
        self.scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=4)
        self.registered["scaler"] = self.scaler

    def make_optimizers(self) -> list[Optimizer]:
        return [torch.optim.AdamW(self.model.parameters(), lr=1e-2, fused=self._fused)]

    def batch(self, step: int) -> float:
        optimizer = self.optimizers[0]
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = self.loss(step)
        scaled = self.scaler.scale(loss)
        (scaled * math.inf if step == 6 else scaled).backward()
        if self._clip:
            self.scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), 0.3)
        self.at("before step")
        self.scaler.step(optimizer)
        self.at("after step")
        self.scaler.update()
        self.schedulers[0].step()
        return float(loss)

    def commit_arguments(self, step: int) -> dict[str, Any]:
        return {"gradients_pending": False}


class Bf16Autocast(Training):
    def loss(self, step: int) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().loss(step)


class Bf16Parameters(Training):
    def __init__(self, make: MakeOptimizer) -> None:
        self._make = make
        super().__init__()

    def make_model(self) -> nn.Module:
        # Sizes that are no multiple of a vector register.
        model = nn.Sequential(nn.Linear(INPUTS, 257), nn.ReLU(), nn.Linear(257, CLASSES))
        return model.to(torch.bfloat16)

    def make_optimizers(self) -> list[Optimizer]:
        return [self._make(list(self.model.parameters()))]

    def inputs(self) -> tuple[Tensor, Tensor]:
        x, y = super().inputs()
        return x.to(torch.bfloat16), y


# Groups and learning rates


class Groups(Training):
    """Two groups with learning rates of their own, changed by a schedule and by hand."""

    def make_optimizers(self) -> list[Optimizer]:
        settings = [
            {"params": self.model[0].parameters(), "lr": 0.02, "weight_decay": 0.1},
            {"params": [*self.model[1].parameters(), *self.model[4].parameters()], "lr": 0.01},
        ]
        return [torch.optim.AdamW(settings)]

    def make_schedulers(self) -> list[Any]:
        return [torch.optim.lr_scheduler.LambdaLR(self.optimizers[0], [lambda n: 0.95**n, lambda n: 1 / (1 + n)])]

    def change_gradients(self, step: int) -> None:
        if step == 12:
            self.optimizers[0].param_groups[0]["weight_decay"] = 0.3


class TensorRate(Training):
    """A learning rate that is a tensor, changed in place."""

    def make_optimizers(self) -> list[Optimizer]:
        return [torch.optim.Adam(self.model.parameters(), lr=torch.tensor(0.02), foreach=False)]

    def make_schedulers(self) -> list[Any]:
        return [torch.optim.lr_scheduler.ExponentialLR(self.optimizers[0], 0.9)]


class OneCycle(Training):
    """The schedule changes momentum together with the learning rate."""

    def make_schedulers(self) -> list[Any]:
        return [torch.optim.lr_scheduler.OneCycleLR(self.optimizers[0], max_lr=0.05, total_steps=STEPS + 1)]


class AddedGroup(Training):
    """The first layer joins the optimizer at step 8."""

    def make_optimizers(self) -> list[Optimizer]:
        return [torch.optim.AdamW(self.model[4].parameters(), lr=1e-2)]

    def make_schedulers(self) -> list[Any]:
        return []

    def batch(self, step: int) -> float:
        if step == 8:
            added = {"params": list(self.model[0].parameters()), "lr": 5e-3, "weight_decay": 0.2}
            self.optimizers[0].add_param_group(added)
        self.model.zero_grad()
        return super().batch(step)


class Unfrozen(Training):
    """The first layer is frozen before step 8 and again from step 16 on."""

    def make_optimizers(self) -> list[Optimizer]:
        self.model[0].requires_grad_(False)
        return super().make_optimizers()

    def batch(self, step: int) -> float:
        if step in (8, 16):
            self.model[0].requires_grad_(step == 8)
        return super().batch(step)


# Parameters and buffers


class TiedNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(260, 32)
        self.middle = nn.Linear(32, 32)
        self.decode = nn.Linear(32, 260, bias=False)
        self.decode.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.decode(torch.relu(self.middle(self.embed(x))))


class Tied(Training):
    def make_model(self) -> nn.Module:
        return TiedNet()

    def inputs(self) -> tuple[Tensor, Tensor]:
        return torch.randint(0, 260, (32,)), torch.randint(0, 260, (32,))


class BranchNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(INPUTS, 128)
        self.extra = nn.Linear(128, 128)
        self.never = nn.Linear(7, 7)
        self.head = nn.Linear(128, CLASSES)
        self.use_extra = False

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.trunk(x))
        if self.use_extra:
            x = torch.relu(self.extra(x))
        return self.head(x)


class Unused(Training):
    """Some parameters have a gradient only in every third batch, some never."""

    def make_model(self) -> nn.Module:
        return BranchNet()

    def loss(self, step: int) -> Tensor:
        self.model.use_extra = step % 3 == 2
        return super().loss(step)


class ChannelsLast(Training):
    def make_model(self) -> nn.Module:
        model = nn.Sequential(
            nn.Conv2d(3, 48, 3),
            nn.BatchNorm2d(48),
            nn.ReLU(),
            nn.Conv2d(48, 24, 3),
            nn.Flatten(),
            nn.Linear(384, CLASSES),
        )
        return model.to(memory_format=torch.channels_last)

    def inputs(self) -> tuple[Tensor, Tensor]:
        x = torch.randn(8, 3, 8, 8).to(memory_format=torch.channels_last)
        return x, torch.randint(0, CLASSES, (8,))


class OddNet(nn.Module):
    """Parameters without dimensions and without elements, transposed, complex, and in double precision."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.transposed = nn.Parameter(torch.randn(CLASSES, INPUTS).t())
        self.bias64 = nn.Parameter(torch.randn(CLASSES, dtype=torch.float64))
        self.phase = nn.Parameter(torch.randn(CLASSES, dtype=torch.complex64))
        self.last = nn.Linear(CLASSES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = x @ self.transposed * self.scale + self.bias64.float() + self.empty.sum() + self.phase.abs()
        return self.last(x)


class Odd(Training):
    def make_model(self) -> nn.Module:
        return OddNet()


class BufferNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(INPUTS, CLASSES)
        self.register_buffer("hidden", torch.zeros(INPUTS), persistent=False)
        self.register_buffer("replaced", torch.ones(CLASSES))
        self.register_buffer("large", torch.randn(20_000))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("flags", torch.zeros(5, dtype=torch.bool))
        self.last = nn.Linear(CLASSES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.hidden.mul_(0.9).add_(x.mean(0), alpha=0.1)
            self.count += 1
            self.flags[int(self.count) % 5] ^= True
        return self.last(self.linear(x - self.hidden) * self.large[:CLASSES] * self.replaced)


class Buffers(Training):
    """Buffers of all kinds; the large one changes at steps 10 and 15, behind autograd's back the second time."""

    def make_model(self) -> nn.Module:
        return BufferNet()

    def batch(self, step: int) -> float:
        if step == 10:
            self.model.large.add_(1.0)
        if step == 15:
            self.model.large.mul_(0.5)
        return super().batch(step)


class ReplacedBuffer(Training):
    """A buffer that is assigned anew at every step, as running statistics often are."""

    def make_model(self) -> nn.Module:
        return BufferNet()

    def batch(self, step: int) -> float:
        self.model.replaced = self.model.replaced * 0.95 + 0.1
        return super().batch(step)


class MovingAverage(Training):
    """An averaged copy of the model, outside of it."""

    def __init__(self) -> None:
        super().__init__()
        self.average = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
        self.extra_modules["average"] = self.average

    def batch(self, step: int) -> float:
        loss = super().batch(step)
        self.average.update_parameters(self.model)
        return loss


# Changes by hand


class ChangedByHand(Training):
    """A parameter is changed between steps: `how` is see `by_hand`."""

    def __init__(self, how: str, at_step: int = 7) -> None:
        self._how, self._at_step = how, at_step
        super().__init__()

    def batch(self, step: int) -> float:
        weight = self.model[0].weight
        if step == self._at_step:
            match self._how:
                case "no_grad":
                    with torch.no_grad():
                        weight.add_(1.0)
                case "data":
                    weight.data.add_(1.0)
                case "one element":
                    weight.data.view(-1)[5000] += 1.0
                case "optimizer state":
                    self.optimizers[0].state[weight]["exp_avg"].mul_(0.5)
                case "other storage":
                    weight.data = weight.data.clone() + 1.0
        loss = super().batch(step)
        if self._how == "every step":  # as a critic's weights are clipped in a Wasserstein GAN
            for param in self.model.parameters():
                param.data.clamp_(-0.1, 0.1)
        return loss


class Compiled(Training):
    """The model is compiled; the checkpointed names are those of the plain one."""

    def watch_points(self) -> None:
        self.compiled = torch.compile(self.model, backend="aot_eager")

    def loss(self, step: int) -> Tensor:
        x, y = self.inputs()
        return functional.cross_entropy(self.compiled(x), y)


PLAIN = Case("plain", Training)

OPTIMIZER_CASES = [Case(name, lambda make=make: OneOptimizer(make)) for name, make in OPTIMIZERS.items()]
OPTIMIZER_CASES += [Case("muon", Muon)]
OPTIMIZER_CASES += [
    Case(name, lambda name=name: SparseEmbedding(name)) for name in ("sparse-adam", "sparse-adagrad", "sparse-sgd")
]

SHAPE_CASES = [
    Case("adversarial", Adversarial),
    Case("kept-gradients", KeptGradients),
    Case("step-in-backward", StepInBackward),
    Case("gradient-penalty", GradientPenalty),
    Case("alternating", Alternating),
    Case("projection", Projection),
    Case("idle", Idle),
    Case("closure", Closure),
    Case("clip-norm", ClipNorm),
    Case("clip-norm-parts", ClipNormParts),
    Case("clip-value", ClipValue),
    Case("scaler", lambda: Scaler(fused=False, clip=False)),
    Case("scaler-clip", lambda: Scaler(fused=False, clip=True)),
    Case("scaler-fused", lambda: Scaler(fused=True, clip=False)),
    Case("scaler-fused-clip", lambda: Scaler(fused=True, clip=True)),
    Case("bf16-autocast", Bf16Autocast),
    Case("bf16-adamw", lambda: Bf16Parameters(lambda p: torch.optim.AdamW(p, lr=0.01))),
    Case("bf16-adamw-fused", lambda: Bf16Parameters(lambda p: torch.optim.AdamW(p, lr=0.01, fused=True))),
    Case("bf16-sgd", lambda: Bf16Parameters(lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, foreach=True))),
    Case("groups", Groups),
    Case("tensor-rate", TensorRate),
    Case("one-cycle", OneCycle),
    Case("added-group", AddedGroup),
    Case("unfrozen", Unfrozen),
    Case("tied", Tied),
    Case("unused", Unused),
    Case("channels-last", ChannelsLast),
    Case("odd", Odd),
    Case("buffers", Buffers),
    Case("replaced-buffer", ReplacedBuffer),
    Case("moving-average", MovingAverage),
]

UNKNOWN_CHANGE_CASES = [
    Case("own-clipping", OwnClipping),
    Case("own-clipping-late", lambda: OwnClipping(since=8)),
    Case("masked-row", MaskedRow),
    Case("replaced-gradient", ReplacedGradient),
    Case("gradient-noise", GradientNoise),
    Case("manual-scale", ManualScale),
]

ACCUMULATION = Case("accumulation", Accumulation)
COMPILED = Case("compiled", Compiled, steps=12)


def by_hand(how: str) -> Case:
    """The case in which a parameter is changed by hand.

    At step 7: "no_grad" (seen by version counters), "data" and "other storage" (not seen by them), "one element" and
    "optimizer state" (seen by nothing but an audit). "every step": all parameters are clamped after each step.
    """
    return Case(f"by-hand {how}", lambda: ChangedByHand(how))
