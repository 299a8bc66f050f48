"""Reports of a session to its user: the held state, the restore, the protection."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from memckpt.session.resume_check import ResumeCheck
from memckpt.state.layout import SNAPSHOTS, Layout
from memckpt.state.spec import StateSpec
from memckpt.user_messages import short_number

_log = logging.getLogger("memckpt")


@dataclass(frozen=True)
class HeldState:
    """The state that the plan has chosen, before it is restored.

    Attributes:
        step: the framework's step number.
        record: number of the record.
        tier: source of the state: ``"local memory"``, ``"peers"``, ``"storage"``, or ``"resharding/ in the run
            directory"``.
        rank_state: values that this rank's captures returned at that step, by the names given to ``provide``. Where the
            number of ranks has changed, those of one of the former ranks.
        world_size: number of ranks of the run that wrote the state.
        newest_step: step that training continues behind. It is `step`, or the one after it where that one is repeated
            first, as a proof.
    """

    step: int
    record: int
    tier: str
    rank_state: Mapping[str, Any]
    world_size: int
    newest_step: int


@dataclass(repr=False)
class RestoreReport:
    """A completed restore; what the first steps show of it is added later.

    Attributes:
        step: the framework's step number of the restored state.
        record: number of its record.
        tier: source of the state, as in :class:`HeldState`.
        seconds: duration of the restore.
        steps_lost: number of committed records beyond the restored one; None where it is not known, as no node's memory
            was left.
        reasons: why training does not go on exactly, in words; empty if it does.
        check: verdict of the resume check, pending until the first steps are over.
        repeated: step that is repeated with ``resume_check="replay"``; `step` and `record` are those before it. None if
            no step is.
    """

    step: int
    record: int
    tier: str
    seconds: float
    steps_lost: int | None
    reasons: tuple[str, ...] = ()
    check: ResumeCheck = field(default_factory=lambda: ResumeCheck("off", "off"))
    repeated: int | None = None

    @property
    def evidence(self) -> str:
        """What of the restored state was compared with the sample that its record carries, and how it came out."""
        return self.check.evidence

    @property
    def exact(self) -> bool:
        """Whether training goes on bit for bit; False also once the resume check has found a difference."""
        return not self.reasons and self.check.verdict != "different"

    def because(self, *reasons: str) -> RestoreReport:
        """Add further reasons, and log each; empty ones are left out. Returns the report itself."""
        new = tuple(reason for reason in reasons if reason and reason not in self.reasons)
        for reason in new:
            _log.warning("memckpt: training does not go on exactly: %s", reason)
        self.reasons += new
        return self

    def __repr__(self) -> str:
        # For a script's log: the check as its verdict, and no more digits than anybody reads.
        return (
            f"RestoreReport(step={self.step}, record={self.record}, tier={self.tier!r}, seconds={self.seconds:.3g}, "
            f"steps_lost={self.steps_lost}, exact={self.exact}, check={self.check.verdict!r}, repeated={self.repeated})"
        )


def describe_protection(spec: StateSpec, reason: str, tap: str, where: str, caveats: Sequence[str]) -> str:
    """One line about the protection of a run: parameters, mode and its reason, tap, memory in MiB, caveats."""
    layout = Layout(spec)
    whole = sum(math.prod(param.tensor.whole_shape) for param in spec.params)
    shards = "" if whole == layout.numel else f", of which this rank holds {short_number(layout.numel)}"
    if spec.mode == "snapshot":
        steps = "every step" if spec.every == 1 else f"one step of {spec.every}"
        how = f"snapshots ({reason}), {SNAPSHOTS} copies"
    else:
        steps = "every step"
        how = f"{spec.mode} redo ({reason}), tap: {tap}, T={spec.period}, D={spec.slots}"
    return (
        f"memckpt: protecting {steps} of {short_number(whole)} parameters{shards}: {how}, "
        f"{layout.total_bytes / 2**20:.0f} MiB {where}" + "".join(f"; note: {caveat}" for caveat in caveats)
    )
