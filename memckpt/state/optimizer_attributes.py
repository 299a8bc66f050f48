"""Attributes of a live optimizer, and private copies of them for siblings that step."""

from __future__ import annotations

import copy
import types
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from memckpt.errors import UnsupportedError
from memckpt.state import codec

#: Attributes that torch sets, including its schedulers and gradient scaler.
_NOT_OURS = (
    "_opt_called",
    "_warned_capturable",
    "_zero_grad_profile_name",
    "_step_count",
    "grad_scale",
    "found_inf",
)


def own_attributes(optimizer: Optimizer) -> dict[str, Any]:
    """The instance attributes of the optimizer itself, without hooks, state, groups, methods and modules."""
    return {
        name: value
        for name, value in vars(optimizer).items()
        if name not in ("state", "param_groups")
        and not name.endswith("_hooks")
        and not name.startswith(_NOT_OURS)
        # Schedulers wrap step() in an attribute of the instance.
        and not (callable(value) and (hasattr(type(optimizer), name) or isinstance(value, types.MethodType)))
        and not isinstance(value, nn.Module)
    }


def own_modules(optimizer: Optimizer) -> dict[str, nn.Module]:
    """Attributes that are modules of other parameters than the optimizer steps."""
    stepped = {id(param) for group in optimizer.param_groups for param in group["params"]}
    return {
        name: value
        for name, value in vars(optimizer).items()
        if isinstance(value, nn.Module) and not any(id(param) in stepped for param in value.parameters())
    }


def attributes(optimizer: Optimizer) -> tuple[dict[str, Any], list[str]]:
    """Instance attributes that can be sent to another process, and the names of those that cannot.

    Hooks, state and groups are left out on purpose, as are methods that a scheduler has wrapped.
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
        stand_ins: replacements of parameters that attributes refer to, by `id`; others become empty parameters.

    Raises:
        UnsupportedError: an attribute cannot be copied.
    """
    memo: dict[int, Any] = {}
    for group in optimizer.param_groups:
        for param in group["params"]:
            # Not the live parameter, which a step would change, nor a copy, which would double the model.
            memo[id(param)] = (stand_ins or {}).get(id(param), torch.nn.Parameter(torch.empty(0)))
    copies = {}
    for name, value in own_attributes(optimizer).items():
        try:
            copies[name] = copy.deepcopy(value, memo)
        except Exception as error:
            raise UnsupportedError(
                f"attribute {name!r} of {type(optimizer).__qualname__} cannot be copied ({type(error).__name__}: "
                f"{error}), so its steps cannot be tried on copies"
            ) from error
    return copies
