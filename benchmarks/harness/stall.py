"""The time that memckpt takes of the training thread, by cause."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field

from memckpt import Session

#: Causes; without storage there are no others.
PARTS = ("hooks", "anchors", "commit", "slot_wait")


def stall_of(session: Session | None) -> dict[str, float]:
    """Seconds so far, by cause; empty without a session."""
    return {} if session is None else asdict(session.stall)


def stall_per_step(before: Mapping[str, float], after: Mapping[str, float], steps: int) -> dict[str, float]:
    """Seconds of each of the steps between two readings, by cause."""
    return {part: (spent - before[part]) / steps for part, spent in after.items()}


@dataclass
class StallPerStep:
    """Accumulates a session's stall over the steps that are measured.

    Attributes:
        session: the measured session.
        steps: number of measured steps.
        seconds: seconds by cause.
    """

    session: Session
    steps: int = 0
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))

    @contextmanager
    def collect(self, steps: int) -> Iterator[None]:
        """Count the block as `steps` steps."""
        before = stall_of(self.session)
        yield
        after = stall_of(self.session)
        self.steps += steps
        for part in PARTS:
            self.seconds[part] += after[part] - before[part]

    def milliseconds(self, part: str) -> float:
        """A cause's share of one step."""
        return self.seconds[part] / max(1, self.steps) * 1e3

    @property
    def total_ms(self) -> float:
        return sum(self.milliseconds(part) for part in PARTS)
