"""Slots: the shared memory that holds the last few records, and the stamps that say which of them are whole.

A slot's header has one stamp for each local rank. A rank invalidates its stamp before its first write of any kind,
anchors included, and sets it to the record's number when its part is complete; whoever reads a slot checks them all.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from memckpt.errors import DamagedStateError
from memckpt.memory.region import Region
from memckpt.state.layout import HEADER_BYTES, Layout

_STAMP = struct.Struct("<qq")  # record number, generation
_WRITING = -(2**63)


def max_local_ranks() -> int:
    """How many ranks one slot header has room for."""
    return HEADER_BYTES // _STAMP.size


class SlotRing:
    """Stamps of a ring of slots. The region belongs to the caller."""

    def __init__(self, region: Region, layout: Layout, generation: int) -> None:
        self._map = region.map
        self._layout = layout
        self._generation = generation

    def _offset(self, record: int, rank: int) -> int:
        position = self._layout.spec.local_ranks.index(rank)
        return self._layout.slot_offset(record) + position * _STAMP.size

    def open_for_writing(self, record: int, rank: int) -> None:
        """Invalidate a rank's stamp: the slot of `record` is being filled from now on."""
        _STAMP.pack_into(self._map, self._offset(record, rank), _WRITING, self._generation)

    def seal(self, record: int, rank: int) -> None:
        """State that a rank's part of `record` is complete."""
        _STAMP.pack_into(self._map, self._offset(record, rank), record, self._generation)

    def check(self, record: int, ranks: Sequence[int]) -> None:
        """Make sure that the slot holds all of `record`.

        Raises:
            DamagedStateError: a rank's part is of another record or incomplete.
        """
        for rank in ranks:
            found, generation = _STAMP.unpack_from(self._map, self._offset(record, rank))
            if found != record or generation != self._generation:
                state = "is being written" if found == _WRITING else f"holds record {found}"
                raise DamagedStateError(
                    f"slot of record {record}, generation {self._generation}: the part of rank {rank} {state} "
                    f"(generation {generation})"
                )
