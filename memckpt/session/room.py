"""Check that a node has the memory for lazy redo, the exact mode on an accelerator."""

from __future__ import annotations

import torch

from memckpt.capture.live_state import LiveState
from memckpt.capture.spec_request import SpecRequest
from memckpt.config import MemckptConfig
from memckpt.memory.budget import available_bytes
from memckpt.session.ranks import Ranks
from memckpt.state.layout import Layout

#: Share of the available memory that lazy redo may take by itself: loader workers and their batches need the rest.
SHARE = 0.75
_GIB = 2**30


def lazy_shortage(config: MemckptConfig, live: LiveState, ranks: Ranks, device: torch.device) -> str:
    """Reason why ``redo="auto"`` avoids lazy redo on an accelerator, with figures; empty if there is enough memory."""
    if config.redo != "auto" or device.type == "cpu" or live.not_redoable:
        return ""
    request = SpecRequest(
        mode="lazy",
        period=config.anchor_period("lazy"),
        slots=config.records_in_flight,
        local_ranks=ranks.unit,
        world_size=ranks.world_size,
        replicas=ranks.replicas if len(ranks.groups) > 1 else (),
        reads_late=config.reads_late,
    )
    # All units of a node hold shards of about the same size.
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
