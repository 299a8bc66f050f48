"""Failures in a writer process: logged with a traceback once, and in one line while they are the same."""

from __future__ import annotations

import logging


class Complaints:
    """Log of the failures of one kind of work: one traceback for each new one."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._last: object = None

    def log_failure(self, what: str, error: BaseException) -> None:
        """Log an error that is being handled; `what` has failed, in words."""
        cause = error.__cause__
        kind = (type(error), type(cause), getattr(cause, "errno", None))
        self._log.error("%s: %s: %s", what, type(error).__name__, error, exc_info=kind != self._last)
        self._last = kind

    def reset(self) -> None:
        """Take the next failure for a new one: the work has succeeded."""
        self._last = None
