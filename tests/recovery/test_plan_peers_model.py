"""The recovery plan with peers, against a model that knows what every record and every fragment of it contains."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from hypothesis import event, given, settings
from hypothesis import strategies as st

from memckpt.memory.generation import branch_off
from memckpt.protocol.replication import FromFragments, FromNode
from memckpt.recovery.plan import NewAttempt, RestoreRecord, StartOver, make_plan
from memckpt.recovery.sources import serves
from memckpt.state.records import Branch, HeldFragments, HeldRecords, Timeline

Unit = tuple[int, ...]
Chain = tuple[str, ...]


@dataclass
class Lived:
    """What a node holds of a unit: by record, the attempts that made the records up to it; first, who started over."""

    attempt: str
    history: tuple[Branch, ...]
    contents: dict[int, Chain]


@dataclass
class Kept:
    """A fragment that a node keeps: by record, the contents that it is a part of."""

    attempt: str
    history: tuple[Branch, ...]
    index: int
    base: int
    contents: dict[int, Chain]
    static: bool


@dataclass
class Node:
    name: str
    live: dict[Unit, Lived] = field(default_factory=dict)
    kept: dict[tuple[Unit, str], Kept] = field(default_factory=dict)


@dataclass
class Job:
    """Units that go from node to node, and a plan at the start of each attempt."""

    units: list[Unit]
    nodes: list[Node]
    data: int
    spare: int
    period: int
    private: bool
    #: By attempt, its timeline and what it began with.
    attempts: dict[str, tuple[Timeline, Chain]] = field(default_factory=dict)

    @property
    def world(self) -> int:
        return sum(map(len, self.units))

    def inventories(self, nodes: Iterable[Node]) -> list[HeldRecords]:
        found = []
        for node in nodes:
            found.append(HeldRecords(node=node.name))
            for unit, held in node.live.items():
                records = tuple(sorted(held.contents))
                steps = tuple(10 * one for one in records)
                found.append(HeldRecords(node.name, records, steps, unit, held.history, self.world))
        return found

    def fragments(self, nodes: Iterable[Node]) -> list[HeldFragments]:
        found = []
        for node in nodes:
            for (unit, name), kept in node.kept.items():
                records = tuple(sorted(kept.contents))
                found.append(
                    HeldFragments(
                        node.name,
                        unit,
                        kept.index,
                        self.data,
                        name,
                        kept.base,
                        self.period,
                        self.private,
                        () if self.private else unit,
                        records,
                        tuple(10 * one for one in records),
                        kept.history,
                        kept.static,
                        self.world,
                    )
                )
        return found

    def plan(self, places: dict[Unit, Node], nonce: str, before: bool = False) -> Any:
        by_rank = [(node.name, unit) for unit, node in places.items() for _ in unit]
        used = list(places.values())
        held, kept = self.inventories(used), self.fragments(used)
        attempt = NewAttempt(self.world, nonce, units=by_rank)
        return make_plan(held, "auto", attempt, fragments=kept, before=before)

    # The model

    def right(self, nodes: Iterable[Node]) -> Any:
        """What the contents of a record are, by the latest attempt that any of the nodes knows of."""
        nodes = list(nodes)
        known = {held.attempt for node in nodes for held in (*node.live.values(), *node.kept.values())}
        if not known:
            return None
        attempt = max(known, key=lambda one: self.attempts[one][0])
        start = self.attempts[attempt][1]
        return lambda record: start[: record + 1] + (attempt,) * (record + 1 - len(start))

    def can_get(self, unit: Unit, record: int, nodes: list[Node], right: Any) -> bool:
        """Try all ways to get it: any node that holds it, any k fragments for each record of the window."""
        if any(self.holds(node, unit, record, right) for node in nodes):
            return True
        if self.private and not any(self.holds(node, one, record, right) for node in nodes for one in self.units):
            return False
        names = {name for node in nodes for owner, name in node.kept if owner == unit}
        return any(
            self.can_decode([(node.name, node.kept.get((unit, name))) for node in nodes], record, right)
            for name in names
        )

    def holds(self, node: Node, unit: Unit, record: int, right: Any) -> bool:
        return unit in node.live and node.live[unit].contents.get(record) == right(record)

    def can_decode(self, kept: list[tuple[str, Kept | None]], record: int, right: Any) -> bool:
        there = [one for _, one in kept if one is not None]
        window = range(record if self.private else record - self.period + 1, record + 1)

        def enough(fits: Any) -> bool:
            groups = itertools.combinations([one for one in there if fits(one)], self.data)
            return any(len({one.index for one in group}) == self.data for group in groups)

        return (
            all(one.base <= record for one in there)
            and enough(lambda one: one.static)
            and all(enough(lambda one, w=w: one.contents.get(w) == right(max(w, one.base))) for w in window)
        )

    # What happens

    def follow(self, found: RestoreRecord | StartOver, places: dict[Unit, Node], nonce: str, right: Any) -> Chain:
        start: Chain = right(found.record) if isinstance(found, RestoreRecord) else (nonce,)
        self.attempts[nonce] = found.timeline, start
        return start


def draw_attempt(
    data: st.DataObject, job: Job, places: dict[Unit, Node], nonce: str, history: tuple[Branch, ...]
) -> None:
    """Some train further than others, holders get some records of some, nodes are lost."""
    start = job.attempts[nonce][1]
    base = len(start) - 1
    used = list(places.values())
    for unit, node in places.items():
        if data.draw(st.integers(0, 5)) == 0:
            continue  # dies before it hears of the plan
        newest = base + data.draw(st.integers(0, 4))
        chain = start + (nonce,) * (newest - base)
        oldest = max(newest - data.draw(st.integers(0, 2)), base)
        node.live[unit] = Lived(nonce, history, {one: chain[: one + 1] for one in range(oldest, newest + 1)})
        holders = [other for other in used if other is not node][: job.data + job.spare]
        for index, holder in enumerate(data.draw(st.permutations(holders))):
            first = data.draw(st.integers(base - job.period + 1, newest))
            last = data.draw(st.integers(newest - 1, newest))
            numbers = set(range(first, last + 1)) - set(data.draw(st.sampled_from([[], [], [first + 1]])))
            holder.kept[unit, f"{nonce}.{unit}"] = Kept(
                nonce,
                history,
                index % (job.data + job.spare),
                base,
                {one: chain[: max(one, base) + 1] for one in numbers},
                data.draw(st.integers(0, 9)) > 0,
            )
    for node in used:
        fate = data.draw(st.sampled_from(["stays", "stays", "stays", "is lost", "forgets old fragments"]))
        if fate == "is lost":
            node.live, node.kept = {}, {}
        elif fate == "forgets old fragments":
            node.kept = {key: one for key, one in node.kept.items() if one.attempt == nonce}


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_the_plan_is_the_newest_record_that_every_unit_can_get(data: st.DataObject) -> None:
    units: list[Unit] = data.draw(
        st.sampled_from([[(0,), (1,), (2,)], [(0, 1), (2, 3), (4, 5)], [(0, 2), (1,), (3,), (4,)]])
    )
    nodes = [Node(f"n{index}") for index in range(len(units) + data.draw(st.integers(0, 1)))]
    job = Job(
        units,
        nodes,
        data.draw(st.integers(1, 2)),
        data.draw(st.integers(0, 1)),
        data.draw(st.integers(1, 3)),
        data.draw(st.booleans()),
    )
    for number in range(data.draw(st.integers(2, 6))):
        nonce = f"attempt{number}"
        places = dict(zip(units, data.draw(st.permutations(nodes)), strict=False))
        used = list(places.values())
        found = job.plan(places, nonce)
        right = job.right(used)
        numbers = {record for one in (*job.inventories(used), *job.fragments(used)) for record in one.records}
        common = [
            record for record in numbers if right and all(job.can_get(unit, record, used, right) for unit in units)
        ]
        if common:
            assert isinstance(found, RestoreRecord)
            assert (found.record, found.step) == (max(common), 10 * max(common))
            check_fetches(job, found, places, right)
            again = job.plan(places, nonce, before=True)
            check_fetches(job, again, places, right)
            assert (again.record, again.step) == (found.record, found.step)
            event("also the record before" if check_before(job, again, places, right) else "not the record before")
            history = branch_off(found.history, found.record, found.timeline)
            event("decodes" if any(isinstance(one.source, FromFragments) for one in found.fetches) else found.tier)
        else:
            assert isinstance(found, StartOver)
            history = (Branch(found.timeline, None),)
            event("starts over")
        job.follow(found, places, nonce, right)
        draw_attempt(data, job, places, nonce, history)


def check_before(job: Job, found: RestoreRecord, places: dict[Unit, Node], right: Any) -> bool:
    """The record before comes for all that fetch, from where there is both, or for none; whether it does."""
    assert len({fetch.before for fetch in found.fetches}) <= 1
    if not any(fetch.before for fetch in found.fetches):
        return False
    nodes = {node.name: node for node in places.values()}
    record, fetching = found.record - 1, {fetch.ranks for fetch in found.fetches}
    assert all(job.holds(node, unit, record, right) for unit, node in places.items() if unit not in fetching)
    for fetch in found.fetches:
        if fetch.server is not None:
            name, ranks = fetch.server
            assert job.holds(nodes[name], ranks, record, right)
        if isinstance(fetch.source, FromFragments):
            source = fetch.source
            kept = [(name, nodes[name].kept.get((fetch.ranks, source.generation))) for name, _ in source.fragments]
            assert job.can_decode(kept, record, right)
    return True


def check_fetches(job: Job, found: RestoreRecord, places: dict[Unit, Node], right: Any) -> None:
    """Who cannot go on by itself is sent where there is what it needs."""
    nodes = {node.name: node for node in places.values()}
    fetches = {fetch.ranks: fetch for fetch in found.fetches}
    assert set(fetches) == {unit for unit, node in places.items() if not job.holds(node, unit, found.record, right)}
    for unit, fetch in fetches.items():
        assert (fetch.node, fetch.record) == (places[unit].name, found.record)
        holders = {name for name, node in nodes.items() if job.holds(node, unit, found.record, right)}
        # A node that has the record itself is done without only for the sake of the one before.
        source = fetch.source
        if isinstance(source, FromNode):
            assert source.node in holders
            continue
        assert not holders or fetch.before
        kept = [(name, nodes[name].kept.get((unit, source.generation))) for name, _ in source.fragments]
        assert all(
            one is not None and one.index == index for (_, one), (_, index) in zip(kept, source.fragments, strict=True)
        )
        assert job.can_decode(kept, found.record, right)
        if source.replica is not None:
            name, ranks = source.replica
            assert job.holds(nodes[name], ranks, found.record, right)
            assert ranks in serves(found.fetches, name)
        assert (source.replica is not None) == job.private
