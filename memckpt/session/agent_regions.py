"""Shared memory that the agent hands over to a trainer."""

from __future__ import annotations

from dataclasses import dataclass

from memckpt.memory.generation_regions import GenerationRegions
from memckpt.memory.region import Region
from memckpt.protocol.trainer import Prepared
from memckpt.state.layout import Layout


class PreparedRegions(GenerationRegions):
    """Regions of a generation, mapped. The receiver closes them.

    Attributes:
        message: layout and state of the generation.
    """

    def __init__(self, message: Prepared, regions: list[Region]) -> None:
        layout = Layout(message.spec)
        given = GenerationRegions.of(layout, regions)
        super().__init__(layout, given.slots, given.static, given.replica)
        self.message = message


@dataclass(frozen=True)
class SnapshotOrder:
    """Order of the agent: copy the state after `record` into `region`, which the receiver closes.

    `number` tells it from other orders, also those for the same record.
    """

    record: int
    number: int
    region: Region
