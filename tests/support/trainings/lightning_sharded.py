"""The model of the Lightning tests, sharded over ranks."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy, Strategy
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils._pytree import tree_map

from tests.support.trainings.lightning_cases import Net, NetWithHooks


class FSDPOnCPU(FSDPStrategy):
    """FSDPStrategy on a CPU: Lightning permits GPUs only."""

    def _setup_model(self, model: nn.Module) -> nn.Module:
        policy = ModuleWrapPolicy({nn.Linear})
        return FullyShardedDataParallel(
            model, device_id=torch.device("cpu"), auto_wrap_policy=policy, use_orig_params=True
        )


def strategy_of(name: str, ranks: int) -> Strategy:
    match name:
        case "fsdp2":
            return ModelParallelStrategy(data_parallel_size=ranks, tensor_parallel_size=1)
        case "tp":
            return ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=ranks)
        case "fsdp1":
            return FSDPOnCPU()
    raise KeyError(name)


class _Sharded(Net):
    def configure_model(self) -> None:
        if self.case.strategy == "fsdp2" and not isinstance(self.head, FSDPModule):
            mesh = self.device_mesh["data_parallel"]
            for each in (self.backbone, self.head):
                fully_shard(each, mesh=mesh)
        elif self.case.strategy == "tp" and not isinstance(self.head.weight, DTensor):
            mesh = self.device_mesh["tensor_parallel"]
            parallelize_module(self.backbone[0], mesh, ColwiseParallel(output_layouts=Replicate()))
            parallelize_module(self.head, mesh, RowwiseParallel(input_layouts=Replicate()))


class ShardedNet(_Sharded):
    pass


class ShardedNetWithHooks(_Sharded, NetWithHooks):
    pass


def held_by_this_rank(values: Any) -> Any:
    """Values with DTensors replaced by this rank's shards, which can be compared without its process group."""
    return tree_map(lambda one: one.to_local().detach().clone() if isinstance(one, DTensor) else one, values)
