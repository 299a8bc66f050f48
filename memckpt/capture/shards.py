"""Modules that put whole parameters in the places of shards for a while, and how to have the shards back.

Both FSDP2 (fully_shard) and FSDP1 leave some whole parameters allocated behind a forward without a backward, an
evaluation: the outermost module's by default, all with other settings. The next forward takes them as they are, so
after a restore it would compute with what was restored over.
"""

from __future__ import annotations

import sys
from typing import Any

from torch import nn


def _imported(module: str, name: str) -> Any:
    """A class to compare with; to import it would take a second of those who do not use it."""
    return getattr(sys.modules.get(module), name, ())


def is_fsdp2(module: nn.Module) -> bool:
    """Whether fully_shard was applied to it."""
    return isinstance(module, _imported("torch.distributed.fsdp", "FSDPModule"))


def fsdp1_wrappers(model: nn.Module) -> list[Any]:
    """The FullyShardedDataParallel modules of a model, outermost first."""
    kind = _imported("torch.distributed.fsdp.fully_sharded_data_parallel", "FullyShardedDataParallel")
    return [one for one in model.modules() if isinstance(one, kind)]


def put_in_place(model: nn.Module) -> None:
    """Have shards in their places, and whole parameters freed. Every rank has to do it at the same time.

    Else some would gather parameters in the next forward, and wait for those that need not.
    """
    for module in model.modules():
        if is_fsdp2(module):
            untyped: Any = module
            untyped.reshard()
    for wrapper in fsdp1_wrappers(model):
        handle = wrapper._handle
        if handle is None or not handle.uses_sharded_strategy:
            continue
        # Before the first forward there is no room for the whole one yet.
        if hasattr(handle.flat_param, "_full_param_padded") and not handle.needs_unshard():
            handle.reshard(free_unsharded_flat_param=True)
            handle.post_reshard()
