"""Shared memory that the agent hands over to a trainer."""

from __future__ import annotations

from dataclasses import dataclass

from memckpt.memory.region import Region
from memckpt.protocol.trainer import Prepared


class PreparedRegions:
    """Regions of a generation, mapped. The receiver closes them.

    Attributes:
        message: layout and state of the generation.
        slots: slots of records.
        static: static tensors; None without any.
        replica: the replica; None without eager redo.
    """

    def __init__(self, message: Prepared, regions: list[Region]) -> None:
        self.message = message
        self.slots = regions[0]
        rest = regions[1:]
        has_replica = message.spec.mode == "eager"
        self.replica = rest.pop() if has_replica and rest else None
        self.static = rest.pop() if rest else None

    def close(self) -> None:
        for region in (self.slots, self.static, self.replica):
            if region is not None:
                region.close()


@dataclass(frozen=True)
class SnapshotOrder:
    """Order of the agent: copy the state after `record` into `region`, which the receiver closes."""

    record: int
    region: Region
