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
        cadence: which states are protected where links are too slow for records; None: no other than these.

    Attributes:
        newest: the newest record that this node has committed.
    """

    def __init__(self, nodes: Collection[str], record: int, cadence: Cadence | None = None) -> None:
        self._cadence = cadence
        self.newest = record
        self._said: dict[str, Acknowledged] = {}
        self._nodes = set(nodes)
        self._unheard: frozenset[str] = frozenset()
        self._given_up: frozenset[str] = frozenset()
        self._told = Watermark(record, False)

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
            return self._tell(msgspec.structs.replace(self._told, whole=False, waits_suspended=waits_suspended))
        record = min(one.record for one in self._said.values())
        if any(one.since > record for one in self._said.values()):
            record = self._told.record  # some node has no such record: wait until all have got past its gap
        record = max(record, self._told.record)
        every = cut = reached = 0
        if self._cadence is not None:
            record = self._cadence.look(self._said.values(), self.newest, record)
            every, cut, reached = self._cadence.every, self._cadence.cut, self._cadence.reached
        # Records that begin beyond a state that holders have: until all have got further than that, it counts.
        there = all(one.whole and (one.since <= record or record == reached) for one in self._said.values())
        whole = not self._unheard and there and not waits_suspended
        return self._tell(Watermark(record, whole, waits_suspended, every, cut))

    def _tell(self, now: Watermark) -> Watermark | None:
        if now == self._told:
            return None
        self._told = now
        return now

    def missing(self) -> tuple[str, ...]:
        """Nodes that hold the watermark back, in order of their names."""
        behind = {node for node in self._nodes if node not in self._said}
        behind |= {one.node for one in self._said.values() if not one.whole or one.record <= self._told.record}
        return tuple(sorted(behind))
