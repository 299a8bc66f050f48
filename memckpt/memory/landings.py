"""Landings: which gradients of a record have come to lie in its slot, for whoever finds the slot of a dead trainer.

Each local rank has an area of its own behind the slot's tensors: a head that names the record, its generation and the
tap, and one word for each parameter. A word is 0 before a copy begins and set when the copy is complete, so that at no
moment it vouches for bytes that are being written. Only the gradients of an optimizer's first step in a record are
marked.
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
    """A gradient that lies complete in a slot.

    Attributes:
        param: index of its parameter.
        firing: which one it is of those that backward made for the parameter in the record, counted from 1.
        order: its place in the order of all that landed.
    """

    param: int
    firing: int
    order: int


class Landings:
    """One rank's marks in a ring of slots. The region belongs to the caller; :meth:`close` lets go of it."""

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
        """Let go of the region."""
        for view in self._words:
            view.release()
        self._words.clear()

    def open(self, record: int, tap: str) -> None:
        """Nothing of `record` has landed yet; its gradients are going to be taken by `tap`."""
        start = self._layout.slot_offset(record) + self._base
        _HEAD.pack_into(self._map, start, _NONE, self._generation)
        self._map[start + LANDING_HEAD_BYTES : start + self._layout.landing_bytes] = self._empty
        name = tap.encode()[: LANDING_HEAD_BYTES - _HEAD.size].ljust(LANDING_HEAD_BYTES - _HEAD.size, b"\0")
        self._map[start + _HEAD.size : start + LANDING_HEAD_BYTES] = name
        _HEAD.pack_into(self._map, start, record, self._generation)

    def words(self, record: int) -> memoryview:
        """The words of a record, by parameter: to be set when a copy is complete, and to 0 before it begins."""
        return self._words[self._layout.slot_number(record)]

    def tap(self, record: int) -> str | None:
        """The tap that took the record's gradients; None if the slot has nothing of the record."""
        start = self._layout.slot_offset(record) + self._base
        if _HEAD.unpack_from(self._map, start) != (record, self._generation):
            return None
        return self._map[start + _HEAD.size : start + LANDING_HEAD_BYTES].rstrip(b"\0").decode(errors="replace")

    def landed(self, record: int) -> Iterator[Landing]:
        """What has landed of the record that the slot is of."""
        words = self.words(record)
        for param in range(len(self._layout.spec.params)):
            word = words[param]
            if word:
                yield Landing(param, word & (1 << FIRING_BITS) - 1, word >> FIRING_BITS)
