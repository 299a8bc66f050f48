"""A plan as a picture; matplotlib is an extra."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from memckpt.errors import ConfigurationError
from memckpt_tools.planning.planned import Planned
from memckpt_tools.planning.schemes import Plan

_GREY, _BLUE, _RED = "#8a8f98", "#2b6cb0", "#c05621"


def check(path: Path) -> None:
    """Refuse before any work what could not be drawn.

    Raises:
        ConfigurationError: matplotlib is not installed, or does not draw such files, or there is no such directory.
    """
    figure = _figure()
    suffix = path.suffix.removeprefix(".").lower()
    known = sorted(figure.canvas.get_supported_filetypes())
    if suffix not in known:
        raise ConfigurationError(f"--plot {path}: expected a suffix of {', '.join(known)}, found {path.suffix!r}")
    if not path.absolute().parent.is_dir():
        raise ConfigurationError(f"--plot {path}: expected a directory, found none at {path.absolute().parent}")


def _figure() -> Any:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigurationError(
            "--plot: expected matplotlib, found none; pip install 'lightning-memckpt[plot]'"
        ) from None
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def draw(plan: Plan, path: Path) -> None:
    """Draw time that does not advance training, steps lost with nodes, and memory, of each scheme.

    Raises:
        ConfigurationError: the file cannot be written.
    """
    rows = [row for row in plan.rows if row.scheme.tiers]
    figure = _figure()
    names = [row.scheme.name for row in rows]
    colors = [_BLUE if row is plan.recommended else _GREY if row.fits else _RED for row in rows]
    wasted, lost, memory = figure.subplots(1, 3, sharey=True)
    _bars(wasted, names, [100 * (1 - row.expectation.ettr) for row in rows], colors, "time that advances nothing, %")
    _bars(lost, names, [row.expectation.lost_steps["nodes"] for row in rows], colors, "steps lost with a node")
    _bars(memory, names, [row.memory.total / 2**30 for row in rows], colors, "memory of a node, GiB")
    wasted.invert_yaxis()
    job = plan.job
    figure.suptitle(
        f"{job.parameters / 1e9:.4g}B parameters, {job.nodes} nodes, a failure every {job.mtbf_seconds / 3600:.3g} h"
        f"{_legend(rows, plan)}",
        fontsize=11,
    )
    from matplotlib import rc_context

    try:
        # The same plan makes the same file: no date, no random names.
        with rc_context({"svg.fonttype": "none", "svg.hashsalt": "memckpt"}):
            figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix.lower() == ".svg" else None)
    except OSError as error:
        raise ConfigurationError(f"--plot {path}: {error}") from error


def _legend(rows: list[Planned], plan: Plan) -> str:
    parts = ["blue: recommended"] if plan.recommended is not None else []
    parts += ["red: does not do for this job"] if not all(row.fits for row in rows) else []
    return f" ({'; '.join(parts)})" if parts else ""


def _bars(axes: Any, names: list[str], values: list[float], colors: list[str], title: str) -> None:
    bars = axes.barh(names, values, color=colors)
    axes.bar_label(bars, [f"{value:.3g}" for value in values], padding=3, fontsize=8)
    axes.set_xlim(0, max([*values, 1e-9]) * 1.2)
    axes.set_title(title, fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
