"""A layout with many tensors."""

from __future__ import annotations

from memckpt.state.spec import (
    OptimizerSpec,
    OwnerSpec,
    ParamSpec,
    StateSpec,
    StateTensorSpec,
    TensorSpec,
)


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
