"""Compressors as communication hooks of DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import GradBucket

from memckpt.compression.reducers import HalfReducer, PowerSgdReducer, QuantizedReducer, RandomKReducer, TopKReducer
from memckpt.compression.reduction import Averaged, Bucket, Reducer
from memckpt.config import CompressionConfig, HalfPrecision, PowerSGD, Quantized8, RandomK, TopK
from memckpt.errors import ConfigurationError, UnsupportedError, UsageError

_REDUCERS: dict[type, type[Reducer]] = {
    TopK: TopKReducer,
    RandomK: RandomKReducer,
    Quantized8: QuantizedReducer,
    PowerSGD: PowerSgdReducer,
    HalfPrecision: HalfReducer,
}
_WIDE = (torch.float32, torch.float64)
_NARROW = (torch.float16, torch.bfloat16)


def reducer_for(
    config: CompressionConfig, params: Iterable[torch.Tensor], group: dist.ProcessGroup | None = None
) -> Reducer:
    """The compressor of these settings, with arguments as for :func:`state`. Raises ConfigurationError."""
    return _kind_of(config)(config, params, group)


def _kind_of(config: object) -> type[Reducer]:
    if type(config) not in _REDUCERS:
        raise ConfigurationError(
            "compression: expected a TopK, RandomK, Quantized8, PowerSGD or HalfPrecision object such as "
            f"TopK(ratio=0.01), found {config!r}"
        )
    return _REDUCERS[type(config)]


def state(config: CompressionConfig, params: Iterable[torch.Tensor], group: dist.ProcessGroup | None = None) -> Reducer:
    """State for ``DistributedDataParallel.register_comm_hook``, beside :func:`hook`.

    `params`: all parameters whose gradients may be averaged, in an order that is the same on all ranks. `group`: the
    ranks that average; None: all of the job.

    Raises ConfigurationError if there is no compressor for these settings, or `params` are no parameters.
    UnsupportedError if one has a dtype that it cannot take; UsageError without a process group with this rank.
    """
    kind, found = _kind_of(config), _parameters_of(params)
    refuse_dtypes(config, ((f"parameter {number}", one) for number, one in enumerate(found) if one.requires_grad))
    _refuse_group(group)
    return kind(config, found, group)


def of_bucket(bucket: GradBucket) -> Bucket:
    """A bucket of DDP's. Raises UnsupportedError if its gradients are sparse."""
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

    Raises UsageError if `state` was not made by :func:`state`, or not for the parameters of this model.
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

    def averaged(done: torch.futures.Future[Averaged]) -> torch.Tensor:
        done.value()  # raises if the reduction failed
        return buffer

    return done.then(averaged)


# Torch compares the annotations with its own classes, and does not resolve strings.
hook.__annotations__.clear()


# What compressors do not take


def refuse_dtypes(config: CompressionConfig, params: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Raise UnsupportedError for the first parameter, given with its name, of a dtype that a compressor cannot take."""
    narrows = isinstance(config, HalfPrecision)
    for name, param in params:
        if param.dtype in _WIDE or (param.dtype in _NARROW and not narrows):
            continue
        expected = "float32 or float64" if narrows else "float32, float64, float16 or bfloat16"
        reason = ", whose gradients take 16 bits already" if param.dtype in _NARROW else ""
        raise UnsupportedError(
            f"compression={type(config).__name__}: expected parameters in {expected}, found {name} in "
            f"{str(param.dtype).removeprefix('torch.')}{reason}; leave out compression, or freeze or convert it"
        )


def refuse_sparse(model: nn.Module) -> None:
    """Raise UnsupportedError for the first embedding with sparse gradients."""
    for name, module in model.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse and module.weight.requires_grad:
            raise UnsupportedError(
                f"compression: expected dense gradients, found sparse ones of {name or 'the model'} "
                f"({type(module).__name__} with sparse=True); set sparse=False, or leave out compression"
            )


def _parameters_of(params: object) -> list[torch.Tensor]:
    """The parameters in an iterable of tensors; raises ConfigurationError if it is none."""
    remedy = "give the parameters themselves: [param for param in model.parameters() if param.requires_grad]"
    if isinstance(params, (nn.Module, torch.Tensor)) or not isinstance(params, Iterable):
        raise ConfigurationError(f"compression.state(): expected parameters, found a {type(params).__name__}; {remedy}")
    found = list(params)
    for one in found:
        if not isinstance(one, torch.Tensor):
            raise ConfigurationError(
                f"compression.state(): expected parameters, found a {type(one).__name__} among them; {remedy}"
            )
    if not found:
        raise ConfigurationError(
            f"compression.state(): expected at least one parameter, found none (a generator is empty once it was "
            f"used); {remedy}"
        )
    return found


def _refuse_group(group: object) -> None:
    """Raise UsageError for a group that does not exist, or that this rank is not in; None: that of the whole job."""
    if not (dist.is_available() and dist.is_initialized()):
        raise UsageError(
            "compression: expected a process group, over whose ranks gradients are averaged, found none; call "
            "torch.distributed.init_process_group() first"
        )
    if group is not None and (not isinstance(group, dist.ProcessGroup) or dist.get_rank(group) < 0):
        raise UsageError(
            f"compression: expected a process group with this rank in it, or None for all ranks, found {group!r}; give "
            "the one that the DistributedDataParallel was given"
        )
