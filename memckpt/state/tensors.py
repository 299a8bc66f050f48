"""Tensors as a rank holds them (all of a plain tensor, the local shard of a DTensor), and their bits."""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, TypeGuard

import torch
from torch.nn.parameter import is_lazy

from memckpt.state.spec import ITEM_BYTES, Shard, TensorSpec

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_dtensor(tensor: torch.Tensor) -> TypeGuard[DTensor]:
    """Whether the tensor is a shard, or a replica, of a tensor on a device mesh."""
    # Importing the module takes a second; before, there are no DTensors.
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


def why_not_held(tensor: torch.Tensor) -> str:
    """What keeps a tensor's values from being copied and put back, in words; empty if nothing does."""
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return "a value inside a torch.func transform"
    if is_lazy(tensor):
        return "not initialized"
    if tensor.is_nested:
        return "a nested tensor"
    if tensor.layout != torch.strided:
        return f"of layout {tensor.layout}"
    if str(tensor.dtype).removeprefix("torch.") not in ITEM_BYTES:
        return f"of dtype {tensor.dtype}"
    if tensor.is_meta:
        return "on the meta device"
    here = local(tensor)
    if type(here) is not torch.Tensor:
        return f"of class {type(here).__name__}"
    if here.is_neg() or here._is_zerotensor():
        return "a result that torch has not computed"
    last = sum((size - 1) * stride for size, stride in zip(here.shape, here.stride(), strict=True))
    held = here.untyped_storage().nbytes() // here.element_size() - here.storage_offset()
    return "without memory" if here.numel() and last >= held else ""


def is_like(tensor: torch.Tensor | None, spec: TensorSpec) -> bool:
    """Whether a tensor has the shape and dtype of a description."""
    return tensor is not None and tensor.shape == spec.shape and str(tensor.dtype) == f"torch.{spec.dtype}"


def has_usual_strides(state: torch.Tensor, param: torch.Tensor) -> bool:
    """Whether a parameter's state is laid out as it is restored: as the parameter is, or row by row."""
    if state.shape == param.shape and not (param.is_contiguous() and state.is_contiguous()):
        return state.stride() == param.stride()
    return state.is_contiguous()


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements lie one beside the other: also in channels_last, and in other permutations."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return last == tensor.numel() - 1 and 0 not in tensor.stride()


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
    """Copy values into a live tensor, even one that was made in inference mode.

    On a CPU nothing is written where all is equal: a frozen table may be a file that is mapped for reading.
    """
    with torch.inference_mode() if tensor.is_inference() else contextlib.nullcontext():
        live = local(tensor)
        for dim, (size, stride) in enumerate(zip(live.shape, live.stride(), strict=True)):
            if size > 1 and stride == 0:  # expanded: its elements along this dimension are one in memory
                live, values = live.narrow(dim, 0, 1), values.narrow(dim, 0, 1)
        if live.device.type != "cpu" or not same_bits(live, values):
            live.copy_(values)


def version(tensor: torch.Tensor) -> int:
    """Number of in-place changes that torch has counted, in a DTensor and in its local tensor.

    Changes that a foreach or fused function makes to DTensors are counted by neither (torch 2.13).
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
    """The shard of a DTensor that this rank holds (one, as torch's checkpoints say); None for a plain tensor."""
    if not is_dtensor(tensor):
        return None
    (piece,) = tensor.__create_chunk_list__()
    return Shard(tuple(piece.offsets), tuple(tensor.shape))


#: Elements compared at once; bounds the temporaries, which are doubles.
_CHUNK = 1 << 22


def same_bits(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Whether two tensors have one shape, one dtype and the same bits; NaNs with equal bits are equal."""
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return False
    return torch.equal(bits_of(ours), bits_of(theirs))


def ulp_distance(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """The largest distance of two tensors of one dtype in units in the last place, counted through zero.

    It is 0 only if all bits are equal. Integers count their difference.
    """
    if ours.is_complex():
        ours, theirs = (torch.view_as_real(one.resolve_conj()) for one in (ours, theirs))
    a, b = bits_of(ours), bits_of(theirs)
    if torch.equal(a, b):
        return 0.0
    width = ours.element_size()
    if not ours.is_floating_point():
        return float((ours.double() - theirs.double()).abs().max())
    if width == 1:
        return float((a.double() - b.double()).abs().max())
    lowest = -(2 ** (8 * width - 1))
    a, b = (torch.where(bits < 0, lowest - bits, bits) for bits in (a, b))
    # Doubles hold differences of 64-bit patterns approximately, which suffices for a magnitude.
    return max(float((a.double() - b.double()).abs().max()), 1.0)


def allowed_rounding(dtype: str) -> float:
    """The largest difference that counts as the rounding of other kernels, as a part of a tensor's largest value.

    Relative to each element it would say nothing: on an H100 sums that nearly cancel came out with another sign.
    """
    return 1e-4 if dtype in ("float32", "float64") else 2e-2


def relative_distance(found: torch.Tensor, held: torch.Tensor) -> float:
    """The largest difference as a part of the largest held value; 0.0 only if all bits are equal.

    Computed in their own dtype, so it is rounded. Infinite for integers, and where values are not finite.
    """
    if same_bits(found, held):
        return 0.0
    if not (held.is_floating_point() or held.is_complex()):
        return math.inf
    largest, scale = float((found - held).abs().max()), float(held.abs().max())
    return max(largest / scale, torch.finfo(held.dtype).eps) if scale and math.isfinite(largest) else math.inf


@dataclass
class Distance:
    """Distance between two tensors, or between pieces of them that are added one by one."""

    elements: int = 0
    differing: int = 0  #: number of elements that differ in any bit
    largest: float = 0.0  #: largest absolute difference of two values; infinite if shapes, dtypes or NaNs differ
    scale: float = 0.0  #: largest absolute value of the expected tensor
    ulp: float = 0.0  #: largest difference in units in the last place

    def add(self, found: torch.Tensor, held: torch.Tensor) -> None:
        """Compare one more pair, found and expected, on any devices; the comparison runs on the device of `found`."""
        self.elements += held.numel()
        if found.shape != held.shape or found.dtype != held.dtype:
            self.differing += max(held.numel(), 1)
            self.largest = self.ulp = float("inf")
            return
        ours, theirs = found.reshape(-1), held.reshape(-1)
        for start in range(0, held.numel(), _CHUNK):
            self._add(ours[start : start + _CHUNK], theirs[start : start + _CHUNK].to(found.device))

    def _add(self, found: torch.Tensor, held: torch.Tensor) -> None:
        wide = torch.complex128 if held.is_complex() else torch.float64
        self.scale = max(self.scale, float(held.to(wide).abs().nan_to_num(nan=0.0, posinf=0.0).max()))
        if same_bits(found, held):
            return
        self.differing += int((bits_of(found) != bits_of(held)).view(found.numel(), -1).any(1).sum())
        self.ulp = max(self.ulp, ulp_distance(found, held))
        difference = (found.to(wide) - held.to(wide)).abs()
        # Equal infinities give NaN, and so do NaNs; neither is a difference if the bits are equal.
        difference = torch.where((found == held) | (found.isnan() & held.isnan()), 0.0, difference)
        self.largest = max(self.largest, float(difference.nan_to_num(nan=math.inf).max()))

    @property
    def relative(self) -> float:
        """The largest difference as a fraction of the largest expected value."""
        if not self.differing:
            return 0.0
        return self.largest / self.scale if self.scale else float("inf")

    @property
    def text(self) -> str:
        """The distance as text."""
        return (
            f"{self.differing} of {self.elements} elements differ, by {self.relative:.2g} of the largest value at most "
            f"({self.ulp:.3g} units in the last place)"
        )
