"""Nodes that owe an acknowledgement for too long, in time that passes only while somebody looks."""

from __future__ import annotations

from collections.abc import Hashable, Mapping

#: The longest time between two looks that counts: whoever was busy or stopped itself has not waited for others.
_LONGEST_LOOK_SECONDS = 2.0
LOST_LIMITS = 20
"""Number of time limits for which training waits for a node that may be lost."""


class Overdue:
    """Time limits of nodes, each counted from the node's last progress.

    Args:
        limit: seconds without progress after which a node is overdue.
    """

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self._watched = 0.0
        self._looked: float | None = None
        self._since: dict[str, tuple[Hashable, float]] = {}
        #: Nodes that were overdue at the last look.
        self.nodes: frozenset[str] = frozenset()

    def look(self, owing: Mapping[str, Hashable], now: float) -> bool:
        """Look at all that owe something; returns whether the overdue ones have changed.

        Args:
            owing: nodes that owe something, each with a value that changes whenever it makes progress.
            now: seconds of a clock that only goes forward.
        """
        passed = 0.0 if self._looked is None else min(max(0.0, now - self._looked), _LONGEST_LOOK_SECONDS)
        self._looked, self._watched = now, self._watched + passed
        for node in [node for node in self._since if node not in owing]:
            del self._since[node]
        for node, progress in owing.items():
            known = self._since.get(node)
            if known is None or known[0] != progress:
                self._since[node] = progress, self._watched
        before = self.nodes
        self.nodes = frozenset(node for node, (_, since) in self._since.items() if self._watched - since >= self.limit)
        return self.nodes != before


class Absence:
    """Nodes that are not heard, and that training does not wait for.

    A node that is silent may stand still, or may be lost with all that ran there. Going on overwrites what a resume
    without it needs. But a record takes all ranks: where two more were made since it was last heard, its trainers live,
    so that it stands still. Where they were not, it is waited for much longer, so that somebody may find it lost.

    Args:
        limit: seconds of silence, where training has gone on since.
    """

    def __init__(self, limit: float) -> None:
        self._still = Overdue(limit)
        self._lost = Overdue(LOST_LIMITS * limit)
        #: By node, when it was heard last and the newest record that this one had then.
        self._heard: dict[str, tuple[float | None, int]] = {}
        self.nodes: frozenset[str] = frozenset()

    def look(self, heard: Mapping[str, float | None], newest: int, every: int, now: float) -> None:
        """Look at all peers.

        Args:
            heard: all peers, each with the time at which it was heard last.
            newest: the newest record that is whole on this node.
            every: records have numbers that are multiples of it.
            now: seconds of a clock that only goes forward.
        """
        for node, at in heard.items():
            known = self._heard.get(node)
            if known is None or known[0] != at:
                self._heard[node] = at, newest
        self._still.look(heard, now)
        self._lost.look(heard, now)
        lives = {node for node in heard if newest >= self._heard[node][1] + 2 * every}
        self.nodes = frozenset(self._still.nodes & lives) | self._lost.nodes
