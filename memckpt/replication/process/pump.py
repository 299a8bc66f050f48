"""Sends what senders have, in turns and as fast as the pacer allows."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from memckpt.replication.keeping.sender import Sender
from memckpt.replication.pacing.pace import Pacer

#: Bytes that are handed over before the loop looks at what has arrived.
PUMP_BYTES = 1 << 20


class Pump:
    """Sends what senders have, in turns and as fast as the pacer allows.

    Args:
        senders: all of a node; they belong to the caller.
        pacer: likewise.
    """

    def __init__(self, senders: Iterable[Sender], pacer: Pacer) -> None:
        self._turns = deque(senders)
        self._pacer = pacer
        self._paused_until = 0.0

    @property
    def wants(self) -> bool:
        """Whether there is anything to send to a holder that would take it."""
        return any(sender.wants for sender in self._turns)

    def work(self, now: float) -> None:
        """Send a piece, if it may go now."""
        self._paused_until = 0.0
        if not self.wants:
            return
        piece = self._pacer.piece(PUMP_BYTES)
        delay = self._pacer.delay(piece, now)
        if delay > 0:
            self._paused_until = now + delay
        else:
            self._pacer.sent(self.send(piece), now)

    def send(self, limit: int) -> int:
        """Send about `limit` bytes, of the senders in turns; returns how many."""
        sent = 0
        for sender in list(self._turns):
            self._turns.rotate(-1)
            sent += sender.pump(limit - sent)
            if sent >= limit:
                break
        return sent

    def delay(self, now: float) -> float:
        """Seconds until more may go."""
        return max(0.0, self._paused_until - now)
