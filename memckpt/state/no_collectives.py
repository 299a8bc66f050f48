"""Isolation of an optimizer's trial steps from other ranks."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from memckpt.errors import UnsupportedError

_COLLECTIVES = (
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "recv",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "scatter",
    "send",
)


@contextlib.contextmanager
def without_collectives() -> Iterator[None]:
    """Make this thread's calls of torch.distributed fail.

    A step that communicates cannot be redone on one rank; and in a trial it would wait for ranks that do not take part.
    """
    if not (dist.is_available() and dist.is_initialized()):
        yield
        return
    thread = threading.get_ident()

    def refusing(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() == thread:
                raise UnsupportedError("its step communicates with other ranks")
            return original(*args, **kwargs)

        return call

    # In both modules: the package re-exports the functions under names of its own.
    replaced = [(module, name, getattr(module, name)) for module in (dist, distributed_c10d) for name in _COLLECTIVES]
    for module, name, original in replaced:
        setattr(module, name, refusing(original))
    try:
        yield
    finally:
        for module, name, original in replaced:
            setattr(module, name, original)
