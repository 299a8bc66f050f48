"""Memory cells that hold one fragment each, behind a stamp that says which.

The stamp is written last and cleared first, so that a process that maps the memory after its writer has died finds
whole fragments only.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from memckpt.replication.coding.fragments import Fragment
from memckpt.replication.transport.wire import Window

#: Stripes of the record (0: the cell is empty), record, step, stripe, length, bytes, checksum, digest.
_STAMP = struct.Struct("<Iqq3I8s16s")
_STRIPES = struct.Struct("<I")
#: Bytes in front of each fragment.
STAMP_BYTES = 64


class Found(NamedTuple):
    """A fragment where it lies. `step`: the framework's step of its record."""

    fragment: Fragment
    step: int
    payload: memoryview


class Cells:
    """The cells of a slot, one after the other: each has a stamp and the bytes of a fragment.

    Args:
        window: generation of the fragments.
        unit: bytes of a fragment of a whole stripe.
        parts: the memory, in order; each a whole number of cells.
    """

    def __init__(self, window: Window, unit: int, parts: list[memoryview]) -> None:
        self._window = window
        self._unit = unit
        self._parts = parts

    def __len__(self) -> int:
        return sum(part.nbytes for part in self._parts) // (STAMP_BYTES + self._unit)

    def _cell(self, stripe: int) -> memoryview:
        start = stripe * (STAMP_BYTES + self._unit)
        for part in self._parts:
            if start < part.nbytes:
                return part[start : start + STAMP_BYTES + self._unit]
            start -= part.nbytes
        raise IndexError(f"expected one of {len(self)} cells, found {stripe}")

    def write(self, fragment: Fragment, step: int, payload: memoryview | bytes) -> memoryview:
        """Write a fragment to its cell; returns its bytes there."""
        one, cell = fragment, self._cell(fragment.stripe)
        # A writer that dies in between leaves an empty cell: the number of stripes is cleared first and written last.
        _STRIPES.pack_into(cell, 0, 0)
        place = cell[STAMP_BYTES : STAMP_BYTES + len(payload)]
        place[:] = payload
        _STAMP.pack_into(cell, 0, 0, one.record, step, one.stripe, one.length, len(payload), one.checksum, one.digest)
        _STRIPES.pack_into(cell, 0, one.stripes)
        return place

    def clear(self) -> None:
        """Empty all cells."""
        for stripe in range(len(self)):
            _STRIPES.pack_into(self._cell(stripe), 0, 0)

    def find(self) -> list[Found]:
        """The fragments of the record that is whole here, by stripe; empty if none is."""
        stripes = _STRIPES.unpack_from(self._cell(0))[0] if len(self) else 0
        if not 1 <= stripes <= len(self):
            return []
        found = [one for stripe in range(stripes) if (one := self._fragment(stripe, stripes)) is not None]
        return found if len(found) == stripes and len({(one.fragment.record, one.step) for one in found}) == 1 else []

    def _fragment(self, expected: int, expected_stripes: int) -> Found | None:
        cell = self._cell(expected)
        stripes, record, step, stripe, length, nbytes, checksum, digest = _STAMP.unpack_from(cell)
        if (stripes, stripe) != (expected_stripes, expected) or nbytes > self._unit:
            return None
        told = self._window
        fragment = Fragment(
            told.generation, told.owner, record, stripe, stripes, told.index, told.data, told.tolerate, length,
            checksum, digest,
        )  # fmt: skip
        return Found(fragment, step, cell[STAMP_BYTES : STAMP_BYTES + nbytes])
