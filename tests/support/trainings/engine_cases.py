"""The cases by name: small trainings, each with one feature that makes per-step recovery hard."""

from __future__ import annotations

import torch
from torch.optim import SGD

from tests.support.trainings.engine_optimizers import (
    OPTIMIZERS,
    Around,
    LatePhase,
    Muon,
    OneOptimizer,
    Products,
    Rebinding,
    SparseEmbedding,
    SparseOrDense,
)
from tests.support.trainings.engine_state import (
    AddedGroup,
    Buffers,
    ChangedByHand,
    ChannelsLast,
    ChannelsLastFused,
    Compiled,
    CompiledStep,
    Groups,
    MomentumEncoder,
    MovingAverage,
    Odd,
    OneCycle,
    ReplacedBuffer,
    TensorRate,
    Tied,
    Unfrozen,
    Unused,
)
from tests.support.trainings.engine_steps import (
    Accumulation,
    Adversarial,
    Alternating,
    AmbientStep,
    AnnouncedAccumulation,
    BeforeStep,
    BetweenSteps,
    Bf16Autocast,
    Bf16Parameters,
    ClipGivenNorm,
    ClipNorm,
    ClipNormParts,
    ClipValue,
    Closure,
    GradientNoise,
    GradientPenalty,
    Idle,
    Interrupted,
    KeptGradients,
    ManualScale,
    MaskedRow,
    OtherGradients,
    OwnClipping,
    Projection,
    ReplacedGradient,
    Scalar,
    Scaler,
    StepInBackward,
    ZeroedInPlace,
    decay,
    halve_gradients,
    hook_base_class,
    switch_nesterov,
    take_turns,
)
from tests.support.trainings.engine_training import Case, Training


def two_groups(params: list[torch.nn.Parameter]) -> SGD:
    """Two groups of equal size, with rates of their own."""
    return SGD([{"params": params[:3], "lr": 0.1}, {"params": params[3:], "lr": 0.01}], momentum=0.9)


PLAIN = Case("plain", Training)
CLIP_GIVEN_NORM = Case("clip-given-norm", ClipGivenNorm)

OPTIMIZER_CASES = [Case(name, lambda make=make: OneOptimizer(make)) for name, make in OPTIMIZERS.items()]
OPTIMIZER_CASES += [Case("muon", Muon), Case("sparse-or-dense", SparseOrDense)]
OPTIMIZER_CASES += [
    Case(name, lambda name=name: SparseEmbedding(name)) for name in ("sparse-adam", "sparse-adagrad", "sparse-sgd")
]

SHAPE_CASES = [
    Case("adversarial", Adversarial),
    Case("kept-gradients", KeptGradients),
    Case("step-in-backward", StepInBackward),
    Case("interrupted", Interrupted),
    Case("zeroed-in-place", ZeroedInPlace),
    Case("gradient-penalty", GradientPenalty),
    Case("alternating", Alternating),
    Case("projection", Projection),
    Case("idle", Idle),
    Case("closure", Closure),
    Case("clip-norm", ClipNorm),
    CLIP_GIVEN_NORM,
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
    Case("channels-last-fused", ChannelsLastFused),
    Case("odd", Odd),
    Case("buffers", Buffers),
    Case("replaced-buffer", ReplacedBuffer),
    Case("moving-average", MovingAverage),
]

NESTEROV = {"lr": 0.05, "momentum": 0.9, "nesterov": True, "foreach": True}
#: What a step uses and does, as it is really taken: by the name of what a record would miss.
STEP_CASES = [
    Case("decay-before-step", lambda: BeforeStep(decay)),
    Case("decay-in-hook", lambda: BeforeStep(decay, hooked=True)),
    Case("decay-in-closure", lambda: BeforeStep(decay, closure=True)),
    Case("between-steps", BetweenSteps),
    Case("nesterov-closure", lambda: BeforeStep(halve_gradients, lambda p: SGD(p, **NESTEROV), closure=True)),
    Case("nesterov-hook", lambda: BeforeStep(halve_gradients, lambda p: SGD(p, **NESTEROV), hooked=True)),
    Case("nesterov-later", lambda: BeforeStep(switch_nesterov, lambda p: SGD(p, lr=0.05, foreach=True))),
    Case("turns", lambda: BeforeStep(take_turns, two_groups)),
    Case("hooked-twice", lambda: BeforeStep(hook_base_class, lambda p: Around(p, lr=0.002))),
    Case("rebinding", lambda: OneOptimizer(Rebinding)),
    Case("late-phase", lambda: OneOptimizer(LatePhase)),
    Case("scalar", Scalar),
    Case("ambient", lambda: AmbientStep(Products)),
]

UNKNOWN_CHANGE_CASES = [
    Case("own-clipping", OwnClipping),
    Case("own-clipping-late", lambda: OwnClipping(since=8)),
    Case("masked-row", MaskedRow),
    Case("replaced-gradient", ReplacedGradient),
    Case("gradient-noise", GradientNoise),
    Case("manual-scale", ManualScale),
]

#: Their gradients are replaced by new tensors, so they are taken at the step.
OTHER_GRADIENT_CASES = [
    Case("fp32-gradients", lambda: OtherGradients(lambda p: torch.optim.SGD(p, lr=0.3))),
    Case("fp32-gradients-momentum", lambda: OtherGradients(lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9))),
    Case("fp32-gradients-later", lambda: OtherGradients(lambda p: torch.optim.SGD(p, lr=0.3), since=8)),
]
MOMENTUM_ENCODER_CASES = [
    Case("momentum-data", lambda: MomentumEncoder("data")),
    Case("momentum-assign", lambda: MomentumEncoder("assign")),
    # The full checks of values are over by then.
    Case("momentum-data-late", lambda: MomentumEncoder("data", since=9)),
]
ACCUMULATION = Case("accumulation", Accumulation)
ANNOUNCED = Case("announced-accumulation", AnnouncedAccumulation)
LIED = Case("lied-accumulation", lambda: AnnouncedAccumulation(lies=True))
COMPILED = Case("compiled", Compiled, steps=12)
COMPILED_STEP = Case("compiled-step", CompiledStep, steps=12)
COMPILED_LATER = Case("compiled-later", lambda: CompiledStep(since=5), steps=12)


def by_hand(how: str) -> Case:
    """The case in which a parameter is changed by hand.

    At step 7: "no_grad" and "optimizer state" (seen by version counters), "data" and "other storage" (not seen by
    them), "one element" (seen only by an audit). "every step": all parameters are clamped after each step.
    """
    return Case(f"by-hand {how}", lambda: ChangedByHand(how))
