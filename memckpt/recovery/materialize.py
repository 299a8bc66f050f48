"""A state that has to be redone, or put together from several parts, as a checkpoint of its own."""

from __future__ import annotations

import time

import msgspec

from memckpt.recovery.from_storage import StoredState
from memckpt.recovery.host_state import HostState
from memckpt.state.layout import whole
from memckpt.storage.base import StoredNames, write_base
from memckpt.storage.catalog import Checkpoint
from memckpt.storage.chain import StoredPoint
from memckpt.storage.format import decode_node_state
from memckpt.storage.store import Store


def as_checkpoint(store: Store, point: StoredPoint, into: Store) -> Checkpoint:
    """Write a state that has to be redone as a checkpoint of its own: that of the first rank.

    Args:
        store: which can produce it.
        point: the state, verified.
        into: another store, for the checkpoint.
    """
    part = point.checkpoint.full_part()
    rank = part.ranks[0]
    stored = StoredState(store, point, rank)
    spec = stored.state.spec
    host = HostState(spec, by_value=True)
    stored.restore(host.tensors, host.optimizers, host.build)
    tensors, state = host.described({rank: stored.rank_state})
    for one in spec.by_value:
        tensors[by_value_name(one.name, rank, spec.local_ranks, True)] = host.tensors[one.name]
    written = msgspec.structs.replace(
        part,
        timeline=point.timeline,
        record=point.record,
        step=point.step,
        created=time.time(),
        world_size=1,
        ranks=(rank,),
    )
    written = write_base(into, written, state, tensors)
    return Checkpoint(point.timeline, point.record, {part.node: written})
