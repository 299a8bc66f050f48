"""Failures from a file: what has happened to a cluster, or an example made by hand."""

from __future__ import annotations

import csv
import io
import math
from pathlib import Path

import numpy as np

from memckpt.errors import ConfigurationError
from memckpt_tools.simulation.failures import CLUSTER, KINDS, Cluster, Failures

COLUMNS = ("time_seconds", "kind", "node")


def parse_trace(text: str, cluster: Cluster, name: str = "trace") -> Failures:
    """Failures in comma-separated values.

    The first line names the columns ``time_seconds``, ``kind`` and ``node``, in any order; others are left alone. Empty
    lines are left out, and lines that begin with ``#``.

    Args:
        text: the file. `time_seconds` counts from the start of training and never falls. `kind` is process, node,
            rack, zone or cluster. `node` is a node's number from 0; any node of the rack or zone that fails, and
            nothing is needed for the cluster.
        cluster: the cluster that they happen to.
        name: name of the file, for messages.

    Raises:
        ConfigurationError: it is malformed; the line, the column, what was expected and found are named.
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
    """Failures in a file; see :func:`parse_trace`.

    Raises:
        ConfigurationError: it cannot be read, or is malformed.
    """
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
