"""Slots: the shared memory that holds the last few records, and the stamps that say which of them are whole.

A slot's header has one stamp for each local rank. A rank invalidates its stamp before its first write of any kind,
anchors included, and sets it to the record's number when its part is complete; whoever reads a slot checks them all.
By-value tensors have slots of their own, fewer of them, with stamps alike. What of them is held once for all local
ranks counts only where their digests, which lie behind the stamps, are equal.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from memckpt.errors import DamagedStateError
from memckpt.memory.region import Region
from memckpt.state.layout import DIGEST_BYTES, HEADER_BYTES, Layout

_STAMP = struct.Struct("<qq")  # record number, generation
_WRITING = -(2**63)
#: How many records later ranks know whether they have agreed on a record, at most: where commits are sent later.
AGREEMENT_RECORDS = 2


def max_local_ranks() -> int:
    """How many ranks one slot header has room for."""
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
        """Invalidate a rank's stamp: the slot of `record` is being filled from now on."""
        self._set(self._layout.slot_offset(record), rank, _WRITING)

    def open_by_value(self, record: int, rank: int) -> None:
        """The same of the by-value tensors of `record`, which are written at its end."""
        if self._layout.by_value_ring:
            self._set(self._layout.by_value_slot_offset(record), rank, _WRITING)

    def seal(self, record: int, rank: int, by_value: bool = True) -> None:
        """State that a rank's part of `record` is complete; without by-value tensors only where it has none."""
        if by_value and self._layout.by_value_ring:
            self._set(self._layout.by_value_slot_offset(record), rank, record)
        self._set(self._layout.slot_offset(record), rank, record)

    def note_digests(self, record: int, rank: int, digests: bytes) -> None:
        """Say what a rank has of the shared tensors of `record`, each in as many bytes; before it seals its part."""
        base = self._layout.digests_base(record, rank)
        self._map[base : base + self._layout.digest_bytes] = digests

    def digests(self, record: int, rank: int) -> bytes:
        """What a rank has said of the shared tensors of `record`, if they are still held."""
        base = self._layout.digests_base(record, rank)
        return self._map[base : base + self._layout.digest_bytes]

    def disagreed(self, record: int) -> list[str]:
        """Names of shared tensors of which not all local ranks have had the same at the end of `record`.

        None where not all of them have sealed their parts of it, or where these are not held any more.
        """
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
        """Make sure that the slot holds all of `record` but its by-value tensors.

        Raises:
            DamagedStateError: a rank's part is of another record or incomplete.
        """
        self._check("slot", self._layout.slot_offset(record), record, ranks)

    def check_by_value(self, record: int, ranks: Sequence[int]) -> None:
        """Make sure that the by-value tensors of `record` are held, and those that are shared for all local ranks.

        Raises:
            DamagedStateError: those of a rank are of another record or incomplete, or ranks do not agree.
        """
        if not self._layout.shared:
            self._check_parts(record, ranks)
            return
        self._check_parts(record, self._layout.spec.local_ranks)  # any of them may have staged what is shared
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
