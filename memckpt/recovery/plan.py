"""The recovery plan: the state that this attempt restores, chosen from what all nodes hold. Pure functions.

Every rank computes the same plan from the same inventories, so no rank has to announce it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from memckpt.config import ResumeChoice
from memckpt.errors import ForeignStateError, NothingHeldError
from memckpt.recovery.sources import BadSource, Fetch, Sources, newest_history
from memckpt.state.records import Branch, HeldFragments, HeldRecords, RankGroup, Timeline, timeline_of
from memckpt.storage.chain import StoredPoint

#: Why a run that no attempt is known of begins.
FIRST_START = "nothing to resume: this is the run's first start"
_OTHER_SHARDS = "with another number of ranks, or other shards"
_NOTHING = (
    "nothing is held in local memory (the training had ended, no agent of this run was alive, it was told to end, or "
    "no step was committed)"
)


@dataclass(frozen=True)
class NewAttempt:
    """The attempt that a plan is for."""

    world_size: int
    nonce: str
    shardings: Sequence[str] = ()  #: digests of shards, by rank; empty: nothing is sharded
    #: By rank, its node and the ranks there that hold the same shards; empty without peers.
    units: Sequence[tuple[str, RankGroup]] = ()
    former: int = 0  #: the newest attempt that some node knows of


@dataclass(frozen=True)
class Stored:
    """States that a store can produce, newest first, and the highest number of an attempt that wrote to it."""

    points: Sequence[StoredPoint] = ()
    latest_attempt: int = 0
    name: str = "storage"
    stranded: str = ""  #: what it has of which no state can be made, in words; empty if there is nothing


NOTHING_STORED = Stored()


@dataclass(frozen=True)
class StartOver:
    """Nothing is restored. `discard`: something is held that is to be dropped; `asked`: the user asked for it."""

    timeline: Timeline
    reason: str
    discard: bool
    asked: bool = False


@dataclass(frozen=True)
class RestoreRecord:
    """All ranks restore the state after `record`, behind which `lost` records were committed.

    With peers, `fetches` are the units that get it from other nodes, and `history` is the record's history.
    """

    timeline: Timeline
    record: int
    step: int
    tier: str
    lost: int
    fetches: tuple[Fetch, ...] = ()
    history: tuple[Branch, ...] = ()


@dataclass(frozen=True)
class RestoreStored:
    """All ranks restore the first intact one of these states in storage, for which memory cannot serve.

    `older_held`: memory could serve, with an older state.
    """

    timeline: Timeline
    candidates: tuple[StoredPoint, ...]
    reason: str
    newest: int | None = None  #: the newest record that some memory knows of; None: there is none
    tier: str = "storage"
    older_held: bool = False


Plan = StartOver | RestoreRecord | RestoreStored


def make_plan(
    inventories: Sequence[HeldRecords],
    resume: ResumeChoice | int,
    attempt: NewAttempt,
    stored: Stored = NOTHING_STORED,
    fragments: Sequence[HeldFragments] = (),
    without: Collection[BadSource] = (),
    before: bool = False,
) -> Plan:
    """Choose the newest record that memory can produce for every rank, or else the newest in storage.

    Ranks of one node repeat its inventories and fragments. `without`: sources that an earlier plan used and that proved
    bad. `before`: fetch from peers so that the previous record can be produced, too, where possible.

    Raises ForeignStateError if the held state belongs to another model, optimizer or world size, NothingHeldError if
    something must be restored and nothing can be.
    """
    assert attempt.units or not fragments, "fragments require units"
    nodes = list({(held.node, held.ranks): held for held in inventories}.values())
    everything: list[HeldRecords | HeldFragments] = [*nodes, *fragments]
    in_memory = max((b.timeline.number for held in everything for b in held.history), default=0)
    in_storage = max((one.timeline.number for one in stored.points), default=0)
    timeline = Timeline(max(in_memory, in_storage, stored.latest_attempt, attempt.former) + 1, attempt.nonce)
    something = any(held.records or held.problem for held in everything)
    if resume == "never":
        return StartOver(timeline, "resume='never'", discard=something, asked=True)
    memory: _OwnMemory | _PeersMemory = _OwnMemory(nodes, attempt)
    if attempt.units:
        memory = _PeersMemory(nodes, fragments, without, attempt, before)
    # Memory is older than storage: the job had moved elsewhere and is back.
    stale = in_storage > in_memory > 0
    if not stale:
        _refuse_problems(everything)
        if memory.changed:
            memory.refuse_changed(stored)
    common = {} if stale or memory.changed else memory.common()
    chosen = _choose(common, resume)
    newer: tuple[StoredPoint, ...] = ()
    if chosen is not None and not isinstance(resume, int):  # memory may hold each N-th record only
        history = newest_history(nodes, fragments)
        leading = (one for one in stored.points if one.timeline == timeline_of(history, one.record))
        newer = tuple(one for one in leading if one.record > chosen[0])
    if chosen is not None and not newer:
        return memory.restore(timeline, *chosen)
    if chosen is not None:
        reason = f"what {memory.name} has is older, of step {chosen[1]}"
    elif stale:
        reason = f"memory holds an older attempt than {stored.name}"
    elif memory.changed:
        reason = f"memory holds a run {memory.changed}"
    elif isinstance(resume, int) and common:
        reason = f"expected step {resume}, found steps {sorted(set(common.values()))} in {memory.name}"
    else:
        reason = memory.why_nothing()
    candidates = newer or tuple(one for one in stored.points if not isinstance(resume, int) or one.step == resume)
    if candidates:
        known = [] if stale else [held.newest for held in nodes if held.newest]
        return RestoreStored(timeline, candidates, reason, max(known, default=None), stored.name, bool(newer))
    if isinstance(resume, int) and stored.points:
        reason += f"; {stored.name} has steps {sorted({one.step for one in stored.points})}"
    if not stored.points and stored.stranded:
        reason += f"; {stored.name} has {stored.stranded}"
    if resume == "auto" or (resume == "exact" and not something):
        # State of some nodes is useless without the others; nothing that could still be restored is dropped.
        first = timeline.number == 1 and reason == _NOTHING
        return StartOver(timeline, FIRST_START if first else reason, discard=something)
    raise NothingHeldError(f"resume={resume!r}: {reason}")


def must_reshard(
    inventories: Sequence[HeldRecords], attempt: NewAttempt, fragments: Sequence[HeldFragments] = ()
) -> bool:
    """Whether the held state cannot be restored directly: other ranks or shards, or ranks placed otherwise (peers)."""
    if attempt.units:
        return bool(_PeersMemory(inventories, fragments, (), attempt).changed)
    return bool(_OwnMemory(inventories, attempt).changed)


def record_to_reshard(inventories: Sequence[HeldRecords], resume: ResumeChoice | int) -> int | None:
    """The record that is written to storage before resharding; None if memory cannot produce the one asked for."""
    if resume == "never" or any(held.problem for held in inventories):
        return None
    chosen = _choose(common_records(inventories), resume)
    return chosen[0] if chosen is not None else None


def plan_to_reshard(
    inventories: Sequence[HeldRecords],
    fragments: Sequence[HeldFragments],
    resume: ResumeChoice | int,
    nodes: Sequence[str],
    nonce: str,
    without: Collection[BadSource] = (),
) -> RestoreRecord | RestoreStored:
    """The record that the nodes write to storage before resharding, and their fetches for it.

    Units whose node is gone are fetched by another. RestoreStored, without candidates: memory cannot produce it.
    """
    timeline = Timeline(0, nonce)  # no training happens on it
    sources = Sources(inventories, fragments, without)
    places = sources.homes(nodes)
    everything: list[HeldRecords | HeldFragments] = [*inventories, *fragments]
    problem = next((held.problem for held in everything if held.problem), "")
    if resume == "never" or problem:
        return RestoreStored(timeline, (), problem or "resume='never'")
    chosen = _choose(sources.common(places), resume) if places else None
    if chosen is None:
        known = sorted(rank for unit in sources.units for rank in unit)
        alone = f"state is left of ranks {known} only"
        return RestoreStored(timeline, (), sources.why_nothing(places) if places else alone)
    record, step = chosen
    fetches = sources.fetches(record, places)
    return RestoreRecord(timeline, record, step, "peers", sources.newest - record, fetches, sources.history)


def common_records(inventories: Sequence[HeldRecords]) -> dict[int, int]:
    """Records, with their steps, that can be produced for every rank on one and the same timeline."""
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


class _OwnMemory:
    """Every node restores what it holds itself. `changed`: why that is impossible, in words; empty if it is not."""

    name = "local memory"

    def __init__(self, nodes: Sequence[HeldRecords], attempt: NewAttempt) -> None:
        self._nodes = nodes
        held = [(each.ranks, each.world_size, each.sharding) for each in nodes if each.records]
        self.changed = _OTHER_SHARDS if _is_other(held, attempt) else ""

    def common(self) -> dict[int, int]:
        return common_records(self._nodes)

    def restore(self, timeline: Timeline, record: int, step: int) -> RestoreRecord:
        newest = max(max(held.newest, *held.records, 0) for held in self._nodes)
        return RestoreRecord(timeline, record, step, self.name, newest - record)

    def refuse_changed(self, stored: Stored) -> None:
        """Refuse a changed run whose newest state in memory is not in storage yet: others could not get it."""
        held = _not_stored(self._nodes, self.common(), stored.points)
        if held is not None:
            raise _changed_error(
                f"node {held.node} holds a run of {held.world_size} ranks with other shards than those of this attempt",
                stored.name,
            )

    def why_nothing(self) -> str:
        holding = [held for held in self._nodes if held.records]
        if not holding:
            return _NOTHING
        empty = sorted({held.node for held in self._nodes} - {held.node for held in holding})
        if empty:
            return f"nothing is held on node {', '.join(empty)}, and the other nodes alone are not enough"
        missing = sorted(set(range(holding[0].world_size)) - {rank for held in holding for rank in held.ranks})
        if missing:
            return f"nothing is held of rank {', '.join(map(str, missing))}, and the other ranks alone are not enough"
        spans = "; ".join(
            f"{held.node}, ranks {list(held.ranks)}: {min(held.records)} to {max(held.records)}"
            for held in sorted(holding, key=lambda one: (one.node, one.ranks))
        )
        return f"the held states have no record in common ({spans})"


class _PeersMemory:
    """Every node restores what it holds of its ranks, or what others hold of them, live or as fragments."""

    name = "memory"

    def __init__(
        self,
        nodes: Sequence[HeldRecords],
        fragments: Sequence[HeldFragments],
        without: Collection[BadSource],
        attempt: NewAttempt,
        before: bool = False,
    ) -> None:
        self._nodes = nodes
        self._before = before
        self._sources = Sources(nodes, fragments, without)
        self._places = {unit: node for node, unit in attempt.units}
        self.changed = ""
        if _is_other(self._sources.held, attempt):
            self.changed = _OTHER_SHARDS
        elif not self._sources.units <= self._places.keys():
            self.changed = "whose ranks were distributed over nodes in another way"

    def common(self) -> dict[int, int]:
        return self._sources.common(self._places)

    def restore(self, timeline: Timeline, record: int, step: int) -> RestoreRecord:
        fetches = self._sources.fetches(record, self._places, self._before)
        tier = "peers" if fetches else "local memory"
        lost = self._sources.newest - record
        return RestoreRecord(timeline, record, step, tier, lost, fetches, self._sources.history)

    def refuse_changed(self, stored: Stored) -> None:
        """Refuse a changed run whose live state is not in storage; of fragments alone an older state there suffices."""
        unsaved = _not_stored(self._nodes, Sources(self._nodes).common_of_all(), stored.points) is not None
        if unsaved or (not stored.points and self._sources.common_of_all()):
            raise _changed_error(f"memory holds a run {self.changed}", stored.name)

    def why_nothing(self) -> str:
        return self._sources.why_nothing(self._places) if self._sources.units else _NOTHING


def _is_other(held: Iterable[tuple[RankGroup, int, str]], attempt: NewAttempt) -> bool:
    """Whether any held (ranks, world size, sharding digest) differs from the attempt's."""
    by_rank = dict(enumerate(attempt.shardings))
    return any(
        found != attempt.world_size or any(by_rank.get(rank, "") != sharding for rank in ranks)
        for ranks, found, sharding in held
    )


def _refuse_problems(everything: Iterable[HeldRecords | HeldFragments]) -> None:
    for held in everything:
        if held.problem:
            raise ForeignStateError(
                f"the state held on node {held.node} belongs to another model or optimizer. First difference: "
                f"{held.problem}. To continue it, make model and optimizers before attach() as they were when it was "
                "recorded, with layers that came later: `memckpt status` shows its step. Or use another run "
                "directory, or resume='never' to drop the held state"
            )


def _not_stored(
    nodes: Iterable[HeldRecords], common: Collection[int], stored: Sequence[StoredPoint]
) -> HeldRecords | None:
    """A held state whose newest record of `common` is not in storage, nor any later one; None if there is none."""
    holding = [held for held in nodes if held.records and common]
    return next((held for held in holding if not _stored_later(held, max(common), stored)), None)


def _changed_error(what: str, store: str) -> ForeignStateError:
    return ForeignStateError(
        f"{what}; such a change can be resumed from {store} only, which lacks the state in memory. Start with as many "
        "ranks, the same mesh and the same ranks together on a node as before, or use resume='never' to drop the "
        "held state"
    )


def _stored_later(held: HeldRecords, record: int, stored: Sequence[StoredPoint]) -> bool:
    """Whether storage has the record that a node holds, or a later one."""
    newest = timeline_of(held.history, record)
    return any(
        (one.timeline, one.record >= record) == (newest, True)
        or (newest is not None and one.timeline.number > newest.number)
        for one in stored
    )


def _choose(common: dict[int, int], resume: ResumeChoice | int) -> tuple[int, int] | None:
    if isinstance(resume, int):
        # A step number names the newest record that carries it.
        matching = [record for record, step in common.items() if step == resume]
        return (max(matching), resume) if matching else None
    if not common:
        return None
    record = max(common)
    return record, common[record]
