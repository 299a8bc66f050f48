"""Places of one rank's gradients in the slots of a generation."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from memckpt.capture.views import Places
from memckpt.memory.region import Region
from memckpt.state import encodings
from memckpt.state.layout import Layout
from memckpt.state.optimizers import dtype_of
from memckpt.state.redo import tensor_at
from memckpt.state.spec import ITEM_BYTES, encoded_parts

#: Places by parameter in one sub-step; None where there is none for a dense gradient of this rank.
Row = list[torch.Tensor | None]


class GradientPlaces:
    """Views of the places that this rank fills.

    Args:
        layout: layout of the generation.
        slots: its slots.
        mine: for each parameter, whether this rank stages it.
    """

    def __init__(self, layout: Layout, slots: Region, mine: Sequence[bool]) -> None:
        self._layout = layout
        self._slots = slots
        # Made here, not at first use: that is during backward, between large gradients, where small long-lived objects
        # would fragment the heap.
        #: By slot, optimizer and sub-step.
        self._rows: list[list[list[Row]]] = [[] for _ in range(layout.ring)]
        # Views of parts of encoded gradients would be many, for all slots: they are cut from one of the bytes.
        self._bytes: torch.Tensor | None = None
        self._parts = [self._parts_of(param) for param in range(len(layout.spec.params))]
        for optimizer in range(len(layout.spec.optimizers)):
            self._add_rows(optimizer, mine)

    def _add_rows(self, optimizer: int, mine: Sequence[bool]) -> None:
        layout, specs = self._layout, self._layout.spec.params
        # Room for sparse gradients may be too small for dense ones.
        filled = [
            param for param in layout.optimizer_params(optimizer) if mine[param] and layout.spec.has_dense_room(param)
        ]
        shaped = [(param, specs[param].tensor.shape, specs[param].grad_dtype) for param in filled]
        by_sub_step = [
            Places([(layout.gradient_offset(optimizer, step, param), shape, dtype) for param, shape, dtype in shaped])
            for step in range(layout.sub_step_room[optimizer])
        ]
        for slot, in_slot in enumerate(self._rows):
            steps = []
            for places in by_sub_step:
                row: Row = [None] * len(specs)
                views = places.at(self._slots.map, slot * layout.slot_bytes)
                for param, view in zip(filled, views, strict=True):
                    row[param] = view
                steps.append(row)
            in_slot.append(steps)

    def _parts_of(self, param: int) -> list[tuple[int, int, torch.dtype]]:
        """First byte behind the beginning of the gradient, number of bytes and dtype of each part."""
        encoding, described = self._layout.spec.encoding(param), self._layout.spec.params[param]
        if encoding is None:
            return []
        parts = encoded_parts(encoding, described.tensor.numel, described.grad_dtype)
        return [(one.offset, one.length * dtype_of(one.dtype).itemsize, dtype_of(one.dtype)) for one in parts]

    def _encoded_places(self, record: int, optimizer: int, sub_step: int, param: int) -> list[torch.Tensor]:
        if self._bytes is None:
            self._bytes = torch.frombuffer(self._slots.map, dtype=torch.uint8)
        start = self._layout.slot_offset(record) + self._layout.gradient_offset(optimizer, sub_step, param)
        return [
            self._bytes[start + offset : start + offset + nbytes].view(dtype)
            for offset, nbytes, dtype in self._parts[param]
        ]

    def encoded(self, record: int, optimizer: int, sub_step: int, param: int) -> list[torch.Tensor] | None:
        """Places of the parts of an encoded gradient; None if there is no room for another step of the optimizer."""
        if sub_step >= self._layout.sub_step_room[optimizer]:
            return None
        return self._encoded_places(record, optimizer, sub_step, param)

    def staged(self, record: int, optimizer: int, sub_step: int, param: int) -> torch.Tensor:
        """The gradient of `param` as staged; a view, or decoded. Only for parameters that this rank stages."""
        spec = self._layout.spec
        encoding = spec.encoding(param)
        if encoding is None:
            return self.view(record, optimizer, sub_step, param)
        described = spec.params[param]
        parts = self._encoded_places(record, optimizer, sub_step, param)
        dense = encodings.decode(encoding, parts, described.tensor.numel, dtype_of(described.grad_dtype))
        return dense.view(described.tensor.shape)

    def sample(self, record: int, optimizer: int, sub_step: int, param: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A few elements of an encoded gradient as staged, others for each record: positions, and values."""
        encoding, described = self._layout.spec.encoding(param), self._layout.spec.params[param]
        assert encoding is not None
        parts = self._encoded_places(record, optimizer, sub_step, param)
        return encodings.sample(encoding, parts, described.tensor.numel, dtype_of(described.grad_dtype), record)

    def close(self) -> None:
        """Release the views, which keep the mapping; also those in rows that were handed out."""
        self._bytes = None
        for row in [row for slot in self._rows for steps in slot for row in steps]:
            row.clear()
        self._rows.clear()

    def view(self, record: int, optimizer: int, sub_step: int, param: int) -> torch.Tensor:
        """Place of the gradient of `param` in that sub-step; only for parameters that this rank stages."""
        view = self._rows[self._layout.slot_number(record)][optimizer][sub_step][param]
        assert view is not None
        return view

    def row(self, record: int, optimizer: int, sub_step: int) -> Row | None:
        """Places of all gradients in that sub-step; None if there is no room for another step of the optimizer."""
        if sub_step >= self._layout.sub_step_room[optimizer]:
            return None
        return self._rows[self._layout.slot_number(record)][optimizer][sub_step]

    def area(self, record: int, optimizer: int, sub_step: int, dtype: str) -> torch.Tensor:
        """All gradients of that sub-step as staged, as a one-dimensional tensor."""
        offset, nbytes = self._layout.gradient_area(optimizer, sub_step)
        offset += self._layout.slot_offset(record)
        return tensor_at(self._slots.map, offset, (nbytes // ITEM_BYTES[dtype],), dtype)

    def sparse(
        self, record: int, optimizer: int, sub_step: int, param: int, gradient: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Places of the indices and values of a sparse gradient, which have to fit."""
        indices, values = gradient._indices(), gradient._values()
        dtype = self._layout.spec.params[param].grad_dtype
        offset = self._layout.slot_offset(record) + self._layout.gradient_offset(optimizer, sub_step, param)
        place = tensor_at(self._slots.map, offset, tuple(indices.shape), "int64")
        return place, tensor_at(self._slots.map, offset + indices.nbytes, tuple(values.shape), dtype)
