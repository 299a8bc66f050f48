"""Times of redo and of restores, from rates of this machine or of a job's description. Seconds throughout."""

from __future__ import annotations

from memckpt_tools.planning.checks import require_number
from memckpt_tools.planning.footprint import Held


def redo_seconds(records: float, parameters: float, parameters_per_second: float) -> float:
    """Time to apply records to parameters.

    Source: docs/compression.md, "Anchors"; measured on one machine.

    Args:
        records: number of records, of each parameter.
        parameters: number of parameters.
        parameters_per_second: parameters that are advanced by one record in a second.
    """
    require_number("records", records, 0, 1e9)
    require_number("parameters", parameters, 0, 1e16)
    require_number("parameters_per_second", parameters_per_second, 0, 1e15, "parameters per second", above=True)
    return records * parameters / parameters_per_second


def window_redo_seconds(held: Held, parameters_per_second: float) -> float:
    """Time to redo a window.

    Anchors in a record are the state before its step, and each of the last T records anchors its share of a node: so
    (T + 1)/2 records are redone for a parameter on average. Source: docs/design.md, "The idea".
    """
    return redo_seconds((held.period + 1) / 2, held.parameters, parameters_per_second)


def from_window_seconds(held: Held, copy_bytes_per_second: float, parameters_per_second: float) -> float:
    """Time to restore from a window in this node's memory (lazy): copy its anchors, then redo.

    Source: docs/design.md, "A resume".
    """
    return held.whole_bytes / _rate(copy_bytes_per_second) + window_redo_seconds(held, parameters_per_second)


def from_replica_seconds(held: Held, copy_bytes_per_second: float) -> float:
    """Time to restore from a replica in this node's memory (eager): a copy of the state."""
    return held.whole_bytes / _rate(copy_bytes_per_second)


def from_peers_seconds(
    held: Held, peer_bytes_per_second: float, copy_bytes_per_second: float, parameters_per_second: float
) -> float:
    """Time to restore a lost node from peers: it fetches and decodes one window, then restores from it.

    Source: docs/design.md, "Peers": from there on a restore is the same as from local memory.
    """
    fetched = held.window_bytes / _rate(peer_bytes_per_second)
    return fetched + from_window_seconds(held, copy_bytes_per_second, parameters_per_second)


def from_other_replica_seconds(held: Held, peer_bytes_per_second: float, copy_bytes_per_second: float) -> float:
    """Time to restore a lost node from another replica: it fetches the state."""
    return held.whole_bytes / _rate(peer_bytes_per_second) + from_replica_seconds(held, copy_bytes_per_second)


def from_storage_seconds(state_bytes: float, disk_bytes_per_second: float, readers: int = 1) -> float:
    """Time to read a checkpoint.

    Args:
        state_bytes: its bytes.
        disk_bytes_per_second: of all readers together.
        readers: how often each byte is read (once by each node that holds a replica).
    """
    require_number("state_bytes", state_bytes, 0, 1e18, "bytes")
    return readers * state_bytes / _rate(disk_bytes_per_second)


def _rate(bytes_per_second: float) -> float:
    require_number("bytes_per_second", bytes_per_second, 0, 1e16, "bytes per second", above=True)
    return bytes_per_second
