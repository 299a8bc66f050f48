"""Fingerprints of tensors: a digest, equal only for equal bits, and a sketch, which tells how far two are apart.

A sketch is four sums of all elements with random signs. The difference of two tensors' sketches is the sketch of their
difference, and the mean of its squares is, on average, the square of that difference's norm. Elements in which the two
do not differ cancel.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from memckpt.capture.copier import Copier
from memckpt.capture.digests import Digests
from memckpt.capture.live_state import state_of
from memckpt.config.observers import Watched
from memckpt.state.tensors import local
from memckpt_tools.drill.lines import SKETCHES, Key

#: Elements that share a set of signs; what lies behind gets other ones.
_BLOCK = 1024
_SEED = 0x6472696C6C


class Fingerprints:
    """Fingerprints of a training's tensors.

    Args:
        live: the session with the live tensors.
        copier: fetches digests from a device.
    """

    def __init__(self, live: Watched, copier: Copier) -> None:
        self._live = live
        self._copier = copier
        generator = torch.Generator("cpu").manual_seed(_SEED)
        drawn = torch.randint(0, 2, (_BLOCK, SKETCHES + 1), generator=generator, device="cpu")
        self._signs = (drawn * 2 - 1).double()

    def take(self) -> tuple[tuple[Key, ...], bytes, bytes]:
        """Names, digests and sketches of all tensors of the state at this point. Changes nothing."""
        with torch.no_grad():
            found = dict(self._tensors())
            digests = Digests(list(found.values()), self._copier)
            sketches = [self._sketch(local(tensor)) for tensor in found.values()]
            self._copier.token()()
            data = torch.stack(sketches).numpy().tobytes() if sketches else b""
            return tuple(found), digests.encode(), data

    def _tensors(self) -> Iterator[tuple[Key, torch.Tensor]]:
        tensors = self._live.tensors()
        stepped = {id(each) for one in self._live.optimizers for group in one.param_groups for each in group["params"]}
        for name, tensor in tensors.items():
            if id(tensor) in stepped and tensor.requires_grad:
                yield ("parameter", name), tensor
            else:
                yield ("frozen" if isinstance(tensor, torch.nn.Parameter) else "buffer", name), tensor
        for index, optimizer in enumerate(self._live.optimizers):
            several = f" of optimizer {index}" if len(self._live.optimizers) > 1 else ""
            yield from _states(optimizer, tensors, several)

    def _sketch(self, tensor: torch.Tensor) -> torch.Tensor:
        """float64 of shape (4,), in host memory."""
        if tensor.is_sparse or tensor.layout is not torch.strided:
            return torch.zeros(SKETCHES, dtype=torch.float64)
        flat = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).reshape(-1)
        dtype = torch.float32 if flat.dtype in (torch.float16, torch.bfloat16, torch.float32) else torch.float64
        whole = flat.numel() // _BLOCK * _BLOCK
        signs = self._signs.to(flat.device, dtype)
        rows = (flat[:whole].view(-1, _BLOCK).to(dtype) @ signs[:, :SKETCHES]).double()
        # Blocks get signs of their own: a change that is the same in all of them must not add up.
        turns = self._signs[:, SKETCHES].to(flat.device).repeat(len(rows) // _BLOCK + 1)[: len(rows), None]
        tail = flat[whole:].to(dtype) @ signs[: flat.numel() - whole, :SKETCHES]
        return ((rows * turns).sum(0) + tail.double()).cpu()


def _states(
    optimizer: Optimizer, tensors: Mapping[str, torch.Tensor], several: str
) -> Iterator[tuple[Key, torch.Tensor]]:
    for name, tensor in tensors.items():
        for path, value in _leaves(state_of(optimizer, tensor), ""):
            yield ("state", f"{name} ({path}){several}"), value


def _leaves(value: Any, path: str) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, (bool, int, float)):
        yield path, torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else torch.int64)
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from _leaves(each, f"{path}.{key}" if path else str(key))
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for index, each in enumerate(value):
            yield from _leaves(each, f"{path}.{index}")
