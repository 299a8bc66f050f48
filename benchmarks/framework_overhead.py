"""Cost of a protected step in a plain loop, with Lightning, Accelerate and transformers.Trainer."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from benchmarks.harness.command import Options, run
from benchmarks.harness.report import RATIO_COLUMNS, Report, median_and_spread, millions
from benchmarks.harness.scratch import scratch_directory
from benchmarks.harness.turns import Block, Rounds, Scale, Worker, start_server, take_turns
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
median over rounds. A batch has 512 tokens, of the small model of a quick run 256."""
MINIMAL_TITLE = "Microseconds that protection adds to a step of a minimal model, by framework"
MINIMAL_METHOD = """\
Trainings that take turns as in `framework_overhead`, of a model so small that a step is little else than calls, on one
thread. *more* is the median over rounds of the difference, *null* the same of the null pair, *stall* the part that
memckpt's engine counts. *beyond the plain loop* is what is more here than there: the adapter's work, above all the
state of loops, loaders and logging, which a plain loop does not have or keeps itself. Accelerate's plugin reads it
within the engine's commit, so it is part of *stall* there; the two others read it before."""

#: Sides of each framework, including its own checkpoint; a plain loop has none (step_overhead has `torch.save`).
FRAMEWORKS: dict[str, str | None] = {
    "plain loop": None,
    "Lightning": "ModelCheckpoint",
    "Accelerate": "save_state",
    "transformers.Trainer": "save_steps=1",
}
#: Steps until every slot has been written once, so that its pages are mapped: T + 4.
_WARM_UP = {"memckpt": 12, "nothing": 3, "own": 2}


#: Trainings of a model with substantial compute, with the frameworks' own checkpoints, and of a minimal model.
FULL = (Scale("30M", rounds=6, steps=3), Scale("30M", rounds=2, steps=2), Scale("minimal", rounds=24, steps=50))
QUICK = (Scale("demo", rounds=2, steps=3), Scale("demo", rounds=1, steps=2), Scale("minimal", rounds=6, steps=20))


def _train(*arguments: Any) -> None:
    """Main function of a process, which has imported this already; the measuring process does not need it."""
    from benchmarks.workloads.frameworks import train

    train(*arguments)


def measure(
    framework: str, scale: Scale, sides: Sequence[Side], threads: int | None = None
) -> tuple[Model, Rounds[Block]]:
    """Trainings of one framework that take turns."""
    with ExitStack() as stack:
        workers = []
        for side in sides:
            task, directory = Task(framework, scale.size, side, threads), stack.enter_context(scratch_directory())
            workers.append(Worker(f"{framework} with {side}", _train, task, directory))
            stack.callback(workers[-1].close)
        model, *_ = [worker.receive() for worker in workers]
        for side, worker in zip(sides, workers, strict=True):
            worker.execute(_WARM_UP[side] - 1)
        return model, take_turns([worker.execute for worker in workers], scale.rounds, scale.steps)


def add_ratios(report: Report, scale: Scale, own_scale: Scale) -> None:
    """The rows of a model with substantial compute."""
    for framework, own in FRAMEWORKS.items():
        try:
            model, found = measure(framework, scale, ("memckpt", "nothing", "nothing"))
            training = f"{framework}, {millions(model.numel)} parameters"
            report.add_ratio(training, "nothing (null pair)", found.pairs(2, 1), scale.steps, framework=framework)
            pairs, stall_ms = found.pairs(0, 1), found.stall_ms(0)
            report.add_ratio(training, "memckpt", pairs, scale.steps, stall_ms, framework=framework)
            if own is not None:
                _, beside = measure(framework, own_scale, ("own", "nothing"))
                report.add_ratio(training, own, beside.pairs(0, 1), own_scale.steps, framework=framework)
        except MemoryError as error:
            report.leave_out(f"{framework} at {scale.size}", str(error))


def microseconds_more(pairs: list[tuple[float, float]]) -> tuple[float, float]:
    """Median and spread of the differences."""
    return median_and_spread([(one - other) * 1e6 for one, other in pairs])


def add_differences(report: Report, scale: Scale) -> None:
    """The rows of a minimal model."""
    plain_loop = 0.0
    for framework in FRAMEWORKS:
        # One thread leaves a core for the agent.
        model, found = measure(framework, scale, ("memckpt", "nothing", "nothing"), threads=1)
        without = statistics.median(other for _, other in found.pairs(0, 1)) * 1e6
        (more, spread), (null, null_spread) = map(microseconds_more, (found.pairs(0, 1), found.pairs(2, 1)))
        stall = found.stall_ms(0) * 1e3
        plain_loop = plain_loop or more
        report.add(
            framework, f"{without:.0f}", f"{more:.0f}", f"{spread:.0f}", f"{null:.0f}", f"{null_spread:.0f}",
            f"{stall:.0f}", "-" if framework == "plain loop" else f"{more - plain_loop:.0f}",
            framework=framework, without_us=without, more_us=more, spread_us=spread, null_us=null,
            null_spread_us=null_spread, stall_us=stall, rounds=scale.rounds, block=scale.steps,
        )  # fmt: skip
        print(f"{framework}, minimal: {more:.0f} us more, ± {spread:.0f}", flush=True)
    report.notes.append(f"{model.numel} parameters in {model.tensors} tensors; microseconds for each step.")


def main(options: Options) -> None:
    report = options.report(TITLE, METHOD, *RATIO_COLUMNS)
    scale, own_scale, minimal_scale = QUICK if options.quick else FULL
    start_server("benchmarks.workloads.frameworks")
    add_ratios(report, scale, own_scale)
    report.write()
    minimal = options.report(
        MINIMAL_TITLE, MINIMAL_METHOD, "training with", "without", "more", "± spread", "null", "± spread", "stall",
        "beyond the plain loop", part="minimal",
    )  # fmt: skip
    add_differences(minimal, minimal_scale)
    minimal.write()


if __name__ == "__main__":
    run("framework_overhead", main)
