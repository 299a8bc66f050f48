"""Any rank of any device mesh, in this process: its part of tensors, without the other ranks."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.testing._internal.distributed.fake_pg import FakeStore

_count = itertools.count()


@contextmanager
def mesh_of(shape: Sequence[int], rank: int) -> Iterator[DeviceMesh]:
    """A mesh as seen by one of its ranks."""
    world_size = 1
    for size in shape:
        world_size *= size
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        # DTensor caches results by mesh, and meshes count as equal unless their dimension names differ.
        names = tuple(f"d{next(_count)}" for _ in shape)
        yield init_device_mesh("cpu", tuple(shape), mesh_dim_names=names)
    finally:
        dist.destroy_process_group()


def empty(shape: Sequence[int], mesh: DeviceMesh, cuts: Sequence[int | None]) -> DTensor:
    """A DTensor full of NaN, sharded along one dimension per mesh dimension; None: not sharded."""
    placements: list[Placement] = [Shard(cut) if cut is not None and cut < len(shape) else Replicate() for cut in cuts]
    size = torch.Size(shape)
    held, _ = compute_local_shape_and_global_offset(size, mesh, placements)
    stride = torch.empty(size, device="meta").stride()
    return DTensor.from_local(torch.full(held, torch.nan), mesh, placements, run_check=False, shape=size, stride=stride)


def all_empty(wholes: Mapping[str, Sequence[int]], mesh: DeviceMesh, cuts: Sequence[int | None]) -> dict[str, DTensor]:
    return {name: empty(shape, mesh, cuts) for name, shape in wholes.items()}
