"""An agent and siblings that only listen, for tests of a node's groups."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from memckpt.journal.events import AnyEvent
from memckpt.protocol.channel import Message


class QuietHost:
    """Is also the siblings of a group that has none.

    Attributes:
        told: what trainers were told, oldest first.
    """

    def __init__(self, start_writer: Callable[..., Any] | None = None) -> None:
        self.told: list[tuple[tuple[int, ...], Message]] = []
        self._start_writer = start_writer

    def start_writer(self, *arguments: Any) -> Any:
        return self._start_writer(*arguments) if self._start_writer is not None else None

    def tell_ranks(
        self, ranks: tuple[int, ...], message: Message, *, besides: int | None = None, fd: int | None = None
    ) -> None:
        self.told.append((ranks, message))

    def notify(self, ranks: tuple[int, ...], message: Message) -> None:
        pass

    def note_event(self, event: AnyEvent) -> None:
        pass

    def checkpoint_failed(self) -> None:
        pass

    def has_lost_file(self) -> bool:
        return False

    def bytes_for_peers(self) -> int:
        return 0

    def announce(self, ranks: tuple[int, ...], record: int) -> None:
        pass

    def hurry(self, lead: int) -> None:
        pass

    def bytes_beside(self, ranks: tuple[int, ...]) -> int:
        return 0
