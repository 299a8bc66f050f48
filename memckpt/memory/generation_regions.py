"""The shared memory of one generation: reserved by the agent, handed over as descriptors in a fixed order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from memckpt.memory.budget import check_budget
from memckpt.memory.region import Region
from memckpt.state.layout import Layout
from memckpt.user_messages import short_number


@dataclass(frozen=True)
class Allowance:
    """Memory that a generation may take.

    `held_bytes`: held on this node beside it. `budget`: limit on all of that, in bytes; None: what the machine has.
    `given_back`: bytes among `held_bytes` that are let go of before the rest of the slots is reserved.
    """

    held_bytes: int = 0
    budget: int | None = None
    given_back: int = 0


class GenerationRegions:
    """The creator owns the memory, every opener its mappings; each calls :meth:`close` on its own.

    `slots`: the ring of records. `static`: tensors that never change; None where there are none. `replica`: the state
    that is redone eagerly; None in other modes.
    """

    def __init__(self, layout: Layout, slots: Region, static: Region | None, replica: Region | None) -> None:
        self.layout = layout
        self.slots, self.static, self.replica = slots, static, replica
        #: Bytes of the slots that are not reserved yet.
        self._later_bytes = 0
        self._budget: int | None = None

    @classmethod
    def create(cls, layout: Layout, allowance: Allowance, begins: int | None = None) -> GenerationRegions:
        """Reserve the memory.

        `allowance`: memory that it may take. `begins`: the record after which it begins. Then only what its start takes
        is reserved, until :meth:`make_whole`. None: all of it is. Raises MemoryBudgetError: there is no room.
        """
        start = None if begins is None else layout.start_ranges(begins)
        later = 0 if start is None else layout.slots_bytes - sum(length for _, length in start)
        detail = _in_words(layout)
        if later:
            after = allowance.held_bytes - allowance.given_back
            check_budget(layout.total_bytes, after, allowance.budget, detail, allowance.given_back)
        check_budget(layout.total_bytes - later, allowance.held_bytes, allowance.budget, detail)
        regions = cls(layout, Region.create("slots", layout.slots_bytes, start), None, None)
        try:
            regions.static = Region.create("static", layout.static_bytes) if layout.static_bytes else None
            regions.replica = Region.create("replica", layout.replica_bytes) if layout.replica_bytes else None
        except BaseException:  # raised again: nobody else knows of these regions
            regions.close()
            raise
        regions._later_bytes, regions._budget = later, allowance.budget
        return regions

    @classmethod
    def of(cls, layout: Layout, regions: Sequence[Region]) -> GenerationRegions:
        """Tell regions that were handed over apart; takes them over.

        Raises ValueError: they are not as many as the layout has.
        """
        rest = list(regions)
        replica = rest.pop() if layout.replica_bytes else None
        static = rest.pop() if layout.static_bytes else None
        (slots,) = rest
        return cls(layout, slots, static, replica)

    def __iter__(self) -> Iterator[Region]:
        """The regions that there are, in the order in which they are handed over."""
        return (region for region in (self.slots, self.static, self.replica) if region is not None)

    @property
    def nbytes(self) -> int:
        """Bytes of memory that are reserved."""
        return self.layout.total_bytes - self._later_bytes

    @property
    def whole(self) -> bool:
        """Whether all of the slots are there, and not only what the start takes."""
        return not self._later_bytes

    def make_whole(self, held_bytes: int) -> None:
        """Reserve the rest of the slots.

        `held_bytes`: held on this node beside them. Raises MemoryBudgetError: there is no room; what the start takes
        stays.
        """
        if self.whole:
            return
        check_budget(self._later_bytes, held_bytes + self.nbytes, self._budget, _in_words(self.layout))
        self.slots.reserve("slots")
        self._later_bytes = 0
        self.slots.populate_in_background()

    def populate_in_background(self) -> None:
        """Touch every page that is reserved from a thread, so that no step pays for a first touch."""
        for region in self:
            if self.whole or region is not self.slots:
                region.populate_in_background()

    def close(self) -> None:
        """Unmap and close them. Idempotent."""
        for region in self:
            region.close()


def _in_words(layout: Layout) -> str:
    """What the memory of a generation is made of, for the message where there is not enough."""
    spec = layout.spec
    detail = (
        f"redo={spec.mode}, T={spec.period}, D={spec.slots}, {short_number(layout.numel)} parameters: "
        f"{layout.total_bytes / max(layout.numel, 1):.0f} bytes each"
    )
    by_value = layout.by_value_slot_bytes * layout.by_value_ring
    if by_value > layout.total_bytes // 10:
        detail += (
            f"; of these {by_value / 2**20:.0f} MiB are averages, buffers and the like, held after "
            f"{layout.by_value_ring} records"
        )
        own = len(spec.by_value) - len(layout.shared)
        detail += f", {own} tensors by each of {len(spec.local_ranks)} ranks" if own else ""
        detail += f", {len(layout.shared)} tensors once for them" if layout.shared else ""
    return detail
