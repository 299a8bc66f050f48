"""The recovery plan's view of peers: who can produce which state, and who fetches it from where. Pure functions.

A *unit* is the ranks of one node that hold the same shards, and is identified by its ranks: it may have moved.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from memckpt.protocol.replication import FromFragments, FromNode
from memckpt.state.records import Branch, HeldFragments, HeldRecords, RankGroup, Timeline, timeline_of


@dataclass(frozen=True)
class BadSource:
    """A source that proved useless; the plan is made again without it."""

    node: str
    ranks: RankGroup
    generation: str = ""  #: that of its fragments; empty: live state
    damaged: bool = True  #: else only other nodes could not fetch it


@dataclass(frozen=True)
class Fetch:
    """The fetch of a record by a unit whose node cannot produce it; with `before`, of the state before it as well."""

    ranks: RankGroup
    node: str
    record: int
    source: FromNode | FromFragments
    before: bool = False

    @property
    def server(self) -> tuple[str, RankGroup] | None:
        """The node that serves live state for it, and of which ranks; None: all is decoded from fragments."""
        match self.source:
            case FromNode(node):
                return node, self.ranks
            case FromFragments(replica=replica):
                return replica


def serves(fetches: Iterable[Fetch], node: str) -> tuple[RankGroup, ...]:
    """The units that `node` has to serve live at the fetched record, ascending."""
    servers = {fetch.server for fetch in fetches if fetch.server is not None}
    return tuple(sorted(ranks for server, ranks in servers if server == node))


def newest_history(inventories: Iterable[HeldRecords], fragments: Iterable[HeldFragments]) -> tuple[Branch, ...]:
    """The history of the latest attempt in any inventory; empty if there is none."""
    both: list[HeldRecords | HeldFragments] = [*inventories, *fragments]
    known = [held.history for held in both if held.history]
    return max(known, key=lambda each: (each[-1].timeline, len(each), each), default=())


#: Key of units with the same shared state: all ranks that hold it (empty: all), sharding digest, world size.
_Shared = tuple[RankGroup, str, int]


def _shared(replicas: RankGroup, sharding: str, world_size: int) -> _Shared:
    return () if replicas == tuple(range(world_size)) else replicas, sharding, world_size


@dataclass(frozen=True)
class _Live:
    """The live state of a unit on a node, as far as it lies on the newest history."""

    node: str
    ranks: RankGroup
    steps: dict[int, int]
    shared: _Shared
    reachable: bool

    def serves(self, node: str | None) -> bool:
        """Whether `node` can fetch it; None: whether any node can."""
        return self.reachable or node in (None, self.node)

    def has(self, records: Iterable[int]) -> bool:
        """Whether it can produce all of these."""
        return all(record in self.steps for record in records)


@dataclass
class _Generation:
    """The fragments of one generation of one unit on any nodes, as far as they lie on the newest history."""

    name: str
    base: int
    data: int
    period: int
    private: bool
    shared: _Shared
    latest: Timeline
    steps: dict[int, int] = field(default_factory=dict)
    #: By record, the indices of fragments that are complete on some node.
    complete: dict[int, set[int]] = field(default_factory=lambda: defaultdict(set))
    static: set[int] = field(default_factory=set)
    #: (node, fragment index): the records complete there, and whether the data sent once per generation are.
    kept: dict[tuple[str, int], tuple[frozenset[int], bool]] = field(default_factory=dict)

    @property
    def order(self) -> tuple[Timeline, int, str]:
        """Sort key by age; the newest comes last."""
        return self.latest, self.base, self.name

    def add(self, held: HeldFragments, steps: dict[int, int]) -> None:
        self.latest = max(self.latest, held.history[-1].timeline)
        self.steps |= steps
        for record in steps:
            self.complete[record].add(held.index)
        if held.static:
            self.static.add(held.index)
        self.kept[held.node, held.index] = frozenset(steps), held.static

    def window(self, record: int) -> range:
        return range(record - self.period + 1, record + 1)

    def decodes(self, record: int) -> bool:
        """Whether enough fragments exist for the state after `record`, or for the unit's private part of it."""
        enough = all(len(self.complete.get(one, ())) >= self.data for one in self.window(record))
        return record >= self.base and enough and len(self.static) >= self.data

    def sources(self, record: int) -> tuple[tuple[str, int], ...]:
        """The (node, fragment index) pairs that hold any fragments needed to decode `record`."""
        window = set(self.window(record))
        return tuple(sorted(where for where, (records, static) in self.kept.items() if static or records & window))

    def missing(self) -> str:
        """The reason why it decodes nothing."""
        fragments = {index for _, index in self.kept}
        if len(fragments) < self.data:
            return f"{len(fragments)} of {self.data} fragments needed are left"
        if len(self.static) < self.data:
            return f"static tensors are left in {len(self.static)} of {self.data} fragments needed"
        newest = max(self.steps)
        left = min(len(self.complete.get(record, ())) for record in self.window(newest))
        return f"{left} of {self.data} fragments needed are left of the {self.period} records up to {newest}"


class Sources:
    """Everything that the nodes of a job hold on its newest history, live and as fragments.

    A record counts only if it was made on the timeline that the newest history has for its number. `newest` is the
    newest record known to be committed; 0 if there is none.
    """

    def __init__(
        self,
        inventories: Iterable[HeldRecords],
        fragments: Iterable[HeldFragments] = (),
        without: Collection[BadSource] = (),
    ) -> None:
        inventories, fragments = list(inventories), list(fragments)
        self.history = newest_history(inventories, fragments)
        self.units: set[RankGroup] = set()  #: of which anything is held, live or as fragments
        self.held: set[tuple[RankGroup, int, str]] = set()  #: (ranks, world size, sharding digest) of these
        self.newest = 0
        #: By unit and node.
        self._live: dict[RankGroup, dict[str, _Live]] = defaultdict(dict)
        self._alike: dict[_Shared, list[_Live]] = defaultdict(list)
        self._coded: dict[RankGroup, list[_Generation]] = {}
        self._add_live(inventories, without)
        self._add_fragments(fragments, without)

    def _add_live(self, inventories: Iterable[HeldRecords], without: Collection[BadSource]) -> None:
        for held in inventories:
            steps = self._on_history(held)
            if held.problem or not steps:
                continue
            self._add_unit(held.ranks, held.world_size, held.sharding, max(steps))
            if self._counts(held.history, held.newest):
                self.newest = max(self.newest, held.newest)
            if BadSource(held.node, held.ranks) in without:
                continue
            shared = _shared(held.replicas, held.sharding, held.world_size)
            reachable = BadSource(held.node, held.ranks, damaged=False) not in without
            live = _Live(held.node, held.ranks, steps, shared, reachable)
            self._live[held.ranks][held.node] = live
        for by_place in self._live.values():
            for live in by_place.values():
                self._alike[live.shared].append(live)

    def _add_fragments(self, fragments: Iterable[HeldFragments], without: Collection[BadSource]) -> None:
        bad = {(one.node, one.ranks, one.generation) for one in without if one.generation}
        found: dict[RankGroup, dict[tuple[object, ...], _Generation]] = defaultdict(dict)
        for held in fragments:
            steps = self._on_history(held)
            if held.problem or not held.history:
                continue
            if steps:
                self._add_unit(held.owner, held.world_size, held.sharding, max(steps))
            if (held.node, held.owner, held.generation) in bad:
                continue
            period = 1 if held.private else held.period
            shared = _shared(held.replicas, held.sharding, held.world_size)
            # All statements about a generation have to agree; deviating ones belong to another.
            said = (held.generation, held.base, held.data, period, held.private, shared, held.digest)
            generation = _Generation(
                held.generation, held.base, held.data, period, held.private, shared, held.history[-1].timeline
            )
            found[held.owner].setdefault(said, generation).add(held, steps)
        for unit, generations in found.items():
            known = [one for one in generations.values() if one.steps]
            self._coded[unit] = sorted(known, key=lambda one: one.order, reverse=True)

    def _add_unit(self, unit: RankGroup, world_size: int, sharding: str, newest: int) -> None:
        self.units.add(unit)
        self.held.add((unit, world_size, sharding))
        self.newest = max(self.newest, newest)

    def _counts(self, history: Sequence[Branch], record: int) -> bool:
        timeline = timeline_of(self.history, record)
        return timeline is not None and timeline_of(history, record) == timeline

    def _on_history(self, held: HeldRecords | HeldFragments) -> dict[int, int]:
        """Its records that count, with their steps."""
        both = zip(held.records, held.steps, strict=True)
        return {record: step for record, step in both if self._counts(held.history, record)}

    # What can be produced

    def homes(self, nodes: Sequence[str]) -> dict[RankGroup, str]:
        """A node for each unit of the attempt that left this: one that holds it live, or the least loaded one.

        Empty if not all ranks of that attempt are known.
        """
        if not self._whole:
            return {}
        homes: dict[RankGroup, str] = {}
        for unit, by_place in self._live.items():
            homes[unit] = min(live.node for live in by_place.values())
        load = Counter(homes.values())
        for unit in sorted(self.units - homes.keys()):
            homes[unit] = min(nodes, key=lambda node: (load[node], node))
            load[homes[unit]] += 1
        return homes

    @property
    def _whole(self) -> bool:
        """Whether something is held of every rank of one attempt."""
        ranks = {rank for unit in self.units for rank in unit}
        worlds = {world_size for _, world_size, _ in self.held}
        return len(worlds) == 1 and ranks == set(range(*worlds))

    def common_of_all(self) -> dict[int, int]:
        """Records, with their steps, that can be produced for all ranks of the attempt that left this, on any nodes."""
        return self.common(dict.fromkeys(self.units)) if self._whole else {}

    def common(self, places: Mapping[RankGroup, str | None]) -> dict[int, int]:
        """Records, with their steps, whose state all of these units can get."""
        common: dict[int, int] | None = None
        for unit, node in sorted(places.items()):
            found = self.producible(unit, node)
            common = found if common is None else {one: step for one, step in common.items() if one in found}
        return common or {}

    def producible(self, unit: RankGroup, node: str | None = None) -> dict[int, int]:
        """Records, with their steps, whose state a unit can get on `node` (None: on any)."""
        found: dict[int, int] = {}
        for generation in self._coded.get(unit, ()):
            shared = {one for live in self._replicas(generation, node) for one in live.steps}
            for record in generation.steps:
                if generation.decodes(record) and (not generation.private or record in shared):
                    found[record] = generation.steps[record]
        for live in self._live.get(unit, {}).values():
            if live.serves(node):
                found |= live.steps
        return found

    def _replicas(self, generation: _Generation, node: str | None) -> list[_Live]:
        """Live units with the state that private fragments leave out."""
        return [live for live in self._alike.get(generation.shared, ()) if generation.private and live.serves(node)]

    def fetches(self, record: int, places: Mapping[RankGroup, str], before: bool = False) -> tuple[Fetch, ...]:
        """The fetches of `record` by units whose own node cannot produce it, ascending by unit; balanced over servers.

        All units must be able to get it. With `before` the previous state is fetched as well, if all units can.
        """
        lacking = [one for one in sorted(places.items()) if not self._has_itself(*one, record)]
        own = all(self._has_itself(*one, record - 1) for one in places.items() if one not in lacking)
        for wanted in ((record, record - 1), (record,)) if before and own else ((record,),):
            load: Counter[str] = Counter()
            found = [self._fetch(unit, node, wanted, load) for unit, node in lacking]
            fetches = tuple(fetch for fetch in found if fetch is not None)
            if len(fetches) == len(lacking):
                return fetches
        raise AssertionError(f"ranks {[unit for unit, _ in lacking]} cannot all get record {record}")

    def _has_itself(self, unit: RankGroup, node: str, record: int) -> bool:
        """Whether the node holds the unit's state itself."""
        live = self._live.get(unit, {}).values()
        return any(one.node == node and record in one.steps for one in live)

    def _fetch(self, unit: RankGroup, node: str, wanted: Collection[int], load: Counter[str]) -> Fetch | None:
        """The fetch of these records, the newest and perhaps the one before; None if it is impossible."""
        record, before = max(wanted), len(wanted) > 1
        there = [one for one in self._live.get(unit, {}).values() if one.serves(node) and one.has(wanted)]
        if there:
            chosen = min(there, key=lambda one: (one.node != node, load[one.node], one.node))
            load[chosen.node] += 1
            return Fetch(unit, node, record, FromNode(chosen.node), before)
        for generation in self._coded.get(unit, ()):
            replicas = [one for one in self._replicas(generation, node) if one.has(wanted)]
            if not all(map(generation.decodes, wanted)) or (generation.private and not replicas):
                continue
            replica = None
            if replicas:
                # State on the node itself need not travel.
                best = min(replicas, key=lambda one: (one.node != node, load[one.node], one.node, one.ranks))
                load[best.node] += 1
                replica = best.node, best.ranks
            source = FromFragments(
                generation=generation.name,
                fragments=tuple(sorted({one for number in wanted for one in generation.sources(number)})),
                data=generation.data,
                period=generation.period,
                replica=replica,
            )
            return Fetch(unit, node, record, source, before)
        return None

    # Reasons for failure

    def why_nothing(self, places: Mapping[RankGroup, str]) -> str:
        """The reason why these units have no record in common."""
        found = {unit: self.producible(unit, node) for unit, node in sorted(places.items())}
        lacking = [f"ranks {list(unit)}: {self._missing(unit)}" for unit, records in found.items() if not records]
        if lacking:
            return "memory cannot produce the states of all ranks (" + "; ".join(lacking) + ")"
        spans = "; ".join(f"ranks {list(unit)}: {min(each)} to {max(each)}" for unit, each in found.items())
        return f"the states and fragments that nodes hold have no record in common ({spans})"

    def _missing(self, unit: RankGroup) -> str:
        generations = self._coded.get(unit, ())
        for generation in generations:
            if any(generation.decodes(record) for record in generation.steps):
                return "no node holds the state that they share with other ranks at records whose fragments are left"
        return generations[0].missing() if generations else "no node holds them or fragments of them"
