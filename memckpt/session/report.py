"""What a session tells its user about a resume."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class HeldState:
    """What the plan decided to restore, before it is restored.

    Attributes:
        step: the framework's step number at that record.
        record: the record's number.
        tier: where it comes from, in words.
        rank_state: what this rank's captures returned then, by the names given to ``provide``. Where the number of
            ranks has changed, what those of a rank returned that there was.
        world_size: of the run that wrote it.
    """

    step: int
    record: int
    tier: str
    rank_state: Mapping[str, Any]
    world_size: int


@dataclass(frozen=True)
class RestoreReport:
    """A restore that has happened: every field is known only once the state is back in the live tensors.

    `exact` is False where the number of ranks has changed: generators of new ranks are derived, and the place in the
    data cannot be the same.
    """

    step: int
    record: int
    tier: str
    seconds: float
    steps_lost: int
    exact: bool = True
