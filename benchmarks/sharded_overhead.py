"""Cost of a protected step of sharded training (FSDP2): time, bytes copied and memory held by the node."""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import dataclass

from benchmarks.harness.command import Options, run
from benchmarks.harness.report import RATIO_COLUMNS, Report, millions
from benchmarks.harness.scratch import scratch_directory
from benchmarks.harness.turns import Block, Rounds, Scale, start_server, take_turns
from benchmarks.workloads.gpt import redo_config
from benchmarks.workloads.sharded import COPIED, MODES, RANKS, Counted, Ranks, Side
from memckpt.processes.address import AgentAddress
from memckpt.processes.control import ask_status

TITLE = "Sharded training (FSDP2): wall time of a step with every step protected, over a step without"
METHOD = """\
A GPT with `fully_shard` on each block and on the whole, AdamW (fused), two ranks on one node (gloo, CPU), each a
process with one compute thread. All trainings run at once and take turns in blocks of a few steps: while one has its
turn, the others are blocked in a read. The order changes from round to round, and the first step of a block is not
timed. Each rank times its own steps, and the slower one counts. A step has 512 tokens over both ranks, of the small
model of a quick run 256.

The ratio is the median over rounds of a training's time over that of the first one with nothing, the spread half the
distance between the quartiles; the null pair is the second one with nothing over the first. What it differs from 1 is
noise, and so is as much of everything else. *stall* is what memckpt counts in the training thread of the slower rank.
What a block has left in the background is waited for after it, untimed: an eager agent's redo, and the last save of
`dcp.async_save`. That one saves `get_state_dict` of model and optimizer after each step, to a disk, without a sync, in
turn over the older of two checkpoints; a save begins when the last one has ended, as it must. It has a process group of
its own, since it communicates beside the training, and keeps its stager, so that the memory for its copies is allocated
once."""
BYTES_TITLE = "Sharded training (FSDP2): bytes that each rank copies at each step"
BYTES_METHOD = """\
The trainings of `sharded_overhead`. Bytes are counted in each rank, over a whole anchor period in steps that are not
timed, by wrapping what copies: memckpt's copier into the slots, by the area of the slot that it writes to, its rank
state (of RNGs and groups, sent to the agent), and what the stager of `dcp.async_save` copies. *formula* is 4 + 12/T
bytes for each parameter of the shard: a gradient, and 1/T of parameter and two moments."""
MEMORY_TITLE = "Sharded training (FSDP2): memory that the node's agent holds"
MEMORY_METHOD = """\
The trainings of `sharded_overhead`. The agent's memory is what it says of itself: all regions that it holds. *design*
is (T + D)(4 + 12/T) bytes a parameter with lazy redo, 12 + D(4 + 12/T) with eager, with D slots; held once for each
shard, and not for each rank the whole model."""

#: Steps until every slot has been written once, so that its pages are mapped: T + 4.
_WARM_UP: dict[Side, int] = {"lazy": 12, "eager": 12, "nothing": 3, "async_save": 3}
_NAMES: dict[Side, str] = {
    "lazy": f"memckpt, {MODES['lazy']}",
    "eager": f"memckpt, {MODES['eager']}",
    "nothing": "nothing (null pair)",
    "async_save": "dcp.async_save",
}


FULL = Scale("30M", rounds=6, steps=3)
QUICK = Scale("demo", rounds=2, steps=2)


@dataclass(frozen=True)
class Design:
    """Bytes per parameter of a shard, by the design's formulas."""

    period: int
    copied: float
    held: float

    @classmethod
    def of(cls, side: Side) -> Design:
        config = redo_config(MODES[side])
        period = config.anchor_period("eager" if side == "eager" else "lazy")
        record = 4 + 12 / period
        held = (
            12 + config.records_in_flight * record if side == "eager" else (period + config.records_in_flight) * record
        )
        return cls(period, record, held)


@dataclass(frozen=True)
class Measured:
    """Results of trainings that took turns; each list is in the order of `sides`.

    Attributes:
        sides: the first is the unprotected one, the reference.
        rounds: the blocks of each round.
        counted: bytes that each rank has copied.
        held: bytes that the agent holds; None: no agent.
    """

    sides: tuple[Side, ...]
    rounds: Rounds[Block]
    counted: list[list[Counted]]
    held: list[int | None]

    @property
    def numel(self) -> int:
        """Number of elements of all parameters, over all shards."""
        return sum(each.numel for each in self.counted[0])


def measure(scale: Scale, sides: tuple[Side, ...]) -> Measured:
    """Run trainings in turns; then each counts the bytes it copies.

    Raises:
        MemoryError: this machine has too little memory for all of them.
    """
    with ExitStack() as stack:
        trainings = []
        for side in sides:
            training = Ranks(scale.size, side, stack.enter_context(scratch_directory()))
            stack.callback(training.close)
            trainings.append(training)
        for side, training in zip(sides, trainings, strict=True):
            training.wait_ready()
            training.take(_WARM_UP[side] - 1)
        rounds = take_turns([training.take for training in trainings], scale.rounds, scale.steps)
        periods = [Design.of(side).period if side in MODES else 1 for side in sides]
        counted = [training.count(period) for training, period in zip(trainings, periods, strict=True)]
        return Measured(sides, rounds, counted, [held_bytes(training) for training in trainings])


def held_bytes(training: Ranks) -> int | None:
    """Bytes that the agent of a training holds."""
    if training.agent is None:
        return None
    status = ask_status(AgentAddress.of(training.directory))
    if status is None:
        raise RuntimeError(f"expected an agent, pid {training.agent}, found none that answers; see its log")
    return status.held_bytes


# The tables


def add_ratios(report: Report, scale: Scale, found: Measured) -> None:
    training = f"{millions(found.numel)} parameters, sharded over {RANKS} ranks"
    for index, side in enumerate(found.sides[1:], 1):
        stall_ms = found.rounds.stall_ms(index) if side in MODES else None
        report.add_ratio(training, _NAMES[side], found.rounds.pairs(index, 0), scale.steps, stall_ms)


def _megabytes(nbytes: float | None) -> str:
    return "-" if nbytes is None else f"{nbytes / 1e6:.2f}"


def add_bytes(report: Report, found: Measured) -> None:
    """Bytes that each rank copies at a step, and sizes of its shards."""
    for side, ranks in zip(found.sides, found.counted, strict=True):
        if side == "nothing":
            continue
        for rank, counted in enumerate(ranks):
            formula = Design.of(side).copied * counted.numel if side in MODES else None
            report.add(
                _NAMES[side], str(rank),
                *(_megabytes(counted.copied.get(part)) for part in (*COPIED, "state")),
                *map(_megabytes, (counted.total, formula, counted.parameters, counted.optimizer_state)),
                f"{counted.total / counted.parameters:.3f}",
                arm=_NAMES[side], rank=rank, copied=counted.copied, copied_bytes=counted.total, formula_bytes=formula,
                shard_numel=counted.numel, shard_parameter_bytes=counted.parameters,
                shard_optimizer_bytes=counted.optimizer_state,
            )  # fmt: skip


def add_memory(report: Report, found: Measured) -> None:
    """Memory that the node's agent holds for both ranks."""
    for side, held in zip(found.sides, found.held, strict=True):
        if held is None:
            continue
        design = Design.of(side).held
        report.add(
            _NAMES[side], f"{held / 2**20:.1f}", f"{held / found.numel:.2f}", f"{design:.2f}", f"{design * RANKS:.2f}",
            arm=_NAMES[side], held_bytes=held, numel=found.numel, designed_bytes=design * found.numel,
        )  # fmt: skip


def main(options: Options) -> None:
    report = options.report(TITLE, METHOD, *RATIO_COLUMNS)
    copied = options.report(
        BYTES_TITLE, BYTES_METHOD, "every step protected by", "rank", *(f"{part}, MB" for part in COPIED), "state, MB",
        "sum, MB", "formula, MB", "shard's parameters, MB", "its optimizer state, MB", "sum / parameters", part="bytes",
    )  # fmt: skip
    held = options.report(
        MEMORY_TITLE, MEMORY_METHOD, "every step protected by", "MiB", "bytes/parameter", "design, each shard once",
        "design, the model on each rank", part="memory",
    )  # fmt: skip
    reports = (report, copied, held)
    scale = QUICK if options.quick else FULL
    for each in reports:
        each.run["compute threads"] = f"{RANKS} ranks of 1"
    sides: tuple[Side, ...] = ("nothing", "lazy", "eager", "nothing", "async_save")
    cores = len(os.sched_getaffinity(0))
    if cores <= RANKS:
        report.leave_out(_NAMES["eager"], f"the ranks take all {cores} cores, and redo needs one of its own")
        sides = tuple(side for side in sides if side != "eager")
    start_server("benchmarks.workloads.sharded")
    try:
        found = measure(scale, sides)
    except MemoryError as error:
        report.leave_out(f"everything at {scale.size}", str(error))
    else:
        add_ratios(report, scale, found)
        add_bytes(copied, found)
        add_memory(held, found)
    for each in reports:
        each.write()


if __name__ == "__main__":
    run("sharded_overhead", main)
