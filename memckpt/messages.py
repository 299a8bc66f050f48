"""What an adapter's user reads: a logger that shows INFO unless the application has configured logging."""

from __future__ import annotations

import logging


def show_by_default(logger: logging.Logger) -> None:
    """Make INFO of `logger` visible on the error stream unless the application has configured logging itself."""
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)
    if not logging.getLogger().hasHandlers() and not logger.handlers:
        logger.addHandler(logging.StreamHandler())
        logger.propagate = False
