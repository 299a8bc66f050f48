"""Cost of protecting every step on a GPU, and rate of a restore (``python -m benchmarks.gpu``)."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu import arms
from benchmarks.gpu.arms import Figures
from benchmarks.gpu.trainee import SIZES, Size
from benchmarks.harness.command import Options
from benchmarks.harness.report import Report

TITLE = "Every step protected on a GPU: overhead, bytes over PCIe, restore"
METHOD = """\
GPT-2's sizes with random weights, AdamW (fused), bf16 autocast, fp32 parameters. Each size in a process of its own,
each way of protecting one after the other; the median of three blocks of steps, each between two synchronizations.
*over nothing*: over the mean of unprotected steps, measured before and after; their difference is noise.
*stall*: what the training thread spends in memckpt, a step. *to the host*: bytes copied from the device, a step. *first
commit*: memory is reserved and page-locked, and the whole state is written. *restore*: for memckpt from attached to
restored, redo included, into a fresh model in the same process; lazily redone parameters are compared bit by bit. For
the page-locked copy it is that copy back. `dcp.async_save` writes to a disk after each step and waits for the last."""

Arm = Callable[[Size, torch.device], Figures]


def arms_of(size: Size, pattern: str = "") -> dict[str, Arm]:
    found: dict[str, Arm] = {"nothing": arms.nothing}
    found[f"memckpt, lazy T={size.period}"] = functools.partial(arms.protected, redo="lazy")
    if size.eager:
        found["memckpt, eager"] = functools.partial(arms.protected, redo="eager")
    found["nothing, again"] = arms.nothing
    found["page-locked copy of the state"] = arms.pinned_copy
    found["dcp.async_save"] = arms.async_save  # last, as it may take all the time that is left
    return {arm: run for arm, run in found.items() if re.search(pattern, arm)}


def measure(name: str, device: torch.device, result: Path, pattern: str = "") -> None:
    """Measure all arms of one size; the failure of an arm is reported and does not affect others."""
    size, found = SIZES[name], {}
    for arm, run in arms_of(size, pattern).items():
        try:
            found[arm] = dataclasses.asdict(run(size, device))
        except Exception as error:  # an arm that lost its protection, too: the others are still worth their time
            found[arm] = {"failed": f"{type(error).__name__}: {str(error)[:300]}"}
        print(f"{name}, {arm}: {json.dumps(found[arm])}", file=sys.stderr, flush=True)
        arms.free()
        result.write_text(json.dumps(found))


def add(report: Report, name: str, found: dict[str, dict[str, Any]]) -> None:
    whole = {arm: Figures(**values) for arm, values in found.items() if "failed" not in values}
    for arm in (arm for arm in found if arm not in whole):
        report.leave_out(f"{name}, {arm}", found[arm]["failed"])
    plain = [figures.median_ms for arm, figures in whole.items() if arm.startswith("nothing")]

    def text(value: float | None, scale: float = 1.0, digits: int = 2) -> str:
        return "" if value is None else f"{value * scale:.{digits}f}"

    for arm, figures in whole.items():
        ratio = figures.median_ms / (sum(plain) / len(plain)) if plain else None
        rate = figures.state_bytes / figures.restore_seconds if figures.restore_seconds else None
        cells = [text(figures.median_ms), text(ratio, digits=3), text(figures.stall_ms)]
        cells += [text(figures.to_host_bytes, 1e-6, 1), text(figures.first_commit_seconds)]
        cells += [text(figures.restore_seconds, digits=3), text(rate, 1e-9)]
        report.add(name, arm, *cells, model=name, arm=arm, **dataclasses.asdict(figures))
        if figures.held_bytes:
            report.notes.append(f"{name}, {arm}: {figures.held_bytes / 2**30:.1f} GiB of the host's memory.")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--quick", action="store_true", help="a tiny model only, not for quoting")
    parser.add_argument("--sizes", help="comma-separated, large too; default: small,medium,1.5B")
    parser.add_argument("--arms", default="", help="only arms in whose name this pattern is found")
    parser.add_argument("--results", type=Path)
    parser.add_argument(
        "--seconds", type=float, default=500.0, help="in all; sizes that it does not reach are left out"
    )
    parser.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        measure(args.measure[0], torch.device(args.device), Path(args.measure[1]), args.arms)
        return
    sizes = (args.sizes or ("tiny" if args.quick else "small,medium,1.5B")).split(",")
    options = Options.of("gpu", args.quick, args.results, f" --device {args.device}")
    report = options.report(
        TITLE, METHOD, "model", "every step", "step, ms", "over nothing", "stall, ms", "to the host, MB",
        "first commit, s", "restore, s", "GB/s",
    )  # fmt: skip
    if args.device == "cuda":
        report.run["gpu"] = torch.cuda.get_device_name()
    ends = _Clock(args.seconds)
    with tempfile.TemporaryDirectory() as directory:
        for name in sizes:
            result = Path(directory) / "result.json"
            result.unlink(missing_ok=True)
            process = [sys.executable, "-m", "benchmarks.gpu", "--device", args.device, "--measure", name, str(result)]
            process += ["--arms", args.arms]
            environment = {**os.environ, "OMP_WAIT_POLICY": "passive"}
            try:
                subprocess.run(process, check=False, env=environment, timeout=ends.left())
            except subprocess.TimeoutExpired:
                report.leave_out(f"{name}, what is missing", f"{args.seconds:.0f} s were over")
            if result.exists():
                add(report, name, json.loads(result.read_text()))
    report.write()


class _Clock:
    """Remaining seconds; at least one."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    def left(self) -> float:
        return max(1.0, self._end - time.monotonic())


if __name__ == "__main__":
    main()
