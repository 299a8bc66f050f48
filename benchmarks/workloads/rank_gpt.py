"""The training of one rank: sharded (FSDP2) or replicated (DDP), with a batch of the rank's own."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from benchmarks.workloads.gpt import Training
from examples.gpt import GPT, Corpus


class ShardedTraining(Training):
    """fully_shard on each block and on the whole."""

    def __init__(self, model: GPT, batch: int) -> None:
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
        super().__init__(model, _batch_of_rank(model, batch))


class ReplicatedTraining(Training):
    """The model in DistributedDataParallel, which is `replica`."""

    def __init__(self, model: GPT, batch: int) -> None:
        self.replica = DistributedDataParallel(model)
        super().__init__(model, _batch_of_rank(model, batch))

    def loss(self) -> Tensor:
        tokens, targets = self.batch
        logits: Tensor = self.replica(tokens)
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _batch_of_rank(model: GPT, size: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1 + dist.get_rank())
    return Corpus(model.config.context).sample(size)
