"""The shared memory of one generation, handed over as descriptors in a fixed order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from memckpt.memory.region import Region
from memckpt.state.layout import Layout


class GenerationRegions:
    """The creator owns the memory, every opener its mappings; each calls :meth:`close` on its own.

    Attributes:
        slots: the ring of records.
        static: tensors that never change; None where there are none.
        replica: the state that is redone eagerly; None in other modes.
    """

    def __init__(self, slots: Region, static: Region | None, replica: Region | None) -> None:
        self.slots, self.static, self.replica = slots, static, replica

    @classmethod
    def create(cls, layout: Layout, ranges: Sequence[tuple[int, int]] | None = None) -> GenerationRegions:
        """Reserve the memory.

        Args:
            layout: of the generation.
            ranges: offsets and lengths, in bytes, of what of the slots is reserved now; None: all of them.

        Raises:
            MemoryBudgetError: the kernel has no room for it.
        """
        regions = cls(Region.create("slots", layout.slots_bytes, ranges), None, None)
        try:
            regions.static = Region.create("static", layout.static_bytes) if layout.static_bytes else None
            regions.replica = Region.create("replica", layout.replica_bytes) if layout.replica_bytes else None
        except BaseException:  # raised again: nobody else knows of these regions
            regions.close()
            raise
        return regions

    @classmethod
    def of(cls, regions: Sequence[Region], layout: Layout) -> GenerationRegions:
        """Tell regions that were handed over apart; takes them over.

        Raises:
            ValueError: they are not as many as the layout has.
        """
        rest = list(regions)
        replica = rest.pop() if layout.replica_bytes else None
        static = rest.pop() if layout.static_bytes else None
        (slots,) = rest
        return cls(slots, static, replica)

    def __iter__(self) -> Iterator[Region]:
        """The regions that there are, in the order in which they are handed over."""
        return (region for region in (self.slots, self.static, self.replica) if region is not None)

    def close(self) -> None:
        """Unmap and close them. Idempotent."""
        for region in self:
            region.close()
