"""The picture of ``memckpt simulate``: ETTR against the time between failures, and against the cluster's size."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from memckpt.errors import ConfigurationError
from memckpt_tools.simulation import Summary, Sweep

_FORMATS = ("pdf", "png", "svg")


def check_plot(path: Path) -> None:
    """Refuse a plot that cannot be drawn, before anything is simulated.

    Raises:
        ConfigurationError: matplotlib is missing, the file's name ends in no known format, or there is no such
            directory.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ConfigurationError(
            f"--plot {path}: expected matplotlib, found none: pip install 'lightning-memckpt[plot]'"
        ) from error
    if path.suffix.removeprefix(".").lower() not in _FORMATS:
        raise ConfigurationError(f"--plot {path}: expected a name that ends in .{' or .'.join(_FORMATS)}")
    if not path.absolute().parent.is_dir():
        raise ConfigurationError(f"--plot {path}: expected a directory that exists, found no {path.parent}")


def draw(sweep: Sweep, path: Path, title: str) -> None:
    """Draw a sweep: a line for each scheme, with its confidence interval as a band.

    Raises:
        ConfigurationError: the file cannot be written.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    hours = [(mtbf / 3600, summaries) for mtbf, summaries in sweep.by_mtbf]
    sizes = [(float(nodes), summaries) for nodes, summaries in sweep.by_nodes]
    for axes, label, points in (
        (left, "mean time between failures of the job, hours", hours),
        (right, "nodes", sizes),
    ):
        for at in range(len(points[0][1])):
            _draw_line(axes, [(x, summaries[at]) for x, summaries in points])
        axes.set_xscale("log")
        axes.set_xticks([x for x, _ in points], [f"{x:,.3g}" if x < 100 else f"{x:,.0f}" for x, _ in points])
        axes.minorticks_off()
        axes.set_xlabel(label)
        axes.grid(alpha=0.3)
    left.set_ylabel("effective training time ratio")
    left.legend()
    figure.suptitle(title)
    try:
        # The same simulation makes the same file: no date, no random names.
        with rc_context({"svg.fonttype": "none", "svg.hashsalt": "memckpt"}):
            figure.savefig(path, metadata={"Date": None} if path.suffix.lower() == ".svg" else None)
    except OSError as error:
        raise ConfigurationError(f"--plot {path}: expected a file that can be written, found {error}") from error


def _draw_line(axes: object, points: Sequence[tuple[float, Summary]]) -> None:
    from matplotlib.axes import Axes

    assert isinstance(axes, Axes)
    xs = [x for x, _ in points]
    ettrs = [summary.ettr for _, summary in points]
    widths = [ettr.half_width or 0.0 for ettr in ettrs]
    (line,) = axes.plot(xs, [ettr.mean for ettr in ettrs], marker="o", markersize=4, label=points[0][1].scheme.name)
    low = [ettr.mean - width for ettr, width in zip(ettrs, widths, strict=True)]
    high = [ettr.mean + width for ettr, width in zip(ettrs, widths, strict=True)]
    axes.fill_between(xs, low, high, color=line.get_color(), alpha=0.2)
