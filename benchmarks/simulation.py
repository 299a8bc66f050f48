"""Time and memory of simulating the failures of large clusters."""

from __future__ import annotations

import time
import tracemalloc

import numpy as np

from benchmarks.harness.command import Options, run
from memckpt.planning.scheme import Scheme, Tier
from memckpt.planning.simulation import Cluster, FailureModel, Repair, Setup, Training, simulate

TITLE = "Simulating failures"
METHOD = """\
Each node fails as often as those of Llama 3's training (419 failures of 2,048 nodes in 54 days), a fifth of that by
software. Three schemes are replayed with the same failures: asynchronous checkpoints on disk; memory and disk; memory,
peers (6 + 2 nodes) and disk. *seconds*: all repetitions of all schemes in one process, draws included. *peak memory*:
what one repetition of all schemes allocates at most, traced in a run of its own."""

DAY = 86400
NODE_MTBF_SECONDS = 54 * DAY * 2048 / 419
DISK = Tier(name="disk", every_steps=100, lag_steps=10, restore_seconds=300, survives_cluster=True)
MEMORY = Tier(name="memory", every_steps=1, lag_steps=0, restore_seconds=60, rebuild_seconds=60)
PEERS = Tier(
    name="peers", every_steps=1, lag_steps=1, restore_seconds=90, group_nodes=8, tolerates=2, rebuild_seconds=60
)
SCHEMES = (
    Scheme(name="disk", overhead=0.01, tiers=(DISK,)),
    Scheme(name="memory, disk", overhead=0.02, tiers=(MEMORY, DISK)),
    Scheme(name="memory, peers, disk", overhead=0.03, tiers=(MEMORY, PEERS, DISK)),
)


def setup_of(nodes: int, shape: float, days: float) -> Setup:
    return Setup(
        cluster=Cluster(nodes=nodes, nodes_per_rack=min(nodes, 32)),
        failures=FailureModel.of_nodes(NODE_MTBF_SECONDS, software_share=0.2, shape=shape),
        training=Training(step_seconds=6.0, duration_seconds=days * DAY),
        repair=Repair(detection_seconds=60, replacement_seconds=120),
    )


def peak_bytes(setup: Setup) -> int:
    """What one repetition of all schemes allocates at most."""
    tracemalloc.start()
    try:
        simulate(setup, SCHEMES, repetitions=1)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def main(options: Options) -> None:
    sizes, repetitions, days = (
        ((1_000, 10_000), 2, 30) if options.quick else ((1_000, 10_000, 100_000, 400_000), 20, 90)
    )
    report = options.report(
        TITLE, METHOD, "times between failures", "nodes", "failures a repetition", "seconds", "µs a failure and scheme",
        "peak memory MB", "bytes a node",
    )  # fmt: skip
    report.notes.append(f"{days} days, {repetitions} repetitions, {len(SCHEMES)} schemes.")
    simulate(setup_of(10, 1.0, 1), SCHEMES, repetitions=1)  # what the first call imports
    for name, shape in (("exponential", 1.0), ("Weibull, shape 0.8", 0.8)):
        for nodes in sizes:
            setup = setup_of(nodes, shape, days)
            began = time.perf_counter()
            summaries = simulate(setup, SCHEMES, repetitions=repetitions)
            seconds = time.perf_counter() - began
            failures = float(np.mean([sum(one.failures) for one in summaries[0].outcomes]))
            each = seconds / (failures * repetitions * len(SCHEMES))
            memory = peak_bytes(setup)
            report.add(
                name, f"{nodes:,}", f"{failures:,.0f}", f"{seconds:.2f}", f"{each * 1e6:.1f}", f"{memory / 1e6:.1f}",
                f"{memory / nodes:.0f}",
                shape=shape, nodes=nodes, failures=failures, seconds=seconds, memory_bytes=memory,
                ettr=[summary.ettr.mean for summary in summaries],
            )  # fmt: skip
            print(f"{name}, {nodes:,} nodes: {seconds:.2f} s", flush=True)
    report.write()


if __name__ == "__main__":
    run("simulation", main)
