"""Waits of a test for what other processes do."""

from __future__ import annotations

import select
import time
from collections.abc import Callable

#: Longest wait for what happens within seconds, in seconds.
LIMIT_SECONDS = 60.0


def until(condition: Callable[[], bool]) -> None:
    """Wait for what another process does."""
    deadline = time.monotonic() + LIMIT_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "it does not happen"
        select.select([], [], [], 0.05)
