"""Cost of a step now, and at an earlier commit, whose files are taken from git."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness.command import Options, run
from benchmarks.harness.report import Report, millions
from benchmarks.harness.scratch import scratch_directory

TITLE = "What evidence and audit cost a step"
#: The last commit whose records carry no evidence, and whose runs have no auditor.
BEFORE = "0f8fe7e"
METHOD = f"""\
A training of `benchmarks.stall`, whose steps are protected and not stored, in a process of its own: in turns this tree
and the tree of commit {BEFORE}, the last one without evidence and audit, with the same Python and libraries.
*stall* is what memckpt itself counts in the training thread, *commit* the part of it in which the rank state is made
and sent; *step* is the time from one step to the next. Figures are medians over the processes; the ratio is the median
over the pairs, the spread half the distance between its quartiles. *null* is the ratio of two processes of this tree,
in the same turns: a ratio that differs from 1 by no more than this one is noise. A batch is counted in sequences."""
COLUMNS = (
    "parameters", "batch", "every step", "stall now, ms", "before", "ratio", "± spread", "commit now, ms", "before",
    "step now, ms", "before", "ratio", "± spread", "null", "± spread", "pairs",
)  # fmt: skip
#: Run in either tree: the names that it uses are the same in both.
_WORK = """
import json, sys, time
from benchmarks.harness.stall import StallPerStep
from benchmarks.workloads.gpt import Trainee, protected, train

size, mode, warm_up, steps, repeats = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:])
trainee = Trainee(size)
trainee.batch = tuple(part.repeat(repeats, 1) for part in trainee.batch)
with protected(trainee, mode) as session:
    stall = StallPerStep(session)
    train(trainee, session, warm_up)
    began = time.perf_counter()
    with stall.collect(steps):
        train(trainee, session, steps)
    step = (time.perf_counter() - began) / steps * 1e3
batch = len(trainee.batch[0])
print(json.dumps([stall.total_ms, stall.milliseconds("commit"), step, trainee.model.numel, batch]))
"""


@dataclass(frozen=True)
class Cost:
    """What one process has measured: milliseconds of each step, the numbers of parameters and of sequences."""

    stall: float
    commit: float
    step: float
    numel: int
    batch: int


@dataclass(frozen=True)
class Scale:
    """The size of the benchmark: model, measured steps of a process, pairs of processes, redo modes, batches."""

    size: str
    steps: int
    pairs: int
    modes: tuple[str, ...]
    repeats: tuple[int, ...]


FULL = Scale("demo", 100, 5, ("lazy T=8", "eager"), (1, 4))
QUICK = Scale("tiny", 10, 2, ("lazy T=8",), (1,))
#: Steps before the measured ones, in which each slot is written once.
_WARM_UP = 20


def measure(tree: Path, scale: Scale, mode: str, repeats: int) -> Cost:
    """Train with the code of a tree, in a process of its own; a longer batch takes fewer steps."""
    counts = map(str, (_WARM_UP, scale.steps // repeats, repeats))
    command = [sys.executable, "-c", _WORK, scale.size, mode, *counts]
    environment = os.environ | {"PYTHONPATH": str(tree)}
    done = subprocess.run(command, cwd=tree, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    return Cost(*json.loads(done.stdout.splitlines()[-1]))


def tree_before(directory: Path) -> Path:
    """The files of the earlier commit."""
    here = Path(__file__).resolve().parent.parent
    archive = subprocess.run(["git", "-C", here, "archive", BEFORE], check=True, stdout=subprocess.PIPE).stdout
    subprocess.run(["tar", "-x", "-C", directory], input=archive, check=True)
    return directory


def ratio(pairs: list[tuple[float, float]]) -> tuple[str, str]:
    """The median of the ratios, and half the distance between their quartiles."""
    ratios = [now / before for now, before in pairs]
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return f"{middle:.3f}", f"{(high - low) / 2:.3f}"


def add_row(report: Report, scale: Scale, mode: str, repeats: int, before: Path) -> None:
    now = Path(__file__).resolve().parent.parent
    turns: list[tuple[Cost, Cost, Cost]] = []
    for number in range(scale.pairs):
        # The tree before runs between the two of this tree; each of these is compared in every second turn.
        first, between = (measure(tree, scale, mode, repeats) for tree in (now, before))
        last = measure(now, scale, mode, repeats)
        turns.append((first, between, last) if number % 2 else (last, between, first))
        print(f"{mode}, turn {number + 1}: {turns[-1][0]} now, {between} before, {turns[-1][2]} now again", flush=True)

    def medians(name: str) -> list[str]:
        return [f"{statistics.median(getattr(turn[side], name) for turn in turns):.2f}" for side in (0, 1)]

    def ratios(name: str, side: int) -> tuple[str, str]:
        return ratio([(getattr(turn[0], name), getattr(turn[side], name)) for turn in turns])

    report.add(
        millions(turns[0][0].numel), str(turns[0][0].batch), f"memckpt, {mode}", *medians("stall"),
        *ratios("stall", 1), *medians("commit"), *medians("step"), *ratios("step", 1), *ratios("step", 2),
        str(scale.pairs),
        mode=mode, pairs=[[vars(one) for one in turn] for turn in turns],
    )  # fmt: skip


def main(options: Options) -> None:
    report = options.report(TITLE, METHOD, *COLUMNS)
    scale = QUICK if options.quick else FULL
    with scratch_directory() as directory:
        before = tree_before(directory)
        for repeats in scale.repeats:
            for mode in scale.modes:
                add_row(report, scale, mode, repeats, before)
    report.write()


if __name__ == "__main__":
    run("since", main)
