"""Ranks that hold the same shards, and refusals of trainings that cannot be protected."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from fnmatch import fnmatchcase

import msgspec
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from memckpt.capture import flat_parameters
from memckpt.capture.live_state import LiveState
from memckpt.capture.taps.ddp import LOCAL_STEPS, refuse_local_sgd
from memckpt.errors import UnsupportedError
from memckpt.recovery.restore import replica_digest
from memckpt.session.ranks import Ranks
from memckpt.state.tensors import is_dtensor


def refuse_unordered(
    model: nn.Module, optimizers: Sequence[Optimizer], data_parallel: DistributedDataParallel | None
) -> None:
    """Refuse trainings that do not synchronize all ranks in every record.

    Gradients of a record on one rank have to imply that every rank has committed the record before it. Nodes agree on
    the record to restore by that.

    Raises:
        UnsupportedError: with the reason and the remedy.
    """
    for optimizer in optimizers:
        if type(optimizer).__name__ == "PostLocalSGDOptimizer":
            raise UnsupportedError(f"local SGD (PostLocalSGDOptimizer): {LOCAL_STEPS}")
    # A stage itself is no module.
    parts = model.modules() if isinstance(model, nn.Module) else [model]
    if any(type(one).__module__.startswith("torch.distributed.pipelining") for one in parts):
        raise UnsupportedError(
            "a pipeline stage: ranks of different stages are reduced apart, so that one may be steps ahead of another; "
            "expected a model that every rank runs as a whole (DistributedDataParallel, fully_shard, tensor parallel)"
        )
    if data_parallel is not None:
        for hook in getattr(data_parallel, "_comm_hooks", []):
            refuse_local_sgd(*hook)


def refuse_few_slots(slots: int, ranks: Ranks) -> None:
    """Refuse too few records in flight for several ranks.

    Raises:
        UnsupportedError: there are fewer than three.
    """
    if ranks.world_size > 1 and slots < 3:
        raise UnsupportedError(
            f"slots: expected 3 or more with several ranks (their commits differ by one), found {slots}"
        )


def refuse_uneven(data_parallel: DistributedDataParallel | None) -> None:
    """Refuse uneven inputs, which only a batch shows.

    Raises:
        UnsupportedError: the model is in a ``join`` context.
    """
    config = getattr(data_parallel, "_join_config", None)
    if config is not None and config.enable:
        raise UnsupportedError(
            "uneven inputs (join): a rank that has run out of data commits no more, so that the others get ahead of "
            "it; expected as many batches on every rank: drop the last ones (drop_last=True, or a sampler that pads)"
        )


def find_replicas(
    live: LiveState, ranks: Ranks, data_parallel: DistributedDataParallel | None, replicated: Sequence[str]
) -> None:
    """Group the ranks by the shards that they hold, from the placements of DTensors; collective.

    Args:
        live: the live state.
        ranks: gets the groups.
        data_parallel: the DDP wrapper; None without one.
        replicated: patterns of names of plain parameters that are equal on all ranks of a sharded job. Other plain
            parameters count as a rank's own.

    Raises:
        UnsupportedError: the ranks are neither replicas nor shards of one job.
    """
    pieces = live.pieces()
    flattened = flat_parameters.is_flattened(live.model)
    ranks.together(lambda: flat_parameters.check(live.model, ranks.world_size))
    if ranks.world_size == 1:
        return
    kinds = ranks.gather((flattened, bool(pieces)))
    if any(flat and cut for flat, cut in kinds) or len({flat for flat, _ in kinds}) > 1:
        raise UnsupportedError(
            "FullyShardedDataParallel (FSDP1) beside DTensors, or on some ranks only: expected one way to shard; "
            "apply fully_shard (FSDP2), which goes together with tensor parallelism"
        )
    if flattened:
        # Pieces of flat parameters are no part of any tensor that another rank knows.
        ranks.share(f"rank {ranks.rank}")
        return
    if not any(cut for _, cut in kinds):
        if data_parallel is None:
            raise UnsupportedError(
                f"{ranks.world_size} ranks without DistributedDataParallel and without sharded parameters: expected "
                "the DDP wrapper as data_parallel (or as the model itself), or a model that fully_shard, "
                "parallelize_module or FullyShardedDataParallel was applied to, so that records hold synchronized "
                "gradients; several ranks with models of their own, as in pipeline stages, are not supported"
            )
        return
    if data_parallel is not None:
        raise UnsupportedError(
            "DistributedDataParallel around sharded parameters: expected fully_shard with a mesh of two dimensions "
            "(replicate, shard), which reduces both ways"
        )
    _refuse_partial_meshes(live, ranks)
    whole = live.whole_parameters()
    declared = {name: one for name, one in whole.items() if any(fnmatchcase(name, pattern) for pattern in replicated)}
    _refuse_differing(declared, ranks)
    private = len(declared) < len(whole)
    # A rank with parameters of its own shares nothing.
    held = (pieces, ranks.rank if private else -1)
    ranks.share(hashlib.blake2b(msgspec.msgpack.encode(held), digest_size=16).hexdigest())


def find_own_buffers(live: LiveState, ranks: Ranks) -> set[str]:
    """Names of large buffers that differ between ranks, and so cannot be static, held once a node; collective."""
    if ranks.world_size == 1:
        return set()
    own = {name: replica_digest([tensor], []) for name, tensor in live.large_buffers().items()}
    everybody = ranks.gather(own)
    return {name for name, digest in own.items() if any(each.get(name) != digest for each in everybody)}


def _refuse_partial_meshes(live: LiveState, ranks: Ranks) -> None:
    reached: set[int] = set()
    for tensor in live.tensors().values():
        if is_dtensor(tensor):
            reached |= {int(rank) for rank in tensor.device_mesh.mesh.flatten()}
    missing = sorted(set(range(ranks.world_size)) - reached)
    problem = f"rank {ranks.rank} shares no tensor with the ranks {missing}" if missing else ""
    found = next((each for each in ranks.gather(problem) if each), "")
    if found:
        raise UnsupportedError(
            f"device meshes that do not cover the job: {found}, as in pipeline stages, whose ranks may be steps apart; "
            "expected every rank on the mesh of the model"
        )


def _refuse_differing(declared: dict[str, torch.Tensor], ranks: Ranks) -> None:
    digests = ranks.gather({name: replica_digest([tensor], []) for name, tensor in declared.items()})
    differing = [name for name in declared if len({each.get(name) for each in digests}) > 1]
    if differing:
        raise UnsupportedError(
            f"replicated: expected {differing[0]} to be the same on all ranks, found other values on some; "
            "broadcast it first, or leave it out: then each rank's own is kept"
        )
