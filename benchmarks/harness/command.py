"""The command line shared by all benchmarks."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness.report import RESULTS, Report


@dataclass(frozen=True)
class Options:
    """Options of a benchmark.

    Attributes:
        name: name of the benchmark.
        quick: a small model and few repetitions.
        results: directory of the result files; quick runs do not overwrite the real ones.
        arguments: further arguments that repeat the run.
    """

    name: str
    quick: bool
    results: Path
    arguments: str = ""

    @classmethod
    def of(cls, name: str, quick: bool, results: Path | None, arguments: str = "") -> Options:
        return cls(name, quick, results or (RESULTS / "quick" if quick else RESULTS), arguments)

    def report(self, title: str, method: str, *columns: str, part: str = "") -> Report:
        """A table of results; `part`: which one, of a benchmark with several."""
        command = f"OMP_WAIT_POLICY=passive python -m benchmarks.{self.name}{self.arguments}"
        name = f"{self.name}_{part}" if part else self.name
        return Report(
            name, self.results, title, method, command + (" --quick" if self.quick else ""), self.quick, columns
        )


def parse(name: str) -> Options:
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}")
    parser.add_argument("--quick", action="store_true", help="a small model and few repetitions, not for quoting")
    parser.add_argument("--results", type=Path, help="directory for the results (default: beside the benchmarks)")
    args = parser.parse_args()
    return Options.of(name, args.quick, args.results)


def run(name: str, main: Callable[[Options], None]) -> None:
    """Run one benchmark with the options of the command line."""
    if os.environ.get("OMP_WAIT_POLICY", "").lower() != "passive":
        # OpenMP has read its settings at the import of torch, so restart the process with them. Spinning threads would
        # take cores from the agent and from background work.
        os.environ["OMP_WAIT_POLICY"] = "passive"
        os.execv(sys.executable, [sys.executable, "-m", f"benchmarks.{name}", *sys.argv[1:]])
    logging.basicConfig(level=logging.WARNING)
    main(parse(name))
