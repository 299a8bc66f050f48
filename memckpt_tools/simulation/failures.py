"""Failures of a cluster: drawn from lifetimes, or read from a trace."""

from __future__ import annotations

import csv
import io
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, get_args

import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from memckpt.config.checks import Checked, Count, require
from memckpt.errors import ConfigurationError
from memckpt_tools.planning.scheme import LONGEST_SECONDS

LongTime = Annotated[float, Meta(gt=0, le=LONGEST_SECONDS)]
Shape = Annotated[float, Meta(ge=0.2, le=20)]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Lifetime(Checked):
    """A Weibull distribution of the lives of units: REFT's survival (equation 1), exp(-(t / scale) ** shape)."""

    mean_seconds: LongTime  #: mean time between failures of one unit
    shape: Shape = 1.0  #: below 1: early failures; above: wear; 1: exponential, a rate that does not depend on age

    @property
    def scale_seconds(self) -> float:
        """Time after which exp(-1) of all units survive."""
        return self.mean_seconds / math.gamma(1 + 1 / self.shape)

    def draw(self, count: int, stream: np.random.Generator) -> Floats:
        """Lives of new units, in seconds."""
        return self.scale_seconds * stream.weibull(self.shape, count)

    def draw_remaining(self, count: int, stream: np.random.Generator) -> Floats:
        """What is left of the lives of units that have been in service for long, in seconds.

        The life that a moment falls into is longer than others in proportion to its length, and the moment is anywhere
        in it. With the density x f(x) / mean, (x / scale) ** shape has a gamma distribution of 1 + 1 / shape.
        """
        lives = self.scale_seconds * stream.gamma(1 + 1 / self.shape, size=count) ** (1 / self.shape)
        return lives * stream.uniform(size=count)


#: What fails at once: the processes of a node, whose memory stays; or nodes with their memory.
Kind = Literal["process", "node", "rack", "zone", "cluster"]
KINDS: tuple[Kind, ...] = get_args(Kind)
PROCESS, NODE, RACK, ZONE, CLUSTER = range(len(KINDS))

MOST_NODES = 1_000_000
#: More failures than that in one run would take minutes and gigabytes, and mean another unit of time.
MOST_FAILURES = 20_000_000

Integers = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Cluster(Checked):
    """The nodes of a job. Racks are runs of neighbouring nodes, zones are runs of racks; None: they are not known."""

    nodes: Annotated[int, Meta(ge=1, le=MOST_NODES)]
    nodes_per_rack: Count | None = None
    racks_per_zone: Count | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        rack, zone = self.nodes_per_rack, self.racks_per_zone
        require(rack is None or rack <= self.nodes, "nodes_per_rack", f"1 to {self.nodes} nodes of the cluster", rack)
        if zone is not None:
            require(rack is not None, "racks_per_zone", "nodes_per_rack beside it", zone)
            racks = self.count(RACK)
            require(zone <= racks, "racks_per_zone", f"1 to {racks} racks of the cluster", zone)

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
    """Failures of one run, in the order of time."""

    seconds: Floats  #: when they happen, from the start of training
    kinds: Integers  #: indices into `KINDS`
    units: Integers  #: number of the node, rack or zone; 0 of the cluster

    def __len__(self) -> int:
        return len(self.seconds)


@dataclass(frozen=True, kw_only=True)
class FailureModel:
    """Distributions of failures; all units fail independently of each other. None: there are none of the kind.

    `new`: units are new when training starts. Else they have been in service for long, and fail as often from the
    start. It makes no difference to exponential times.
    """

    nodes: Lifetime | None = None  #: of a node with its memory (hardware)
    processes: Lifetime | None = None  #: of a node's processes, whose memory stays (software)
    racks: Lifetime | None = None  #: with the memory of all its nodes, as below
    zones: Lifetime | None = None
    cluster: Lifetime | None = None
    new: bool = False

    @classmethod
    def of_nodes(
        cls, mean_seconds: float, *, software_share: float = 0.0, shape: float = 1.0, new: bool = False
    ) -> FailureModel:
        """Failures of nodes by hardware and software, whose times between failures are exponential.

        `mean_seconds` is of one node, of both kinds; `shape` is that of hardware's times.
        """
        require(0 <= software_share <= 1, "software_share", "0 to 1", software_share)
        hardware = Lifetime(mean_seconds / (1 - software_share), shape) if software_share < 1 else None
        software = Lifetime(mean_seconds / software_share) if software_share > 0 else None
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

        Each kind has its stream, so that more of one kind do not change the others.
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
    if lifetime.shape == 1:
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


COLUMNS = ("time_seconds", "kind", "node")


def parse_trace(text: str, cluster: Cluster, name: str = "trace") -> Failures:
    """Failures in comma-separated values. Raises ConfigurationError, with the line and the column.

    The first line names the columns ``time_seconds``, ``kind`` and ``node``, in any order; others are left alone. Empty
    lines are left out, and lines that begin with ``#``. Times count from the start of training and never fall. `node`
    is a node's number from 0: any node of the rack or zone that fails; nothing is needed for the cluster.
    """
    lines = [
        (number, line)
        for number, line in enumerate(text.splitlines(), start=1)
        if line.strip() and not line.startswith("#")
    ]
    if not lines:
        raise ConfigurationError(f"{name}: expected a line of columns {', '.join(COLUMNS)}, found an empty file")
    header = [column.strip() for column in next(csv.reader([lines[0][1]]))]
    if missing := [column for column in COLUMNS if column not in header]:
        raise ConfigurationError(
            f"{name}, line {lines[0][0]}: expected the columns {', '.join(COLUMNS)}, found {', '.join(header)}: "
            f"{', '.join(missing)} missing"
        )
    at = [header.index(column) for column in COLUMNS]
    seconds, kinds, units = [], [], []
    before = 0.0
    for number, line in lines[1:]:
        cells = [cell.strip() for cell in next(csv.reader(io.StringIO(line)))]
        where = f"{name}, line {number}"
        if len(cells) != len(header):
            raise ConfigurationError(f"{where}: expected {len(header)} columns, found {len(cells)}")
        when, kind, node = (cells[column] for column in at)
        before = _parse_seconds(where, when, before)
        level, unit = _parse_unit(where, kind, node, cluster)
        seconds.append(before)
        kinds.append(level)
        units.append(unit)
    return Failures(np.array(seconds, np.float64), np.array(kinds, np.int64), np.array(units, np.int64))


def read_trace(path: Path, cluster: Cluster) -> Failures:
    """Failures in a file, as :func:`parse_trace` reads them."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"trace: expected a readable text file, found {path}: {error}") from error
    return parse_trace(text, cluster, str(path))


def _parse_seconds(where: str, text: str, before: float) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not math.isfinite(seconds) or seconds < 0:
        raise ConfigurationError(f"{where}: time_seconds: expected seconds of 0 or more, found {text!r}")
    if seconds < before:
        raise ConfigurationError(
            f"{where}: time_seconds: expected {before:g} or more, the time of the line before, found {text}; "
            "sort the file by time"
        )
    return seconds


def _parse_unit(where: str, kind: str, node: str, cluster: Cluster) -> tuple[int, int]:
    """The kind's index, and the number of the unit."""
    levels = {name: level for level, name in enumerate(KINDS)}
    if kind not in levels:
        raise ConfigurationError(f"{where}: kind: expected one of {', '.join(KINDS)}, found {kind!r}")
    level = levels[kind]
    size = cluster.size(level)
    if size is None:
        raise ConfigurationError(f"{where}: kind: expected a cluster whose {kind}s are known, found a failure of one")
    if level == CLUSTER:
        return level, 0
    if not (node.isascii() and node.isdigit() and int(node) < cluster.nodes):
        raise ConfigurationError(
            f"{where}: node: expected a number of 0 to {cluster.nodes - 1}, the nodes of the cluster, found {node!r}"
        )
    return level, int(node) // size
