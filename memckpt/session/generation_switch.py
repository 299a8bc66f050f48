"""When a new generation begins."""

from __future__ import annotations

from collections.abc import Callable

from memckpt.capture.live_state import SpecRequest
from memckpt.protocol.trainer import Begin
from memckpt.session.ranks import Ranks


class DueGeneration:
    """After which record the next generation begins, the same on all ranks that share slots.

    Args:
        request: what the next generation is to be like.

    Attributes:
        after: that record; None while none is to begin.
        began: after which record the current one did.
    """

    def __init__(self, ranks: Ranks, request: Callable[[], SpecRequest]) -> None:
        self._ranks = ranks
        self._request = request
        self.after: int | None = None
        self.began = 0

    def has_begun(self, record: int) -> None:
        """The one that was due has."""
        self.after, self.began = None, record

    @property
    def _in_turns(self) -> bool:
        """Whether a generation has to begin with a record that others capture, too, who go on as they are.

        Captured records must be common: one that only these ranks have could not be restored.
        """
        return self._request().mode == "capture" and len(self._ranks.unit) < self._ranks.world_size

    def turn(self, record: int) -> int:
        """The first record, from this one on, after which a generation may begin."""
        if not self._in_turns:
            return record
        every = self._request().every
        return -(-record // every) * every

    def note(self, order: Begin) -> None:
        """All local ranks begin a generation; an order that comes when that is done already is a second rank's."""
        if order.record > self.began:
            self.after = self.turn(order.record)
