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
        rank_state: what this rank's captures returned then, by the names given to ``provide``.
    """

    step: int
    record: int
    tier: str
    rank_state: Mapping[str, Any]


@dataclass(frozen=True)
class RestoreReport:
    """A restore that has happened: every field is known only once the state is back in the live tensors."""

    step: int
    record: int
    tier: str
    seconds: float
    steps_lost: int
