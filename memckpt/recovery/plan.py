"""The recovery plan: from what all nodes hold, what this attempt restores. Pure functions.

Every rank computes the same plan from the same inventories, so nobody has to be told.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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
    shardings: Sequence[str] = (),
) -> Plan:
    """Choose the newest record that memory can produce of every rank, or else the newest in storage.

    Args:
        inventories: of every rank's node, for each set of shards that it holds; ranks of one node repeat them.
        resume: what the user asked for.
        world_size: of this attempt.
        nonce: of this attempt.
        stored: the complete checkpoints in storage, newest first.
        latest_attempt: the highest number of an attempt that has begun to write to storage.
        shardings: by rank, which pieces of tensors it holds in this attempt; empty: nobody holds pieces.

    Raises:
        ForeignStateError: what is held belongs to another model, optimizer or world size.
        NothingHeldError: something must be restored and nothing can be.
    """
    nodes = {(inventory.node, inventory.ranks): inventory for inventory in inventories}
    in_memory = max((b.timeline.number for held in nodes.values() for b in held.history), default=0)
    in_storage = max((one.timeline.number for one in stored), default=0)
    timeline = Timeline(max(in_memory, in_storage, latest_attempt) + 1, nonce)
    something = any(held.records or held.problem for held in nodes.values())
    if resume == "never":
        return StartOver(timeline, "resume='never'", discard=something)
    # Memory of an attempt that storage has seen a later one of: the job had moved elsewhere and is back.
    stale = in_storage > in_memory > 0
    reshaped = must_reshard(list(nodes.values()), world_size, shardings)
    held_in_common = common_records(list(nodes.values()))
    if not stale:
        _refuse_foreign(nodes.values(), stored, max(held_in_common, default=None) if reshaped else None)
    common = {} if stale or reshaped else held_in_common
    chosen = _choose(common, resume)
    if chosen is not None:
        record, step = chosen
        lost = max(max(held.newest, *held.records, 0) for held in nodes.values()) - record
        return RestoreRecord(timeline, record, step, "local memory", lost)
    reason = _why_nothing(list(nodes.values()), common, resume)
    if stale:
        reason = "memory holds an older attempt than storage"
    elif reshaped:
        reason = "memory holds a run of another number of ranks, or cut into other shards"
    candidates = tuple(one for one in stored if not isinstance(resume, int) or one.step == resume)
    if candidates:
        return RestoreStored(timeline, candidates, reason)
    if isinstance(resume, int) and stored:
        reason += f"; storage has steps {sorted({one.step for one in stored})}"
    if resume == "auto":
        # What some nodes hold is of no use without the others; nothing was lost that could still be had.
        return StartOver(timeline, reason, discard=something)
    raise NothingHeldError(f"resume={resume!r}: {reason}")


def must_reshard(inventories: Sequence[HeldRecords], world_size: int, shardings: Sequence[str]) -> bool:
    """Whether what is held cannot go straight back: it is of another number of ranks, or cut into other shards."""
    by_rank = dict(enumerate(shardings))
    return any(
        held.records
        and (held.world_size != world_size or any(by_rank.get(rank, "") != held.sharding for rank in held.ranks))
        for held in inventories
    )


def record_to_reshard(inventories: Sequence[HeldRecords], resume: ResumeChoice | int) -> int | None:
    """The record that is written to storage before it is resharded; None if memory cannot produce what is asked for."""
    if resume == "never" or any(held.problem for held in inventories):
        return None
    chosen = _choose(common_records(inventories), resume)
    return chosen[0] if chosen is not None else None


def _stored_later(held: HeldRecords, record: int, stored: Sequence[StoredPoint]) -> bool:
    """Whether storage has a record that a node holds, or a later one."""
    newest = timeline_of(held.history, record)
    return any(
        (one.timeline, one.record >= record) == (newest, True)
        or (newest is not None and one.timeline.number > newest.number)
        for one in stored
    )


def _refuse_foreign(inventories: Iterable[HeldRecords], stored: Sequence[StoredPoint], resharded: int | None) -> None:
    for held in inventories:
        if held.problem:
            raise ForeignStateError(
                f"what node {held.node} holds belongs to another model or optimizer. First difference: {held.problem}. "
                "Use another run directory, or resume='never' to drop what is held"
            )
        if held.records and resharded is not None and not _stored_later(held, resharded, stored):
            raise ForeignStateError(
                f"node {held.node} holds a run of {held.world_size} ranks that is cut into other shards than those of "
                "this attempt; such a change is resumed from storage, and what is in memory is not there. Start with "
                "as many ranks and the same mesh as before, or use resume='never' to drop what is held"
            )


def common_records(inventories: Sequence[HeldRecords]) -> dict[int, int]:
    """Records that can be produced of every rank, on one and the same timeline, with their steps."""
    holding = [held for held in inventories if held.records]
    ranks = {rank for held in holding for rank in held.ranks}
    if not holding or ranks < set(range(holding[0].world_size)):
        return {}
    common: dict[int, int] = {}
    for record, step in zip(holding[0].records, holding[0].steps, strict=True):
        timelines = {timeline_of(held.history, record) for held in holding}
        if len(timelines) == 1 and all(record in held.records for held in holding):
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


def _why_nothing(inventories: Sequence[HeldRecords], common: dict[int, int], resume: ResumeChoice | int) -> str:
    if isinstance(resume, int) and common:
        return f"expected step {resume}, found steps {sorted(set(common.values()))} in local memory"
    holding = [held for held in inventories if held.records]
    if not holding:
        return "nothing is held in local memory (no agent of this run was alive, or no step was committed)"
    empty = sorted({held.node for held in inventories} - {held.node for held in holding})
    if empty:
        return f"nothing is held on node {', '.join(empty)}, and the other nodes alone are not enough"
    missing = sorted(set(range(holding[0].world_size)) - {rank for held in holding for rank in held.ranks})
    if missing:
        return f"nothing is held of rank {', '.join(map(str, missing))}, and the other ranks alone are not enough"
    spans = "; ".join(
        f"{held.node}, ranks {list(held.ranks)}: {min(held.records)} to {max(held.records)}"
        for held in sorted(holding, key=lambda one: (one.node, one.ranks))
    )
    return f"what is held has no record in common ({spans})"
