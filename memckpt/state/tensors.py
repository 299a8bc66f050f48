"""Tensors as a rank holds them: all of a plain one, its own piece of a DTensor."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor

from memckpt.state.layout import Shard


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether this is a piece of a tensor (or a replica of one) that lives on a device mesh."""
    return isinstance(tensor, DTensor)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a tensor, as a plain one that shares its memory and asks for no gradient."""
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    with torch.no_grad():
        return tensor.to_local().detach()


def shard_of(tensor: torch.Tensor) -> Shard | None:
    """Which piece of a DTensor this rank holds; None for a plain tensor.

    The protocol is that of torch.distributed.checkpoint: a DTensor has one piece on each rank.
    """
    if not isinstance(tensor, DTensor):
        return None
    (piece,) = tensor.__create_chunk_list__()
    return Shard(tuple(piece.offsets), tuple(tensor.shape))
