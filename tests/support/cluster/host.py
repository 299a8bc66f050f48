"""An agent and siblings that only listen, for tests of a node's units."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from memckpt.agent.unit_host import Host, Siblings
from memckpt.protocol.channel import Message


class QuietHost(Host, Siblings):
    """Is also the siblings of a unit that has none."""

    def __init__(self, start_writer: Callable[..., Any] | None = None) -> None:
        self.told: list[tuple[tuple[int, ...], Message]] = []  # to trainers, oldest first
        self._start_writer = start_writer

    def start_writer(self, *arguments: Any) -> Any:
        return self._start_writer(*arguments) if self._start_writer is not None else None

    def tell_ranks(self, ranks: tuple[int, ...], message: Any, **_: Any) -> None:
        self.told.append((ranks, message))

    def bytes_for_peers(self) -> int:
        return 0

    def bytes_beside(self, ranks: tuple[int, ...]) -> int:
        return 0
