"""Waits of a test for what other processes do."""

from __future__ import annotations

import select
import time
from collections.abc import Callable
from typing import Any

#: Longest wait for what happens within seconds, on a busy machine, in seconds.
LIMIT_SECONDS = 120.0


def until(condition: Callable[[], Any], what: str = "it", limit: float = LIMIT_SECONDS, pause: float = 0.05) -> Any:
    """Wait for what another process does; returns the first true value of `condition`."""
    deadline = time.monotonic() + limit
    while not (found := condition()):
        assert time.monotonic() < deadline, f"expected {what} within {limit:.0f} s"
        select.select([], [], [], pause)
    return found
