"""Compressors as communication hooks of DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket

from memckpt.compression.power_sgd import PowerSgdReducer
from memckpt.compression.reduction import Bucket, Encoded, Reducer
from memckpt.compression.rounded import HalfReducer, QuantizedReducer
from memckpt.compression.sparse import RandomKReducer, TopKReducer
from memckpt.config.compression import CompressionConfig, HalfPrecision, PowerSGD, Quantized8, RandomK, TopK
from memckpt.errors import ConfigurationError


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
    match config:
        case TopK():
            return TopKReducer(config, params, group)
        case RandomK():
            return RandomKReducer(config, params, group)
        case Quantized8():
            return QuantizedReducer(config, params, group)
        case PowerSGD():
            return PowerSgdReducer(config, params, group)
        case HalfPrecision():
            return HalfReducer(config, params, group)
        case _:
            raise ConfigurationError(
                f"compression: expected TopK, RandomK, Quantized8, PowerSGD or HalfPrecision, found {config!r}"
            )


def state(config: CompressionConfig, params: Iterable[torch.Tensor], group: dist.ProcessGroup | None = None) -> Reducer:
    """State for ``DistributedDataParallel.register_comm_hook``, beside :func:`hook`; as :func:`reducer_for`."""
    return reducer_for(config, params, group)


def of_bucket(bucket: GradBucket) -> Bucket:
    """A bucket of DDP's."""
    buffer = bucket.buffer()
    first = buffer.storage_offset()
    starts = [int(gradient.storage_offset() - first) for gradient in bucket.gradients()]
    flat = [buffer[at : at + one.numel()] for at, one in zip(starts, bucket.gradients(), strict=True)]
    return Bucket(bucket.parameters(), flat, buffer)


def hook(state: Reducer, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket in compressed form; for ``DistributedDataParallel.register_comm_hook``."""
    buffer = bucket.buffer()
    done = state.average(of_bucket(bucket), bucket.is_last())

    def averaged(done: torch.futures.Future[Encoded]) -> torch.Tensor:
        done.value()  # raises if the reduction failed
        return buffer

    return done.then(averaged)


# Torch compares the annotations with its own classes, and does not resolve strings.
hook.__annotations__.clear()
