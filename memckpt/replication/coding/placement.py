"""Which nodes keep the fragments of whose records: pure functions, so that every node computes the same.

A group has k + m nodes or some more, on a ring. The k + m - 1 nodes that follow a node on its ring keep one fragment
each of its records: every node keeps as much as it sends. Nodes are dealt out to the groups, and laid on the ring,
such that no two of k + m neighbours are of one failure domain. That is possible exactly where no domain has more than
n // (k + m) nodes: n records each touch it at most once, and each of its nodes is touched by k + m of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from memckpt.config import DomainLevel, ErasureConfig
from memckpt.errors import ConfigurationError

#: A failure domain, or the way to it from the widest one that is known: ("zone-a", "rack-3", "node-7").
Path = tuple[str, ...]


@dataclass(frozen=True)
class Placement:
    """Who keeps what: each group of nodes is a ring, the larger ones last.

    `survived`: by level, widest first: how many domains, whichever they are, may be lost at once.
    """

    groups: tuple[tuple[int, ...], ...]
    survived: tuple[int, ...]
    warnings: tuple[str, ...]
    #: By node, the k + m - 1 nodes that keep a fragment of its records, whose number is the position.
    holders: tuple[tuple[int, ...], ...] = field(repr=False)
    #: By node, (owner, fragment) of all that it keeps.
    kept: tuple[tuple[tuple[int, int], ...], ...] = field(repr=False)


def domains_suffice(domains: Sequence[Hashable], group_nodes: int) -> bool:
    """Whether no two of the `group_nodes` nodes that hold a record need to be of one domain; `domains` are by node."""
    return max(Counter(domains).values(), default=0) <= len(domains) // group_nodes


def place(domains: Sequence[Path], data: int, tolerate: int) -> Placement:
    """Form groups of `data` + `tolerate` nodes or more, and say who keeps whose fragments.

    `domains`: by node, the way to its failure domain from the widest one, all of one length. Names tell only which
    nodes share a domain: a replaced node's place is taken, and nothing else moves. Raises ConfigurationError: there are
    fewer than k + m nodes.
    """
    nodes, span = len(domains), data + tolerate
    if nodes < span:
        raise ConfigurationError(
            f"peers: expected k + m = {data} + {tolerate} = {span} nodes or more, found {nodes}; choose a smaller k or "
            "m, or more nodes"
        )
    if len({len(path) for path in domains}) != 1:
        raise ValueError(f"expected domains by paths of one length, found {list(domains)}")
    count = nodes // span
    groups: list[list[int]] = [[] for _ in range(count)]
    # The first round leaves out the groups in front, so that those behind are the larger ones.
    for turn, node in enumerate(_sort_by_domain(range(nodes), domains), start=-nodes % count):
        groups[turn % count].append(node)
    rings = [_lay_ring(group, domains) for group in groups]
    holders: list[tuple[int, ...]] = [()] * nodes
    kept: list[list[tuple[int, int]]] = [[] for _ in range(nodes)]
    for ring in rings:
        for at, owner in enumerate(ring):
            holders[owner] = tuple(ring[(at + distance) % len(ring)] for distance in range(1, span))
            for index, holder in enumerate(holders[owner]):
                kept[holder].append((owner, index))
    depth = len(domains[0])
    survived = tuple(
        _count_survived(holders, [path[:end] for path in domains], tolerate) for end in range(1, depth + 1)
    )
    warnings = _warn(domains, span, tolerate, survived[-1])
    return Placement(
        groups=tuple(map(tuple, rings)),
        survived=survived,
        warnings=warnings,
        holders=tuple(holders),
        kept=tuple(tuple(sorted(each)) for each in kept),
    )


def _sort_by_domain(nodes: Sequence[int], domains: Sequence[Path]) -> list[int]:
    """Nodes of a domain side by side at every level, those of the largest first."""
    sizes = Counter(domains[node][:end] for node in nodes for end in range(1, len(domains[node]) + 1))
    first: dict[Path, int] = {}
    for node in nodes:
        for end in range(1, len(domains[node]) + 1):
            first.setdefault(domains[node][:end], node)

    def key(node: int) -> list[tuple[int, int]]:
        # Names stay out of it: they change when a node is replaced.
        ways = [domains[node][:end] for end in range(1, len(domains[node]) + 1)]
        return [(-sizes[way], first[way]) for way in ways]

    return sorted(nodes, key=lambda node: (key(node), node))


def _lay_ring(group: Sequence[int], domains: Sequence[Path]) -> list[int]:
    """Order a group such that nodes of one domain are as far from each other as can be.

    The ring is cut into as many rows as the largest domain has nodes. Written column by column, a domain has at most
    one node in a row, and a row's length lies between two.
    """
    rows, depth = 1, len(domains[group[0]])
    while rows == 1 and depth:  # where all are different at a level, a wider one decides
        rows = max(Counter(domains[node][:depth] for node in group).values())
        depth -= 1
    table: list[list[int]] = [[] for _ in range(rows)]
    for turn, node in enumerate(_sort_by_domain(sorted(group), domains)):
        table[turn % rows].append(node)
    return [node for row in table for node in row]


def _count_survived(holders: Sequence[Sequence[int]], domains: Sequence[Path], tolerate: int) -> int:
    """The largest number of domains that can be lost with no record lost, whichever domains they are.

    A record is lost with its owner and m of the others. The worst choice is the owner's domain and those that have the
    most of the others.
    """
    least = len(set(domains))
    for owner, others in enumerate(holders):
        touched = Counter(domains[node] for node in others)
        losses = [1 + touched.pop(domains[owner], 0), *sorted(touched.values(), reverse=True)]
        lost = survived = 0
        for each in losses:
            lost += each
            if lost > tolerate:
                break
            survived += 1
        least = min(least, survived)
    return least


def _warn(domains: Sequence[Path], span: int, tolerate: int, survived: int) -> tuple[str, ...]:
    if domains_suffice(domains, span):
        return ()
    path, most = Counter(domains).most_common(1)[0]
    left = {0: "the loss of one domain can lose records", 1: "one domain may be lost, not two"}
    message = (
        f"peers: expected at most {len(domains) // span} of {len(domains)} nodes in one domain, so that the {span} "
        f"nodes that hold a record are in different ones, found {most} in {'/'.join(path)}: "
        f"{left.get(survived, f'any {survived} of them may be lost')}, where {tolerate} are to be survived; spread the "
        "job over more of them, or choose smaller k and m"
    )
    return (message,)


#: A node's rack and zone, where the configuration has none. On Kubernetes a pod is given them through the downward API,
#: from its own labels, to which the cluster copies those of its node (``topology.kubernetes.io/zone``).
RACK_VARIABLE, ZONE_VARIABLE = "MEMCKPT_RACK", "MEMCKPT_ZONE"
#: Slurm gives each task the way to its node, "root.cell-1.leaf-7.node-31", and what its parts are,
#: "switch.switch.switch.node"; or "block-2.node-31" and "block.node"; or the node alone.
SLURM_ADDRESS, SLURM_PATTERN = "SLURM_TOPOLOGY_ADDR", "SLURM_TOPOLOGY_ADDR_PATTERN"

_LEVELS = ("zone", "rack", "node")  # widest first


class Domain(NamedTuple):
    """Place of a node: names of its failure domains, widest first; empty where it is not known."""

    zone: str
    rack: str
    node: str


class Level(NamedTuple):
    """The failure domains that are placed for: ``"zone"``, ``"rack"`` or ``"node"``, why, and each node's way."""

    name: str
    paths: tuple[Path, ...]
    reason: str


def find_domain(config: ErasureConfig, node: str, environment: Mapping[str, str]) -> Domain:
    """Where this node is: as configured, by MEMCKPT_RACK and MEMCKPT_ZONE, or as Slurm's innermost two switches say."""
    above = _read_slurm(environment)
    rack = config.rack or environment.get(RACK_VARIABLE, "") or (above[-1] if above else "")
    zone = config.zone or environment.get(ZONE_VARIABLE, "") or (above[-2] if len(above) > 1 else "")
    return Domain(zone, rack, node)


def _read_slurm(environment: Mapping[str, str]) -> list[str]:
    """The switches or blocks that a node is in, outermost first; empty if Slurm does not say."""
    address, pattern = environment.get(SLURM_ADDRESS, ""), environment.get(SLURM_PATTERN, "")
    kinds = pattern.split(".")
    parts = address.split(".", len(kinds) - 1)  # a node's own name may have dots
    if kinds[-1] != "node" or len(parts) != len(kinds):
        return []
    return parts[:-1]


def choose_level(domains: Sequence[Domain], level: DomainLevel, group_nodes: int) -> Level:
    """Choose the failure domains to place for. Raises ConfigurationError: not all nodes know the level asked for.

    ``"auto"``: the widest level that all nodes know, at which a record's k + m holders can be apart.
    """
    known = [name for name in _LEVELS if name == "node" or all(getattr(domain, name) for domain in domains)]
    if level != "auto":
        if level not in known:
            unknown = _name([one.node for one in domains if not getattr(one, level)])
            raise ConfigurationError(
                f"peers.domain_level={level!r}: expected every node to know its {level}, found that it is not known of "
                f"{unknown}; set peers.{level} or MEMCKPT_{level.upper()} there, or choose domain_level='auto'"
            )
        return Level(level, _paths(domains, known, level), "as configured")
    passed = []
    for name in _LEVELS:
        if name not in known:
            passed.append(
                f"the {name} of {_name([one.node for one in domains if not getattr(one, name)])} is not known"
            )
            continue
        paths = _paths(domains, known, name)
        if name == "node" or domains_suffice(paths, group_nodes):
            break
        passed.append(f"{name}s are too few or too unequal ({len(set(paths))}) for the {group_nodes} nodes of a record")
    return Level(name, paths, "; ".join(passed) or "the widest level")


def _paths(domains: Sequence[Domain], known: Sequence[str], level: str) -> tuple[Path, ...]:
    names = known[: known.index(level) + 1]
    return tuple(tuple(getattr(domain, name) for name in names) for domain in domains)


def _name(nodes: Sequence[str]) -> str:
    more = f" and {len(nodes) - 3} more" if len(nodes) > 3 else ""
    return f"{'node' if len(nodes) == 1 else 'nodes'} {', '.join(nodes[:3])}{more}"
