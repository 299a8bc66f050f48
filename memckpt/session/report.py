"""What a session tells its user about a resume."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from memckpt.session.resume_check import ResumeCheck
from memckpt.state.layout import CAPTURES, Layout, StateSpec
from memckpt.user_messages import short_number


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

    `steps_lost` is how many committed records lie beyond the restored one; None where that is not known: of what
    storage does not have, only some node's memory could tell.

    `exact` is False where the number of ranks or the mesh has changed: generators of new ranks are derived, and the
    place in the data cannot be the same.

    `check` is how the resume proves itself; it is over after the first steps. With ``resume_check="replay"`` the step
    that was taken last is repeated, so that `step` and `record` are those before it; `repeated` is that step then.
    """

    step: int
    record: int
    tier: str
    seconds: float
    steps_lost: int | None
    exact: bool = True
    check: ResumeCheck = field(default_factory=lambda: ResumeCheck("off", "off"))
    repeated: int | None = None


def describe_protection(spec: StateSpec, reason: str, tap: str, where: str, caveats: Sequence[str]) -> str:
    """One line: what protects a run, how, and at what price in memory."""
    layout = Layout(spec)
    whole = sum(math.prod(param.tensor.whole_shape) for param in spec.params)
    shards = "" if whole == layout.numel else f", of which this rank holds {short_number(layout.numel)}"
    if spec.mode == "capture":
        steps = "every step" if spec.every == 1 else f"one step of {spec.every}"
        how = f"state capture ({reason}), {CAPTURES} copies"
    else:
        steps = "every step"
        how = f"{spec.mode} redo ({reason}), tap: {tap}, T={spec.period}, D={spec.slots}"
    return (
        f"memckpt: protecting {steps} of {short_number(whole)} parameters{shards}: {how}, "
        f"{layout.total_bytes / 2**20:.0f} MiB {where}" + "".join(f"; note: {caveat}" for caveat in caveats)
    )
