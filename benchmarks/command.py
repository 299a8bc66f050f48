"""The command line that all benchmarks share."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.report import RESULTS


@dataclass(frozen=True)
class Options:
    """How to run a benchmark.

    Attributes:
        quick: a small model and few repetitions.
        results: where the files go; quick runs do not overwrite the real ones.
        command: to repeat it.
    """

    quick: bool
    results: Path
    command: str


def parse(name: str) -> Options:
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}")
    parser.add_argument("--quick", action="store_true", help="a small model and few repetitions, not for quoting")
    parser.add_argument("--results", type=Path, help="directory for the results (default: beside the benchmarks)")
    args = parser.parse_args()
    results = args.results or (RESULTS / "quick" if args.quick else RESULTS)
    command = f"OMP_WAIT_POLICY=passive python -m benchmarks.{name}" + (" --quick" if args.quick else "")
    return Options(args.quick, results, command)


def run(name: str, main: Callable[[Options], None]) -> None:
    """Run one benchmark with the options of the command line."""
    if os.environ.get("OMP_WAIT_POLICY", "").lower() != "passive":
        # Read when OpenMP starts, which was at the import of torch: begin again with it. Spinning threads would take
        # the cores from the agent, and from everything that works in the background.
        os.environ["OMP_WAIT_POLICY"] = "passive"
        os.execv(sys.executable, [sys.executable, "-m", f"benchmarks.{name}", *sys.argv[1:]])
    logging.basicConfig(level=logging.WARNING)
    main(parse(name))
