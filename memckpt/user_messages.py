"""Output for users: short counts and sizes; a logger that shows INFO unless the application configures logging."""

from __future__ import annotations

import logging
from collections.abc import Iterator


def short_number(number: float, digits: int = 1) -> str:
    """A count as people write it: 3.2M, 8.3K, 41."""
    for size, letter in ((1e6, "M"), (1e3, "K")):
        if number >= size:
            return f"{number / size:.{digits}f}{letter}"
    return f"{number:.0f}"


def nbytes_text(nbytes: float) -> str:
    """A number of bytes in a suitable unit."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"


def seconds_text(seconds: float) -> str:
    """A duration in a suitable unit."""
    if seconds < 100:
        return f"{max(0.0, seconds):.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    if seconds < 100 * 60:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.0f} h" if seconds < 100 * 3600 else f"{seconds / 86400:.0f} days"


def show_by_default(logger: logging.Logger) -> None:
    """Show INFO of `logger` on the error stream unless the application has configured logging itself."""
    if not any(each.level != logging.NOTSET for each in _named(logger)):
        logger.setLevel(logging.INFO)
    if not logger.hasHandlers():
        logger.addHandler(logging.StreamHandler())
        logger.propagate = False


def _named(logger: logging.Logger) -> Iterator[logging.Logger]:
    """The logger and its ancestors, without the root: a level set on any of them is the application's choice."""
    each: logging.Logger | None = logger
    while each is not None and each.parent is not None:
        yield each
        each = each.parent


class Messages:
    """The lines of one training, in the adapter's log; only its first rank `speaks`."""

    def __init__(self, logger: logging.Logger, speaks: bool) -> None:
        self._logger = logger
        self._speaks = speaks
        self._said: set[str] = set()
        if speaks:
            show_by_default(logger)

    def inform(self, line: str) -> None:
        """Log one line about progress."""
        if self._speaks:
            self._logger.info("memckpt: %s", line)

    def resumed(self, report: object) -> None:
        """Log where training continues, and what was lost, as a printed `memckpt.RestoreReport` says."""
        self.inform(str(report))

    def warn(self, line: str) -> None:
        """Log one line, once, about something that the user may not expect."""
        if self._speaks and line not in self._said:
            self._logger.warning("memckpt: %s", line)
        self._said.add(line)
