"""How much memory a process on this node may still take, and what base and log need of it."""

from __future__ import annotations

from pathlib import Path

from memckpt.errors import MemoryBudgetError
from memckpt.memory.cgroup import memory_limits

_MIB = 2**20
#: Left free for everything else when the budget is not given.
_HEADROOM = 0.05


def available_bytes() -> int:
    """Memory that can still be taken here: the machine's, or what the tightest enclosing cgroup has left."""
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    available = int(fields["MemAvailable"].split()[0]) * 1024
    return min([available, *(each.left for each in memory_limits())])


def check_budget(needed: int, already_held: int, budget: int | None, detail: str, given_back: int = 0) -> None:
    """Refuse an allocation that cannot fit.

    Args:
        needed: bytes to be allocated now.
        already_held: bytes held already that stay while the new ones are written.
        budget: the configured limit on both together; None: only what the machine has. More than the machine has is no
            promise: anonymous memory that is not there shows up as an OOM kill, never as an error.
        detail: what the figure is made of, for the message.
        given_back: bytes, not among those already held, that are free by the time at which they are needed.

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
