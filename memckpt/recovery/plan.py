"""The recovery plan: from what all nodes hold, what this attempt restores. Pure functions.

Every rank computes the same plan from the same inventories, so nobody has to be told.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from memckpt.config import ResumeChoice
from memckpt.errors import ForeignStateError, NothingHeldError
from memckpt.state.records import HeldRecords, Timeline, timeline_of
from memckpt.storage.chain import StoredPoint


@dataclass(frozen=True)
class StartOver:
    """Nothing is restored. `reason` says why in words; `discard` that something is held and not wanted."""

    timeline: Timeline
    reason: str
    discard: bool


@dataclass(frozen=True)
class RestoreRecord:
    """All ranks restore the state after `record`. `lost` is how many committed records lie beyond it."""

    timeline: Timeline
    record: int
    step: int
    tier: str
    lost: int


@dataclass(frozen=True)
class RestoreStored:
    """All ranks restore the first of the states in storage that proves to be whole. `reason`: why not memory."""

    timeline: Timeline
    candidates: tuple[StoredPoint, ...]
    reason: str


Plan = StartOver | RestoreRecord | RestoreStored


def make_plan(
    inventories: Sequence[HeldRecords],
    resume: ResumeChoice | int,
    world_size: int,
    nonce: str,
    stored: Sequence[StoredPoint] = (),
    latest_attempt: int = 0,
) -> Plan:
    """Choose the newest record that every node can produce from memory, or else the newest in storage.

    Args:
        inventories: of every rank's node; ranks of one node repeat it.
        resume: what the user asked for.
        world_size: of this attempt.
        nonce: of this attempt.
        stored: the complete checkpoints in storage, newest first.
        latest_attempt: the highest number of an attempt that has begun to write to storage.

    Raises:
        ForeignStateError: what is held belongs to another model, optimizer or world size.
        NothingHeldError: something must be restored and nothing can be.
    """
    nodes = {inventory.node: inventory for inventory in inventories}
    in_memory = max((b.timeline.number for held in nodes.values() for b in held.history), default=0)
    in_storage = max((one.timeline.number for one in stored), default=0)
    timeline = Timeline(max(in_memory, in_storage, latest_attempt) + 1, nonce)
    something = any(held.records or held.problem for held in nodes.values())
    if resume == "never":
        return StartOver(timeline, "resume='never'", discard=something)
    # Memory of an attempt that storage has seen a later one of: the job had moved elsewhere and is back.
    stale = in_storage > in_memory > 0
    if not stale:
        _refuse_foreign(nodes, world_size, stored)
    other_size = any(held.records and held.world_size != world_size for held in nodes.values())
    common = {} if stale or other_size else common_records(list(nodes.values()))
    chosen = _choose(common, resume)
    if chosen is not None:
        record, step = chosen
        lost = max(max(held.newest, *held.records) for held in nodes.values()) - record
        return RestoreRecord(timeline, record, step, "local memory", lost)
    reason = _why_nothing(nodes, common, resume)
    if stale:
        reason = "memory holds an older attempt than storage"
    elif other_size:
        reason = f"memory holds a run of another number of ranks than {world_size}"
    candidates = tuple(one for one in stored if not isinstance(resume, int) or one.step == resume)
    if candidates:
        return RestoreStored(timeline, candidates, reason)
    if isinstance(resume, int) and stored:
        reason += f"; storage has steps {sorted({one.step for one in stored})}"
    if resume == "auto":
        # What some nodes hold is of no use without the others; nothing was lost that could still be had.
        return StartOver(timeline, reason, discard=something)
    raise NothingHeldError(f"resume={resume!r}: {reason}")


def stored_later(held: HeldRecords, stored: Sequence[StoredPoint]) -> bool:
    """Whether storage has the newest of a node's records, or a later one."""
    newest = timeline_of(held.history, max(held.records))
    return any(
        (one.timeline, one.record >= max(held.records)) == (newest, True)
        or (newest is not None and one.timeline.number > newest.number)
        for one in stored
    )


def _refuse_foreign(nodes: dict[str, HeldRecords], world_size: int, stored: Sequence[StoredPoint]) -> None:
    for held in nodes.values():
        if held.problem:
            raise ForeignStateError(
                f"what node {held.node} holds belongs to another model or optimizer. First difference: {held.problem}. "
                "Use another run directory, or resume='never' to drop what is held"
            )
        if held.records and held.world_size != world_size and not stored_later(held, stored):
            raise ForeignStateError(
                f"node {held.node} holds a run of {held.world_size} ranks, expected {world_size} as in this attempt; "
                "a change of world size is resumed from storage, and what is in memory is not there. Start with as "
                "many ranks as before, or use resume='never' to drop what is held"
            )


def common_records(inventories: Sequence[HeldRecords]) -> dict[int, int]:
    """Records that every node can produce, on one and the same timeline, with their steps."""
    if not inventories:
        return {}
    common: dict[int, int] = {}
    for record, step in zip(inventories[0].records, inventories[0].steps, strict=True):
        timelines = {timeline_of(held.history, record) for held in inventories}
        if len(timelines) == 1 and all(record in held.records for held in inventories):
            common[record] = step
    return common


def _choose(common: dict[int, int], resume: ResumeChoice | int) -> tuple[int, int] | None:
    if isinstance(resume, int):
        # A step names the newest record that carries it.
        matching = [record for record, step in common.items() if step == resume]
        return (max(matching), resume) if matching else None
    if not common:
        return None
    record = max(common)
    return record, common[record]


def _why_nothing(nodes: dict[str, HeldRecords], common: dict[int, int], resume: ResumeChoice | int) -> str:
    if isinstance(resume, int) and common:
        return f"expected step {resume}, found steps {sorted(set(common.values()))} in local memory"
    empty = sorted(node for node, held in nodes.items() if not held.records)
    if len(empty) == len(nodes):
        return "nothing is held in local memory (no agent of this run was alive, or no step was committed)"
    if empty:
        return f"nothing is held on node {', '.join(empty)}, and the other nodes alone are not enough"
    spans = "; ".join(f"{node}: {min(h.records)} to {max(h.records)}" for node, h in sorted(nodes.items()))
    return f"the nodes hold no record in common ({spans})"
