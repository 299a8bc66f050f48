"""Results: a table with the machine, the versions and the command that made it, as Markdown and as JSON."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

_ROOT = Path(__file__).resolve().parents[2]
RESULTS = _ROOT / "benchmarks/results"
#: Columns that `Report.add_ratio` fills.
RATIO_COLUMNS = (
    "training", "every step protected by", "ratio", "± spread", "ms with", "ms without", "pairs of blocks", "stall ms",
)  # fmt: skip


def describe_machine() -> str:
    """Properties of the machine that matter for comparing figures; nothing that identifies it."""
    model = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.split(":", 1)[1].strip()
            break
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    return f"{model}, {len(os.sched_getaffinity(0))} cores, {memory:.1f} GiB"


def describe_commit() -> str:
    """The checked out commit, and whether files differ from it; results themselves do not count."""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=_ROOT, capture_output=True, text=True, check=True).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!benchmarks/results")
        return git("rev-parse", "--short", "HEAD") + (", with changes" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown: not a checkout"


def describe_run() -> dict[str, str]:
    """Date, commit, versions and machine of a run."""
    return {
        "date": datetime.now(timezone.utc).date().isoformat(),
        "commit": describe_commit(),
        "versions": f"Python {platform.python_version()}, torch {torch.__version__}",
        "machine": describe_machine(),
        "compute threads": str(torch.get_num_threads()),
        "load average": f"{os.getloadavg()[0]:.2f} at the start",
    }


@dataclass
class Report:
    """One table of results.

    Attributes:
        name: name of the files written.
        directory: where they are written.
        title: the question that the table answers.
        method: description of the method.
        command: command that reproduces the table.
        quick: whether it was a quick run, whose figures are not for quoting.
        columns: headings.
        rows: formatted cells.
        figures: the raw figures of each row.
        notes: remarks below the table.
        run: what the figures depend on besides the command.
    """

    name: str
    directory: Path
    title: str
    method: str
    command: str
    quick: bool
    columns: Sequence[str]
    rows: list[Sequence[str]] = field(default_factory=list)
    figures: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    run: dict[str, str] = field(default_factory=describe_run)

    def add(self, *cells: str, **figures: Any) -> None:
        """Add a row."""
        assert len(cells) == len(self.columns), cells
        self.rows.append(cells)
        self.figures.append(figures)

    def add_ratio(
        self,
        training: str,
        protection: str,
        pairs: Sequence[tuple[float, float]],
        block: int,
        stall_ms: float | None = None,
        *more: str,
        **figures: Any,
    ) -> None:
        """Add a row of paired measurements, in seconds per step with and without protection, of blocks of steps."""
        ratio = Ratio.of(pairs)
        self.add(
            training, protection, f"{ratio.ratio:.3f}", f"{ratio.spread:.3f}", f"{ratio.with_ms:.1f}",
            f"{ratio.without_ms:.1f}", f"{ratio.pairs} x {block}", "-" if stall_ms is None else f"{stall_ms:.1f}",
            *more,
            training=training, arm=protection, pairs=pairs, block=block, stall_ms=stall_ms, **figures,
        )  # fmt: skip
        print(f"{training}, {protection}: {ratio.ratio:.3f} ± {ratio.spread:.3f}", flush=True)

    def leave_out(self, what: str, reason: str) -> None:
        """Note why a figure is missing."""
        self.notes.append(f"Left out: {what}: {reason}")

    def markdown(self) -> str:
        def line(cells: Sequence[str]) -> str:
            return "| " + " | ".join(cells) + " |"

        def items(texts: Sequence[str]) -> str:
            return "\n".join(f"- {text}" for text in texts)

        rule = ["---:" if self._numeric(column) else "---" for column in range(len(self.columns))]
        parts = [
            f"# {self.title}",
            "\n".join(map(line, [self.columns, rule, *self.rows])),
            items(self.notes),
            f"Made by `{self.command}`:",
            items([f"{key}: {value}" for key, value in self.run.items()]),
            self.method,
        ]
        if self.quick:
            parts.insert(1, "**Quick run: a small model and few repetitions, not for quoting.**")
        return "\n\n".join(part for part in parts if part) + "\n"

    def _numeric(self, column: int) -> bool:
        return all(row[column][:1] in "+-0123456789" for row in self.rows)

    def write(self) -> None:
        """Write NAME.md and NAME.json, and print the former."""
        self.run["load average"] = f"{self.run['load average'].partition(',')[0]}, {os.getloadavg()[0]:.2f} at the end"
        self.directory.mkdir(parents=True, exist_ok=True)
        text = self.markdown()
        (self.directory / f"{self.name}.md").write_text(text)
        found = {"command": self.command, "run": self.run, "rows": self.figures, "notes": self.notes}
        (self.directory / f"{self.name}.json").write_text(json.dumps(found, indent=1) + "\n")
        print(text, flush=True)


def millions(numel: int) -> str:
    return f"{numel / 1e6:.1f}M"


def median_and_spread(values: Sequence[float]) -> tuple[float, float]:
    """The median, and half the distance between the quartiles."""
    quartiles = statistics.quantiles(values, n=4) if len(values) > 1 else [0.0, 0.0, 0.0]
    return statistics.median(values), (quartiles[2] - quartiles[0]) / 2


@dataclass(frozen=True)
class Ratio:
    """Paired measurements: the median ratio and its spread.

    Attributes:
        ratio: median of the pairs' ratios.
        spread: half the distance between the quartiles of the ratios.
        with_ms, without_ms: medians of the two sides.
        pairs: number of pairs.
    """

    ratio: float
    spread: float
    with_ms: float
    without_ms: float
    pairs: int

    @classmethod
    def of(cls, pairs: Sequence[tuple[float, float]]) -> Ratio:
        """Make a ratio from pairs of (seconds with, seconds without)."""
        ratio, spread = median_and_spread([one / other for one, other in pairs])
        return cls(
            ratio=ratio,
            spread=spread,
            with_ms=statistics.median(one for one, _ in pairs) * 1e3,
            without_ms=statistics.median(other for _, other in pairs) * 1e3,
            pairs=len(pairs),
        )
