"""Batched copies of many tensors to their places in shared memory, and batched views of those places.

For a small tensor, creating a view of its place takes several times as long as the copy; keeping the views of all slots
would take more memory than the tensors.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from math import prod
from operator import attrgetter

import torch
from torch.optim import Optimizer

from memckpt.state.layout import Piece, aligned
from memckpt.state.optimizers import dtype_of
from memckpt.state.redo import tensor_at
from memckpt.state.spec import ITEM_BYTES, ParamSpec
from memckpt.state.tensors import is_dtensor

#: Offset (bytes), shape and dtype.
Place = tuple[int, tuple[int, ...], str]
#: Tensors up to this size are copied twice, which is cheaper than a view.
SMALL_BYTES = 4 << 10

_dtype, _shape, _on_host = attrgetter("dtype"), attrgetter("shape"), attrgetter("is_cpu")
_PLAIN = {torch.Tensor, torch.nn.Parameter}


class Places:
    """Places laid out alike in several parts of a region, one part per record.

    One operation makes the views of all places of one dtype.

    Args:
        places: the places, which do not overlap; offsets are multiples of the dtypes' sizes.
    """

    def __init__(self, places: Sequence[Place]) -> None:
        self._count = len(places)
        self._rows = [_Rows(dtype, places) for dtype in dict.fromkeys(dtype for _, _, dtype in places)]

    def at(self, buffer: mmap.mmap, base: int) -> list[torch.Tensor]:
        """Views of all places, offset by `base` bytes. Each view keeps the mapping alive."""
        views: list[torch.Tensor | None] = [None] * self._count
        with torch.no_grad():
            for rows in self._rows:
                rows.fill(views, buffer, base)
        return [view for view in views if view is not None]


class _Rows:
    """The places of one dtype: runs of elements with gaps before them."""

    def __init__(self, dtype: str, places: Sequence[Place]) -> None:
        item = ITEM_BYTES[dtype]
        # Empty places first: they may share an offset with another place.
        found = sorted(
            (offset, prod(shape), index) for index, (offset, shape, one) in enumerate(places) if one == dtype
        )
        self._dtype = dtype
        self._first = found[0][0]
        self._order = [index for _, _, index in found]
        self._shapes = [(position, places[index][1]) for position, index in enumerate(self._order)]
        self._shapes = [(position, shape) for position, shape in self._shapes if len(shape) != 1]
        self._sizes: list[int] = []
        end = self._first
        for offset, numel, _ in found:
            self._sizes += [(offset - end) // item, numel]
            end = offset + numel * item
        self._total = (end - self._first) // item

    def fill(self, views: list[torch.Tensor | None], buffer: mmap.mmap, base: int) -> None:
        flat = tensor_at(buffer, base + self._first, (self._total,), self._dtype)
        rows = list(flat.split_with_sizes(self._sizes)[1::2])
        for position, shape in self._shapes:
            rows[position] = rows[position].view(shape)
        for index, row in zip(self._order, rows, strict=True):
            views[index] = row


class Batch:
    """Copies tensors in host memory to their places, in the calling thread.

    Small tensors are gathered in memory laid out like their places, and copied from there by one operation per
    contiguous run.

    Args:
        places: the places, aligned as a layout aligns them; each includes the padding behind it.
    """

    def __init__(self, places: Sequence[Place]) -> None:
        sizes = [prod(shape) * ITEM_BYTES[dtype] for _, shape, dtype in places]
        small = [index for index, size in enumerate(sizes) if size <= SMALL_BYTES]
        large = [index for index, size in enumerate(sizes) if size > SMALL_BYTES]
        self._order = small + large
        self._shapes = [places[index][1] for index in self._order]
        self._dtypes = [dtype_of(places[index][2]) for index in self._order]
        self._large = Places([places[index] for index in large])
        #: Byte ranges that places of small tensors fill without a gap.
        self._stretches: list[tuple[int, int]] = []
        for start, stop in sorted((places[index][0], places[index][0] + aligned(sizes[index])) for index in small):
            if self._stretches and self._stretches[-1][1] == start:
                start, _ = self._stretches.pop()
            self._stretches.append((start, stop))
        self._first = self._stretches[0][0] if small else 0
        self._memory = mmap.mmap(-1, max(self._stretches[-1][1] - self._first, 1) if small else 1)
        near = [(places[index][0] - self._first, places[index][1], places[index][2]) for index in small]
        self._gathered = Places(near).at(self._memory, 0)

    @torch.no_grad()
    def copy(self, buffer: mmap.mmap, base: int, sources: Sequence[torch.Tensor]) -> bool:
        """Copy each of `sources` to its place, offset by `base` bytes; without autograd.

        Returns False, and copies nothing, unless all are plain tensors in host memory with the shapes and dtypes of
        their places: a copy would silently cast and broadcast.
        """
        if not sources:
            return True
        if not set(map(type, sources)) <= _PLAIN:
            return False
        ordered = [sources[index] for index in self._order]
        if list(map(_dtype, ordered)) != self._dtypes or list(map(_shape, ordered)) != self._shapes:
            return False
        if not all(map(_on_host, ordered)):
            return False
        torch._foreach_copy_(self._gathered + self._large.at(buffer, base), ordered)
        for start, stop in self._stretches:
            gathered = tensor_at(self._memory, start - self._first, (stop - start,), "uint8")
            tensor_at(buffer, base + start, (stop - start,), "uint8").copy_(gathered)
        return True


#: Keys of a parameter's state, by optimizer.
Keys = list[tuple[int, tuple[str, ...]]]


class AnchorCopies:
    """The pieces due at one step of the anchor period that can be copied together.

    Args:
        pieces: the pieces due, each with the places of its parts: the parameter, and its state by owner.
        params: the live parameters.
        specs: the layout's specs of `params`.
        mine: for each parameter, whether this rank copies it.
        optimizers: the live optimizers.

    Attributes:
        rest: positions of the pieces that the caller has to copy itself.
    """

    def __init__(
        self,
        pieces: Sequence[tuple[Piece, list[Place]]],
        params: Sequence[torch.Tensor],
        specs: Sequence[ParamSpec],
        mine: Sequence[bool],
        optimizers: Sequence[Optimizer],
    ) -> None:
        self._optimizers = optimizers
        self.rest: list[int] = []
        #: Each parameter, the keys of its state, and whether this rank copies it.
        self._live: list[tuple[torch.Tensor, Keys, bool]] = []
        places: list[Place] = []
        for position, (piece, parts) in enumerate(pieces):
            param, spec = params[piece.param], specs[piece.param]
            keys = [(owner.optimizer, tuple(state.key for state in owner.state)) for owner in spec.owners]
            sources = self._sources_of(param, keys)
            uncut = piece.stop - piece.start == spec.tensor.numel and not is_dtensor(param)
            shapes = [spec.tensor.shape] + [state.shape for owner in spec.owners for state in owner.state]
            shaped = [(offset, shape, dtype) for (offset, _, dtype), shape in zip(parts, shapes, strict=True)]
            if uncut and sources is not None and _fit(sources, shaped):
                self._live.append((param, keys, mine[piece.param]))
                places += shaped if mine[piece.param] else ()
            else:
                self.rest.append(position)
        self._batch = Batch(places)

    def _sources_of(self, param: torch.Tensor, keys: Keys) -> list[torch.Tensor] | None:
        """A parameter and its state; None if they differ from the layout."""
        found = [param]
        for optimizer, names in keys:
            state = self._optimizers[optimizer].state.get(param)
            if state is None or len(state) != len(names):
                return None
            for name in names:
                value = state.get(name)
                if type(value) is not torch.Tensor:
                    return None
                found.append(value)
        return found

    def copy(self, buffer: mmap.mmap, base: int) -> bool:
        """Copy all pieces into the slot that begins at byte `base`, in the calling thread.

        Returns False, and copies nothing, if a tensor no longer matches the layout.
        """
        sources: list[torch.Tensor] = []
        for param, keys, mine in self._live:
            found = self._sources_of(param, keys)
            if found is None:
                return False
            if mine:
                sources += found
        return self._batch.copy(buffer, base, sources)


def _fit(sources: Sequence[torch.Tensor], places: Sequence[Place]) -> bool:
    """Whether the tensors lie in host memory and have the shapes and dtypes of their places."""
    return all(
        source.is_cpu and tuple(source.shape) == shape and source.dtype == dtype_of(dtype)
        for source, (_, shape, dtype) in zip(sources, places, strict=True)
    )
