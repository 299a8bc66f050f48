"""Input that compressors take: parameters of certain types, with dense gradients, averaged over a process group."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn

from memckpt.config.schema import CompressionConfig, HalfPrecision, PowerSGD, Quantized8, RandomK, TopK
from memckpt.errors import ConfigurationError, UnsupportedError, UsageError

_WIDE = (torch.float32, torch.float64)
_NARROW = (torch.float16, torch.bfloat16)


def refuse_settings(config: object) -> None:
    """Refuse what is no compressor's settings.

    Raises:
        ConfigurationError: it is something else.
    """
    if not isinstance(config, (TopK, RandomK, Quantized8, PowerSGD, HalfPrecision)):
        raise ConfigurationError(
            "compression: expected a TopK, RandomK, Quantized8, PowerSGD or HalfPrecision object such as "
            f"TopK(ratio=0.01), found {config!r}"
        )


def refuse_dtypes(config: CompressionConfig, params: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Refuse parameters of a dtype that the compressor cannot take.

    Args:
        config: settings of the compressor.
        params: names, for the message, and parameters.

    Raises:
        UnsupportedError: it names the first one.
    """
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
    """Refuse embeddings with sparse gradients.

    Raises:
        UnsupportedError: it names the first one.
    """
    for name, module in model.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse and module.weight.requires_grad:
            raise UnsupportedError(
                f"compression: expected dense gradients, found sparse ones of {name or 'the model'} "
                f"({type(module).__name__} with sparse=True); set sparse=False, or leave out compression"
            )


def parameters_of(params: object) -> list[torch.Tensor]:
    """The parameters whose gradients may be averaged, from an iterable of tensors.

    Raises:
        ConfigurationError: it is none.
    """
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


def refuse_group(group: object) -> None:
    """Refuse a process group that does not exist, or that this rank is not in; None: that of the whole job.

    Raises:
        UsageError: it is one of these.
    """
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
