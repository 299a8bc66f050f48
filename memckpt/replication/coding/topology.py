"""Where a node is, as far as its surroundings say, and which failure domains a job's placement is made for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from memckpt.config import DomainLevel, ErasureConfig
from memckpt.errors import ConfigurationError
from memckpt.replication.coding.placement import Path, domains_suffice

#: A node's rack and zone, where the configuration has none. On Kubernetes a pod is given them through the downward API,
#: from its own labels, to which the cluster copies those of its node (``topology.kubernetes.io/zone``).
RACK_VARIABLE, ZONE_VARIABLE = "MEMCKPT_RACK", "MEMCKPT_ZONE"
#: Slurm gives each task the way to its node, "root.cell-1.leaf-7.node-31", and what its parts are,
#: "switch.switch.switch.node"; or "block-2.node-31" and "block.node"; or the node alone.
SLURM_ADDRESS, SLURM_PATTERN = "SLURM_TOPOLOGY_ADDR", "SLURM_TOPOLOGY_ADDR_PATTERN"

_LEVELS = ("zone", "rack", "node")  # widest first


class Domain(NamedTuple):
    """Where a node is: names of its failure domains, widest first; empty where it is not known."""

    zone: str
    rack: str
    node: str


class Level(NamedTuple):
    """The failure domains that are placed for.

    Attributes:
        name: ``"zone"``, ``"rack"`` or ``"node"``.
        paths: the way to each node's domain from the widest level that all nodes know.
        reason: why it is this level, in words.
    """

    name: str
    paths: tuple[Path, ...]
    reason: str


def find_domain(config: ErasureConfig, node: str, environment: Mapping[str, str]) -> Domain:
    """Where this node is: what is configured, or else MEMCKPT_RACK and MEMCKPT_ZONE, or else Slurm's switches.

    Of Slurm's way to the node, the innermost switch or block counts as its rack, the one around it as its zone.
    """
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
    """Choose which failure domains to place for.

    Args:
        domains: domain of each node, by its index.
        level: what is asked for; ``"auto"`` takes the widest level that all nodes know, at which a record's holders can
            all be in different domains.
        group_nodes: k + m, how many nodes hold a record.

    Raises:
        ConfigurationError: a level is asked for that not all nodes know.
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
