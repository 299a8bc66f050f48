"""Bare copies into shared memory: the lower bound of all costs."""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor


class SharedCopy:
    """Shared memory with room for a list of tensors, touched before use.

    Attributes:
        nbytes: its size.
        views: a tensor in it for each of the list.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.nbytes = sum(tensor.nbytes for tensor in tensors)
        self._map = mmap.mmap(-1, self.nbytes)
        self.views: list[Tensor] = []
        offset = 0
        for tensor in tensors:
            view = torch.frombuffer(self._map, dtype=tensor.dtype, count=tensor.numel(), offset=offset)
            self.views.append(view.view(tensor.shape).zero_())
            offset += tensor.nbytes

    def take(self, tensors: Sequence[Tensor]) -> None:
        """Copy the tensors into it, one by one."""
        for view, tensor in zip(self.views, tensors, strict=True):
            view.copy_(tensor)


def copy_bandwidth(nbytes: int = 256 << 20, repetitions: int = 5) -> float:
    """Bytes per second that one thread copies from private into shared memory."""
    source = [torch.ones(1 << 20) for _ in range(nbytes >> 22)]
    target = SharedCopy(source)
    return target.nbytes / best_of(lambda: target.take(source), repetitions)


def best_of(action: Callable[[], object], repetitions: int) -> float:
    """Seconds of the fastest repetition, after a warm-up."""
    action()
    return min(seconds_of(action) for _ in range(repetitions))


def seconds_of(action: Callable[[], object]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started
