"""Landings: marks of the gradients that are complete in a slot, for readers of a dead trainer's slot.

Each local rank has an area behind the slot's tensors: a head that names the record, its generation and the tap, and one
word per parameter. A word is 0 before a copy begins and set when the copy is complete, so it never vouches for bytes
that are being written. Only the gradients of an optimizer's first step in a record are marked.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

from memckpt.memory.region import Region
from memckpt.state.layout import LANDING_HEAD_BYTES, Layout

_HEAD = struct.Struct("<qq")  # record number, generation
_NONE = -(2**63)
#: A word is ``order << FIRING_BITS | firing``: see :class:`Landing`.
FIRING_BITS = 32


@dataclass(frozen=True)
class Landing:
    """A gradient that is complete in a slot.

    `param`: index of its parameter. `firing`: its number among the gradients that backward made for the parameter in
    the record, from 1. `order`: its place in the order of all landed gradients.
    """

    param: int
    firing: int
    order: int


class Landings:
    """One rank's marks in a ring of slots. The caller owns the region; :meth:`close` releases it."""

    def __init__(self, region: Region, layout: Layout, generation: int, rank: int) -> None:
        self._map = region.map
        self._layout = layout
        self._generation = generation
        self._base = layout.landing_base(rank)
        self._empty = bytes(layout.landing_bytes - LANDING_HEAD_BYTES)
        self._words = [self._view(slot * layout.slot_bytes) for slot in range(layout.ring)]

    def _view(self, slot: int) -> memoryview:
        start = slot + self._base + LANDING_HEAD_BYTES
        with memoryview(self._map) as whole, whole[start : start + len(self._empty)] as part:
            return part.cast("Q")

    def close(self) -> None:
        """Release the views of the region."""
        for view in self._words:
            view.release()
        self._words.clear()

    def open(self, record: int, tap: str) -> None:
        """Clear the marks for `record`, whose gradients `tap` takes."""
        start = self._layout.slot_offset(record) + self._base
        _HEAD.pack_into(self._map, start, _NONE, self._generation)
        self._map[start + LANDING_HEAD_BYTES : start + self._layout.landing_bytes] = self._empty
        name = tap.encode()[: LANDING_HEAD_BYTES - _HEAD.size].ljust(LANDING_HEAD_BYTES - _HEAD.size, b"\0")
        self._map[start + _HEAD.size : start + LANDING_HEAD_BYTES] = name
        _HEAD.pack_into(self._map, start, record, self._generation)

    def words(self, record: int) -> memoryview:
        """The words of a record, by parameter: 0 before a copy begins, set when it is complete."""
        return self._words[self._layout.slot_number(record)]

    def tap(self, record: int) -> str | None:
        """The tap that took the record's gradients; None if the slot holds another record."""
        start = self._layout.slot_offset(record) + self._base
        if _HEAD.unpack_from(self._map, start) != (record, self._generation):
            return None
        return self._map[start + _HEAD.size : start + LANDING_HEAD_BYTES].rstrip(b"\0").decode(errors="replace")

    def landed(self, record: int) -> Iterator[Landing]:
        """The landed gradients of the record in the slot."""
        words = self.words(record)
        for param in range(len(self._layout.spec.params)):
            word = words[param]
            if word:
                yield Landing(param, word & (1 << FIRING_BITS) - 1, word >> FIRING_BITS)
