"""Layouts from other nodes and from files, validated before use."""

from __future__ import annotations

from math import prod

import msgspec

from memckpt.state.encoding_spec import is_possible
from memckpt.state.spec import ITEM_BYTES, StateSpec, StateTensorSpec, TensorSpec

#: Upper bounds beyond any real node: bytes of memory, and counts of anything.
_MOST_BYTES = 1 << 50
_MOST = 1 << 20


def read_spec(data: bytes) -> StateSpec:
    """Decode a spec, and check that a layout can be made from it. Raises ValueError: it cannot."""
    try:
        spec = msgspec.msgpack.decode(data, type=StateSpec)  # msgspec's other errors are ValueErrors
    except RecursionError as error:
        raise ValueError("expected a layout spec, found lists in lists in lists") from error
    problem = problem_of(spec)
    if problem:
        raise ValueError(f"expected a valid layout spec, found {problem}")
    return spec


def problem_of(spec: StateSpec) -> str:
    """The reason why no layout can be made from a spec; empty if one can."""
    for name in ("period", "slots", "every", "world_size"):
        if not 1 <= getattr(spec, name) <= _MOST:
            return f"{name}={getattr(spec, name)}"
    if not 0 <= spec.by_value_slots <= _MOST:
        return f"by_value_slots={spec.by_value_slots}"
    if not {*spec.shared} <= {one.name for one in spec.by_value}:
        return f"shared={spec.shared} not among the by-value tensors"
    ranks = {*spec.local_ranks, *spec.replicas}
    if not spec.local_ranks or min(ranks) < 0 or max(ranks) >= spec.world_size:
        return f"local_ranks={spec.local_ranks}, replicas={spec.replicas} of {spec.world_size} ranks"
    if any(not 0 <= one.sub_steps <= _MOST for one in spec.optimizers):
        return "an impossible number of steps of an optimizer"
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
        return "an impossible size of a sparse gradient"
    if spec.encodings and len(spec.encodings) != len(spec.params):
        return f"{len(spec.encodings)} encodings of {len(spec.params)} gradients"
    for param, encoding in zip(spec.params, spec.encodings, strict=bool(spec.encodings)):
        if encoding is not None and not is_possible(encoding, param.tensor.numel, param.grad_dtype):
            return f"an impossible encoding of a gradient: {encoding}"
    if sum(prod(one.shape) * ITEM_BYTES[one.dtype] for one in tensors) > _MOST_BYTES:
        return "an impossible number of bytes of tensors"
    pieces = [(one.name, one.shape) for one in spec.tensors() if one.shard is not None]
    return "a shard of a tensor twice" if len(set(pieces)) < len(pieces) else ""
