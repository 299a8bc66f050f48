"""News of a replica's redo thread to the event loop of its agent; they stay within the process."""

from __future__ import annotations

from dataclasses import dataclass

from memckpt.memory.region import Region
from memckpt.protocol.trainer import Alarm, Credit, Drift


@dataclass(frozen=True)
class ReplicaCopied:
    """The replica after `record` has been copied into a snapshot.

    Attributes:
        record: after which it was to be copied.
        snapshot: region into which it was to be copied.
        seconds: that took.
        missing, plain: of the optimizer state, as in a snapshot that a trainer takes.
        problem: why it was not copied, in words; empty if it was.
    """

    record: int
    snapshot: Region
    seconds: float
    missing: tuple[tuple[int, int, str], ...] = ()
    plain: bytes = b""
    problem: str = ""


RedoNews = Credit | Drift | Alarm | ReplicaCopied
