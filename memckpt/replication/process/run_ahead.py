"""How far training may be ahead of the watermark, and for how long it has waited there."""

from __future__ import annotations

from collections.abc import Mapping

from memckpt.state.records import RankGroup


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

    def begin(self, ranks: RankGroup, records: int, every: int) -> None:
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

    def look(self, newest: Mapping[RankGroup, int | None], watermark: int, suspended: bool, now: float) -> float | None:
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
