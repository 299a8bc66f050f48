"""What goes wrong in a writer process: with a traceback in the log once, and in one line while it is the same."""

from __future__ import annotations

import logging


class Complaints:
    """Log of the failures of one kind of work: one traceback for each new one.

    Args:
        log: where to.
    """

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._last: object = None

    def tell(self, what: str, error: BaseException) -> None:
        """Log an error that is being handled."""
        cause = error.__cause__
        kind = (type(error), type(cause), getattr(cause, "errno", None))
        self._log.error("%s: %s: %s", what, type(error).__name__, error, exc_info=kind != self._last)
        self._last = kind

    def forget(self) -> None:
        """It has worked: what comes next is new."""
        self._last = None
