"""Slots: the shared memory that holds the last few records, and the stamps that mark the complete ones.

A slot's header has one stamp per local rank. A rank invalidates its stamp before its first write of any kind, anchors
included, and sets it to the record's number when its part is complete; readers check all stamps. By-value tensors have
other, fewer slots, with the same kind of stamps. Tensors held once for all local ranks are valid only if the ranks'
digests of them, behind the stamps, are equal.

Landings mark the gradients that are complete in a slot, for readers of a dead trainer's slot. Each local rank has an
area behind the slot's tensors: a head that names the record, its generation and the tap, and one word per parameter. A
word is 0 before a copy begins and set when the copy is complete, so it never vouches for bytes that are being written.
Only the gradients of an optimizer's first step in a record are marked.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from memckpt.errors import DamagedStateError
from memckpt.memory.region import Region
from memckpt.state.layout import DIGEST_BYTES, HEADER_BYTES, LANDING_HEAD_BYTES, Layout

_STAMP = struct.Struct("<qq")  # record number, generation
_WRITING = -(2**63)
#: A landing's word is ``order << FIRING_BITS | firing``: see :class:`Landing`.
FIRING_BITS = 32
#: Records after which ranks know, at the latest, whether they agreed on a record (with commits that are sent later).
AGREEMENT_RECORDS = 2


def max_local_ranks() -> int:
    """Number of ranks that a slot header has room for."""
    return HEADER_BYTES // _STAMP.size


class SlotRing:
    """Stamps of a ring of slots. The region belongs to the caller."""

    def __init__(self, region: Region, layout: Layout, generation: int) -> None:
        self._map = region.map
        self._layout = layout
        self._generation = generation

    def _set(self, slot: int, rank: int, record: int) -> None:
        position = self._layout.spec.local_ranks.index(rank)
        _STAMP.pack_into(self._map, slot + position * _STAMP.size, record, self._generation)

    def open_for_writing(self, record: int, rank: int) -> None:
        """Invalidate a rank's stamp: the slot of `record` is about to be filled."""
        self._set(self._layout.slot_offset(record), rank, _WRITING)

    def open_by_value(self, record: int, rank: int) -> None:
        """Invalidate a rank's stamp of the by-value slot of `record`, which is written at the record's end."""
        if self._layout.by_value_ring:
            self._set(self._layout.by_value_slot_offset(record), rank, _WRITING)

    def seal(self, record: int, rank: int, by_value: bool = True) -> None:
        """Mark a rank's part of `record` as complete; without its by-value tensors if `by_value` is False."""
        if by_value and self._layout.by_value_ring:
            self._set(self._layout.by_value_slot_offset(record), rank, record)
        self._set(self._layout.slot_offset(record), rank, record)

    def note_digests(self, record: int, rank: int, digests: bytes) -> None:
        """Store a rank's digests of the shared tensors of `record`; call before it seals its part."""
        base = self._layout.digests_base(record, rank)
        self._map[base : base + self._layout.digest_bytes] = digests

    def digests(self, record: int, rank: int) -> bytes:
        """A rank's digests of the shared tensors of `record`; valid only while these are held."""
        base = self._layout.digests_base(record, rank)
        return self._map[base : base + self._layout.digest_bytes]

    def disagreed(self, record: int) -> list[str]:
        """Names of shared tensors that differ between ranks at the end of `record`; empty while not all are sealed."""
        if not self._layout.shared:
            return []
        try:
            self._check_parts(record, self._layout.spec.local_ranks)
        except DamagedStateError:
            return []
        return self._differing(record)

    def _differing(self, record: int) -> list[str]:
        layout = self._layout
        found = [self.digests(record, rank) for rank in layout.spec.local_ranks]
        if len(set(found)) == 1:
            return []
        places = [slice(index * DIGEST_BYTES, (index + 1) * DIGEST_BYTES) for index in range(len(layout.shared))]
        names = [layout.spec.by_value[position].name for position in layout.shared]
        return [name for name, place in zip(names, places, strict=True) if len({one[place] for one in found}) > 1]

    def check(self, record: int, ranks: Sequence[int]) -> None:
        """Check that the slot holds `record`, except its by-value tensors. Raises DamagedStateError: it does not."""
        self._check("slot", self._layout.slot_offset(record), record, ranks)

    def check_by_value(self, record: int, ranks: Sequence[int]) -> None:
        """Check that these ranks' by-value tensors of `record` are held; shared ones for all local ranks.

        Raises DamagedStateError: they are not, or the ranks disagree.
        """
        if not self._layout.shared:
            self._check_parts(record, ranks)
            return
        self._check_parts(record, self._layout.spec.local_ranks)  # any of them may have staged shared tensors
        differing = self._differing(record)
        if differing:
            raise DamagedStateError(
                f"by-value tensors of record {record}: expected all of the ranks {list(self._layout.spec.local_ranks)} "
                f"to have the same {differing[0]}, which is held once for them, found that they differ"
            )

    def _check_parts(self, record: int, ranks: Sequence[int]) -> None:
        if self._layout.by_value_ring:
            self._check("by-value tensors", self._layout.by_value_slot_offset(record), record, ranks)

    def _check(self, what: str, slot: int, record: int, ranks: Sequence[int]) -> None:
        for rank in ranks:
            position = self._layout.spec.local_ranks.index(rank)
            found, generation = _STAMP.unpack_from(self._map, slot + position * _STAMP.size)
            if found != record or generation != self._generation:
                state = "is being written" if found == _WRITING else f"holds record {found}"
                raise DamagedStateError(
                    f"{what} of record {record}, generation {self._generation}: the part of rank {rank} {state} "
                    f"(generation {generation})"
                )


@dataclass(frozen=True)
class Landing:
    """A gradient that is complete in a slot: one of its parameter's, from 1, and its place in the order of all."""

    param: int
    firing: int
    order: int


class Landings:
    """One rank's landings in a ring of slots. The caller owns the region; :meth:`close` releases its views."""

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
        _STAMP.pack_into(self._map, start, _WRITING, self._generation)
        self._map[start + LANDING_HEAD_BYTES : start + self._layout.landing_bytes] = self._empty
        name = tap.encode()[: LANDING_HEAD_BYTES - _STAMP.size].ljust(LANDING_HEAD_BYTES - _STAMP.size, b"\0")
        self._map[start + _STAMP.size : start + LANDING_HEAD_BYTES] = name
        _STAMP.pack_into(self._map, start, record, self._generation)

    def words(self, record: int) -> memoryview:
        """The words of a record, by parameter: 0 before a copy begins, set when it is complete."""
        return self._words[self._layout.slot_number(record)]

    def tap(self, record: int) -> str | None:
        """The tap that took the record's gradients; None if the slot holds another record."""
        start = self._layout.slot_offset(record) + self._base
        if _STAMP.unpack_from(self._map, start) != (record, self._generation):
            return None
        return self._map[start + _STAMP.size : start + LANDING_HEAD_BYTES].rstrip(b"\0").decode(errors="replace")

    def landed(self, record: int) -> Iterator[Landing]:
        """The landed gradients of the record in the slot."""
        words = self.words(record)
        for param in range(len(self._layout.spec.params)):
            word = words[param]
            if word:
                yield Landing(param, word & (1 << FIRING_BITS) - 1, word >> FIRING_BITS)
