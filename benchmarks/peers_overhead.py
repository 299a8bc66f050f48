"""Cost of a protected step with peers, compared to one without peers and one without memckpt."""

from __future__ import annotations

import os
import statistics
from contextlib import ExitStack
from dataclasses import replace
from typing import Literal

from benchmarks.harness.command import Options, run
from benchmarks.harness.report import RATIO_COLUMNS, Report, millions
from benchmarks.harness.scratch import scratch_directory
from benchmarks.harness.turns import Rounds, Scale, start_server, take_turns
from benchmarks.workloads.gpt import redo_config
from benchmarks.workloads.peer_nodes import Nodes
from benchmarks.workloads.peer_ranks import NodesBlock, Task
from memckpt import ErasureConfig

NODES = 2
TITLE = "Training with peers: wall time of a step, and CPU time of replicators"
METHOD = f"""\
A GPT with `fully_shard` on each block and on the whole, AdamW (fused), on {NODES} nodes, which is the least that peers
can be: k=1, m=1, a copy of each record on the other node, T=8. Both nodes are on this machine: a rank of one compute
thread each (gloo), an agent, and with peers a replicator. All trainings run at once and take turns in blocks of steps:
while one has its turn, the others are blocked in a read. The order changes from round to round, and the first step of a
block is not timed. Each rank times its own steps, and the slower one counts.

The ratio is the median over rounds of a training's time over that of the first one with nothing, the spread half the
distance between the quartiles; the null pair is the second one with nothing over the first. What it differs from 1 is
noise, and so is as much of everything else. *stall* is what memckpt counts in the training thread of the slower rank,
waiting for peers included. *behind* is how long after a block's last step its records were acknowledged by all; the
next training has its turn only then. Pauses between blocks are single long steps to the governor, which goes by
medians. *replicators* is the CPU time of both nodes' replicators for a step's record: each encodes, encrypts, sends,
receives, decrypts, checks and keeps one shard's.

**Where the ranks leave no core free, as they do on two, replicators and agents take their CPU time from the training.**
The ratio is then that of a machine without a core to spare, and not what peers cost on nodes of their own. What carries
over is the CPU time of replicators."""

Side = Literal["nothing", "local", "peers", "plain"]
_NAMES: dict[Side, str] = {
    "nothing": "nothing (null pair)",
    "local": "memckpt, no peers",
    "peers": "memckpt, peers",
    "plain": "memckpt, peers, security='plain'",
}
_WITH_PEERS: tuple[Side, ...] = ("peers", "plain")
#: Steps until every slot has been written once, and the first window is with its peers.
_WARM_UP = 12


FULL = Scale("30M", rounds=8, steps=6)
QUICK = Scale("demo", rounds=2, steps=2)


def task_of(scale: Scale, side: Side, stack: ExitStack) -> Task:
    config = None if side == "nothing" else redo_config("lazy T=8")
    if config is not None and side in _WITH_PEERS:
        peers = ErasureConfig(data=1, tolerate=1, security="plain" if side == "plain" else "curve")
        config = replace(config, peers=peers)
    return Task("fsdp", scale.size, NODES, stack.enter_context(scratch_directory()), config)


def measure(report: Report, scale: Scale, sides: tuple[Side, ...]) -> None:
    """Trainings that take turns.

    Raises:
        MemoryError: this machine has too little memory for all of them.
    """
    with ExitStack() as stack:
        trainings = []
        for side in sides:
            nodes = Nodes(task_of(scale, side, stack))
            stack.callback(nodes.close)
            trainings.append(nodes)
        for nodes in trainings:
            nodes.wait_ready()
            nodes.take(_WARM_UP)
        rounds = take_turns([nodes.take for nodes in trainings], scale.rounds, scale.steps)
        add_ratios(report, scale, sides, trainings[0].numel, rounds)
        for side, nodes in zip(sides, trainings, strict=True):
            if side in _WITH_PEERS:
                pace = " and ".join(sorted({status.pace for status in nodes.peers_status(0)} - {""}))
                report.notes.append(f"Pace at the end, {_NAMES[side]}: {pace or 'nothing to say'}.")


def add_ratios(report: Report, scale: Scale, sides: tuple[Side, ...], numel: int, rounds: Rounds[NodesBlock]) -> None:
    training = f"{millions(numel)} parameters, sharded over {NODES} nodes"
    for index, side in enumerate(sides[1:], 1):
        peers = side in _WITH_PEERS
        behind = statistics.median(block.behind for block in rounds.of(index)) * 1e3
        replicators = statistics.mean(block.replicator_seconds for block in rounds.of(index))
        report.add_ratio(
            training, _NAMES[side], rounds.pairs(index, 0), scale.steps,
            None if side == "nothing" else rounds.stall_ms(index),
            f"{behind:.1f}" if peers else "-", f"{replicators * 1e3:.1f}" if peers else "-",
            f"{replicators / numel * 1e9:.1f}" if peers else "-",
            behind_ms=behind if peers else None, replicator_seconds=replicators if peers else None,
        )  # fmt: skip


def main(options: Options) -> None:
    columns = ("behind ms", "replicators, CPU ms a record", "ns a parameter")
    report = options.report(TITLE, METHOD, *RATIO_COLUMNS, *columns)
    scale = QUICK if options.quick else FULL
    report.run["compute threads"] = f"{NODES} ranks of 1"
    spare = len(os.sched_getaffinity(0)) - NODES
    report.notes.append(f"The ranks leave {max(spare, 0)} of the machine's cores for two replicators and two agents.")
    sides: tuple[Side, ...] = ("nothing", "local", "peers", "nothing")
    if not options.quick:
        sides = (*sides, "plain")
    start_server("benchmarks.workloads.peer_ranks")
    try:
        measure(report, scale, sides)
    except MemoryError as error:
        report.leave_out(f"everything at {scale.size}", str(error))
    report.write()


if __name__ == "__main__":
    run("peers_overhead", main)
