"""News of a generation's threads to the event loop of its agent; they stay within the process."""

from __future__ import annotations

from dataclasses import dataclass

from memckpt.memory.region import Region
from memckpt.protocol.trainer import Alarm, Credit, Drift


@dataclass(frozen=True)
class ReplicaCopied:
    """The replica after `record` was copied into `region`, or was not."""

    record: int
    region: Region
    seconds: float
    missing: tuple[tuple[int, int, str], ...] = ()  #: of the optimizer state, as in a copy that trainers make
    plain: bytes = b""  #: likewise
    problem: str = ""  #: why it was not copied, in words


@dataclass(frozen=True)
class MemoryReserved:
    """The memory of a generation is reserved, or the kernel has refused it."""

    generation: int


@dataclass(frozen=True)
class CopyReserved:
    """The memory of a copy of the state is reserved, or the kernel has refused it; `order` is its number."""

    order: int


RedoNews = Credit | Drift | Alarm | ReplicaCopied | MemoryReserved | CopyReserved
