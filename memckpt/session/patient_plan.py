"""The plan of a start whose storage cannot be read for a moment, or is absent."""

from __future__ import annotations

from collections.abc import Callable

from memckpt.config import ResumeChoice
from memckpt.errors import NothingHeldError, PeerError, StorageAwayError, StorageError
from memckpt.recovery.plan import Plan, RestoreRecord, RestoreStored, StartOver
from memckpt.session.storage_tier import StorageTier


def plan_patiently(tier: StorageTier, resume: ResumeChoice | int, make: Callable[[], Plan]) -> Plan:
    """Make the plan; where memory does not suffice, unreadable storage is retried before it is given up.

    Args:
        tier: storage tier, which may be listed again.
        resume: choice of the user.
        make: makes the plan from memory and the tier.

    Raises:
        StorageError: neither memory nor the readable part of storage suffices.
        StorageAwayError: memory does not suffice, and the store is absent.
    """
    if resume == "never":
        tier.begin_anew()
    if resume == "never" or not (tier.unread or tier.absent):
        tier.say_unread()
        return make()
    plan, reason = _try_plan(make)
    if tier.absent:
        if isinstance(plan, RestoreRecord):
            tier.go_on_without()
            return plan
        raise StorageAwayError(
            f"memory cannot resume this run ({reason}), and {tier.absent} Bring it back, or set storage.url as it was, "
            "and start again. resume='never' starts over"
        )
    if isinstance(plan, RestoreRecord) or (isinstance(plan, RestoreStored) and isinstance(resume, int)):
        tier.say_unread()
        return plan
    tier.look_again()
    if not tier.unread:
        return make()
    plan, reason = _try_plan(make)
    if plan is None or isinstance(plan, StartOver):
        raise StorageError(
            f"memory cannot resume this run ({reason}), and {tier.name} cannot be looked into: {tier.unread}. "
            "Try again when it can; resume='never' starts over"
        )
    return plan


def _try_plan(make: Callable[[], Plan]) -> tuple[Plan | None, str]:
    """The plan, None if there is none; and why memory does not suffice, in words."""
    try:
        plan = make()
    except (NothingHeldError, PeerError) as error:
        return None, str(error)
    return plan, "" if isinstance(plan, RestoreRecord) else plan.reason
