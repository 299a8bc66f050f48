"""Who asks for a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from memckpt.protocol.storing import Saved, SaveFailed

Done = Callable[["Saved | SaveFailed"], None]


@dataclass(frozen=True)
class Run:
    """The run, for its own storage. Its trainers are told."""

    url: str


@dataclass(frozen=True)
class Export:
    """Somebody who waits for an answer: `done` is called once.

    `record`: the one to save, where other groups of ranks save the same; None: the newest.
    """

    url: str
    done: Done
    record: int | None = None


@dataclass(frozen=True)
class Peers:
    """Other nodes, which get a copy of the state into their memory in place of records."""


Asker = Run | Export | Peers
