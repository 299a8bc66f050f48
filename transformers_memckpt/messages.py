"""What the user reads: one logger that shows INFO by default."""

from __future__ import annotations

import logging

logger = logging.getLogger("transformers_memckpt")


def show_by_default() -> None:
    """Make INFO visible unless the application has configured logging itself."""
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)
    if not logging.getLogger().hasHandlers() and not logger.handlers:
        logger.addHandler(logging.StreamHandler())
        logger.propagate = False


class Messages:
    """Lines of one training; only its first rank speaks.

    Args:
        speaks: whether this is that rank.
    """

    def __init__(self, speaks: bool) -> None:
        self._speaks = speaks
        self._said: set[str] = set()

    def inform(self, line: str) -> None:
        """Say one line about progress."""
        if self._speaks:
            logger.info("memckpt: %s", line)

    def warn(self, line: str) -> None:
        """Say, once, one line about something that is not as the user may expect."""
        if self._speaks and line not in self._said:
            logger.warning("memckpt: %s", line)
        self._said.add(line)
