"""Torch's own communication hooks of DDP: how their results can be recorded, and what they carry from step to step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState

from memckpt.state.optimizers import dtype_name
from memckpt.state.spec import GradientEncoding

_PACKAGE = "torch.distributed.algorithms.ddp_comm_hooks."
_HALF_TYPES: dict[Callable[..., Any], torch.dtype] = {
    default_hooks.fp16_compress_hook: torch.float16,
    default_hooks.bf16_compress_hook: torch.bfloat16,
}
#: Attributes of PowerSGD's state with a tensor for each bucket.
_BY_BUCKET = ("error_dict", "p_memory_dict", "q_memory_dict")


def half_type(hook: Callable[..., Any]) -> torch.dtype | None:
    """The 16-bit type that a hook averages in; None: it does not, or is none of torch's."""
    return _HALF_TYPES.get(hook)


def half_encoding(hook: Callable[..., Any], param: torch.Tensor) -> GradientEncoding | None:
    """Encoding of a hook's results for a parameter; None: they are recorded as they are."""
    dtype = half_type(hook)
    if dtype is None or param.dtype not in (torch.float32, torch.float64) or not param.is_contiguous():
        return None
    return GradientEncoding("half", dtype=dtype_name(dtype))


def takes_any_bucket(hook: Callable[..., Any]) -> bool:
    """Whether a hook works with a bucket that is not DDP's own, as torch's do."""
    return getattr(hook, "__module__", "").startswith(_PACKAGE)


class PlainBucket:
    """A bucket with the methods of DDP's, for a reduction in another layout.

    Args:
        index: its number in its backward.
        params: parameters.
        gradients: their gradients, one-dimensional views of the buffer.
        buffer: all of them, one behind the other.
        last: whether it is the last one of its backward.
    """

    def __init__(
        self,
        index: int,
        params: Sequence[torch.Tensor],
        gradients: Sequence[torch.Tensor],
        buffer: torch.Tensor,
        last: bool,
    ) -> None:
        self._index, self._params, self._last = index, list(params), last
        first = buffer.storage_offset()
        self._begins = [int(each.storage_offset() - first) for each in gradients]
        self._buffer = buffer

    def index(self) -> int:
        """Number of the bucket."""
        return self._index

    def buffer(self) -> torch.Tensor:
        """The gradients, one behind the other."""
        return self._buffer

    def set_buffer(self, buffer: torch.Tensor) -> None:
        """Replace the buffer."""
        self._buffer = buffer

    def gradients(self) -> list[torch.Tensor]:
        """The gradients, in the shapes of their parameters; views of the buffer, also where that was replaced."""
        flat, params = self._buffer.view(-1), self._params
        return [
            flat[begin : begin + param.numel()].view(param.shape)
            for begin, param in zip(self._begins, params, strict=True)
        ]

    def parameters(self) -> list[torch.Tensor]:
        """The parameters."""
        return self._params

    def is_last(self) -> bool:
        """Whether it is the last one of its backward."""
        return self._last


class PowerSgdCarried:
    """State of torch's PowerSGD as rank state: errors, factors, iteration and generator.

    Errors and factors are by bucket, so the first backward after a resume has to be reduced in the held layout.

    Args:
        state: the hook's state.
        device: device of the gradients.
    """

    def __init__(self, state: PowerSGDState, device: torch.device) -> None:
        self._state = state
        self._device = device

    def state_dict(self) -> dict[str, Any]:
        """All of it; errors take 4 bytes per parameter."""
        state = self._state
        by_bucket = {name: dict(getattr(state, name)) for name in _BY_BUCKET}
        return {"iter": state.iter, "rng": list(state.rng.get_state()), **by_bucket}

    def load_state_dict(self, held: dict[str, Any]) -> None:
        """Take over what :meth:`state_dict` returned."""
        state = self._state
        state.iter = held["iter"]
        state.rng.set_state(tuple(held["rng"]))
        for name in _BY_BUCKET:
            setattr(state, name, {bucket: one.to(self._device) for bucket, one in held[name].items()})


def carried_by(state: object, device: torch.device) -> PowerSgdCarried | None:
    """State that a hook carries from step to step, for gradients on a device; None for hooks without it."""
    return PowerSgdCarried(state, device) if isinstance(state, PowerSGDState) else None
