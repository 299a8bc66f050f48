"""Trainings that step, or change their gradients, in ways that make per-step recovery hard."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

from tests.support.trainings.engine_optimizers import MakeOptimizer, OneOptimizer
from tests.support.trainings.engine_training import CLASSES, INPUTS, Training

# Order and number of steps


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
    """The generator steps first, and its gradients on the critic are zeroed in place, not set to None."""

    def batch(self, step: int) -> float:
        generator, critic = self.model["generator"], self.model["critic"]
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=False)
        generator_loss = -critic(generator(torch.randn(16, 8))).mean()
        generator_loss.backward()
        self.optimizers[0].step()
        self.at("before step")
        self.optimizers[1].zero_grad(set_to_none=False)
        # Every other batch reaches only a part of the critic: the rest steps with gradients of zero.
        part = critic[2:] if step % 2 else critic
        loss = part(torch.randn(16, 128 if step % 2 else INPUTS)).square().mean()
        loss.backward()
        self.optimizers[1].step()
        self.at("after step")
        for scheduler in self.schedulers:
            scheduler.step()
        return float(loss) + float(generator_loss)


class Interrupted(Training):
    """Every third backward raises half way, as if out of memory, and the batch is tried again."""

    def loss(self, step: int) -> Tensor:
        if step % 3 == 0:
            handle = self.model[0].weight.register_hook(self._raise)
            with contextlib.suppress(MemoryError):
                super().loss(step).backward()
            handle.remove()
            self.optimizers[0].zero_grad(set_to_none=step % 2 == 0)
        return super().loss(step)

    def _raise(self, gradient: Tensor) -> Tensor:
        raise MemoryError("on the device")


class ZeroedInPlace(Training):
    """Gradients are zeroed in place right after the step, before the batch is committed."""

    def batch(self, step: int) -> float:
        loss = super().batch(step)
        self.optimizers[0].zero_grad(set_to_none=False)
        return loss


class StepInBackward(Training):
    """One optimizer per parameter, stepped by a hook as soon as its gradient exists."""

    def make_optimizers(self) -> list[Optimizer]:
        own: dict[Tensor, Optimizer] = {param: torch.optim.AdamW([param], lr=0.01) for param in self.model.parameters()}

        def step(param: Tensor) -> None:
            own[param].step()
            own[param].zero_grad()

        for param in self.model.parameters():
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
    """A user's hook on the optimizer normalizes rows of weights after every step."""

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


class AnnouncedAccumulation(Accumulation):
    """Each micro-batch is announced to be the last or not; with `lies` none of them is."""

    def __init__(self, lies: bool = False) -> None:
        super().__init__()
        self._step = 0
        self.accumulates = lambda: lies or self._step % 3 > 0

    def batch(self, step: int) -> float:
        self._step = step
        return super().batch(step)


class Idle(Training):
    """Two of three batches only read data: buffers and generators move, no optimizer steps."""

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


# What is changed right before a step


class BeforeStep(Training):
    """`change` is called at the last moment before some steps, by training or in a pre-hook that is registered late.

    Args:
        change: takes the training and the step.
        make: makes the optimizers.
        hooked: a pre-hook calls it.
        closure: the step is given a closure, and `change` is called in it.
    """

    def __init__(
        self,
        change: Callable[[BeforeStep, int], Any],
        make: MakeOptimizer = lambda params: torch.optim.Adam(params, lr=0.01),
        hooked: bool = False,
        closure: bool = False,
    ) -> None:
        self._change, self._make, self._hooked, self._closure = change, make, hooked, closure
        super().__init__()

    def make_optimizers(self) -> list[Optimizer]:
        return [self._make(list(self.model.parameters()))]

    def begin(self, step: int) -> None:
        if self._hooked:
            self.optimizers[0].register_step_pre_hook(lambda *_: self._change(self, self._step))

    def change_gradients(self, step: int) -> None:
        if not self._hooked:
            self._change(self, step)

    def batch(self, step: int) -> float:
        self._step = step
        if not self._closure:
            return super().batch(step)

        def closure() -> Tensor:
            self.optimizers[0].zero_grad()
            loss = self.loss(step)
            loss.backward()
            self.change_gradients(step)
            return loss

        found = self.optimizers[0].step(closure)
        self.schedulers[0].step()
        return float(found)


def decay(training: BeforeStep, step: int) -> None:
    """Decay weights by hand, now and then: the record stays one of redo."""
    if step % 3 == 0:
        for param in training.model.parameters():
            param.data.mul_(0.9)


def halve_gradients(training: BeforeStep, step: int) -> None:
    for param in training.model.parameters():
        assert param.grad is not None
        param.grad.mul_(0.5)


def switch_nesterov(training: BeforeStep, step: int) -> None:
    if step == 5:
        training.optimizers[0].param_groups[0].update(momentum=0.9, nesterov=True)


def take_turns(training: BeforeStep, step: int) -> None:
    """Let two groups of equal size change places."""
    if step in (6, 12):
        one, other = training.optimizers[0].param_groups
        one["params"], other["params"] = other["params"], one["params"]


def hook_base_class(training: BeforeStep, step: int) -> None:
    if step >= 5:
        torch.optim.RMSprop([torch.zeros(1)])


class BetweenSteps(Training):
    """The first optimizer's weights are clamped through ``.data`` behind its step, and before the second one's."""

    def make_optimizers(self) -> list[Optimizer]:
        layers = (self.model[0], self.model[-1])
        return [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in layers]

    def batch(self, step: int) -> float:
        self._step = step
        return super().batch(step)

    def watch_points(self) -> None:
        super().watch_points()
        self._step = 0
        self.optimizers[1].register_step_pre_hook(lambda *_: self._clamp())

    def _clamp(self) -> None:
        if self._step % 3 == 0:
            self.model[0].weight.data.clamp_(-0.1, 0.1)


class AmbientStep(OneOptimizer):
    """Steps inside autocast, with settings of torch that are not its defaults."""

    def begin(self, step: int) -> None:
        torch.set_float32_matmul_precision("medium")
        torch.set_flush_denormal(True)

    def batch(self, step: int) -> float:
        with torch.autocast("cpu", torch.bfloat16, enabled=step % 2 == 0):
            return super().batch(step)


# Changes of gradients


class ClipNorm(Training):
    def change_gradients(self, step: int) -> None:
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.3)


class Scalar(ClipNorm):
    """Clips gradients of several dtypes, one of them without dimensions."""

    def make_model(self) -> nn.Module:
        model = super().make_model()
        model.register_parameter("scale", nn.Parameter(torch.tensor(1.3, dtype=torch.bfloat16)))
        return model

    def loss(self, step: int) -> Tensor:
        return super().loss(step) * self.model.scale


class ClipNormParts(Training):
    """Parts are clipped separately, one of them twice."""

    def change_gradients(self, step: int) -> None:
        nn.utils.clip_grad_norm_(self.model[0].parameters(), 0.2, norm_type=math.inf)
        nn.utils.clip_grad_norm_(self.model[4].parameters(), 0.2, foreach=False)
        nn.utils.clip_grad_norm_(self.model[4].weight, 0.1)


class ClipGivenNorm(Training):
    """The norm is computed first, as when it has to be added up over meshes or stages."""

    def change_gradients(self, step: int) -> None:
        params = list(self.model.parameters())
        norm = nn.utils.get_total_norm([param.grad for param in params if param.grad is not None])
        nn.utils.clip_grads_with_norm_(params, 0.2, norm)


class ClipValue(Training):
    def change_gradients(self, step: int) -> None:
        nn.utils.clip_grad_value_(self.model.parameters(), 0.01)


class OwnClipping(Training):
    """Clipping that torch does not know, from step `since` on."""

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
    """One row of one gradient is zeroed, from step 6 on, which a sample of a few values would miss."""

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
    """A user-defined loss scale, divided out in place."""

    def loss(self, step: int) -> Tensor:
        return super().loss(step) * 1024

    def change_gradients(self, step: int) -> None:
        for param in self.model.parameters():
            assert param.grad is not None
            param.grad.div_(1024)


class Scaler(Training):
    """GradScaler with fp16 autocast; the gradients of step 6 overflow, so its optimizer step is skipped."""

    def __init__(self, fused: bool, clip: bool) -> None:
        self._fused, self._clip = fused, clip
        super().__init__()
        self.scaler = torch.amp.GradScaler(self.device_type, init_scale=256.0, growth_interval=4)
        self.registered["scaler"] = self.scaler

    def make_optimizers(self) -> list[Optimizer]:
        return [torch.optim.AdamW(self.model.parameters(), lr=1e-2, fused=self._fused)]

    def batch(self, step: int) -> float:
        optimizer = self.optimizers[0]
        optimizer.zero_grad()
        with torch.autocast(self.device_type, torch.float16):
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
        with torch.autocast(self.device_type, torch.bfloat16):
            return super().loss(step)


class OtherGradients(Training):
    """Parameters in bf16 with gradients in fp32.

    Args:
        make: makes the optimizer.
        since: the first step with fp32 gradients; before, they are in bf16.
    """

    def __init__(self, make: MakeOptimizer, since: int = 1) -> None:
        self._make, self._since = make, since
        super().__init__()

    def make_model(self) -> nn.Module:
        model = nn.Sequential(nn.Linear(INPUTS, 250), nn.ReLU(), nn.Linear(250, CLASSES)).to(torch.bfloat16)
        for param in model.parameters():
            param.grad_dtype = torch.float32 if self._since == 1 else None
        return model

    def make_optimizers(self) -> list[Optimizer]:
        return [self._make(list(self.model.parameters()))]

    def loss(self, step: int) -> Tensor:
        x, y = self.inputs()
        return functional.cross_entropy(self.model(x.bfloat16()).float(), y)

    def change_gradients(self, step: int) -> None:
        if step >= self._since:
            for param in self.model.parameters():
                assert param.grad is not None
                # Values that bf16 cannot represent.
                param.grad = param.grad.float() * 1.0009765 + 1e-4


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
