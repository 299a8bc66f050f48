"""A state that is chosen to be resumed, from its opening to its restore."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from memckpt.recovery.from_storage import StoredState
from memckpt.recovery.plan import RestoreRecord
from memckpt.session.agent_regions import PreparedRegions
from memckpt.session.report import HeldState
from memckpt.session.staging import RestorePoint
from memckpt.state import codec


@dataclass
class ChosenInMemory:
    """A record in this node's memory. Owns the regions until they are taken.

    Attributes:
        plan: plan with the record's number and source.
        held: description for the user.
        state: decoded rank state that is restored; that of the record before it where the step is repeated.
        point: the record with its own rank state.
        regions: regions of its generation; None once they are taken.
        following: encoded rank states of the records behind it that are still to be compared, by record.
        diverges: always None: each rank gets its own generators back.
    """

    plan: RestoreRecord
    held: HeldState
    state: dict[str, Any]
    point: RestorePoint
    regions: PreparedRegions | None
    following: dict[int, bytes] = field(default_factory=dict)
    diverges: int | None = None

    @property
    def restored(self) -> bool:
        """Whether the restore has begun."""
        return self.regions is None

    @property
    def lost(self) -> int | None:
        """Number of committed records beyond it."""
        return self.plan.lost

    def repeat_from(self, record: int, step: int, rank_state: bytes, world_size: int) -> None:
        """Restore the state before the record, from which its step is repeated."""
        self.state = codec.decode(rank_state)
        newest = self.point.step
        self.held = HeldState(step, record, self.plan.tier, self.state["provided"], world_size, newest)

    def take_regions(self) -> PreparedRegions:
        """The regions, once; the caller closes them."""
        regions, self.regions = self.regions, None
        assert regions is not None
        return regions

    def close(self) -> None:
        """Close the regions that nobody has taken."""
        regions, self.regions = self.regions, None
        if regions is not None:
            regions.close()


@dataclass
class ChosenInStorage:
    """A state in a store. Owns nothing.

    Attributes:
        held: description for the user.
        state: decoded rank state that is restored.
        stored: reader of the state.
        newest_known: newest record that some memory knows of; None if none does.
        repeated: reader of the state after `stored`, whose step is repeated; None if no step is.
        diverges: first rank that was seeded as this one, if generators have to differ again from those of other ranks.
        restored: whether the restore has begun.
    """

    held: HeldState
    state: dict[str, Any]
    stored: StoredState
    newest_known: int | None
    repeated: StoredState | None = None
    diverges: int | None = None
    restored: bool = False

    @property
    def lost(self) -> int | None:
        """Number of committed records beyond it; None where no memory knows."""
        reached = self.repeated if self.repeated is not None else self.stored
        return max(0, self.newest_known - reached.point.record) if self.newest_known is not None else None

    def repeat_from(self, before: StoredState, state: Mapping[str, Any]) -> None:
        """Restore the state before the chosen one, from which its step is repeated."""
        self.repeated, self.stored = self.stored, before
        self.state = dict(state)
        point, newest = before.point, self.held.newest_step
        self.held = HeldState(
            point.step, point.record, self.held.tier, self.state["provided"], point.world_size, newest
        )

    def close(self) -> None:
        """No-op: no file stays open between two reads."""


Chosen = ChosenInMemory | ChosenInStorage
