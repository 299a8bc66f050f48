"""Failures of a job: of processes, nodes, racks, zones, the cluster; drawn from distributions."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from memckpt.errors import ConfigurationError
from memckpt_tools.planning.checks import require_count, require_number
from memckpt_tools.simulation.checks import LONGEST_SECONDS
from memckpt_tools.simulation.lifetimes import Exponential, Floats, Lifetime, Weibull

#: What fails at once: the processes of a node, whose memory stays; or nodes with their memory.
Kind = Literal["process", "node", "rack", "zone", "cluster"]
KINDS: tuple[Kind, ...] = get_args(Kind)
PROCESS, NODE, RACK, ZONE, CLUSTER = range(len(KINDS))

MOST_NODES = 1_000_000
#: More failures than that in one run would take minutes and gigabytes, and mean another unit of time.
MOST_FAILURES = 20_000_000

Integers = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """The nodes of a job. Racks are runs of neighbouring nodes, zones are runs of racks.

    Attributes:
        nodes: number of nodes.
        nodes_per_rack: number of nodes in a rack, the last one may have fewer; None: racks are not known.
        racks_per_zone: number of racks in a zone, the last one may have fewer; None: zones are not known.
    """

    nodes: int
    nodes_per_rack: int | None = None
    racks_per_zone: int | None = None

    def __post_init__(self) -> None:
        require_count("nodes", self.nodes, 1, MOST_NODES, "nodes")
        if self.nodes_per_rack is not None:
            require_count("nodes_per_rack", self.nodes_per_rack, 1, self.nodes, "nodes of the cluster")
        if self.racks_per_zone is not None:
            if self.nodes_per_rack is None:
                raise ConfigurationError(
                    f"racks_per_zone: expected nodes_per_rack beside it, found {self.racks_per_zone} alone"
                )
            require_count("racks_per_zone", self.racks_per_zone, 1, self.count(RACK), "racks of the cluster")

    def size(self, kind: int) -> int | None:
        """Number of nodes in one unit of a kind; None: such units are not known."""
        if kind == RACK:
            return self.nodes_per_rack
        if kind == ZONE:
            racks = self.racks_per_zone
            return None if racks is None or self.nodes_per_rack is None else racks * self.nodes_per_rack
        return self.nodes if kind == CLUSTER else 1

    def count(self, kind: int) -> int:
        """Number of units of a kind; 0: they are not known."""
        size = self.size(kind)
        return 0 if size is None else -(-self.nodes // size)

    def nodes_of(self, kind: int, unit: int) -> range:
        """The nodes whose memory is lost with a unit; none with processes."""
        size = self.size(kind)
        assert size is not None
        return range(0) if kind == PROCESS else range(unit * size, min(self.nodes, (unit + 1) * size))


@dataclass(frozen=True)
class Failures:
    """Failures of one run, in the order of time.

    Attributes:
        seconds: when they happen, from the start of training, float64.
        kinds: index into `KINDS`, int64.
        units: number of the node, rack or zone; 0 of the cluster, int64.
    """

    seconds: Floats
    kinds: Integers
    units: Integers

    def __len__(self) -> int:
        return len(self.seconds)

    def check(self, cluster: Cluster) -> None:
        """Refuse failures out of order, and of what the cluster does not have."""
        if not len(self.seconds) == len(self.kinds) == len(self.units):
            found = f"{len(self.seconds)}, {len(self.kinds)} and {len(self.units)}"
            raise ConfigurationError(f"failures: expected as many seconds as kinds and units, found {found}")
        before = np.concatenate(([0.0], self.seconds[:-1]))
        if len(wrong := np.flatnonzero(~((self.seconds >= before) & np.isfinite(self.seconds)))):
            at = int(wrong[0])
            raise ConfigurationError(
                f"failures.seconds[{at}]: expected {before[at]:g} or more, found {self.seconds[at]:g}"
            )
        if len(wrong := np.flatnonzero((self.kinds < 0) | (self.kinds >= len(KINDS)))):
            at = int(wrong[0])
            raise ConfigurationError(f"failures.kinds[{at}]: expected 0 to {len(KINDS) - 1}, found {self.kinds[at]}")
        counts = np.array([cluster.count(kind) for kind in range(len(KINDS))])[self.kinds]
        if len(wrong := np.flatnonzero((self.units < 0) | (self.units >= counts))):
            at = int(wrong[0])
            of = f"{counts[at]} of kind {KINDS[self.kinds[at]]}"
            raise ConfigurationError(
                f"failures.units[{at}]: expected one of the cluster's {of}, found {self.units[at]}"
            )


@dataclass(frozen=True, kw_only=True)
class FailureModel:
    """Distributions of failures; all units fail independently of each other.

    Attributes:
        nodes: time between failures of a node with its memory (hardware); None: there are none.
        processes: time between failures of a node's processes, whose memory stays (software).
        racks, zones: time between failures of a rack or zone, with the memory of all its nodes.
        cluster: time between failures of all nodes at once.
        new: whether units are new when training starts. Otherwise they have been in service for long, and fail as
            often from the start. It makes no difference to exponential times.
    """

    nodes: Lifetime | None = None
    processes: Lifetime | None = None
    racks: Lifetime | None = None
    zones: Lifetime | None = None
    cluster: Lifetime | None = None
    new: bool = False

    @classmethod
    def of_nodes(
        cls, mean_seconds: float, *, software_share: float = 0.0, shape: float = 1.0, new: bool = False
    ) -> FailureModel:
        """Failures of nodes by hardware and software.

        Args:
            mean_seconds: mean time between failures of one node, whatever they are, in seconds.
            software_share: share of software among them, from 0 to 1: of 1 to 3 it is 0.25. Times between failures of
                software are exponential.
            shape: shape of the Weibull distribution of times between failures of hardware; 1: they are exponential.
            new: whether nodes are new when training starts.
        """
        require_number("mean_seconds", mean_seconds, 0, LONGEST_SECONDS, "seconds", above=True)
        require_number("software_share", software_share, 0, 1, "(a share)")
        require_number("weibull_shape", shape, 0.2, 20, "(no unit)")
        hardware: Lifetime | None = None
        if software_share < 1:
            mean = mean_seconds / (1 - software_share)
            hardware = Exponential(mean) if shape == 1 else Weibull.of_mean(shape, mean)
        software = Exponential(mean_seconds / software_share) if software_share > 0 else None
        return cls(nodes=hardware, processes=software, new=new)

    def of_kind(self, kind: int) -> Lifetime | None:
        """Time between failures of one unit of a kind."""
        return (self.processes, self.nodes, self.racks, self.zones, self.cluster)[kind]

    def mean_seconds(self, cluster: Cluster) -> float:
        """Mean time between failures of the job, in seconds."""
        rate = 0.0
        for kind in range(len(KINDS)):
            lifetime = self.of_kind(kind)
            rate += 0.0 if lifetime is None else cluster.count(kind) / lifetime.mean_seconds
        return 1 / rate if rate else math.inf

    def check(self, cluster: Cluster, duration_seconds: float) -> None:
        """Refuse failures of units that the cluster does not have, and more of them than can be meant."""
        for kind, name in ((RACK, "racks"), (ZONE, "zones")):
            if self.of_kind(kind) is not None and cluster.size(kind) is None:
                field = "nodes_per_rack" if kind == RACK else "racks_per_zone"
                raise ConfigurationError(f"{name}: expected {field} of the cluster beside it, found None")
        expected = duration_seconds / self.mean_seconds(cluster)
        if expected > MOST_FAILURES:
            raise ConfigurationError(
                f"mean time between failures: expected up to {MOST_FAILURES:,} failures in {duration_seconds:g} "
                f"seconds, found {expected:.3g}; are both in seconds?"
            )

    def draw(self, cluster: Cluster, duration_seconds: float, seed: np.random.SeedSequence) -> Failures:
        """Failures of a cluster from the start to `duration_seconds`.

        Each kind has a stream of its own, so that more of one kind do not change the others.
        """
        self.check(cluster, duration_seconds)
        seconds, kinds, units = [], [], []
        # Not `seed.spawn`, which counts what was spawned: the same seed must lead to the same failures again.
        for kind in range(len(KINDS)):
            lifetime = self.of_kind(kind)
            if lifetime is None:
                continue
            stream = np.random.default_rng(np.random.SeedSequence(seed.entropy, spawn_key=(*seed.spawn_key, kind)))
            when, which = _draw_units(lifetime, cluster.count(kind), duration_seconds, self.new, stream)
            seconds.append(when)
            kinds.append(np.full(len(when), kind, np.int64))
            units.append(which)
        if not seconds:
            return Failures(np.empty(0), np.empty(0, np.int64), np.empty(0, np.int64))
        when = np.concatenate(seconds)
        order = np.argsort(when, kind="stable")
        return Failures(when[order], np.concatenate(kinds)[order], np.concatenate(units)[order])


def _draw_units(
    lifetime: Lifetime, count: int, duration_seconds: float, new: bool, stream: np.random.Generator
) -> tuple[Floats, Integers]:
    """When and which of `count` alike units fail; each begins a new life with its failure."""
    if isinstance(lifetime, Exponential):
        # The superposition of Poisson processes is one, whose events belong to any of them.
        number = int(stream.poisson(count * duration_seconds / lifetime.mean_seconds))
        return stream.uniform(0, duration_seconds, number), stream.integers(0, count, number)
    seconds, units = [], []
    which = np.arange(count)
    when = lifetime.draw(count, stream) if new else lifetime.draw_remaining(count, stream)
    while True:
        within = when < duration_seconds
        when, which = when[within], which[within]
        if not len(when):
            break
        seconds.append(when)
        units.append(which)
        when = when + lifetime.draw(len(when), stream)
    if not seconds:
        return np.empty(0), np.empty(0, np.int64)
    return np.concatenate(seconds), np.concatenate(units)
