"""How a node asks its peers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from memckpt.replication.transport.wire import WireMessage


@dataclass(frozen=True)
class Questions:
    """How questions reach peers, and how their answers are told apart.

    Attributes:
        send: gives a question to a node.
        number: makes a number that no other question has.
    """

    send: Callable[[str, WireMessage], None]
    number: Callable[[], int]
