"""Results: tables with the machine and the command that made them, as Markdown and as JSON."""

from __future__ import annotations

import json
import os
import platform
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parents[1] / "results"


def describe_machine() -> dict[str, Any]:
    """Properties of the machine that matter for comparing figures; nothing that identifies it."""
    model = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.split(":", 1)[1].strip()
            break
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(pages / 2**30, 1),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "compute_threads": torch.get_num_threads(),
        "omp_wait_policy": os.environ.get("OMP_WAIT_POLICY", "unset"),
        "load_average_at_start": round(os.getloadavg()[0], 2),
    }


@dataclass
class Table:
    """Rows of formatted cells, and their raw figures."""

    title: str
    columns: Sequence[str]
    rows: list[Sequence[str]] = field(default_factory=list)
    figures: list[dict[str, Any]] = field(default_factory=list)

    def add(self, *cells: str, **figures: Any) -> None:
        assert len(cells) == len(self.columns), cells
        self.rows.append(cells)
        self.figures.append(figures)

    def markdown(self) -> str:
        def line(cells: Sequence[str]) -> str:
            return "| " + " | ".join(cells) + " |"

        rule = "|" + "|".join("---" if i == 0 else "---:" for i in range(len(self.columns))) + "|"
        return "\n".join([f"## {self.title}", "", line(self.columns), rule, *map(line, self.rows)])


@dataclass
class Report:
    """One benchmark's results.

    Attributes:
        name: name of the module and of the files written.
        title: the question that the benchmark answers.
        method: description of the method.
        command: command that reproduces the results.
        quick: whether it was a quick run, whose figures are not for quoting.
    """

    name: str
    title: str
    method: str
    command: str
    quick: bool
    machine: dict[str, Any] = field(default_factory=describe_machine)
    tables: list[Table] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def table(self, title: str, *columns: str) -> Table:
        self.tables.append(Table(title, columns))
        return self.tables[-1]

    def leave_out(self, what: str, reason: str) -> None:
        """Note why a figure is missing."""
        self.notes.append(f"Left out: {what}: {reason}")

    def markdown(self) -> str:
        load = round(os.getloadavg()[0], 2)
        machine = {**self.machine, "load_average_at_end": load}
        parts = [f"# {self.title}"]
        if self.quick:
            parts.append("**Quick run: a small model and few repetitions, not for quoting.**")
        parts += [self.method, f"Made by `{self.command}` on:"]
        parts.append("\n".join(f"- {key.replace('_', ' ')}: {value}" for key, value in machine.items()))
        parts += [table.markdown() for table in self.tables]
        if self.notes:
            parts.append("## Notes\n\n" + "\n".join(f"- {note}" for note in self.notes))
        return "\n\n".join(parts) + "\n"

    def write(self, directory: Path) -> None:
        """Write NAME.md and NAME.json, and print the former."""
        directory.mkdir(parents=True, exist_ok=True)
        text = self.markdown()
        (directory / f"{self.name}.md").write_text(text)
        plain = asdict(self)
        for table in plain["tables"]:
            table["rows"] = table.pop("figures")
            del table["columns"]
        (directory / f"{self.name}.json").write_text(json.dumps(plain, indent=1) + "\n")
        print(text, flush=True)


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
