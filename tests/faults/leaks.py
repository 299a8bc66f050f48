"""Census of what a job holds: processes, descriptors, memory, and files beyond those that belong to it."""

from __future__ import annotations

import contextlib
import os
import re
from dataclasses import dataclass
from pathlib import Path

from memckpt.storage.local_store import LocalStore
from tests.faults.cluster import Cluster

#: An agent that got SIGTERM may take `storage.grace_seconds` (25) to save.
LEAVING_SECONDS = 45.0
#: Files that a run directory may hold after a run.
_EXPECTED = re.compile(r"run\.json|journal.*|agent-node\d+\.(log|json|journal|jsonl)|.*\.log(\.\d+)?|.*\.jsonl")


@dataclass(frozen=True)
class Holdings:
    """What the agents of a job and their helpers hold, in sum; of shared memory each region counts once."""

    processes: int
    descriptors: int
    sockets: int
    memory_bytes: int
    resident_bytes: int


def holdings(cluster: Cluster) -> Holdings:
    agents = [pid for node in cluster.nodes if (pid := cluster.agent_of(node)) is not None]
    helpers = [pid for node in cluster.nodes for pid in cluster.helpers_of(node, "memckpt.")]
    pids = [*agents, *helpers]
    found = [each for pid in pids for each in _descriptors(pid)]
    regions = {stat.st_ino: stat.st_blocks * 512 for target, stat in found if "memfd:memckpt" in target}
    return Holdings(
        processes=len(pids),
        descriptors=len(found),
        sockets=sum(target.startswith("socket:") for target, _ in found),
        memory_bytes=sum(regions.values()),
        resident_bytes=sum(_private(pid) for pid in pids),
    )


def own_descriptors() -> list[str]:
    """What this process has open."""
    return sorted(target for target, _ in _descriptors(os.getpid()))


def strange_files(cluster: Cluster, store: Path) -> list[str]:
    """Files that a finished run should not leave: half-written ones, sockets, locks."""
    store_files = LocalStore(store)
    partial = set(store_files.find("", unfinished=True)) - set(store_files.find(""))
    run_dir = cluster.lab.run_dir
    others = [path.name for path in run_dir.rglob("*") if path.is_file() and not _EXPECTED.fullmatch(path.name)]
    return sorted(partial) + sorted(others)


def _descriptors(pid: int) -> list[tuple[str, os.stat_result]]:
    """What a process has open, and what it is."""
    found = []
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                found.append((os.readlink(fd), fd.stat()))
    return found


def _private(pid: int) -> int:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Private_"))
    return 0
