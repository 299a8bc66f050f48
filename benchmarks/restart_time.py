"""Time from the SIGKILL of a training under ``memckpt run`` to the end of its first new step, cold and warm."""

from __future__ import annotations

import itertools
import os
import statistics
import time

from benchmarks.harness.command import Options, run
from benchmarks.harness.report import Report
from benchmarks.harness.scratch import scratch_directory
from benchmarks.workloads.supervised import Supervised

TITLE = "From SIGKILL to the end of the first new step, under `memckpt run`"
METHOD = """\
A training under `memckpt run` is killed after some steps; everything else `memckpt run` does by itself. Medians of
several kills, in seconds. *script*: from the signal until the script runs, behind its imports and the first torch
optimizer, which imports torch's compiler. *built*: model and optimizer. *restored*: attached, copied and redone. *a
step* is the median of the steps before the kill, for comparison with the first one. Warm kills come when the warm
process has said that it is ready."""

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
    cells = [f"{value:.2f}" for value in (*medians.values(), total)]
    report.add(
        size, mode, start, *cells, f"{totals[0]:.2f} to {totals[-1]:.2f}", f"{step:.2f}",
        size=size, mode=mode, start=start, kills=kills, total=total, step=step, **medians,
    )  # fmt: skip


def main(options: Options) -> None:
    report = options.report(
        TITLE, METHOD, "size", "redo", "restart", "script, s", "built", "restored", "first step",
        "kill to first new step", "least to most", "a step",
    )  # fmt: skip
    os.environ["MEMCKPT_STORAGE"] = "none"
    for size in ("demo",) if options.quick else ("30M",):
        for mode in ("eager",) if options.quick else ("lazy T=8",):
            for cold in (True, False):
                add_row(report, size, mode, cold, 1 if options.quick else 3)
    report.write()


if __name__ == "__main__":
    run("restart_time", main)
