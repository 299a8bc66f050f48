"""Conversion of a state that needs redo, or has several parts, into a checkpoint of its own."""

from __future__ import annotations

import time

import msgspec

from memckpt.recovery.from_storage import StoredState
from memckpt.recovery.host_state import HostState
from memckpt.state.spec import ParamSpec, StateSpec, TensorSpec
from memckpt.storage.base import StoredNames, write_base
from memckpt.storage.catalog import Checkpoint
from memckpt.storage.chain import StoredPoint
from memckpt.storage.format import FORMAT_VERSION, decode_node_state
from memckpt.storage.store import Store


def as_checkpoint(store: Store, point: StoredPoint, into: Store) -> Checkpoint:
    """Write a state that needs redo as a checkpoint of its own: rank 0's, with whole tensors.

    Args:
        store: the store that can produce the state.
        point: the state, verified.
        into: the store for the checkpoint.
    """
    part = point.checkpoint.part_serving(0)
    spec = unsharded(decode_node_state(store.read(part.state_path)).spec)
    stored = StoredState(store, point, 0, spec)
    host = HostState(spec, by_value=True)
    stored.restore(host.tensors, host.optimizers, host.build)
    tensors, state = host.described({0: stored.rank_state})
    names = StoredNames(spec)
    tensors |= {names.by_value(one, 0): host.tensors[one.name] for one in spec.by_value}
    written = msgspec.structs.replace(
        part,
        format=FORMAT_VERSION,
        timeline=point.timeline,
        record=point.record,
        step=point.step,
        created=time.time(),
        world_size=1,
        ranks=(0,),
        serves=(0,),
        content=spec.content(),
    )
    written = write_base(into, written, state, tensors)
    return Checkpoint(point.timeline, point.record, {part.node: written})


def unsharded(spec: StateSpec) -> StateSpec:
    """The spec of a single rank that holds the whole of each tensor of this state."""
    replace = msgspec.structs.replace

    def tensor(one: TensorSpec) -> TensorSpec:
        return replace(one, shape=one.whole_shape, shard=None)

    def param(one: ParamSpec) -> ParamSpec:
        shape = one.tensor.whole_shape
        owners = tuple(
            replace(
                owner, state=tuple(replace(each, shape=shape) if each.elementwise else each for each in owner.state)
            )
            for owner in one.owners
        )
        return replace(one, tensor=tensor(one.tensor), owners=owners)

    return replace(
        spec,
        params=tuple(param(one) for one in spec.params),
        static=tuple(tensor(one) for one in spec.static),
        by_value=tuple(tensor(one) for one in spec.by_value),
        local_ranks=(0,),
        world_size=1,
        replicas=(),
    )
