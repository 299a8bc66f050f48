"""Trainings whose state has a form, or changes in a way, that makes per-step recovery hard."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer
from torch.optim import lr_scheduler as schedules
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tests.support.trainings.engine_training import CLASSES, INPUTS, STEPS, Case, Training, case_of

# Groups and learning rates


def two_groups(params: list[nn.Parameter]) -> Optimizer:
    groups = [{"params": params[:2], "lr": 0.02, "weight_decay": 0.1}, {"params": params[2:], "lr": 0.01}]
    return torch.optim.AdamW(groups)


def decay_more(training: Training, step: int) -> None:
    if step == 12:
        training.optimizers[0].param_groups[0]["weight_decay"] = 0.3


class AddedGroup(Training):
    """The first layer joins the optimizer at step 8."""

    scheduled = False
    make = staticmethod(lambda params: torch.optim.AdamW(params[4:], lr=1e-2))

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


def tied_net() -> nn.Module:
    embed, decode = nn.Embedding(260, 32), nn.Linear(32, 260, bias=False)
    decode.weight = embed.weight
    return nn.Sequential(embed, nn.Linear(32, 32), nn.ReLU(), decode)


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


def use_branch(training: Training, step: int) -> None:
    """Some parameters have a gradient only in every third batch, some never."""
    training.model.use_extra = step % 3 == 2


class ChannelsLast(Training):
    def make_model(self) -> nn.Module:
        first, second = nn.Conv2d(3, 48, 3), nn.Conv2d(48, 24, 3)
        model = nn.Sequential(first, nn.BatchNorm2d(48), nn.ReLU(), second, nn.Flatten(), nn.Linear(384, CLASSES))
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


def change_buffer(training: Training, step: int) -> None:
    """Change the large one, the second time unseen by autograd."""
    if step == 10:
        training.model.large.add_(1.0)
    if step == 15:
        training.model.large.mul_(0.5)


def replace_buffer(training: Training, step: int) -> None:
    """Replace one at every step, as running statistics often are."""
    training.model.replaced = training.model.replaced * 0.95 + 0.1


class MovingAverage(Training):
    """An averaged copy of the model, outside of it."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.average = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
        self.extra_modules["average"] = self.average

    def batch(self, step: int) -> float:
        loss = super().batch(step)
        self.average.update_parameters(self.model)
        return loss


class MomentumEncoder(Training):
    """A frozen copy of the model that follows it, unseen by the version counters."""

    how = "data"  # writes through ``.data``; "assign" replaces the tensor
    since = 1  # the first step after which it follows
    make = staticmethod(lambda params: torch.optim.AdamW(params[:4], lr=1e-2))

    def make_model(self) -> nn.Module:
        query = nn.Sequential(nn.Linear(INPUTS, 256), nn.ReLU(), nn.Linear(256, CLASSES))
        key = copy.deepcopy(query).requires_grad_(False)
        return nn.ModuleDict({"query": query, "key": key})

    def watch_points(self) -> None:
        pass

    def loss_of(self, x: Tensor, y: Tensor) -> Tensor:
        out = self.model["query"](x)
        return functional.cross_entropy(out, y) + (out - self.model["key"](x)).square().mean()

    def batch(self, step: int) -> float:
        loss = super().batch(step)
        if step >= self.since:
            for ours, theirs in zip(self.model["query"].parameters(), self.model["key"].parameters(), strict=True):
                if self.how == "data":
                    theirs.data.mul_(0.9).add_(ours.data, alpha=0.1)
                else:
                    theirs.data = theirs.data * 0.9 + ours.data * 0.1
        return loss


# Changes by hand


class ChangedByHand(Training):
    """A parameter is changed between steps; for `how` see `by_hand`."""

    how = ""

    def batch(self, step: int) -> float:
        weight = self.model[0].weight
        if step == 7:
            match self.how:
                case "no_grad":
                    with torch.no_grad():
                        weight.add_(1.0)
                case "data":
                    weight.data.add_(1.0)
                case "one element":
                    weight.data.view(-1)[5000] += 1.0
                case "optimizer state":
                    self.optimizers[0].state[weight]["exp_avg"].mul_(0.5)
                case "optimizer data":
                    self.optimizers[0].state[weight]["exp_avg"].data.view(-1)[5000] += 0.25
                case "other storage":
                    weight.data = weight.data.clone() + 1.0
        if self.how == "now and then" and step % 4 == 0:
            weight.data.view(-1)[(step - 4) * 411] += 1.0
        loss = super().batch(step)
        if self.how == "every step":  # like the weight clipping of a Wasserstein GAN's critic
            for param in self.model.parameters():
                param.data.clamp_(-0.1, 0.1)
        if self.how.startswith("behind the step") and step % 6 == 0:
            moments = self.optimizers[0].state[weight]["exp_avg"]
            (moments if self.how.endswith("counted") else moments.data).view(-1)[(step - 6) * 411] += 0.25
        return loss


# Compiled


def rounding_otherwise(graph: torch.fx.GraphModule, inputs: Any) -> Any:
    """A compiler backend whose square roots differ by one unit in the last place, as those of other kernels may."""
    for node in graph.graph.nodes:
        if node.op == "call_method" and node.target == "sqrt":
            node.op, node.target = "call_function", lambda value: torch.nextafter(value.sqrt(), value + 1)
    graph.recompile()
    return graph.forward


class CompiledStep(Training):
    """The optimizer's step is compiled, from step `since` on."""

    since = 1
    scheduled = False  # each learning rate would be another kernel

    def make_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(INPUTS, 16), nn.ReLU(), nn.Linear(16, CLASSES))

    def watch_points(self) -> None:
        super().watch_points()
        self.compiled = torch.compile(lambda: self.optimizers[0].step(), backend=rounding_otherwise)

    def take_step(self, step: int) -> None:
        self.at("before step")
        self.compiled() if step >= self.since else self.optimizers[0].step()
        self.at("after step")


class Compiled(Training):
    """The model is compiled; checkpointed names are those of the plain one."""

    def watch_points(self) -> None:
        self.compiled = torch.compile(self.model, backend="aot_eager")

    def loss_of(self, x: Tensor, y: Tensor) -> Tensor:
        return functional.cross_entropy(self.compiled(x), y)


# Tensors that torch treats specially


class CacheNet(nn.Module):
    """Two buffers that an evaluation replaces: one is copied with every record, one is not."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(INPUTS, CLASSES)
        self.last = nn.Linear(CLASSES, CLASSES)
        self.register_buffer("small", torch.zeros(CLASSES), persistent=False)
        self.register_buffer("large", torch.zeros(20_000), persistent=False)
        self.register_buffer("unused", torch.zeros(20_000), persistent=False)
        with torch.inference_mode():
            self.unused = torch.ones(20_000)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.linear(x) + self.small.clone() + self.large[:CLASSES].clone())


def evaluate(training: Training, step: int) -> None:
    """Make inference tensors of all buffers: one of them is one from the start."""
    if step == 6:
        with torch.inference_mode():
            training.model.small = torch.arange(CLASSES) * 0.1
            training.model.large = torch.arange(20_000) * 0.001
            training.model.unused.add_(1.0)


class DoubleComplexNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Parameter(torch.randn(INPUTS, 100, dtype=torch.complex128))
        self.phase = nn.Parameter(torch.randn(100, dtype=torch.complex128))
        self.last = nn.Linear(100, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.last((x.to(torch.complex128) @ self.wide * self.phase).abs().float())


# Cases


def fused(params: list[nn.Parameter]) -> Optimizer:
    """Fused kernels process memory in its order, whatever the strides."""
    return torch.optim.AdamW(params, lr=1e-2, fused=True)


def tensor_rate(params: list[nn.Parameter]) -> Optimizer:
    """A learning rate that a schedule changes in place."""
    return torch.optim.Adam(params, lr=torch.tensor(0.02), foreach=False)


def of_tokens() -> tuple[Tensor, Tensor]:
    return torch.randint(0, 260, (32,)), torch.randint(0, 260, (32,))


def by_groups(optimizer: Optimizer) -> Any:
    return schedules.LambdaLR(optimizer, [lambda n: 0.95**n, lambda n: 1 / (1 + n)])


SHAPES_OF_STATE = [
    case_of("groups", make=two_groups, schedule=by_groups, change=decay_more),
    case_of("tensor-rate", make=tensor_rate, schedule=lambda optimizer: schedules.ExponentialLR(optimizer, 0.9)),
    # It changes momentum, too.
    case_of("one-cycle", schedule=lambda optimizer: schedules.OneCycleLR(optimizer, 0.05, total_steps=STEPS + 1)),
    case_of("added-group", AddedGroup),
    case_of("unfrozen", Unfrozen),
    case_of("tied", net=tied_net, inputs=of_tokens),
    case_of("unused", net=BranchNet, before=use_branch),
    case_of("channels-last", ChannelsLast),
    case_of("channels-last-fused", ChannelsLast, make=fused),
    case_of("odd", net=OddNet),
    case_of("buffers", net=BufferNet, before=change_buffer),
    case_of("replaced-buffer", net=BufferNet, before=replace_buffer),
    case_of("moving-average", MovingAverage),
]
MOMENTUM_ENCODER_CASES = [
    case_of("momentum-data", MomentumEncoder),
    case_of("momentum-assign", MomentumEncoder, how="assign"),
    # The full checks of values are over by then.
    case_of("momentum-data-late", MomentumEncoder, since=9),
]
COMPILED = case_of("compiled", Compiled, steps=12)
COMPILED_STEP = case_of("compiled-step", CompiledStep, steps=12)
COMPILED_LATER = case_of("compiled-later", CompiledStep, steps=12, since=5)
INFERENCE_TENSORS = case_of("inference-tensors", net=CacheNet, before=evaluate)
DOUBLE_COMPLEX = case_of("double-complex", net=DoubleComplexNet)


def by_hand(how: str) -> Case:
    """The case in which a parameter is changed by hand.

    At step 7: "no_grad" and "optimizer state" (seen by version counters), "data" and "other storage" (not seen by
    them), "one element" (of many: seen only by an audit). "every step": all parameters are clamped after each step.
    "now and then": one element in each fourth step, the first of them in the sample of large tensors.
    """
    return case_of(f"by-hand {how}", ChangedByHand, how=how)
