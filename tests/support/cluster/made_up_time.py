"""Time that a test makes up: it passes as the test says."""

from __future__ import annotations

from typing import Any


class MadeUp:
    """A clock, and a poller under which it advances by as long as it is asked to wait."""

    def __init__(self, now: float = 100.0) -> None:
        self.now = now
        self.waits: list[int | None] = []

    def __call__(self) -> float:
        return self.now

    def register(self, source: int, flags: int = 0) -> None: ...

    unregister = register

    def poll(self, milliseconds: int | None) -> list[tuple[Any, int]]:
        self.waits.append(milliseconds)
        self.now += (milliseconds or 0) / 1000
        return []
