"""Presence and kind of each parameter's gradient between two steps: optimizers treat None and zeros differently.

After ``zero_grad(set_to_none=False)`` a parameter that a batch does not use has a gradient of zeros, and its optimizer
steps it (decay, momentum). A parameter whose gradient is None is not stepped. So a resume puts zeros where there was a
gradient. Its values do not matter at a restore point: it has been used, and is about to be zeroed.
"""

from __future__ import annotations

from typing import Any

import torch

from memckpt.capture.live_state import LiveState
from memckpt.state.optimizers import dtype_name, dtype_of
from memckpt.state.tensors import is_dtensor

#: None: no gradient. Else its layout ("dense" or "sparse"), its dtype and, if sparse, its number of sparse dimensions.
Kind = list[Any] | None


def describe_gradients(live: LiveState) -> dict[str, Any]:
    """Input of :func:`restore_gradients`, for the rank state: the common case, and exceptions by name."""
    present: list[str] = []
    absent: list[str] = []
    others: list[list[Any]] = []
    for optimizer, names in zip(live.optimizers, live.names_of_groups(), strict=True):
        for group, in_group in zip(optimizer.param_groups, names, strict=True):
            for param, name in zip(group["params"], in_group, strict=True):
                gradient = param.grad
                if gradient is None:
                    absent.append(name)
                elif gradient.dtype == param.dtype and not gradient.is_sparse:
                    present.append(name)
                else:
                    others.append([name, _kind(gradient)])
    usual = len(present) > len(absent)
    return {"usual": usual, "unusual": absent if usual else present, "others": others}


def _kind(gradient: torch.Tensor) -> Kind:
    if gradient.is_sparse:
        return ["sparse", dtype_name(gradient.dtype), gradient.sparse_dim()]
    return ["dense", dtype_name(gradient.dtype)]


@torch.no_grad()
def restore_gradients(live: LiveState, described: dict[str, Any]) -> None:
    """Give zeros to every parameter that had a gradient, and None to every other."""
    unusual = set(described["unusual"])
    others = dict(described["others"])
    for optimizer, names in zip(live.optimizers, live.names_of_groups(), strict=True):
        for group, in_group in zip(optimizer.param_groups, names, strict=True):
            for param, name in zip(group["params"], in_group, strict=True):
                if name in others:
                    param.grad = _zeros(param, others[name])
                elif described["usual"] != (name in unusual):
                    param.grad = torch.zeros_like(param)
                else:
                    param.grad = None


def _zeros(param: torch.Tensor, kind: Kind) -> torch.Tensor | None:
    if kind is None:
        return None
    dtype = dtype_of(kind[1])
    if kind[0] == "dense" or is_dtensor(param):
        return torch.zeros_like(param, dtype=dtype)
    dims = kind[2]
    return torch.sparse_coo_tensor(
        torch.empty((dims, 0), dtype=torch.int64, device=param.device),
        torch.empty((0, *param.shape[dims:]), dtype=dtype, device=param.device),
        param.shape,
        is_coalesced=True,
        check_invariants=False,
    )
