"""Check that a node has the memory for other settings than those that take the least."""

from __future__ import annotations

import torch

from memckpt.capture.live_state import LiveState
from memckpt.capture.spec_request import SpecRequest
from memckpt.config import MemckptConfig
from memckpt.memory.budget import available_bytes
from memckpt.session.ranks import Ranks
from memckpt.state.layout import Layout
from memckpt.state.spec import StateSpec

#: Share of the available memory that protection may take by itself: loader workers and their batches need the rest.
SHARE = 0.75
_GIB = 2**30


def node_bytes(spec: StateSpec, ranks: Ranks) -> int:
    """Shared memory that a generation of this layout takes on this node, in bytes.

    All units of a node hold shards of about the same size.
    """
    return Layout(spec).total_bytes * len(ranks.local_ranks) // len(ranks.unit)


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
    needed, budget = node_bytes(live.spec(request), ranks), config.agent.memory_budget_bytes
    return _shortage("lazy redo, which is exact on an accelerator,", needed, SHARE * available_bytes(), budget)


def find_shortage(config: MemckptConfig, ranks: Ranks, spec: StateSpec, held: StateSpec | None) -> str:
    """Reason why a layout is not advised, with figures; empty if there is enough memory.

    A budget is not advised to the full: generations to come need some of it.

    Args:
        config: settings of the session.
        ranks: ranks of the job.
        spec: the layout.
        held: layout of what is held in its place now; None: nothing is held.
    """
    given_back = node_bytes(held, ranks) if held is not None else 0
    budget = config.agent.memory_budget_bytes
    room = SHARE * (available_bytes() + given_back)
    return _shortage("it", node_bytes(spec, ranks), room, None if budget is None else SHARE * budget)


def _shortage(what: str, needed: int, room: float, budget: float | None) -> str:
    source = f"{SHARE:.0%} of the available memory"
    if budget is not None and budget < room:
        room, source = budget, "of agent.memory_budget_bytes"
    if needed <= room:
        return ""
    return (
        f"{what} would take {needed / _GIB:.3g} GiB of this node's memory, and {room / _GIB:.3g} GiB are there for it "
        f"({source})"
    )
