"""Time and memory of placing a job's records on its nodes, up to 100,000 nodes."""

from __future__ import annotations

import time
import tracemalloc

from benchmarks.harness.command import Options, run
from memckpt.config import DomainLevel
from memckpt.replication.coding.placement import place
from memckpt.replication.coding.topology import Domain, choose_level

TITLE = "Placement: who keeps whose fragments"
METHOD = """\
What each node computes at the start of an attempt: the level of failure domains (`choose_level`), groups, rings and
holders (`place`), of nodes in racks of 16 and zones of 64 racks, in an order in which racks are mixed. One thread, the
best of the repetitions; the microseconds for each node stay the same where the time is linear. Memory: the most that
Python has allocated, in a run of its own."""

#: (k, m), level, whether zones and racks are known.
CASES: tuple[tuple[int, int, DomainLevel, bool], ...] = (
    (4, 2, "auto", True), (8, 2, "rack", True), (4, 2, "auto", False), (1, 1, "auto", True),
)  # fmt: skip
_RACK_NODES, _ZONE_RACKS = 16, 64


def domains_of(nodes: int, known: bool) -> list[Domain]:
    """Rack of each node; neighbours in the order of nodes are in different racks."""
    racks = -(-nodes // _RACK_NODES)
    return [
        Domain(f"zone-{node % racks // _ZONE_RACKS}", f"rack-{node % racks}", f"node-{node}")
        if known
        else Domain("", "", f"node-{node}")
        for node in range(nodes)
    ]


def place_job(domains: list[Domain], data: int, tolerate: int, level: DomainLevel) -> int:
    """Place a job as its nodes do; returns the number of groups."""
    chosen = choose_level(domains, level, data + tolerate)
    return len(place(chosen.paths, data, tolerate, level=chosen.name).groups)


def main(options: Options) -> None:
    report = options.report(TITLE, METHOD, "k, m", "level", "domains", "nodes", "s", "us a node", "MiB")
    repetitions = 1 if options.quick else 3
    for data, tolerate, level, known in CASES:
        for nodes in (100, 1_000) if options.quick else (1_000, 10_000, 100_000):
            domains = domains_of(nodes, known)
            seconds = []
            for _ in range(repetitions):
                started = time.perf_counter()
                groups = place_job(domains, data, tolerate, level)
                seconds.append(time.perf_counter() - started)
            tracemalloc.start()
            place_job(domains, data, tolerate, level)
            most = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            report.add(
                f"{data}, {tolerate}", level, "racks, zones" if known else "nodes", f"{nodes:,}", f"{min(seconds):.3f}",
                f"{min(seconds) / nodes * 1e6:.1f}", f"{most / 2**20:.1f}",
                data=data, tolerate=tolerate, level=level, known=known, nodes=nodes, groups=groups, seconds=seconds,
                bytes=most,
            )  # fmt: skip
    report.write()


if __name__ == "__main__":
    run("placement", main)
