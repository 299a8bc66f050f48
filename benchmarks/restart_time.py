"""Time from the SIGKILL of a training under ``memckpt run`` to its first new step, cold and warm."""

from __future__ import annotations

import itertools
import os
import statistics
import time

from benchmarks.harness.command import Options, run
from benchmarks.harness.report import Report
from benchmarks.harness.scratch import scratch_directory
from benchmarks.workloads.supervised import Supervised
from benchmarks.workloads.trainee_process import trainee_process

TITLE = "From SIGKILL to the first new step, under `memckpt run`"
METHOD = """\
A training under `memckpt run` is killed after some steps; everything else `memckpt run` does by itself. Medians of
several kills, in seconds. *script*: from the signal until the script runs, behind its imports and the first torch
optimizer, which imports torch's compiler. *built*: model and optimizer. *restored*: attached, copied and redone. *to
training* is the sum of these: the first new step begins. *first step* is that step, and *to its end* the sum of all. *a
step* is the median of the steps before the kill. Warm kills come when the warm process has said that it is ready.

The last row is the same script started by hand, with no protection and nothing to restore, from its start: its *built*
and *first step* are the training's own share of any restart. A first step is slower than later ones, since the kernel
gives it its memory page by page."""

#: Stages, with the event that ends each.
STAGES = {"script": "first optimizer", "built": "built", "restored": "restored", "first step": "step"}


def restarts(size: str, mode: str, kills: int, cold: bool) -> tuple[list[dict[str, float]], float]:
    """Seconds of each stage at each kill; and the median of a step's."""
    found, steps = [], []
    with scratch_directory() as directory:
        arguments = ("--size", size, "--protect", mode, "--run-dir", str(directory), "--steps", "100000")
        with Supervised(arguments, cold) as training:
            training.wait_for("step", 12)
            if not cold:
                training.wait_until_warm()
            for _ in range(kills):
                training.skip()
                ends = [float(training.wait_for("step")["at"]) for _ in range(6)]
                steps += [after - before for before, after in itertools.pairwise(ends)]
                at = time.monotonic()
                training.kill()
                stages = {}
                for name, event in STAGES.items():
                    end = float(training.wait_for_next_start(event)["at"])
                    stages[name], at = end - at, end
                found.append(stages)
    return found, statistics.median(steps)


def add_row(report: Report, size: str, mode: str, cold: bool, kills: int) -> None:
    found, step = restarts(size, mode, kills, cold)
    medians = {name: statistics.median(each[name] for each in found) for name in STAGES}
    totals = sorted(sum(each.values()) for each in found)
    total = statistics.median(totals)
    start = "cold" if cold else "warm"
    to_training = statistics.median(sum(each.values()) - each["first step"] for each in found)
    report.add(
        size, mode, start, *_cells(medians, to_training, total),
        f"{totals[0]:.2f} to {totals[-1]:.2f}", f"{step:.2f}",
        size=size, mode=mode, start=start, kills=kills, to_training=to_training, total=total, step=step, **medians,
    )  # fmt: skip


def _cells(stages: dict[str, float], to_training: float, total: float) -> list[str]:
    *before, first_step = stages.values()
    return [f"{value:.2f}" for value in (*before, to_training, first_step, total)]


def add_fresh_row(report: Report, size: str, starts: int) -> None:
    """The script's own share."""
    found = []
    for _ in range(starts):
        with trainee_process("--size", size, "--steps", "6") as process:
            process.wait_for("waiting")
            at, stages = process.started_at, {}
            for name, event in STAGES.items():
                stages[name], at = process.moments[event] - at, process.moments[event]
            found.append(stages)
    medians = {name: statistics.median(each[name] for each in found) for name in STAGES}
    to_training = statistics.median(sum(each.values()) - each["first step"] for each in found)
    totals = sorted(sum(each.values()) for each in found)
    total = statistics.median(totals)
    report.add(
        size, "unprotected", "by hand", *_cells(medians, to_training, total),
        f"{totals[0]:.2f} to {totals[-1]:.2f}", "",
        size=size, mode="unprotected", start="by hand", kills=0, to_training=to_training, total=total, **medians,
    )  # fmt: skip


def main(options: Options) -> None:
    report = options.report(
        TITLE, METHOD, "size", "redo", "start", "script, s", "built", "restored", "to training", "first step",
        "to its end", "least to most", "a step",
    )  # fmt: skip
    os.environ["MEMCKPT_STORAGE"] = "none"
    for size in ("demo",) if options.quick else ("30M",):
        kills = 1 if options.quick else 3
        for mode in ("eager",) if options.quick else ("eager", "lazy T=8"):
            for cold in (True, False):
                add_row(report, size, mode, cold, kills)
        add_fresh_row(report, size, kills)
    report.write()


if __name__ == "__main__":
    run("restart_time", main)
