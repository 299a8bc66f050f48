"""Exchange of slices at a restore: each tensor is broadcast from a rank whose node has it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from memckpt.capture.beside.param_groups import order_state
from memckpt.capture.live_state import LiveState, state_of
from memckpt.session.ranks import Ranks
from memckpt.session.resume.chosen import Chosen


class _Room(NamedTuple):
    """A tensor of optimizer state that another rank makes, too."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    on_host: bool


@torch.no_grad()
def exchange_slices(chosen: Chosen, live: LiveState, ranks: Ranks) -> str:
    """Take what is elsewhere from the first rank that has restored it; collective.

    Returns what is in no node's slice, in words, the same on all ranks; empty if there is nothing.
    """
    spec, tensors, optimizers = chosen.tensors_spec, live.tensors(), live.optimizers
    if spec.slice_count == 1:  # on all ranks: those that have read all slices from a store have the joined spec
        return ""
    parts = *(one.tensor for one in spec.params), *spec.static
    here = [one.name for one in (*parts, *chosen.spec.by_value) if not one.elsewhere]
    everybody = ranks.gather((here, [one.name for one in parts if one.elsewhere]))
    having = [set(names) for names, _ in everybody]
    wanted = sorted({name for _, lacking in everybody for name in lacking})
    source = {name: next((rank for rank, names in enumerate(having) if name in names), -1) for name in wanted}
    if nobody := [name for name in wanted if source[name] < 0]:
        return f"{nobody[0]} is in no node's slice"
    if not wanted:
        return ""
    mine = [name for name in wanted if source[name] == ranks.rank]
    described = ranks.gather({name: _describe_state(tensors[name], optimizers) for name in mine})
    states = {name: state for each in described for name, state in each.items()}
    group = ranks.open_groups([range(ranks.world_size)])
    for name in wanted:
        if source[name] != ranks.rank:
            _make_state(tensors[name], optimizers, states[name])
        kept = [value for each in optimizers for value in state_of(each, tensors[name]).values()]
        for tensor in (tensors[name], *(one for one in kept if isinstance(one, torch.Tensor))):
            ranks.broadcast_tensor(tensor, source[name], group)
    for optimizer in optimizers:
        for param in [one for params in optimizer.param_groups for one in params["params"]]:
            if param in optimizer.state:
                optimizer.state[param] = optimizer.state.pop(param)
    order_state(live, chosen.state)
    return ""


def _describe_state(param: torch.Tensor, optimizers: Sequence[Optimizer]) -> list[dict[str, Any]]:
    """By optimizer, the state that it keeps for a parameter: numbers and the like, and what tensors take."""
    return [
        {
            key: _Room(tuple(one.shape), one.dtype, one.device.type == "cpu") if isinstance(one, torch.Tensor) else one
            for key, one in state_of(optimizer, param).items()
        }
        for optimizer in optimizers
    ]


def _make_state(param: torch.Tensor, optimizers: Sequence[Optimizer], described: Sequence[Mapping[str, Any]]) -> None:
    """Make optimizers keep such state for a parameter; the values of tensors come later."""

    def made(value: Any) -> Any:
        if not isinstance(value, _Room):
            return value
        device = "cpu" if value.on_host else param.device
        if value.shape == param.shape:
            return torch.empty_like(param, dtype=value.dtype, device=device, requires_grad=False)
        return torch.empty(value.shape, dtype=value.dtype, device=device)

    for optimizer, state in zip(optimizers, described, strict=True):
        if state:
            optimizer.state[param] = {key: made(value) for key, value in state.items()}
