"""The watermark: the newest record that is acknowledged for every node of the job."""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from memckpt.replication.pacing.cadence import Cadence
from memckpt.replication.transport.wire import Acknowledged, Watermark


class Leader:
    """The watermark, put together from the nodes' acknowledgements; the first rank's node is the leader.

    Args:
        nodes: all nodes of the job.
        record: the record that every node can produce at the start.
        cadence: N, and which states are protected in place of records; None: every record.
    """

    def __init__(self, nodes: Collection[str], record: int, cadence: Cadence | None = None) -> None:
        self._cadence = cadence
        self._newest = record
        self._said: dict[str, Acknowledged] = {}
        self._nodes = set(nodes)
        self._unheard: frozenset[str] = frozenset()
        self._given_up: frozenset[str] = frozenset()
        self._told = Watermark(record, False, every=1 if cadence is None else cadence.every)

    @property
    def watermark(self) -> Watermark:
        """The newest watermark."""
        return self._told

    def acknowledged(self, message: Acknowledged) -> Watermark | None:
        """Take a node's acknowledgement. Returns the new watermark if it changed; it never goes back."""
        if message.node not in self._nodes:
            return None
        self._said[message.node] = message
        return self._change()

    def committed(self, record: int) -> Watermark | None:
        """Note the newest record of the leader's node. Returns the new watermark if it changed."""
        if record == self._newest:
            return None
        self._newest = record
        return self._change() if self._cadence is not None else None

    def begin_generation(self, snapshots: bool) -> Watermark | None:
        """Choose N anew. Returns the new watermark if it changed."""
        if self._cadence is None:
            return None
        self._cadence.begin_generation(snapshots)
        return self._change()

    def unheard(self, nodes: frozenset[str]) -> Watermark | None:
        """Note the nodes that are silent now: while there are any, not all is whole.

        Returns:
            The new watermark, if it has changed.
        """
        if nodes == self._unheard:
            return None
        self._unheard = nodes
        return self._change()

    def give_up(self, nodes: frozenset[str]) -> Watermark | None:
        """Note the nodes that are silent for too long to be waited for. Returns the new watermark if it changed."""
        if nodes == self._given_up:
            return None
        self._given_up = nodes
        return self._change()

    def _change(self) -> Watermark | None:
        waits_suspended = bool(self._given_up) or any(one.lost for one in self._said.values())
        if set(self._said) != self._nodes:
            return self._tell_change(msgspec.structs.replace(self._told, whole=False, waits_suspended=waits_suspended))
        record = min(one.record for one in self._said.values())
        if any(one.since > record for one in self._said.values()):
            record = self._told.record  # some node has no such record: wait until all have got past its gap
        record = max(record, self._told.record)
        every, cut, needed, reached = 1, 0, 0, 0
        if (cadence := self._cadence) is not None:
            record = cadence.advance(self._said.values(), self._newest, record)
            every, cut, needed, reached = cadence.every, cadence.cut, cadence.needed, cadence.reached
        # Records that begin beyond a state that holders have: until all have got further than that, it counts.
        there = all(one.whole and (one.since <= record or record == reached) for one in self._said.values())
        whole = not self._unheard and there and not waits_suspended
        return self._tell_change(Watermark(record, whole, waits_suspended, every, cut, needed))

    def _tell_change(self, now: Watermark) -> Watermark | None:
        if now == self._told:
            return None
        self._told = now
        return now

    def missing(self) -> tuple[str, ...]:
        """Nodes that hold the watermark back, in order of their names."""
        behind = {node for node in self._nodes if node not in self._said}
        behind |= {one.node for one in self._said.values() if not one.whole or one.record <= self._told.record}
        return tuple(sorted(behind))
