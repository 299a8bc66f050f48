"""Trainings that step, or change their gradients, in ways that make per-step recovery hard."""

from __future__ import annotations

import contextlib
import math
import os
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.optim import SGD, Optimizer

from tests.support.trainings.engine_optimizers import Around, LatePhase, Products, Rebinding
from tests.support.trainings.engine_state import BranchNet
from tests.support.trainings.engine_training import CLASSES, INPUTS, Case, Training, case_of

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

    def step_critic(self) -> Tensor:
        generator, critic = self.model["generator"], self.model["critic"]
        loss = critic(generator(torch.randn(16, 8)).detach()).mean() - critic(self.inputs()[0]).mean()
        loss.backward()
        self.optimizers[1].step()
        return loss

    def step_generator(self) -> Tensor:
        loss = -self.model["critic"](self.model["generator"](torch.randn(16, 8))).mean()
        loss.backward()
        self.optimizers[0].step()
        return loss

    def end_batch(self) -> None:
        self.at("after step")
        for scheduler in self.schedulers:
            scheduler.step()

    def batch(self, step: int) -> float:
        for _ in range(5):
            self.optimizers[1].zero_grad()
            loss = self.step_critic()
        self.at("before step")
        self.optimizers[0].zero_grad()
        generator_loss = self.step_generator()
        self.end_batch()
        return float(loss) + float(generator_loss)


class KeptGradients(Adversarial):
    """The generator steps first, and its gradients on the critic are zeroed in place, not set to None."""

    def batch(self, step: int) -> float:
        self.zero(to_none=False)
        generator_loss = self.step_generator()
        self.at("before step")
        self.optimizers[1].zero_grad(set_to_none=False)
        # Every other batch reaches only a part of the critic: the rest steps with gradients of zero.
        critic = self.model["critic"]
        part = critic[2:] if step % 2 else critic
        loss = part(torch.randn(16, 128 if step % 2 else INPUTS)).square().mean()
        loss.backward()
        self.optimizers[1].step()
        self.end_batch()
        return float(loss) + float(generator_loss)


class Recycled(Adversarial):
    """A generator's backward leaves gradients on the critic; they are discarded, but in one batch, which uses them."""

    how = "none"  # discarded by ``zero_grad``, as with "zero"; "by hand" without
    used_at = 0  # the batch that uses them; 0 for none

    def batch(self, step: int) -> float:
        if step != self.used_at and self.how == "by hand":
            for param in self.model["critic"].parameters():
                param.grad = None
        elif step != self.used_at:
            self.optimizers[1].zero_grad(set_to_none=self.how == "none")
        loss = self.step_critic()
        self.at("before step")
        self.optimizers[0].zero_grad()
        self.step_generator()
        self.end_batch()
        return float(loss)


class Interrupted(Training):
    """Every third backward raises half way, as if out of memory, and the batch is tried again."""

    def loss(self, step: int) -> Tensor:
        if step % 3 == 0:
            handle = self.model[0].weight.register_hook(self._raise)
            with contextlib.suppress(MemoryError):
                super().loss(step).backward()
            handle.remove()
            self.zero(to_none=step % 2 == 0)
        return super().loss(step)

    def _raise(self, gradient: Tensor) -> Tensor:
        raise MemoryError("on the device")


def zero_in_place(training: Training, step: int) -> None:
    training.zero(to_none=False)


class StepInBackward(Training):
    """One optimizer per parameter, stepped by a hook as soon as its gradient exists."""

    scheduled = False

    def make_optimizers(self) -> list[Optimizer]:
        own: dict[Tensor, Optimizer] = {param: torch.optim.AdamW([param], lr=0.01) for param in self.model.parameters()}

        def step(param: Tensor) -> None:
            own[param].step()
            own[param].zero_grad()

        for param in self.model.parameters():
            param.register_post_accumulate_grad_hook(step)
        return list(own.values())

    def batch(self, step: int) -> float:
        loss = self.loss(step)
        loss.backward()
        self.at("before step")
        return float(loss)


class Alternating(Training):
    """Two optimizers step the same parameters in turns."""

    make = staticmethod(lambda params: [SGD(params, lr=0.05, momentum=0.9), torch.optim.Adam(params, lr=0.005)])

    def stepping(self, step: int) -> Sequence[Optimizer]:
        return [self.optimizers[step % 2]]


def projecting(params: list[nn.Parameter]) -> Optimizer:
    """A user's hook on the optimizer normalizes rows of weights after every step."""

    @torch.no_grad()
    def project(*_: Any) -> None:
        params[0].div_(params[0].norm(dim=1, keepdim=True).clamp(min=0.5))

    optimizer = torch.optim.AdamW(params, lr=1e-2)
    optimizer.register_step_post_hook(project)
    return optimizer


class GradientPenalty(Training):
    """A second backward through the gradients of a first."""

    def loss_of(self, x: Tensor, y: Tensor) -> Tensor:
        loss = super().loss_of(x.requires_grad_(), y)
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        return loss + gradient.square().sum()


class Accumulation(Training):
    """An optimizer step every third micro-batch; commit() is called after each."""

    def backward(self, step: int) -> Tensor:
        loss = self.loss(step) / 3
        loss.backward()
        return loss

    def batch(self, step: int) -> float:
        loss = self.backward(step)
        if step % 3 == 0:
            self.take_step(step)
            self.zero()
        return float(loss)


class AnnouncedAccumulation(Accumulation):
    """Each micro-batch is announced to be the last or not; with `lies` none of them is."""

    lies = False

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.accumulates = lambda: self.lies or self.number % 3 > 0


class Unsynchronized(Accumulation):
    """One rank, as from ``torchrun --nproc_per_node=1``, that reduces only the last gradients of a step."""

    kind = "ddp"  # or "fsdp2"

    def make_model(self) -> nn.Module:
        if not dist.is_initialized():
            store = dist.FileStore(os.path.join(tempfile.mkdtemp(), "store"), 1)
            dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        model = nn.Sequential(nn.Linear(INPUTS, 64), nn.ReLU(), nn.Linear(64, CLASSES))
        if self.kind == "ddp":
            return nn.parallel.DistributedDataParallel(model)
        mesh = init_device_mesh("cpu", (1,))
        fully_shard(model[0], mesh=mesh)
        return fully_shard(model, mesh=mesh)

    def backward(self, step: int) -> Tensor:
        last, model = step % 3 == 0, self.model
        if self.kind == "fsdp2":
            model.set_requires_gradient_sync(last)
        with model.no_sync() if self.kind == "ddp" and not last else contextlib.nullcontext():
            return super().backward(step)


class Idle(Training):
    """Two of three batches only read data: buffers and generators move, no optimizer steps."""

    def batch(self, step: int) -> float:
        if step % 3 == 0:
            return super().batch(step)
        with torch.no_grad():
            return float(self.loss(step))


# Gradients that batches end with: some of these are used later, others discarded


class TwoPaces(Training):
    """The first layers step after every batch, the last one after every fourth, with accumulated gradients."""

    make = staticmethod(lambda params: [torch.optim.AdamW(part, lr=1e-2) for part in (params[:-2], params[-2:])])

    def batch(self, step: int) -> float:
        loss = self.loss(step)
        loss.backward()
        self.at("before step")
        for optimizer in self.optimizers if step % 4 == 0 else self.optimizers[:1]:
            optimizer.step()
            optimizer.zero_grad()
        self.at("after step")
        self.schedulers[0].step()
        return float(loss)


class RareLayer(Training):
    """Gradients are zeroed, not set to None: in most batches a rarely used layer is stepped with zeros."""

    net = BranchNet

    def zero(self, to_none: bool = False) -> None:
        super().zero(to_none=False)

    def loss(self, step: int) -> Tensor:
        self.model.use_extra = step % 4 == 3
        return super().loss(step)


def read_gradients(training: Training, step: int) -> None:
    """The norm of a step's gradients, more than are carried, decides about the next step before they are zeroed."""
    gradients = [param.grad for param in training.model.parameters() if param.grad is not None]
    if gradients:
        norm = torch.stack(torch._foreach_norm(gradients)).sum()
        training.optimizers[0].param_groups[0]["weight_decay"] = float(norm)


def three_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(INPUTS, 500), nn.Tanh(), nn.Linear(500, CLASSES))


class TakingTurns(Training):
    """Two networks are trained in turn, and gradients are clipped by the norm of both.

    Attributes:
        joint: whether every loss is one of both networks.
    """

    joint = False
    clips = True
    scheduled = False
    net = staticmethod(lambda: nn.ModuleList([three_layers(), three_layers()]))
    make = staticmethod(lambda params: [SGD(part, lr=0.1) for part in (params[:4], params[4:])])

    def batch(self, step: int) -> float:
        x, y = self.inputs()
        optimizer = self.optimizers[step % 2]
        optimizer.zero_grad()
        out = sum(net(x) for net in self.model) if self.joint else self.model[step % 2](x)
        loss = functional.cross_entropy(out, y)
        loss.backward()
        if self.clips:
            nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)
        self.at("before step")
        optimizer.step()
        self.at("after step")
        return float(loss)


class UnevenTurns(TakingTurns):
    """The second network is small, and gradients are zeroed before the batch ends."""

    net = staticmethod(lambda: nn.ModuleList([three_layers(), nn.Linear(INPUTS, CLASSES)]))
    clips = False

    def batch(self, step: int) -> float:
        loss = super().batch(step)
        self.optimizers[step % 2].zero_grad(set_to_none=False)
        return loss


class ZeroedBefore(Training):
    """Gradients are zeroed in place before a batch ends, `sometimes` but in each fifth one."""

    net = staticmethod(lambda: three_layers())
    sometimes = False
    scheduled = False

    def batch(self, step: int) -> float:
        loss = self.loss(step)
        loss.backward()
        self.take_step(step)
        if not self.sometimes or step % 5:
            super().zero(to_none=False)
        return float(loss)


class Fading(ZeroedBefore):
    """Gradients are multiplied before a batch ends: by zero at first, and later not."""

    def batch(self, step: int) -> float:
        loss = self.loss(step)
        loss.backward()
        self.take_step(step)
        for param in self.model.parameters():
            assert param.grad is not None
            param.grad.mul_(0.0 if step < 8 else 0.5)
        return float(loss)


class RareSparseLayer(RareLayer):
    """The same with sparse gradients."""

    def make_model(self) -> nn.Module:
        embedding = nn.Embedding(50, 16, sparse=True)
        return nn.ModuleDict({"table": embedding, "head": nn.Linear(16, CLASSES)})

    make = staticmethod(lambda params: [torch.optim.SparseAdam(params[:1], lr=1e-2), SGD(params[1:], 1e-2, 0.9)])

    def loss(self, step: int) -> Tensor:
        x = self.model["table"](torch.randint(0, 50, (16,)))
        if step % 3 == 1:
            x = x.detach()
        return functional.cross_entropy(self.model["head"](x), torch.randint(0, CLASSES, (16,)))


# What is changed right before a step


class BeforeStep(Training):
    """`change` is called at the last moment before some steps, in a pre-hook that is registered late or by training."""

    hooked = False
    make = staticmethod(lambda params: torch.optim.Adam(params, lr=0.01))

    def begin(self, step: int) -> None:
        if self.hooked:
            self.optimizers[0].register_step_pre_hook(lambda *_: self.change(self, self.number))

    def change_gradients(self, step: int) -> None:
        if not self.hooked:
            super().change_gradients(step)


def decay(training: Training, step: int) -> None:
    """Decay weights by hand, now and then: the record stays one of redo."""
    if step % 3 == 0:
        for param in training.model.parameters():
            param.data.mul_(0.9)


def switch_nesterov(training: Training, step: int) -> None:
    if step == 5:
        training.optimizers[0].param_groups[0].update(momentum=0.9, nesterov=True)


def take_turns(training: Training, step: int) -> None:
    """Let two groups of equal size change places."""
    if step in (6, 12):
        one, other = training.optimizers[0].param_groups
        one["params"], other["params"] = other["params"], one["params"]


def hook_base_class(training: Training, step: int) -> None:
    if step >= 5:
        torch.optim.RMSprop([torch.zeros(1)])


def two_groups(params: list[nn.Parameter]) -> SGD:
    """Two groups of equal size, with rates of their own."""
    return SGD([{"params": params[:3], "lr": 0.1}, {"params": params[3:], "lr": 0.01}], momentum=0.9)


class BetweenSteps(Training):
    """The first optimizer's weights are clamped through ``.data`` behind its step, and before the second one's."""

    make = staticmethod(lambda params: [SGD(params[:2], lr=0.1), SGD(params[-2:], lr=0.1)])

    def watch_points(self) -> None:
        super().watch_points()
        self.optimizers[1].register_step_pre_hook(lambda *_: self._clamp())

    def _clamp(self) -> None:
        if self.number % 3 == 0:
            self.model[0].weight.data.clamp_(-0.1, 0.1)


class AmbientStep(Training):
    """Steps inside autocast, with settings of torch that are not its defaults."""

    def begin(self, step: int) -> None:
        torch.set_float32_matmul_precision("medium")
        torch.set_flush_denormal(True)

    def batch(self, step: int) -> float:
        with torch.autocast("cpu", torch.bfloat16, enabled=step % 2 == 0):
            return super().batch(step)


# Changes of gradients


def each_gradient(change: Callable[[Tensor], Any], since: int = 1) -> Callable[[Training, int], None]:
    """A change of all gradients, from a step on."""

    def change_all(training: Training, step: int) -> None:
        for param in training.model.parameters():
            assert param.grad is not None
            if step >= since:
                change(param.grad)

    return change_all


def clip_norm(training: Training, step: int) -> None:
    nn.utils.clip_grad_norm_(training.model.parameters(), 0.3)


def clip_value(training: Training, step: int) -> None:
    nn.utils.clip_grad_value_(training.model.parameters(), 0.01)


def clip_norm_parts(training: Training, step: int) -> None:
    """Clip parts separately, one of them twice."""
    model = training.model
    nn.utils.clip_grad_norm_(model[0].parameters(), 0.2, norm_type=math.inf)
    nn.utils.clip_grad_norm_(model[4].parameters(), 0.2, foreach=False)
    nn.utils.clip_grad_norm_(model[4].weight, 0.1)


def clip_given_norm(training: Training, step: int) -> None:
    """Compute the norm first, as when it has to be added up over meshes or stages."""
    params = list(training.model.parameters())
    norm = nn.utils.get_total_norm([param.grad for param in params if param.grad is not None])
    nn.utils.clip_grads_with_norm_(params, 0.2, norm)


def mask_row(training: Training, step: int) -> None:
    """Zero one row of one gradient, from step 6 on, which a sample of a few values would miss."""
    if step >= 6:
        training.model[0].weight.grad[17] = 0.0


def replace_gradient(training: Training, step: int) -> None:
    if step >= 6:
        weight = training.model[0].weight
        changed = weight.grad.clone()
        changed[3, 5] += 1.0
        weight.grad = changed


def clip_by_hand(gradient: Tensor) -> None:
    """Clip as torch does not know."""
    gradient.mul_(0.5 / (gradient.norm() + 1e-3))


class Scalar(Training):
    """Clips gradients of several dtypes, one of them without dimensions."""

    change = staticmethod(clip_norm)

    def make_model(self) -> nn.Module:
        model = super().make_model()
        model.register_parameter("scale", nn.Parameter(torch.tensor(1.3, dtype=torch.bfloat16)))
        return model

    def loss(self, step: int) -> Tensor:
        return super().loss(step) * self.model.scale


class ManualScale(Training):
    """A user-defined loss scale, divided out in place."""

    change = staticmethod(each_gradient(lambda gradient: gradient.div_(1024)))

    def loss(self, step: int) -> Tensor:
        return super().loss(step) * 1024


class Scaler(Training):
    """GradScaler with fp16 autocast; the gradients of step 6 overflow, so its optimizer step is skipped."""

    fused = clip = False

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.scaler = torch.amp.GradScaler(self.device_type, init_scale=256.0, growth_interval=4)
        self.registered["scaler"] = self.scaler

    def make_optimizers(self) -> list[Optimizer]:
        return [torch.optim.AdamW(self.model.parameters(), lr=1e-2, fused=self.fused)]

    def batch(self, step: int) -> float:
        optimizer = self.optimizers[0]
        optimizer.zero_grad()
        with torch.autocast(self.device_type, torch.float16):
            loss = self.loss(step)
        scaled = self.scaler.scale(loss)
        (scaled * math.inf if step == 6 else scaled).backward()
        if self.clip:
            self.scaler.unscale_(optimizer)
            clip_norm(self, step)
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


class Bf16Parameters(Training):
    def make_model(self) -> nn.Module:
        # Sizes that are no multiple of a vector register.
        return nn.Sequential(nn.Linear(INPUTS, 257), nn.ReLU(), nn.Linear(257, CLASSES)).bfloat16()

    def loss_of(self, x: Tensor, y: Tensor) -> Tensor:
        return super().loss_of(x.to(torch.bfloat16), y)


class OtherGradients(Training):
    """Parameters in bf16 with gradients in fp32 from step `since` on; before, they are in bf16."""

    since = 1

    def make_model(self) -> nn.Module:
        model = nn.Sequential(nn.Linear(INPUTS, 250), nn.ReLU(), nn.Linear(250, CLASSES)).to(torch.bfloat16)
        for param in model.parameters():
            param.grad_dtype = torch.float32 if self.since == 1 else None
        return model

    def loss_of(self, x: Tensor, y: Tensor) -> Tensor:
        return functional.cross_entropy(self.model(x.bfloat16()).float(), y)

    def change_gradients(self, step: int) -> None:
        if step >= self.since:
            for param in self.model.parameters():
                # Values that bf16 cannot represent.
                param.grad = param.grad.float() * 1.0009765 + 1e-4


# Cases

CLIP_GIVEN_NORM = case_of("clip-given-norm", change=clip_given_norm)
SHAPES_OF_STEPS = [
    case_of("adversarial", Adversarial),
    case_of("kept-gradients", KeptGradients),
    case_of("step-in-backward", StepInBackward),
    case_of("interrupted", Interrupted),
    case_of("zeroed-in-place", behind=zero_in_place),
    case_of("gradient-penalty", GradientPenalty),
    case_of("alternating", Alternating),
    case_of("projection", make=projecting),
    case_of("idle", Idle),
    case_of("closure", closure=True),
    case_of("clip-norm", change=clip_norm),
    CLIP_GIVEN_NORM,
    case_of("clip-norm-parts", change=clip_norm_parts),
    case_of("clip-value", change=clip_value),
    case_of("scaler", Scaler),
    case_of("scaler-clip", Scaler, clip=True),
    case_of("scaler-fused", Scaler, fused=True),
    case_of("scaler-fused-clip", Scaler, fused=True, clip=True),
    case_of("bf16-autocast", Bf16Autocast),
    case_of("bf16-adamw", Bf16Parameters),
    case_of("bf16-adamw-fused", Bf16Parameters, make=lambda params: torch.optim.AdamW(params, lr=0.01, fused=True)),
    case_of("bf16-sgd", Bf16Parameters, make=lambda params: SGD(params, lr=0.05, momentum=0.9, foreach=True)),
]


def nesterov(params: list[nn.Parameter]) -> SGD:
    return SGD(params, lr=0.05, momentum=0.9, nesterov=True, foreach=True)


halve = each_gradient(lambda gradient: gradient.mul_(0.5))
#: What a step uses and does, as it is really taken: by the name of what a record would miss.
STEP_CASES = [
    case_of("decay-before-step", BeforeStep, change=decay),
    case_of("decay-in-hook", BeforeStep, change=decay, hooked=True),
    case_of("decay-in-closure", BeforeStep, change=decay, closure=True),
    case_of("between-steps", BetweenSteps),
    case_of("nesterov-closure", BeforeStep, change=halve, make=nesterov, closure=True),
    case_of("nesterov-hook", BeforeStep, change=halve, make=nesterov, hooked=True),
    case_of("nesterov-later", BeforeStep, change=switch_nesterov, make=lambda p: SGD(p, lr=0.05, foreach=True)),
    case_of("turns", BeforeStep, change=take_turns, make=two_groups),
    case_of("hooked-twice", BeforeStep, change=hook_base_class, make=lambda params: Around(params, lr=0.002)),
    case_of("rebinding", make=Rebinding),
    case_of("late-phase", make=LatePhase),
    case_of("scalar", Scalar),
    case_of("ambient", AmbientStep, make=Products),
]
UNKNOWN_CHANGE_CASES = [
    case_of("own-clipping", change=each_gradient(clip_by_hand)),
    case_of("own-clipping-late", change=each_gradient(clip_by_hand, since=8)),
    case_of("masked-row", change=mask_row),
    case_of("replaced-gradient", change=replace_gradient),
    case_of("gradient-noise", change=each_gradient(lambda one: one.add_(torch.randn_like(one), alpha=0.01))),
    case_of("manual-scale", ManualScale),
]
#: Their gradients are replaced by new tensors, so they are taken at the step.
OTHER_GRADIENT_CASES = [
    case_of("fp32-gradients", OtherGradients, make=lambda params: SGD(params, lr=0.3)),
    case_of("fp32-gradients-momentum", OtherGradients, make=lambda params: SGD(params, lr=0.05, momentum=0.9)),
    case_of("fp32-gradients-later", OtherGradients, make=lambda params: SGD(params, lr=0.3), since=8),
]
ACCUMULATION = case_of("accumulation", Accumulation)
ANNOUNCED = case_of("announced-accumulation", AnnouncedAccumulation)
LIED = case_of("lied-accumulation", AnnouncedAccumulation, lies=True)
TWO_PACES = case_of("two-paces", TwoPaces)
ZEROED_IN_PLACE = case_of("zeros-in-place", RareLayer)
TURNS = case_of("clipped-turns", TakingTurns)
JOINT_TURNS = case_of("joint-turns", TakingTurns, joint=True)
UNEVEN_TURNS = case_of("uneven-turns", UnevenTurns)
ZEROED_BEFORE = case_of("zeroed-before", ZeroedBefore)
SOMETIMES_ZEROED = case_of("sometimes-zeroed", ZeroedBefore, sometimes=True)
FADING = case_of("fading-gradients", Fading)
LARGE = case_of("large-gradients", net=three_layers)
READ_GRADIENTS = case_of("read-gradients", net=three_layers, before=read_gradients)
SPARSE_ZEROED_IN_PLACE = case_of("sparse-zeros-in-place", RareSparseLayer)


def unsynchronized(kind: str) -> Case:
    return case_of(f"unsynchronized {kind}", Unsynchronized, kind=kind)


def recycled(how: str, used_at: int = 0) -> Case:
    return case_of(f"recycled {how} {used_at}", Recycled, how=how, used_at=used_at)


def kills_of(case: Case, kills: list[tuple[str, int]]) -> list[tuple[str, int]]:
    """The kills at points that the case reaches."""
    match case.name:
        case "closure" | "idle":  # idle: optimizers step in every third batch only
            return [("forward" if point == "before step" else point, step) for point, step in kills]
        case "adversarial" | "kept-gradients":
            # Gradients that the generator leaves on the critic wait until it throws them away, in the second batch.
            kills = [(point, step) for point, step in kills if step > 2]
            return [("before step" if point == "forward" else point, step) for point, step in kills]
    return kills
