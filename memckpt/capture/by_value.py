"""Copies of one rank's by-value tensors: those of its own, and its share of those that are held once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from memckpt.capture.copier import Copier
from memckpt.capture.digests import Digests
from memckpt.capture.views import Batch
from memckpt.errors import UnsupportedError
from memckpt.memory.region import Region
from memckpt.state.layout import Layout
from memckpt.state.optimizers import dtype_name
from memckpt.state.redo import tensor_at
from memckpt.state.tensors import local, same_bits


class LayoutChangedError(UnsupportedError):
    """The live state no longer fits the layout; a new generation is needed."""


class Holder(Protocol):
    """What a tensor is looked up in: a dict of its module."""

    def get(self, key: str, /) -> torch.Tensor | None: ...


@dataclass(frozen=True)
class LiveTensor:
    """A tensor; with what holds it, and its key there, where user code may replace it at any time."""

    tensor: torch.Tensor
    holder: tuple[Holder, str] | None

    def now(self) -> torch.Tensor | None:
        """The tensor, or the one that is in its place now."""
        return self.tensor if self.holder is None else self.holder[0].get(self.holder[1])


class ByValueTensors:
    """The by-value tensors of a generation, as one rank copies them.

    Args:
        layout: layout of the generation.
        live: the live tensors, in the layout's order.
        rank: this rank.
        copier: copies into slots and snapshots.
    """

    def __init__(self, layout: Layout, live: Sequence[LiveTensor], rank: int, copier: Copier) -> None:
        self._specs = layout.spec.by_value
        self._shared = layout.shared
        self._copier = copier
        self._live = live
        stagers = layout.shared_stagers
        #: Positions of those that this rank copies.
        self._copied = [at for at in range(len(self._specs)) if stagers.get(at, rank) == rank]
        self._offsets = layout.by_value_offsets(rank)
        self._batch: Batch | None = None

    def _now(self, position: int) -> torch.Tensor:
        """The live tensor; raises LayoutChangedError if it does not fit its place."""
        spec, held = self._specs[position], self._live[position].now()
        tensor = None if held is None else local(held)
        if tensor is None or tuple(tensor.shape) != spec.shape or dtype_name(tensor.dtype) != spec.dtype:
            found = "nothing" if tensor is None else f"{list(tensor.shape)} {tensor.dtype}"
            raise LayoutChangedError(f"{spec.name}: expected {list(spec.shape)} {spec.dtype}, found {found}")
        return tensor

    def copy(self, region: Region, base: int) -> None:
        """Copy them to their places, offset by `base` bytes.

        Raises:
            LayoutChangedError: a buffer has changed its shape or dtype, or was removed.
        """
        now = [self._live[position].now() for position in self._copied]
        found = [tensor for tensor in now if tensor is not None]
        if len(found) == len(now) and not self._copier.asynchronous:
            if self._batch is None:
                self._batch = Batch(
                    [(self._offsets[at], self._specs[at].shape, self._specs[at].dtype) for at in self._copied]
                )
            if self._batch.copy(region.map, base, found):
                return
        for position in self._copied:
            self._copier.copy(self._place(position, region, base), self._now(position))

    def _place(self, position: int, region: Region, base: int) -> torch.Tensor:
        spec = self._specs[position]
        return tensor_at(region.map, base + self._offsets[position], spec.shape, spec.dtype)

    def digests(self) -> Digests | None:
        """Digests of the tensors held once, as they are now; None if there are none.

        Raises:
            LayoutChangedError: as :meth:`copy`.
        """
        return Digests([self._now(position) for position in self._shared], self._copier) if self._shared else None

    def differ(self, region: Region, base: int, digests: bytes) -> bool:
        """Whether a tensor differs, in any bit, from the copies at `base`, those held once from these digests.

        Waits for the copies. Another rank may still be copying a tensor that is held once, and may hold other values:
        so this rank's own digests count.
        """
        try:
            now = self.digests()
        except LayoutChangedError:
            return True
        self._copier.token()()
        if now is not None and now.encode() != digests:
            return True
        own = [(at, one.now()) for at, one in enumerate(self._live) if at not in self._shared]
        return any(
            held is None or not same_bits(local(held).detach().cpu(), self._place(at, region, base)) for at, held in own
        )
