"""Stall of a protected step in the training thread by cause, compared to bare copies."""

from __future__ import annotations

from functools import partial

from benchmarks.harness.command import Options, run
from benchmarks.harness.copies import SharedCopy, best_of, copy_bandwidth
from benchmarks.harness.report import Report, millions
from benchmarks.harness.stall import PARTS, StallPerStep
from benchmarks.workloads.gpt import Trainee, protected, train
from memckpt.errors import MemoryBudgetError

TITLE = "What protection takes of the training thread at each step"
METHOD = """\
Seconds that memckpt itself counts in the training thread, over steps of 512 tokens with fused AdamW, after the
generation and the first records. *hooks* copies gradients as backward produces them and notes the optimizer's step,
*anchors* copies 1/T of the state, *commit* is the rank state and the message, *slot wait* is waiting for an eager
agent. *floor* is (4 + 12/T) bytes a parameter at the speed at which one thread copies from private into shared
memory, measured here; the bare copies move all gradients, or parameters and optimizer state, once, in a loop that
does nothing else."""

MODES = {"lazy T=8": 8, "lazy T=16": 16, "eager": 32}


def measure(size: str, mode: str, steps: int) -> tuple[StallPerStep, int]:
    """Stall of a protected training, and its number of parameters."""
    trainee = Trainee(size)
    with protected(trainee, mode) as session:
        stall = StallPerStep(session)
        # Until every slot has been written once, so that its pages are mapped.
        train(trainee, session, 4 if mode == "eager" else MODES[mode] + 4)
        with stall.collect(steps):
            train(trainee, session, steps)
    return stall, trainee.model.numel


def add_modes(report: Report, size: str, steps: int, bandwidth: float) -> None:
    for mode, period in MODES.items():
        try:
            stall, numel = measure(size, mode, steps)
        except MemoryBudgetError as error:
            report.leave_out(f"{mode} at {size}", str(error))
            continue
        floor = (4 + 12 / period) * numel / bandwidth * 1e3
        per_parameter = 1e6 / numel
        report.add(
            millions(numel),
            f"memckpt, {mode}",
            *(f"{stall.milliseconds(part):.2f}" for part in PARTS),
            f"{stall.total_ms:.2f}",
            f"{stall.total_ms * per_parameter:.3f}",
            f"{floor:.2f}",
            arm=mode, steps=steps, total_ms=stall.total_ms, floor_ms=floor, numel=numel,
            **{f"{part}_ms": stall.milliseconds(part) for part in PARTS},
        )  # fmt: skip


def add_copies(report: Report, size: str, bandwidth: float) -> None:
    """The bare copies, of gradients and of the whole state."""
    trainee = Trainee(size)
    trainee.step()
    trainee.model.loss(*trainee.batch).backward()
    gradients = [param.grad for param in trainee.model.parameters() if param.grad is not None]
    numel = trainee.model.numel
    for name, tensors, width in (("gradients", gradients, 4), ("state", trainee.tensors(), 12)):
        milliseconds = best_of(partial(SharedCopy(tensors).take, tensors), 5) * 1e3
        floor = width * numel / bandwidth * 1e3
        per_parameter = f"{milliseconds * 1e6 / numel:.3f}"
        report.add(
            millions(numel), f"bare copy of the {name}", "-", "-", "-", "-", f"{milliseconds:.2f}", per_parameter,
            f"{floor:.2f}",
            arm=f"copy of {name}", total_ms=milliseconds, floor_ms=floor, numel=numel,
        )  # fmt: skip


def main(options: Options) -> None:
    report = options.report(
        TITLE, METHOD, "parameters", "every step", *(f"{part.replace('_', ' ')}, ms" for part in PARTS), "sum, ms",
        "ns per parameter", "floor, ms",
    )  # fmt: skip
    bandwidth = copy_bandwidth()
    report.notes.append(f"One thread copies {bandwidth / 1e9:.2f} GB/s from private into shared memory.")
    for size, steps in (("demo", 8),) if options.quick else (("30M", 24), ("100M", 12)):
        add_modes(report, size, steps, bandwidth)
        add_copies(report, size, bandwidth)
    report.write()


if __name__ == "__main__":
    run("stall", main)
