"""Peers that training does not wait for."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Mapping, Sequence

from memckpt.replication.keeping.sender import Sender
from memckpt.replication.pacing.overdue import Absence, Overdue

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

    def look(
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
        self._overdue.look({node: one for node, one in owing.items() if node not in unheard}, now)
        self._tell(before, self.overdue, "acknowledges nothing")
        newest = max((sender.newest or 0 for sender in senders), default=0)
        every = max((sender.window.every for sender in senders if sender.window is not None), default=1)
        before = self.away
        self._away.look(heard, newest, every, now)
        self._tell(before, self.away, "is not heard")

    def _tell(self, before: frozenset[str], after: frozenset[str], what: str) -> None:
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
