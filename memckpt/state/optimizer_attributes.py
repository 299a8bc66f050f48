"""Attributes of a live optimizer, and copies of them: what a sibling does when it steps, it does to its own."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch.optim import Optimizer

from memckpt.errors import UnsupportedError
from memckpt.state import codec

#: Attributes that torch sets, its schedulers and gradient scaler among them.
_NOT_OURS = (
    "_opt_called",
    "_warned_capturable",
    "_zero_grad_profile_name",
    "_step_count",
    "grad_scale",
    "found_inf",
)


def own_attributes(optimizer: Optimizer) -> dict[str, Any]:
    """The instance attributes that belong to the optimizer itself: no hooks, no state, no groups, nothing callable."""
    return {
        name: value
        for name, value in vars(optimizer).items()
        if name not in ("state", "param_groups")
        and not name.endswith("_hooks")
        and not name.startswith(_NOT_OURS)
        and not callable(value)
    }


def attributes(optimizer: Optimizer) -> tuple[dict[str, Any], list[str]]:
    """Instance attributes that another process can be given, and the names of those it cannot.

    Hooks, the state and the groups are left out on purpose; so are methods that a scheduler has wrapped.
    """
    kept: dict[str, Any] = {}
    dropped: list[str] = []
    for name, value in own_attributes(optimizer).items():
        if codec.unencodable_paths(value):
            dropped.append(name)
        else:
            kept[name] = value
    return kept, dropped


def private_attributes(optimizer: Optimizer, stand_ins: dict[int, torch.nn.Parameter] | None = None) -> dict[str, Any]:
    """Copies of the instance attributes that share nothing with the optimizer.

    Args:
        stand_ins: by identity, what stands for parameters that attributes refer to; others become empty ones.

    Raises:
        UnsupportedError: one of them cannot be copied.
    """
    memo: dict[int, Any] = {}
    for group in optimizer.param_groups:
        for param in group["params"]:
            # Never the live one: a step would change it. Nor a copy of all of the model.
            memo[id(param)] = (stand_ins or {}).get(id(param), torch.nn.Parameter(torch.empty(0)))
    copies = {}
    for name, value in own_attributes(optimizer).items():
        try:
            copies[name] = copy.deepcopy(value, memo)
        except Exception as error:
            raise UnsupportedError(
                f"attribute {name!r} of {type(optimizer).__qualname__} cannot be copied ({type(error).__name__}: "
                f"{error}), so that its steps cannot be tried on copies"
            ) from error
    return copies
