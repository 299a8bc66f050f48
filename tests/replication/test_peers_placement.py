"""Placement: any m losses leave k fragments, everybody keeps as much, domains differ wherever possible."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memckpt.config import DomainLevel, ErasureConfig
from memckpt.errors import ConfigurationError
from memckpt.replication.coding.placement import (
    Domain,
    Path,
    Placement,
    choose_level,
    domains_suffice,
    find_domain,
    place,
)

NOWHERE: Sequence[Path] = [(str(node),) for node in range(64)]


def check_placement(placement: Placement, nodes: int, data: int, tolerate: int) -> None:
    """What must hold whatever the domains are."""
    span = data + tolerate
    sizes = [len(group) for group in placement.groups]
    assert sorted(node for group in placement.groups for node in group) == list(range(nodes))
    assert sizes == sorted(sizes)
    assert span <= sizes[0] <= sizes[-1] <= sizes[0] + 1
    assert len(sizes) == nodes // span  # as many as can be, so that as many losses as can be are survived
    group_of = {node: group for group in placement.groups for node in group}
    kept: list[list[tuple[int, int]]] = [[] for _ in range(nodes)]
    for owner in range(nodes):
        holders = placement.holders[owner]
        assert len({owner, *holders}) == span == len(holders) + 1
        assert {group_of[holder] for holder in holders} == {group_of[owner]}
        for index, holder in enumerate(holders):
            kept[holder].append((owner, index))
    for node in range(nodes):
        assert placement.kept[node] == tuple(sorted(kept[node]))
        assert len(kept[node]) == span - 1


def lost_records(placement: Placement, nodes: int, data: int, lost: set[int]) -> list[int]:
    """The owners whose records are on neither them nor k of those who keep fragments."""
    return [owner for owner in lost if len(set(placement.holders[owner]) - lost) < data]


def records_share_no_domain(placement: Placement, domains: Sequence[Path]) -> bool:
    touched = [[domains[owner], *(domains[one] for one in placement.holders[owner])] for owner in range(len(domains))]
    return all(len(set(each)) == len(each) for each in touched)


def some_assignment_exists(domains: Sequence[Path], span: int) -> bool:
    """Brute force, with no regard to groups: holders in different domains, such that loads differ by at most one.

    All loads are then equal. Owners choose one after the other, among choices that leave everybody room.
    """
    nodes = len(domains)
    room = [span - 1] * nodes

    def choose(owner: int) -> bool:
        if owner == nodes:
            return True
        others = [node for node in range(nodes) if room[node] and domains[node] != domains[owner]]
        for holders in itertools.combinations(others, span - 1):
            if len({domains[node] for node in holders}) == span - 1:
                for node in holders:
                    room[node] -= 1
                if choose(owner + 1):
                    return True
                for node in holders:
                    room[node] += 1
        return False

    return choose(0)


def partitions(count: int, most: int | None = None) -> Iterator[list[int]]:
    """All ways to write a number as a sum, largest first: sizes of domains."""
    if count == 0:
        yield []
    for first in range(min(count, most or count), 0, -1):
        yield from ([first, *rest] for rest in partitions(count - first, first))


@pytest.mark.promise(
    "fragments are placed evenly, so that any m losses leave k, in different failure domains while these suffice"
)
@pytest.mark.parametrize("nodes", range(2, 65))
def test_every_number_of_nodes(nodes: int) -> None:
    for data, tolerate in itertools.product(range(1, 9), range(1, 9)):
        if data + tolerate <= nodes:
            placement = place(NOWHERE[:nodes], data, tolerate)
            check_placement(placement, nodes, data, tolerate)
            assert placement.survived == (tolerate,)
            assert not placement.warnings


def test_any_m_losses_leave_k_fragments_and_m_more_do_not() -> None:
    for nodes, data, tolerate in itertools.product(range(2, 10), range(1, 5), range(1, 4)):
        if data + tolerate > nodes:
            continue
        placement = place(NOWHERE[:nodes], data, tolerate)
        for lost in itertools.combinations(range(nodes), tolerate):
            assert not lost_records(placement, nodes, data, set(lost))
        more = itertools.combinations(range(nodes), tolerate + 1)
        assert any(lost_records(placement, nodes, data, set(lost)) for lost in more)


def test_domains_are_kept_apart_exactly_where_any_assignment_could() -> None:
    possible = impossible = 0
    for nodes, span in itertools.product(range(2, 8), range(2, 5)):
        for sizes in partitions(nodes) if span <= nodes else ():
            domains = [(f"d{index}",) for index, size in enumerate(sizes) for _ in range(size)]
            placement = place(domains, 1, span - 1)
            could = some_assignment_exists(domains, span)
            assert records_share_no_domain(placement, domains) == could
            assert bool(placement.warnings) == (not could)
            assert domains_suffice(domains, span) == could
            possible, impossible = possible + could, impossible + (not could)
    assert possible > 20
    assert impossible > 20


@st.composite
def jobs(draw: st.DrawFn) -> tuple[list[Path], int, int]:
    """Nodes in racks in zones, few or many of each, in any order; k and m for which they are enough."""
    nodes = draw(st.integers(2, 64))
    zones, racks = draw(st.integers(1, 6)), draw(st.integers(1, 40))
    domains = [
        (f"z{draw(st.integers(1, zones))}", f"r{draw(st.integers(1, racks))}", f"n{node}") for node in range(nodes)
    ]
    data = draw(st.integers(1, min(32, nodes - 1)))
    tolerate = draw(st.integers(1, min(32, nodes - data)))
    return domains, data, tolerate


@given(jobs(), st.integers(1, 3), st.data())
@settings(max_examples=300, deadline=None)
def test_domains_of_any_shape(job: tuple[list[Path], int, int], depth: int, data: st.DataObject) -> None:
    whole, fragments, tolerate = job
    span = fragments + tolerate
    domains = [path[:depth] for path in whole]
    placement = place(domains, fragments, tolerate)
    check_placement(placement, len(domains), fragments, tolerate)
    suffice = max(Counter(domains).values()) <= len(domains) // span
    assert records_share_no_domain(placement, domains) == suffice
    assert bool(placement.warnings) == (not suffice)
    # What it says of losses is so, at each level, and is the most that can be said.
    for level, survived in enumerate(placement.survived, start=1):
        names = sorted({path[:level] for path in domains})
        lost = data.draw(st.permutations(names))[:survived]
        nodes = {node for node, path in enumerate(domains) if path[:level] in lost}
        assert not lost_records(placement, len(domains), fragments, nodes)
        if len(names) <= 8:
            worse = (
                {node for node, path in enumerate(domains) if path[:level] in choice}
                for choice in itertools.combinations(names, survived + 1)
            )
            assert any(lost_records(placement, len(domains), fragments, choice) for choice in worse)
    if suffice:
        assert placement.survived[-1] >= tolerate
    # Only who shares a domain matters, not what it is called.
    renamed = [tuple(f"{name}-{len(name)}"[::-1] for name in path) for path in domains]
    assert place(renamed, fragments, tolerate).groups == placement.groups
    everywhere, groups = Counter(domains), placement.groups
    for group in groups:  # spread as evenly as can be, in any case
        counts = Counter(domains[node] for node in group)
        assert all(count <= -(-everywhere[domain] // len(groups)) for domain, count in counts.items())


def test_nodes_of_a_domain_are_as_far_from_each_other_as_can_be() -> None:
    """On a ring of g nodes, c of them alike: g // c from one to the next, for domains of every size at once."""
    for nodes in range(4, 10):
        for sizes in (order for some in partitions(nodes) for order in set(itertools.permutations(some))):
            zones = [f"zone{index}" for index, size in enumerate(sizes) for _ in range(size)]
            (group,) = place([(zone, str(node)) for node, zone in enumerate(zones)], 1, nodes - 1).groups
            distance = nodes // max(sizes)
            for at in range(nodes):
                near = {zones[group[(at + step) % nodes]] for step in range(distance)}
                assert len(near) == distance, (sizes, group)


@pytest.mark.parametrize(
    ("sizes", "data", "tolerate", "message"),
    [
        (
            [2, 2],
            2,
            2,
            r"at most 1 of 4 nodes in one domain, .* the 4 nodes .* found 2 in rack0: one domain may be lost",
        ),
        ([4], 1, 2, "found 4 in rack0: the loss of one domain can lose records, where 2 are to be survived"),
        ([2, 1, 1, 1, 1], 3, 3, "found 2 in rack0: any 2 of them may be lost, where 3 are to be survived"),
    ],
)
def test_too_few_domains_are_said(sizes: list[int], data: int, tolerate: int, message: str) -> None:
    domains = [(f"rack{index}",) for index, size in enumerate(sizes) for _ in range(size)]
    (warning,) = place(domains, data, tolerate).warnings
    assert re.search(message, warning)


def test_too_few_nodes_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"expected k \+ m = 4 \+ 2 = 6 nodes or more, found 5; choose"):
        place(NOWHERE[:5], 4, 2)


CONFIG = ErasureConfig()
SLURM = {"SLURM_TOPOLOGY_ADDR": "root.cell1.leaf7.node31", "SLURM_TOPOLOGY_ADDR_PATTERN": "switch.switch.switch.node"}


@pytest.mark.parametrize(
    ("config", "environment", "expected"),
    [
        (CONFIG, {}, ("", "")),
        (CONFIG, SLURM, ("cell1", "leaf7")),
        (CONFIG, {"SLURM_TOPOLOGY_ADDR": "n1", "SLURM_TOPOLOGY_ADDR_PATTERN": "node"}, ("", "")),
        (CONFIG, {"SLURM_TOPOLOGY_ADDR": "b2.n1.lan", "SLURM_TOPOLOGY_ADDR_PATTERN": "block.node"}, ("", "b2")),
        (CONFIG, {"SLURM_TOPOLOGY_ADDR": "n1", "SLURM_TOPOLOGY_ADDR_PATTERN": "switch.node"}, ("", "")),
        (CONFIG, {"SLURM_TOPOLOGY_ADDR": "s1.n1"}, ("", "")),
        (CONFIG, SLURM | {"MEMCKPT_RACK": "r1"}, ("cell1", "r1")),
        (ErasureConfig(zone="z"), SLURM | {"MEMCKPT_RACK": "r1", "MEMCKPT_ZONE": "other"}, ("z", "r1")),
        (ErasureConfig(rack="r"), {"MEMCKPT_RACK": "other", "MEMCKPT_ZONE": "z1"}, ("z1", "r")),
    ],
)
def test_where_a_node_is(config: ErasureConfig, environment: dict[str, str], expected: tuple[str, str]) -> None:
    assert find_domain(config, "me", environment) == (*expected, "me")


def where(text: str) -> list[Domain]:
    """Nodes by "zone/rack", either of them empty."""
    return [Domain(*one.split("/"), f"n{index}") for index, one in enumerate(text.split())]


@pytest.mark.parametrize(
    ("text", "level", "name", "first", "reason"),
    [
        ("a/1 b/1 c/1", "auto", "zone", ("a",), "the widest level"),
        ("a/1 a/2 a/3", "auto", "rack", ("a", "1"), r"zones are too few or too unequal \(1\) for the 3 nodes"),
        ("/1 /2 /3", "auto", "rack", ("1",), "the zone of nodes n0, n1, n2 is not known"),
        ("a/1 /2 /3 /4", "auto", "rack", ("1",), "the zone of nodes n1, n2, n3 is not known"),
        ("a/1 b/2 c/ a/1 b/2 c/3", "auto", "zone", ("a",), "the widest level"),
        ("a/1 a/1 b/2 b/ c/3", "auto", "node", ("a", "n0"), "zones are too few .*; the rack of node n3 is"),
        ("/ / / / /", "auto", "node", ("n0",), "the zone of nodes n0, n1, n2 and 2 more is not known; the rack of"),
        ("a/1 a/1 a/1", "rack", "rack", ("a", "1"), "as configured"),
        ("a/1 b/1 c/1", "node", "node", ("a", "1", "n0"), "as configured"),
    ],
)
def test_the_level_of_domains(text: str, level: DomainLevel, name: str, first: Path, reason: str) -> None:
    chosen = choose_level(where(text), level, 3)
    assert (chosen.name, chosen.paths[0]) == (name, first)
    assert re.match(reason, chosen.reason)
    place(chosen.paths, 2, 1)


def test_a_level_that_is_not_known_everywhere_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="to know its rack, found that it is not known of node n1; set"):
        choose_level(where("a/1 a/ a/3"), "rack", 3)
