"""Tensors as a rank holds them: all of a plain one, its own piece of a DTensor."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, TypeGuard

import torch

from memckpt.state.layout import Shard

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_dtensor(tensor: torch.Tensor) -> TypeGuard[DTensor]:
    """Whether this is a piece (or a replica) of a tensor on a device mesh."""
    # Importing it takes a second; where nobody has, there is none.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a tensor, as a plain one that shares its memory and asks for no gradient."""
    if not is_dtensor(tensor):
        return tensor.detach()
    with torch.no_grad():
        return tensor.to_local().detach()


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """All of a tensor. Of a DTensor that is sharded all ranks of its mesh have to ask for it."""
    return tensor.full_tensor() if is_dtensor(tensor) else tensor


def version(tensor: torch.Tensor) -> int:
    """A count of the in-place changes that torch has noticed.

    Those made through a DTensor are counted by it, those of its local tensor by that; those that a foreach or fused
    function makes to DTensors by neither (torch 2.13).
    """
    if not is_dtensor(tensor):
        return tensor._version
    return tensor._version + local(tensor)._version


def shard_of(tensor: torch.Tensor) -> Shard | None:
    """Which piece of a DTensor this rank holds; None for a plain tensor.

    The protocol is that of torch.distributed.checkpoint: a DTensor has one piece on each rank.
    """
    if not is_dtensor(tensor):
        return None
    (piece,) = tensor.__create_chunk_list__()
    return Shard(tuple(piece.offsets), tuple(tensor.shape))
