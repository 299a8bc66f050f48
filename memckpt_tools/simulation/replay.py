"""One training under one scheme of protection, through one sequence of failures.

Time passes from failure to failure: between them training makes progress at the rate of its steps, and nothing has to
be looked at. So a run costs what its failures cost.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from memckpt.config.checks import Checked
from memckpt_tools.planning.scheme import Scheme, Seconds, Tier
from memckpt_tools.simulation.failures import KINDS, MOST_NODES, Cluster, Failures, LongTime

#: Recovery where no tier holds anything: training begins anew.
NOTHING = "nothing"

#: A state is due at a multiple of steps; sums of times are not exact to the last bit.
_ROUNDING = 1e-9
_AT_ONCE = 1 << 16


@dataclass(frozen=True, kw_only=True)
class Repair(Checked):
    """How long it takes until lost nodes are there again; the times are those of ``memckpt simulate --help``."""

    detection_seconds: Seconds = 0.0
    replacement_seconds: Seconds = 0.0
    repair_seconds: Seconds = 0.0
    #: Number at the start; None: there always is one. If all are in use, training waits for the first repaired node.
    spares: Annotated[int, Meta(ge=0, le=MOST_NODES)] | None = None
    start_seconds: Seconds = 0.0


@dataclass(frozen=True, kw_only=True)
class Training(Checked):
    """A training: the time of its steps without protection, and its time from start to end, failures included."""

    step_seconds: Annotated[float, Meta(ge=1e-4, le=300.0)]  # beyond these it was meant in milli- or microseconds
    duration_seconds: LongTime


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of a training. The four times add up to its duration."""

    useful_seconds: float  #: that its steps at the end would have taken without protection
    overhead_seconds: float  #: that protection added to them
    lost_seconds: float
    down_seconds: float
    steps: float
    lost_steps: float  #: lost with a failure, parts of steps included
    failures: tuple[int, ...]  #: number of failures by kind, in the order of `KINDS`
    recoveries: tuple[int, ...]  #: from each tier, and last from nothing; each failure has one

    @property
    def duration_seconds(self) -> float:
        return self.useful_seconds + self.overhead_seconds + self.lost_seconds + self.down_seconds

    @property
    def ettr(self) -> float:
        """Effective training time ratio: the useful share of the duration."""
        return self.useful_seconds / self.duration_seconds


def replay(
    scheme: Scheme, failures: Failures, cluster: Cluster, training: Training, repair: Repair | None = None
) -> Outcome:
    """What becomes of a training with these failures; without a `repair` lost nodes are replaced at once."""
    repair = repair or Repair()
    places = [_Place(tier, cluster.nodes) for tier in scheme.tiers]
    restores = [*(tier.restore_seconds for tier in scheme.tiers), repair.start_seconds]
    step_seconds = training.step_seconds * (1 + scheme.overhead)
    nodes = _Nodes(repair)
    steps = lost_steps = down_seconds = 0.0
    now = resumed = 0.0  # the last failure, and when training goes on after it
    by_kind = [0] * len(KINDS)
    recoveries = [0] * len(restores)
    for when, kind, unit in _in_turn(failures):
        if when >= training.duration_seconds:
            break
        if when > resumed:
            down_seconds += resumed - now
            steps += (when - resumed) / step_seconds
        else:
            down_seconds += when - now
        lost = cluster.nodes_of(kind, unit)
        best, chosen = -math.inf, len(places)
        for index, place in enumerate(places):
            held = place.strike(when, steps, lost)
            if held > best:
                best, chosen = held, index
        best = max(best, 0.0)
        by_kind[kind] += 1
        recoveries[chosen] += 1
        lost_steps += steps - best
        steps = best
        now, resumed = when, nodes.replaced(when, len(lost)) + restores[chosen]
        source_survived = False  # what is on its way to the first tier comes from processes, which have ended
        for place in places:
            place.resume(resumed, steps, source_survived)
            source_survived = not place.lost
    down_seconds += min(resumed, training.duration_seconds) - now
    steps += max(0.0, training.duration_seconds - resumed) / step_seconds
    return Outcome(
        useful_seconds=steps * training.step_seconds,
        overhead_seconds=steps * training.step_seconds * scheme.overhead,
        lost_seconds=lost_steps * step_seconds,
        down_seconds=down_seconds,
        steps=steps,
        lost_steps=lost_steps,
        failures=tuple(by_kind),
        recoveries=tuple(recoveries),
    )


def _in_turn(failures: Failures) -> Iterator[tuple[float, int, int]]:
    """Time, kind and unit, as numbers of Python, which are faster one by one; not all at once, for their memory."""
    for first in range(0, len(failures), _AT_ONCE):
        part = slice(first, first + _AT_ONCE)
        yield from zip(
            failures.seconds[part].tolist(), failures.kinds[part].tolist(), failures.units[part].tolist(), strict=True
        )


class _Nodes:
    """Spare nodes, and lost ones on their way to becoming spares."""

    def __init__(self, repair: Repair) -> None:
        self._repair = repair
        self._available = None if repair.spares is None else [0.0] * repair.spares  # a heap: when each spare is there
        self._complete = 0.0

    def replaced(self, when: float, lost: int) -> float:
        """When processes can start after a failure of `lost` nodes, and all those before it."""
        repair = self._repair
        noticed = when + repair.detection_seconds
        if self._available is None:
            if lost:
                self._complete = noticed + repair.replacement_seconds
        else:
            for _ in range(lost):
                spare = heapq.heappushpop(self._available, when + repair.repair_seconds)
                self._complete = max(self._complete, max(spare, noticed) + repair.replacement_seconds)
        return max(self._complete, noticed)


def group_of(node: int, nodes: int, group_nodes: int) -> int:
    """The group of a node: those of `memckpt.replication.coding.placement`, for domains that are runs of nodes.

    Neighbours are in different groups, so that a group has as few nodes of a rack as can be. Where nodes do not divide,
    some groups are larger.
    """
    return (node - nodes) % (nodes // group_nodes)


class _Place:
    """What one tier holds, in the course of a training.

    `lost`: whether the last failure, or one from which its nodes have not recovered, was more than it survives.
    """

    def __init__(self, tier: Tier, nodes: int) -> None:
        self._every, self._lag, self._rebuild = tier.every_steps, tier.lag_steps, tier.rebuild_seconds
        self._survives, self._tolerates = tier.survives_cluster, tier.tolerates
        self._group_nodes, self._cluster_nodes = tier.group_nodes, nodes
        self._newest = -math.inf  # the newest state of those from before `_since`
        self._since = 0.0  # newer states come after this step
        self._whole = 0.0  # when protection is complete again
        self._empty: dict[int, set[int]] = {}  # by group: nodes that hold nothing until then
        self.lost = False

    def strike(self, when: float, steps: float, nodes: range) -> float:
        """A failure of so many steps, and of these nodes' memory; the newest state that it leaves, or -inf."""
        due = math.floor((steps - self._lag) / self._every + _ROUNDING) * self._every
        if due > self._since and due > self._newest:
            self._newest = due
        if self._survives:
            return self._newest
        if when >= self._whole:
            self.lost = False
            if self._empty:
                self._empty.clear()
        if nodes and not self.lost:
            self.lost = self._exceeds(nodes)
        return -math.inf if self.lost else self._newest

    def _exceeds(self, nodes: range) -> bool:
        """Count nodes as lost; whether these are more than the tier survives."""
        size, total, tolerates = self._group_nodes, self._cluster_nodes, self._tolerates
        if tolerates == 0:  # the nodes' own memory, of which each is needed
            return True
        for node in nodes:
            members = self._empty.setdefault(group_of(node, total, size), set())
            members.add(node)
            if len(members) > tolerates:
                return True
        return False

    def resume(self, when: float, steps: float, source_survived: bool) -> None:
        """Training goes on; `source_survived`: what states on their way to this tier come from is still there."""
        self._whole = when + self._rebuild
        if self.lost:
            self._newest = -math.inf
        if self.lost or not source_survived:
            self._since = steps
        else:
            self._since = min(self._since, steps)
