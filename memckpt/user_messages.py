"""What a user reads: counts in short, and a logger that shows INFO unless the application has configured logging."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Protocol


class Report(Protocol):
    """How a restore went: a `memckpt.RestoreReport`."""

    @property
    def step(self) -> int: ...
    @property
    def tier(self) -> str: ...
    @property
    def seconds(self) -> float: ...
    @property
    def steps_lost(self) -> int | None: ...
    @property
    def repeated(self) -> int | None: ...


def short_number(number: float, digits: int = 1) -> str:
    """A count as people write it: 3.2M, 8.3K, 41."""
    for size, letter in ((1e6, "M"), (1e3, "K")):
        if number >= size:
            return f"{number / size:.{digits}f}{letter}"
    return f"{number:.0f}"


def show_by_default(logger: logging.Logger) -> None:
    """Make INFO of `logger` visible on the error stream unless the application has configured logging itself."""
    if not any(each.level != logging.NOTSET for each in _named(logger)):
        logger.setLevel(logging.INFO)
    if not logger.hasHandlers():
        logger.addHandler(logging.StreamHandler())
        logger.propagate = False


def _named(logger: logging.Logger) -> Iterator[logging.Logger]:
    """The logger and those above it, without the root: whose level somebody has chosen for us, if it has one."""
    each: logging.Logger | None = logger
    while each is not None and each.parent is not None:
        yield each
        each = each.parent


class Messages:
    """The lines of one training; only its first rank speaks.

    Args:
        logger: of the adapter.
        speaks: whether this is that rank.
    """

    def __init__(self, logger: logging.Logger, speaks: bool) -> None:
        self._logger = logger
        self._speaks = speaks
        self._said: set[str] = set()
        if speaks:
            show_by_default(logger)

    def inform(self, line: str) -> None:
        """Say one line about progress."""
        if self._speaks:
            self._logger.info("memckpt: %s", line)

    def resumed(self, report: Report) -> None:
        """Say where training goes on, and what was lost."""
        lost = f"{report.steps_lost} step{'' if report.steps_lost == 1 else 's'} lost"
        if report.steps_lost is None:
            lost = "what was trained beyond it is lost"
        step, proof = report.step, ""
        if report.repeated is not None:
            step, proof = report.repeated, f"; step {report.repeated} is repeated first, as a proof"
        self.inform(f"resumed at step {step} from {report.tier} in {report.seconds:.2f} s, {lost}{proof}")

    def warn(self, line: str) -> None:
        """Say, once, one line about something that is not as the user may expect."""
        if self._speaks and line not in self._said:
            self._logger.warning("memckpt: %s", line)
        self._said.add(line)
