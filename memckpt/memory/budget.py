"""Memory that a process on this node may still allocate, and the check of base and log against it."""

from __future__ import annotations

from pathlib import Path

from memckpt.errors import MemoryBudgetError
from memckpt.memory.cgroup import memory_limits

_MIB = 2**20
#: Fraction of the available memory left free for everything else.
_HEADROOM = 0.05


def available_bytes() -> int:
    """Bytes that can still be allocated: the machine's available memory, or less in a limiting cgroup."""
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    available = int(fields["MemAvailable"].split()[0]) * 1024
    return min([available, *(each.left for each in memory_limits())])


def check_budget(needed: int, already_held: int, budget: int | None, detail: str, given_back: int = 0) -> None:
    """Refuse an allocation that cannot fit.

    Args:
        needed: bytes to allocate now.
        already_held: bytes held already that stay while the new ones are written.
        budget: configured limit on both together, in bytes; None: the machine's memory. A budget beyond that is capped:
            missing anonymous memory shows up as an OOM kill, never as an error.
        detail: breakdown of the figure, for the message.
        given_back: bytes, not among those already held, that are freed before they are needed.

    Raises:
        MemoryBudgetError: with the figures and the remedy.
    """
    room, source = int(available_bytes() * (1 - _HEADROOM)) + given_back, "available memory"
    if budget is not None and budget - already_held < room:
        room, source = budget - already_held, "agent.memory_budget_bytes"
    if needed > room:
        raise MemoryBudgetError(
            f"expected room for {needed / _MIB:.0f} MiB of base and log on this node ({detail}), found "
            f"{room / _MIB:.0f} MiB ({source}); lower anchor_period_steps or slots, choose redo='eager', raise the "
            "budget, or give the job more memory"
        )
