"""Parts of checkpoints, made by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from memckpt.agent.saving.writer.checkpoint_writer import save
from memckpt.config import StorageConfig
from memckpt.memory.region import Region
from memckpt.protocol.storing import Save, Saved
from memckpt.session.resume.storage_tier import StorageTier
from memckpt.state.records import Timeline
from memckpt.state.spec import OptimizerSpec, StateSpec, TensorSpec
from memckpt.storage.format import Batch, NodeState, Part
from memckpt.storage.node_files import write_commit, write_files
from memckpt.storage.store import Store
from tests.support.cluster.thread_ranks import on_ranks

T1 = Timeline(1, "a")


def part_of(
    record: int, *, node: str = "node", ranks: tuple[int, ...] = (0,), world_size: int = 1, **rest: Any
) -> Part:
    settings = {"timeline": T1, "step": record, "full": 0 in ranks, "created": 0.0, **rest}
    return Part(record=record, node=node, ranks=ranks, world_size=world_size, **settings)


def batch_of(first: int, last: int, *, ranks: tuple[int, ...] = (0,), **rest: Any) -> Batch:
    """A batch of one rank's records, which can be redone on the checkpoint before them."""
    steps = tuple(range(first, last + 1))
    settings = {"timeline": T1, "follows": T1, "world_size": 1, "node": "n", "full": 0 in ranks, "created": 0.0}
    return Batch(first=first, last=last, ranks=ranks, **{"steps": steps, **settings, **rest})


def some_state() -> NodeState:
    optimizers = (OptimizerSpec("torch.optim.sgd", "SGD", b"", (1,), 1),)
    spec = StateSpec((), optimizers, (), (TensorSpec("buffer", (3,), "float32"),), "lazy", 4, 3, (0,), 1)
    return NodeState(spec, (), b"", {0: b"state of rank 0"})


def save_part(place: Path | str, part: Part, **settings: Any) -> Saved:
    """Write a checkpoint without tensors, as the writer process does; it keeps one, unless the settings say more."""
    region = Region.create("test", 4096)
    settings = {"rank_states": {0: b""}, "keep_last": 1, "keep_every_steps": None, **settings}
    try:
        return save(Save(str(place), part, some_state().spec, "copy", 1, **settings), [region, region])
    finally:
        region.close()


def write(store: Store, part: Part) -> Part:
    written = write_files(store, part, some_state(), {"model.weight": torch.arange(6.0).view(2, 3) + part.record})
    write_commit(store, written)
    return written


def start(place: Path, run_dir: Path, **settings: Any) -> StorageTier:
    """The storage tier of an attempt with one rank."""
    config = StorageConfig(url=str(place), **settings)
    tier: StorageTier = on_ranks(1, lambda ranks: StorageTier(config, run_dir, ranks, None))[0]
    return tier
