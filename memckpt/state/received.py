"""Layouts that come from other nodes: read, and refused where nothing could be laid out by them."""

from __future__ import annotations

from math import prod

import msgspec

from memckpt.state.layout import ITEM_BYTES, StateSpec, StateTensorSpec, TensorSpec

#: More than any node has: memory in bytes, and how many of anything.
_MOST_BYTES = 1 << 50
_MOST = 1 << 20


def read_spec(data: bytes) -> StateSpec:
    """What a layout is made from, of which one can be made.

    Raises:
        ValueError: it is not.
    """
    spec = msgspec.msgpack.decode(data, type=StateSpec)  # msgspec's error is a ValueError, as that of text
    problem = _problem(spec)
    if problem:
        raise ValueError(f"expected what a layout can be made from, found {problem}")
    return spec


def _problem(spec: StateSpec) -> str:
    for name in ("period", "slots", "every", "world_size"):
        if not 1 <= getattr(spec, name) <= _MOST:
            return f"{name}={getattr(spec, name)}"
    if not 0 <= spec.by_value_slots <= _MOST:
        return f"by_value_slots={spec.by_value_slots}"
    if not {*spec.shared} <= {one.name for one in spec.by_value}:
        return f"shared={spec.shared} that are not by value"
    ranks = {*spec.local_ranks, *spec.replicas}
    if not spec.local_ranks or min(ranks) < 0 or max(ranks) >= spec.world_size:
        return f"local_ranks={spec.local_ranks}, replicas={spec.replicas} of {spec.world_size} ranks"
    if any(not 0 <= one.sub_steps <= _MOST for one in spec.optimizers):
        return "a number of an optimizer's steps that cannot be"
    states = [state for param in spec.params for owner in param.owners for state in owner.state]
    tensors: list[TensorSpec | StateTensorSpec] = [*spec.tensors(), *states]
    for one in tensors:
        if one.dtype not in ITEM_BYTES or any(length < 0 for length in one.shape):
            return f"{one}"
    indices = [owner.optimizer for param in spec.params for owner in param.owners]
    if any(not 0 <= index < len(spec.optimizers) for index in indices):
        return f"a parameter of optimizer {max(indices)} of {len(spec.optimizers)}"
    if any(param.grad_dtype not in ITEM_BYTES for param in spec.params):
        return "gradients of an unknown dtype"
    if any(not 0 <= param.sparse_bytes <= _MOST_BYTES for param in spec.params):
        return "a sparse gradient of a size that cannot be"
    if sum(prod(one.shape) * ITEM_BYTES[one.dtype] for one in tensors) > _MOST_BYTES:
        return "more bytes of tensors than can be"
    pieces = [(one.name, one.shape) for one in spec.tensors() if one.shard is not None]
    return "a piece of a tensor twice" if len(set(pieces)) < len(pieces) else ""
