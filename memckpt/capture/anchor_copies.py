"""Batched copies of the anchors due in a record.

A piece that is a whole parameter in host memory, with all of its state in tensors, is copied together with the others
of its kind. Every record checks the tensors of each such piece; on a mismatch the caller copies piece by piece, and so
finds what has changed.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence

import torch
from torch.optim import Optimizer

from memckpt.capture.views import Batch, Place
from memckpt.state.layout import Piece
from memckpt.state.optimizers import dtype_of
from memckpt.state.spec import ParamSpec
from memckpt.state.tensors import is_dtensor

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
