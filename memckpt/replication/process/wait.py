"""For whom training waits, how far it may be ahead, and for how long it has waited."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Mapping, Sequence

from memckpt.replication.keeping.sender import Sender
from memckpt.state.records import RankGroup

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

    def check_owing(self, owing: Mapping[str, Hashable], now: float) -> bool:
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

    def check_heard(self, heard: Mapping[str, float | None], newest: int, every: int, now: float) -> None:
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
        self._still.check_owing(heard, now)
        self._lost.check_owing(heard, now)
        lives = {node for node in heard if newest >= self._heard[node][1] + 2 * every}
        self.nodes = frozenset(self._still.nodes & lives) | self._lost.nodes


_log = logging.getLogger("memckpt.replicator")


class Laggards:
    """Holders that acknowledge nothing of what they are sent, and nodes that are not heard, for too long.

    Args:
        limit: seconds without progress (ack_timeout_seconds).
    """

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._overdue = Overdue(limit)
        self._away = Absence(limit)

    @property
    def overdue(self) -> frozenset[str]:
        """Holders that acknowledge nothing."""
        return self._overdue.nodes

    @property
    def away(self) -> frozenset[str]:
        """Nodes that are not heard."""
        return self._away.nodes

    def check_peers(
        self,
        senders: Sequence[Sender],
        progress: Callable[[str], tuple[int, Hashable]],
        heard: Mapping[str, float | None],
        unheard: frozenset[str],
        now: float,
    ) -> None:
        """Look at all peers.

        Args:
            senders: of the node's records.
            progress: as of :meth:`Sender.owing`.
            heard: by peer, when it was heard last.
            unheard: peers that are silent now.
            now: seconds of a clock that only goes forward.
        """
        owing: dict[str, Hashable] = {}
        for sender in senders:
            for holder, one in sender.owing(progress).items():
                owing[holder] = owing.get(holder), one
        before = self.overdue
        # Whether a peer that is not heard at all is lost is the leader's to judge.
        self._overdue.check_owing({node: one for node, one in owing.items() if node not in unheard}, now)
        self._log_change(before, self.overdue, "acknowledges nothing")
        newest = max((sender.newest or 0 for sender in senders), default=0)
        every = max((sender.window.every for sender in senders if sender.window is not None), default=1)
        before = self.away
        self._away.check_heard(heard, newest, every, now)
        self._log_change(before, self.away, "is not heard")

    def _log_change(self, before: frozenset[str], after: frozenset[str], what: str) -> None:
        for node in sorted(after - before):
            _log.warning(
                "%s %s for too long (ack_timeout_seconds=%g): training does not wait for it, and what it lacks is a "
                "gap in protection",
                node,
                what,
                self._limit,
            )
        for node in sorted(before - after):
            _log.info("%s is waited for again; it is sent what it lacks", node)


class RunAhead:
    """How far each unit's training may be ahead of the watermark.

    Args:
        waits: whether training waits for acknowledgements.
        beyond: whether training may be further ahead than it is to be, as nobody waited for a while.

    Attributes:
        beyond: as given, as of now.
    """

    def __init__(self, waits: bool, beyond: bool) -> None:
        self.beyond = beyond
        self._waits = waits
        #: By unit: how many records training may be ahead, and how many steps these are.
        self._records: dict[RankGroup, int] = {}
        self._reach: dict[RankGroup, int] = {}
        self._waiting_since: float | None = None

    def begin_generation(self, ranks: RankGroup, records: int, every: int) -> None:
        """Note a unit's new generation.

        Args:
            ranks: the unit.
            records: number of records that training may be ahead of the watermark.
            every: distance between the numbers of two records.
        """
        self._records[ranks] = records
        self._reach[ranks] = records * every

    @property
    def records(self) -> int:
        """Number of records that any unit may be ahead; 0 before the first generation."""
        return min(self._records.values(), default=0)

    def is_late(self, ranks: RankGroup, newest: int | None, acknowledged: int, watermark: int) -> bool:
        """Whether training has gone on without peers so far that this node cannot go back to what they have.

        Args:
            ranks: the unit.
            newest: its newest record; None: there is none.
            acknowledged: the newest record that its own holders have.
            watermark: the newest record that is acknowledged for every node.
        """
        if newest is None or ranks not in self._reach or (self._waits and not self.beyond):
            return False
        return newest - (watermark if self._waits else acknowledged) >= self._reach[ranks]

    def check_waiting(
        self, newest: Mapping[RankGroup, int | None], watermark: int, suspended: bool, now: float
    ) -> float | None:
        """Look whether training waits for the watermark.

        Args:
            newest: newest record of each unit.
            watermark: the newest record that is acknowledged for every node.
            suspended: whether nobody waits at present.
            now: seconds of a clock that only goes forward.

        Returns:
            Seconds that training has waited since the last look; None: it did not wait then.
        """
        waits = (
            self._waits
            and not suspended
            and any(
                record is not None and record - watermark >= self._reach[ranks]
                for ranks, record in newest.items()
                if ranks in self._reach
            )
        )
        waited = None if self._waiting_since is None else now - self._waiting_since
        self._waiting_since = now if waits else None
        return waited
