"""Compressors as communication hooks of DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket

from memckpt.compression.accepted import parameters_of, refuse_dtypes, refuse_group, refuse_settings
from memckpt.compression.power_sgd import PowerSgdReducer
from memckpt.compression.reduction import Bucket, Encoded, Reducer
from memckpt.compression.rounded import HalfReducer, QuantizedReducer
from memckpt.compression.sparse import RandomKReducer, TopKReducer
from memckpt.config.schema import CompressionConfig, HalfPrecision, PowerSGD, Quantized8, RandomK, TopK
from memckpt.errors import UnsupportedError, UsageError


def reducer_for(
    config: CompressionConfig, params: Iterable[torch.Tensor], group: dist.ProcessGroup | None = None
) -> Reducer:
    """The compressor of these settings.

    Args:
        config: settings.
        params: all parameters whose gradients may be averaged, in an order that is the same on all ranks.
        group: the ranks that average; None: all of the job.

    Raises:
        ConfigurationError: there is none for them.
    """
    refuse_settings(config)
    match config:
        case TopK():
            return TopKReducer(config, params, group)
        case RandomK():
            return RandomKReducer(config, params, group)
        case Quantized8():
            return QuantizedReducer(config, params, group)
        case PowerSGD():
            return PowerSgdReducer(config, params, group)
        case _:
            assert isinstance(config, HalfPrecision)
            return HalfReducer(config, params, group)


def state(config: CompressionConfig, params: Iterable[torch.Tensor], group: dist.ProcessGroup | None = None) -> Reducer:
    """State for ``DistributedDataParallel.register_comm_hook``, beside :func:`hook`.

    Args:
        config: settings of the compressor.
        params: all parameters whose gradients may be averaged, in an order that is the same on all ranks.
        group: the ranks that average; None: all of the job.

    Raises:
        ConfigurationError: there is no compressor for these settings, or `params` are no parameters.
        UnsupportedError: a parameter has a dtype that the compressor cannot take.
        UsageError: there is no process group yet, or this rank is not in `group`.
    """
    refuse_settings(config)
    found = parameters_of(params)
    refuse_dtypes(config, ((f"parameter {number}", one) for number, one in enumerate(found) if one.requires_grad))
    refuse_group(group)
    return reducer_for(config, found, group)


def of_bucket(bucket: GradBucket) -> Bucket:
    """A bucket of DDP's.

    Raises:
        UnsupportedError: its gradients are sparse.
    """
    buffer = bucket.buffer()
    if buffer.is_sparse:
        raise UnsupportedError(
            "compression: expected dense gradients, found sparse ones; set sparse=False in the model's embeddings, or "
            "leave out compression"
        )
    first = buffer.storage_offset()
    starts = [int(gradient.storage_offset() - first) for gradient in bucket.gradients()]
    flat = [buffer[at : at + one.numel()] for at, one in zip(starts, bucket.gradients(), strict=True)]
    return Bucket(bucket.parameters(), flat, buffer)


def hook(state: Reducer, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket in compressed form; for ``DistributedDataParallel.register_comm_hook``.

    Raises:
        UsageError: `state` was not made by :func:`state`, or not for the parameters of this model.
    """
    if not isinstance(state, Reducer):
        raise UsageError(
            "compression.hook: expected as its state what compression.state(config, params) returns, found "
            f"{state!r}; register_comm_hook(compression.state(config, params), compression.hook)"
        )
    mine = of_bucket(bucket)
    if not all(map(state.knows, mine.params)):
        raise UsageError(
            "compression.hook: expected gradients of the parameters that compression.state() was given, found those of "
            "another model; make the state from the parameters of the model that DistributedDataParallel has now"
        )
    buffer = mine.buffer
    done = state.average(mine, bucket.is_last())

    def averaged(done: torch.futures.Future[Encoded]) -> torch.Tensor:
        done.value()  # raises if the reduction failed
        return buffer

    return done.then(averaged)


# Torch compares the annotations with its own classes, and does not resolve strings.
hook.__annotations__.clear()
