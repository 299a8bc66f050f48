"""Parts of checkpoints, made by hand."""

from __future__ import annotations

from typing import Any

import torch

from memckpt.state.records import Timeline
from memckpt.state.spec import OptimizerSpec, StateSpec, TensorSpec
from memckpt.storage.base import write_base
from memckpt.storage.format import (
    FORMAT_VERSION,
    NodeState,
    Part,
)
from memckpt.storage.store import Store


def part_of(
    record: int, *, node: str = "node", ranks: tuple[int, ...] = (0,), world_size: int = 1, **rest: Any
) -> Part:
    settings = {"timeline": Timeline(1, "a"), "format": FORMAT_VERSION, "full": 0 in ranks, "created": 0.0, **rest}
    return Part(record=record, step=record, node=node, ranks=ranks, world_size=world_size, **settings)


def some_state() -> NodeState:
    optimizers = (OptimizerSpec("torch.optim.sgd", "SGD", b"", (1,), 1),)
    spec = StateSpec((), optimizers, (), (TensorSpec("buffer", (3,), "float32"),), "lazy", 4, 3, (0,), 1)
    return NodeState(spec, (), b"", {0: b"state of rank 0"})


def write(store: Store, part: Part) -> Part:
    return write_base(store, part, some_state(), {"model.weight": torch.arange(6.0).view(2, 3) + part.record})
