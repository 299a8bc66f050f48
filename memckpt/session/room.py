"""Whether a node has the memory for lazy redo, which is what an accelerator's training wants."""

from __future__ import annotations

import torch

from memckpt.capture.live_state import LiveState, SpecRequest
from memckpt.config import MemckptConfig
from memckpt.memory.budget import available_bytes
from memckpt.session.ranks import Ranks
from memckpt.state.layout import Layout

#: The part of the available memory that is taken without being asked for: training itself is yet to take some, for
#: loader workers and the batches that they hand over.
SHARE = 0.75
_GIB = 2**30


def lazy_shortage(config: MemckptConfig, live: LiveState, ranks: Ranks, device: torch.device) -> str:
    """Why ``redo="auto"`` does without lazy redo on an accelerator, in words; empty where its memory is there."""
    if config.redo != "auto" or device.type == "cpu" or live.not_redoable:
        return ""
    request = SpecRequest(
        mode="lazy",
        period=config.anchor_period("lazy"),
        slots=config.slots,
        local_ranks=ranks.unit,
        world_size=ranks.world_size,
        replicas=ranks.replicas if len(ranks.groups) > 1 else (),
        reads_late=config.reads_late,
    )
    # The units of a node hold shards of nearly the same size.
    needed = Layout(live.spec(request)).total_bytes * len(ranks.local_ranks) / len(ranks.unit)
    room, source = SHARE * available_bytes(), f"{SHARE:.0%} of the available memory"
    budget = config.agent.memory_budget_bytes
    if budget is not None and budget < room:
        room, source = budget, "agent.memory_budget_bytes"
    if needed <= room:
        return ""
    return (
        f"lazy redo, which is exact on an accelerator, would take {needed / _GIB:.1f} GiB of this node's memory, and "
        f"{room / _GIB:.1f} GiB are there ({source})"
    )
