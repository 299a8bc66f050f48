"""Pictures of a plan and of simulations: what can be drawn, and files that are the same for the same values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from memckpt.errors import ConfigurationError


def check_plot(path: Path) -> None:
    """Refuse what could not be drawn before any work: without matplotlib, of another kind, in no directory."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigurationError(
            f"--plot {path}: expected matplotlib, found none; pip install 'lightning-memckpt[plot]'"
        ) from None
    known = sorted(Figure().canvas.get_supported_filetypes())
    if path.suffix.removeprefix(".").lower() not in known:
        raise ConfigurationError(f"--plot {path}: expected a suffix of {', '.join(known)}, found {path.suffix!r}")
    if not path.absolute().parent.is_dir():
        raise ConfigurationError(f"--plot {path}: expected a directory, found none at {path.absolute().parent}")


def save_figure(figure: Any, path: Path) -> None:
    """Write a figure of matplotlib; the same values make the same file: no date, no random names."""
    from matplotlib import rc_context

    try:
        with rc_context({"svg.fonttype": "none", "svg.hashsalt": "memckpt"}):
            figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix.lower() == ".svg" else None)
    except OSError as error:
        raise ConfigurationError(f"--plot {path}: expected a file that can be written, found {error}") from error
