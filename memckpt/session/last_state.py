"""The state after the last step of a training, copied for storage by those who still have it."""

from __future__ import annotations

import logging
from functools import partial

from memckpt.agent.client import LastState, SnapshotOrder
from memckpt.agent.messages import SnapshotTaken
from memckpt.session.staging import RestorePoint, Staging

_log = logging.getLogger("memckpt")


def last_state(staging: Staging, point: RestorePoint) -> LastState | None:
    """The final state where it is still live: to copy it is faster than to redo it, and exact on any device.

    Args:
        staging: of a session with lazy redo that is about to close.
        point: the last restore point.
    """
    try:
        return LastState(point.record, partial(_copy, staging, point)) if staging.stands_at(point.record) else None
    except Exception as error:
        _tell(point, error)
        return None


def _copy(staging: Staging, point: RestorePoint, order: SnapshotOrder) -> SnapshotTaken:
    try:
        return staging.take_snapshot(order, point)
    except Exception as error:
        order.region.close()
        _tell(point, error)
        return SnapshotTaken(point.record, 0.0, missed=True)


def _tell(point: RestorePoint, error: Exception) -> None:
    """Training has ended well, and the agent can do without: nothing is raised."""
    _log.warning("memckpt: the final step %d is redone for storage, since it cannot be copied: %s", point.step, error)
