"""Cost of a protected step in a plain loop, with Lightning, Accelerate and transformers.Trainer."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness.command import Options, run
from benchmarks.harness.report import Ratio, Report, Table, median_and_spread
from benchmarks.harness.scratch import scratch_directory
from benchmarks.harness.turns import Block, Worker, start_server, take_turns
from benchmarks.workloads.gate import Model, Side, Task

TITLE = "Wall time of a step with every step protected, over a step without, by framework"
METHOD = """\
The same model, data, AdamW (fused) and schedule in a plain loop, with Lightning, with Accelerate and with
transformers.Trainer, each with the adapter that belongs to it, lazy redo and T = 8. The frameworks own their loops, so
every training is a process of its own, which is let go for a block of steps and then stops in its data loader, blocked
in a read, while another one has its turn. A round has a block of each of three trainings, one with memckpt and two with
nothing; the order changes from round to round. A block is measured within the process, from one fetch of a batch to
another: whole steps, with all that framework and adapter do between them. Its first step is not timed. Lazy redo leaves
no work in the background that would have to be waited for.

The ratio is the median over rounds of a training's time over that of the first one with nothing, the spread half the
distance between the quartiles; the null pair is the second one with nothing over the first. What it differs from 1 is
noise, the places of two processes in memory included, and so is as much of everything else. The framework's own
checkpoint at every step (`ModelCheckpoint`, `save_state`, `save_steps=1`, each to a disk, without a sync, the newest
kept) takes turns with nothing afterwards, in fewer rounds. *stall* is what memckpt counts in the training thread, the
median over rounds. A batch has 512 tokens, of the small model of a quick run 256.

The last table has a model so small that a step is little else than calls, on one thread. *more* is the median over
rounds of the difference, *null* the same of the null pair, *stall* the part that memckpt's engine counts. *beyond the
plain loop* is what is more here than there: the adapter's work, above all the state of loops, loaders and logging,
which a plain loop does not have or keeps itself. Accelerate's plugin reads it within the engine's commit, so it is part
of *stall* there; the two others read it before."""

#: Sides of each framework, including its own checkpoint; a plain loop has none (step_overhead has `torch.save`).
FRAMEWORKS: dict[str, str | None] = {
    "plain loop": None,
    "Lightning": "ModelCheckpoint",
    "Accelerate": "save_state",
    "transformers.Trainer": "save_steps=1",
}
#: Steps until every slot has been written once, so that its pages are mapped: T + 4.
_WARM_UP = {"memckpt": 12, "nothing": 3, "own": 2}


@dataclass(frozen=True)
class Scale:
    """Numbers of rounds, and of steps in a block."""

    size: str
    rounds: int
    steps: int
    own_rounds: int
    own_steps: int
    minimal_rounds: int
    minimal_steps: int


FULL = Scale("30M", rounds=6, steps=3, own_rounds=2, own_steps=2, minimal_rounds=24, minimal_steps=50)
QUICK = Scale("demo", rounds=2, steps=3, own_rounds=1, own_steps=2, minimal_rounds=6, minimal_steps=20)


@dataclass(frozen=True)
class Measured:
    """The blocks of each round, in the order of the sides."""

    numel: int
    tensors: int
    rounds: list[list[Block]]

    def pairs(self, side: int, other: int) -> list[tuple[float, float]]:
        return [(blocks[side].seconds, blocks[other].seconds) for blocks in self.rounds]

    def stall(self, side: int) -> float:
        """Median seconds per step that memckpt takes in the training thread."""
        return statistics.median(sum(blocks[side].stall.values()) for blocks in self.rounds)


def _train(*arguments: Any) -> None:
    """Main function of a process, which has imported this already; the measuring process does not need it."""
    from benchmarks.workloads.frameworks import train

    train(*arguments)


class Training:
    """A training in a process of its own, which stops between blocks. Owns the process."""

    def __init__(self, task: Task, directory: Path) -> None:
        self._worker = Worker(f"{task.framework} with {task.side}", _train, task, directory)

    def wait_ready(self) -> Model:
        """Wait until it is ready for its first step; errors as for a worker."""
        model: Model = self._worker.receive()
        return model

    def take(self, steps: int) -> Block:
        """Run one untimed step and a block of timed ones; errors as for a worker."""
        self._worker.send(steps)
        block: Block = self._worker.receive()
        return block

    def close(self) -> None:
        """End it."""
        self._worker.close()


def measure(
    framework: str, size: str, sides: Sequence[Side], rounds: int, steps: int, threads: int | None = None
) -> Measured:
    """Trainings of one framework that take turns."""
    with ExitStack() as stack:
        trainings = []
        for side in sides:
            training = Training(Task(framework, size, side, threads), stack.enter_context(scratch_directory()))
            stack.callback(training.close)
            trainings.append(training)
        models = [each.wait_ready() for each in trainings]
        for side, each in zip(sides, trainings, strict=True):
            each.take(_WARM_UP[side] - 1)
        return Measured(models[0].numel, models[0].tensors, take_turns(trainings, rounds, steps))


def add_ratio(
    table: Table, framework: str, protection: str, pairs: list[tuple[float, float]], steps: int, stall: float | None
) -> None:
    ratio = Ratio.of(pairs)
    stall_ms = None if stall is None else stall * 1e3
    table.add(
        f"{framework}: {protection}", f"{ratio.ratio:.3f}", f"{ratio.spread:.3f}", f"{ratio.with_ms:.1f}",
        f"{ratio.without_ms:.1f}", f"{ratio.pairs} x {steps}", "-" if stall_ms is None else f"{stall_ms:.1f}",
        framework=framework, arm=protection, ratio=ratio.ratio, spread=ratio.spread, with_ms=ratio.with_ms,
        without_ms=ratio.without_ms, pairs=pairs, block=steps, stall_ms=stall_ms,
    )  # fmt: skip
    print(f"{framework}, {protection}: {ratio.ratio:.3f} +- {ratio.spread:.3f}", flush=True)


def add_ratios(report: Report, scale: Scale) -> None:
    """A table for a model with substantial compute."""
    columns = ("every step protected by", "ratio", "± spread", "ms with", "ms without", "pairs of blocks", "stall ms")
    table = report.table(scale.size, *columns)
    for framework, own in FRAMEWORKS.items():
        try:
            found = measure(framework, scale.size, ("memckpt", "nothing", "nothing"), scale.rounds, scale.steps)
            table.title = f"{found.numel / 1e6:.1f}M parameters"
            add_ratio(table, framework, "nothing (null pair)", found.pairs(2, 1), scale.steps, None)
            add_ratio(table, framework, "memckpt", found.pairs(0, 1), scale.steps, found.stall(0))
            if own is not None:
                beside = measure(framework, scale.size, ("own", "nothing"), scale.own_rounds, scale.own_steps)
                add_ratio(table, framework, own, beside.pairs(0, 1), scale.own_steps, None)
        except MemoryError as error:
            report.leave_out(f"{framework} at {scale.size}", str(error))


def microseconds_more(pairs: list[tuple[float, float]]) -> tuple[float, float]:
    """Median and spread of the differences."""
    return median_and_spread([(one - other) * 1e6 for one, other in pairs])


def add_differences(report: Report, scale: Scale) -> None:
    """A table for a minimal model."""
    columns = ("training with", "without", "more", "± spread", "null", "± spread", "stall", "beyond the plain loop")
    table = report.table("minimal", *columns)
    plain_loop = 0.0
    for framework in FRAMEWORKS:
        found = measure(
            framework,
            "minimal",
            ("memckpt", "nothing", "nothing"),
            scale.minimal_rounds,
            scale.minimal_steps,
            threads=1,  # leaves a core for the agent
        )
        table.title = f"{found.numel} parameters in {found.tensors} tensors, microseconds for each step"
        without = statistics.median(other for _, other in found.pairs(0, 1)) * 1e6
        (more, spread), (null, null_spread) = map(microseconds_more, (found.pairs(0, 1), found.pairs(2, 1)))
        stall = found.stall(0) * 1e6
        plain_loop = plain_loop or more
        table.add(
            framework, f"{without:.0f}", f"{more:.0f}", f"{spread:.0f}", f"{null:.0f}", f"{null_spread:.0f}",
            f"{stall:.0f}", "-" if framework == "plain loop" else f"{more - plain_loop:.0f}",
            framework=framework, without_us=without, more_us=more, spread_us=spread, null_us=null,
            null_spread_us=null_spread, stall_us=stall, rounds=scale.minimal_rounds, block=scale.minimal_steps,
        )  # fmt: skip
        print(f"{framework}, minimal: {more:.0f} us more, +- {spread:.0f}", flush=True)


def main(options: Options) -> None:
    report = Report("framework_overhead", TITLE, METHOD, options.command, options.quick)
    scale = QUICK if options.quick else FULL
    start_server("benchmarks.workloads.frameworks")
    add_ratios(report, scale)
    add_differences(report, scale)
    report.write(options.results)


if __name__ == "__main__":
    run("framework_overhead", main)
