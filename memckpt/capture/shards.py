"""Modules that temporarily replace shards by whole parameters, and how to put the shards back.

FSDP2 (fully_shard) and FSDP1 leave some whole parameters allocated after a forward without a backward, as in an
evaluation: by default those of the outermost module, with other settings all. The next forward uses them as they are,
so after a restore it would compute with outdated values.
"""

from __future__ import annotations

import sys
from typing import Any

from torch import nn


def _imported(module: str, name: str) -> Any:
    """A class to compare with, if its module is loaded: importing it takes a second."""
    return getattr(sys.modules.get(module), name, ())


def is_fsdp2(module: nn.Module) -> bool:
    """Whether fully_shard was applied to the module."""
    return isinstance(module, _imported("torch.distributed.fsdp", "FSDPModule"))


def fsdp1_wrappers(model: nn.Module) -> list[Any]:
    """The FullyShardedDataParallel modules of a model, outermost first."""
    kind = _imported("torch.distributed.fsdp.fully_sharded_data_parallel", "FullyShardedDataParallel")
    return [one for one in model.modules() if isinstance(one, kind)]


def put_in_place(model: nn.Module) -> None:
    """Put shards in place and free whole parameters. Every rank has to call this at the same time.

    Otherwise some ranks would gather parameters in the next forward, and wait for ranks that do not.
    """
    for module in model.modules():
        if is_fsdp2(module):
            untyped: Any = module
            untyped.reshard()
    for wrapper in fsdp1_wrappers(model):
        handle = wrapper._handle
        if handle is None or not handle.uses_sharded_strategy:
            continue
        # Before the first forward the whole parameter has no storage yet.
        if hasattr(handle.flat_param, "_full_param_padded") and not handle.needs_unshard():
            handle.reshard(free_unsharded_flat_param=True)
            handle.post_reshard()
