"""Checks of what a simulation is given: an error names the field, the range and what was found."""

from __future__ import annotations

from collections.abc import Sequence

from memckpt.errors import ConfigurationError
from memckpt_tools.planning.checks import require_count, require_number
from memckpt_tools.planning.scheme import Scheme, Tier

#: Longest time that is taken for meant, in seconds: 3,000 years as a mean time between failures is another unit's.
LONGEST_SECONDS = 1e11
#: Time of a step, in seconds: beyond these it was meant in milliseconds or microseconds.
STEP_SECONDS = (1e-4, 300.0)


def check_schemes(schemes: Sequence[Scheme], nodes: int) -> None:
    """Refuse schemes that a cluster of so many nodes cannot have.

    Raises:
        ConfigurationError: there is none, two have one name, or a value of one is out of range.
    """
    if not schemes:
        raise ConfigurationError("schemes: expected one or more, found none")
    names = [scheme.name for scheme in schemes]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ConfigurationError(f"schemes: expected a name of its own for each, found {min(twice)!r} twice")
    for scheme in schemes:
        where = f"scheme {scheme.name!r}"
        require_number(f"{where}: overhead", scheme.overhead, 0, 100, "of training time")
        for field in ("memory_bytes", "wire_bytes", "disk_bytes"):
            require_number(f"{where}: {field}", getattr(scheme, field), 0, 1e18, "bytes")
        tiers = [tier.name for tier in scheme.tiers]
        if twice := {name for name in tiers if tiers.count(name) > 1}:
            raise ConfigurationError(f"{where}: tiers: expected a name of its own for each, found {min(twice)!r} twice")
        for tier in scheme.tiers:
            _check_tier(f"{where}, tier {tier.name!r}", tier, nodes)


def _check_tier(where: str, tier: Tier, nodes: int) -> None:
    require_number(f"{where}: every_steps", tier.every_steps, 0, 1e12, "steps", above=True)
    require_number(f"{where}: lag_steps", tier.lag_steps, 0, 1e12, "steps")
    require_number(f"{where}: restore_seconds", tier.restore_seconds, 0, LONGEST_SECONDS, "seconds")
    require_number(f"{where}: rebuild_seconds", tier.rebuild_seconds, 0, LONGEST_SECONDS, "seconds")
    require_count(
        f"{where}: group_nodes", tier.group_nodes, 0, nodes, "nodes of the cluster, 0 where they do not matter"
    )
    most = max(0, tier.group_nodes - 1)
    require_count(f"{where}: tolerates", tier.tolerates, 0, most, f"nodes of a group of {tier.group_nodes}")
