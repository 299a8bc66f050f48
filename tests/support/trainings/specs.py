"""What layouts are made of: many tensors, an average of a model, a few tensors by value."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import torch
from torch import nn

from memckpt.capture.live_state import LiveState
from memckpt.capture.spec_request import SpecRequest
from memckpt.state.spec import OptimizerSpec, OwnerSpec, ParamSpec, StateSpec, StateTensorSpec, TensorSpec


def an_optimizer(index: int, sub_steps: int) -> OptimizerSpec:
    return OptimizerSpec(module="m", qualname=f"O{index}", attributes=b"", group_sizes=(1,), sub_steps=sub_steps)


def large_spec(period: int) -> StateSpec:
    params = tuple(
        ParamSpec(
            TensorSpec(f"p{i}", (size,), "float32"),
            (OwnerSpec(0, 0, (StateTensorSpec("exp_avg", (size,), "float32", True, False),)),),
            False,
            0,
        )
        for i, size in enumerate([1_000_000, 300, 20_000, 5])
    )
    return StateSpec(params, (an_optimizer(0, 1),), (), (), "lazy", period, 3, (0,), 1)


def averaged_spec(count: int = 2, live: LiveState | None = None, **request: Any) -> StateSpec:
    """A model of about a million parameters with an average of it, T = 8 and D = 3."""
    live = live or averaged()
    ranks = tuple(range(count))
    arguments = {"mode": "lazy", "period": 8, "slots": 3, "local_ranks": ranks, "world_size": count, "shares": True}
    return live.spec(SpecRequest(**{**arguments, **request}))


def averaged() -> LiveState:
    model = nn.Linear(1024, 1024)
    average = nn.Linear(1024, 1024).requires_grad_(False)
    live = LiveState(model, [torch.optim.AdamW(model.parameters())], {"average": average})
    live.growth.changing = {"average.weight", "average.bias"}
    return live


def ring_spec(ranks: int, period: int, slots: int, shared: Sequence[str] = (), **other: Any) -> StateSpec:
    """A lazy layout of one parameter and three tensors by value."""
    names = {"count": (2,), "average": (4,), "second": (4,)}
    spec = StateSpec(
        params=(ParamSpec(TensorSpec("weight", (4,), "float32"), (OwnerSpec(0, 0, ()),), True, 0),),
        optimizers=(OptimizerSpec("torch.optim.sgd", "SGD", b"", (1,), 1),),
        static=(),
        by_value=tuple(TensorSpec(name, shape, "float32") for name, shape in names.items()),
        mode="lazy",
        period=period,
        slots=slots,
        local_ranks=tuple(range(ranks)),
        world_size=ranks,
        by_value_slots=slots + 1,
        shared=tuple(shared),
    )
    return msgspec.structs.replace(spec, **other)
