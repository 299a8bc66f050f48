"""Tensors as a rank holds them: all of a plain tensor, the local shard of a DTensor."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, TypeGuard

import torch

from memckpt.state.spec import Shard, TensorSpec

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_dtensor(tensor: torch.Tensor) -> TypeGuard[DTensor]:
    """Whether the tensor is a shard, or a replica, of a tensor on a device mesh."""
    # Importing the module takes a second; until somebody has, there are no DTensors.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a tensor that this rank holds, as a detached plain tensor that shares its memory."""
    if not is_dtensor(tensor):
        return tensor.detach()
    with torch.no_grad():
        return tensor.to_local().detach()


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The whole tensor. For a sharded DTensor this is collective over its mesh."""
    return tensor.full_tensor() if is_dtensor(tensor) else tensor


def is_like(tensor: torch.Tensor | None, spec: TensorSpec) -> bool:
    """Whether a tensor has the shape and dtype of a description."""
    return tensor is not None and tensor.shape == spec.shape and str(tensor.dtype) == f"torch.{spec.dtype}"


def has_usual_strides(state: torch.Tensor, param: torch.Tensor) -> bool:
    """Whether a parameter's state is laid out as it is restored: as the parameter is, or row by row."""
    if state.shape == param.shape and not (param.is_contiguous() and state.is_contiguous()):
        return state.stride() == param.stride()
    return state.is_contiguous()


def with_strides(tensor: torch.Tensor, stride: Sequence[int]) -> torch.Tensor:
    """The same values with these strides: products of matrices depend on them."""
    if tensor.stride() == tuple(stride):
        return tensor
    return torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def give_gradient(param: torch.nn.Parameter, gradient: torch.Tensor | None) -> None:
    """Set a parameter's gradient, which may have another dtype."""
    if gradient is not None and gradient.dtype != param.dtype:
        param.grad_dtype = gradient.dtype
    param.grad = gradient


_BITS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
#: Version of tensors whose changes torch does not count.
UNCOUNTED = -1


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """The elements' bits as integers, for bitwise comparison; a view."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    return tensor.view(_BITS[tensor.element_size()])


def fill(tensor: torch.Tensor, values: torch.Tensor) -> None:
    """Copy values into a live tensor, even one that was made in inference mode."""
    with torch.inference_mode() if tensor.is_inference() else contextlib.nullcontext():
        live = local(tensor)
        for dim, (size, stride) in enumerate(zip(live.shape, live.stride(), strict=True)):
            if size > 1 and stride == 0:  # expanded: its elements along this dimension are one in memory
                live, values = live.narrow(dim, 0, 1), values.narrow(dim, 0, 1)
        live.copy_(values)


def version(tensor: torch.Tensor) -> int:
    """Number of in-place changes that torch has counted.

    Changes made through a DTensor are counted by it, those of its local tensor by that. Changes that a foreach or fused
    function makes to DTensors are counted by neither (torch 2.13).
    """
    try:
        if not is_dtensor(tensor):
            return tensor._version
        return tensor._version + local(tensor)._version
    except RuntimeError:
        return UNCOUNTED  # made in inference mode


_counter = attrgetter("_version")


class Fixed:
    """Tensors that are compared in every step.

    The DTensors among them are found once: asking each time would be most of the cost with a thousand small tensors.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = list(tensors)
        self._dtensors = [(index, tensor) for index, tensor in enumerate(tensors) if is_dtensor(tensor)]

    def versions(self) -> list[int]:
        """The :func:`version` of each."""
        found = list(map(_counter, self._tensors))
        if self._dtensors:
            with torch.no_grad():
                for index, tensor in self._dtensors:
                    found[index] += tensor.to_local()._version
        return found

    def pointers(self) -> list[int]:
        """The address of each tensor's memory, or of this rank's shard of it."""
        held = self._tensors
        if self._dtensors:
            held = held.copy()
            with torch.no_grad():
                for index, tensor in self._dtensors:
                    held[index] = tensor.to_local()
        return list(map(torch.Tensor.data_ptr, held))


def shard_of(tensor: torch.Tensor) -> Shard | None:
    """The shard of a DTensor that this rank holds; None for a plain tensor.

    The protocol is that of torch.distributed.checkpoint: a DTensor has one shard on each rank.
    """
    if not is_dtensor(tensor):
        return None
    (piece,) = tensor.__create_chunk_list__()
    return Shard(tuple(piece.offsets), tuple(tensor.shape))
