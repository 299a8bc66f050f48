"""Generations of a node's own records: where their bytes lie, and what their holders get of them."""

from __future__ import annotations

from memckpt.memory.region import Region
from memckpt.protocol.replication import SendGeneration, SendRecord
from memckpt.replication.keeping.outgoing import Outgoing
from memckpt.replication.process.node_plan import NodePlan
from memckpt.replication.process.source import PartSource, RegionSource
from memckpt.state.records import RankGroup


class OwnGenerations:
    """The newest generation of each of a node's units. Whoever sends a generation closes its regions.

    Args:
        plan: the node's part in the job's plan.
    """

    def __init__(self, plan: NodePlan) -> None:
        self._plan = plan
        self._sources: dict[RankGroup, RegionSource] = {}

    def open(self, message: SendGeneration, regions: list[Region]) -> Outgoing:
        """A generation that is complete on this node, to be sent."""
        source = RegionSource(message.spec, message.number, message.base, regions, message.missing, message.plain)
        for record, (step, meta, rank_states) in message.records.items():
            source.note(record, step, meta, rank_states)
        self._sources[message.ranks] = source
        window = self._plan.window(message)
        records = [record for record in sorted(message.records) if not window.private or record >= message.base]
        part = PartSource(source, "private" if window.private else "all")
        return Outgoing(window, part, records, source.layout.ring)

    def note(self, message: SendRecord) -> bool:
        """Note a record that is whole on this node; False: no generation of its unit is known."""
        source = self._sources.get(message.ranks)
        if source is None:
            return False
        source.note(message.record, message.step, message.meta, message.rank_states)
        return True

    def can_be_cut(self, ranks: RankGroup) -> bool:
        """Whether the unit's state can be copied and cut into virtual records."""
        source = self._sources.get(ranks)
        return source is not None and source.spec.mode != "snapshot"

    def begins_in_replica(self, ranks: RankGroup) -> bool:
        """Whether the virtual records with which the unit's generation begins are cut from its replica."""
        source = self._sources.get(ranks)
        return source is not None and source.spec.mode == "eager" and ranks not in self._plan.private

    def clear(self) -> None:
        self._sources.clear()
