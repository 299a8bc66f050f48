"""All schemes for a job, and the recommended one."""

from __future__ import annotations

from dataclasses import dataclass

from memckpt_tools.planning.baselines import asynchronous, synchronous, unprotected
from memckpt_tools.planning.job import Job
from memckpt_tools.planning.planned import Planned
from memckpt_tools.planning.protected import SAME_ETTR, compressed, copies, erasure, logged, memory_only


@dataclass(frozen=True)
class Plan:
    """The schemes for a job.

    Attributes:
        job: the job.
        rows: the schemes, evaluated: those of users first.
        recommended: the best one of this product; None: none does.
        reason: why it is that one, or why there is none, in words.
    """

    job: Job
    rows: tuple[Planned, ...]
    recommended: Planned | None
    reason: str


def make_plan(job: Job) -> Plan:
    """Evaluate all schemes for a job, and recommend one.

    Recommended is, of this product's schemes that keep the budgets and do not change what is trained, the one with the
    highest ETTR among those within the budget of losses; where several are within 0.1%, an exact one that protects
    every step, of the least memory.
    """
    rows = (
        unprotected(job),
        synchronous(job),
        asynchronous(job),
        memory_only(job),
        copies(job),
        erasure(job),
        compressed(job),
        logged(job),
    )
    candidates = [row for row in rows if row.fits and row.config is not None and row.config.compression is None]
    if not candidates:
        own = [row for row in rows if row.config is not None and row.problems]
        reasons = "; ".join(f"{row.scheme.name}: {', '.join(row.problems)}" for row in own)
        return Plan(job, rows, None, f"no scheme keeps the budgets: {reasons}")
    kept = [row for row in candidates if row.keeps_memory] or candidates
    most = max(row.expectation.ettr for row in kept)
    alike = [row for row in kept if row.expectation.ettr >= most - SAME_ETTR]
    exact = [row for row in alike if row.exact] or alike
    exact = [row for row in exact if _every_step(row)] or exact
    recommended = min(exact, key=lambda row: (row.memory.total, row.monthly_loss or 0.0))
    words = [f"ETTR {recommended.expectation.ettr:.2%}"]
    if len(alike) == 1:
        words.append("the most within the budgets")
    else:
        words.append(f"within {SAME_ETTR:.1%} of memckpt's most, and of those the one of the least memory")
    if len(exact) < len(alike):
        words.append("that is exact and protects every step" if _every_step(recommended) else "that is exact")
    if not _every_step(recommended) and recommended.config is not None:
        words.append(f"which protects one step in {recommended.config.snapshot_every_steps}, as the budgets allow")
    if not recommended.keeps_memory:
        words.append(f"but memory is lost with a probability of {recommended.monthly_loss:.2g} a month")
    others = max((row for row in rows if row.config is None), key=lambda row: row.expectation.ettr)
    if others.expectation.ettr > recommended.expectation.ettr:
        much = others.expectation.ettr > recommended.expectation.ettr + SAME_ETTR
        why = ": failures cost less than their prevention" if much else ""
        words.append(f"although {others.scheme.name} has {others.expectation.ettr:.2%}{why}")
    return Plan(job, rows, recommended, ", ".join(words).replace(", that is", " that is"))


def _every_step(row: Planned) -> bool:
    """Whether each step is recorded, and not each N-th state captured."""
    return row.config is not None and row.config.redo != "snapshot"
