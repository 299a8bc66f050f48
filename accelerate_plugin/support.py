"""What the plugin refuses, by name and with the reason, and what it finds among the prepared objects."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from accelerate.utils import DistributedType
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from memckpt.errors import UnsupportedError, UsageError

_SUPPORTED = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)
_REASONS = {
    DistributedType.FSDP: "a rank's parameters are shards there, and sharded state is not in this version",
    DistributedType.DEEPSPEED: "DeepSpeed's engine owns parameters, optimizer and the step itself",
    DistributedType.MEGATRON_LM: "Megatron-LM cuts the model over ranks, and sharded state is not in this version",
    DistributedType.XLA: "XLA defers what a step does until after the place where it could be recorded",
}
_PREPARE = "model, optimizer, loader, scheduler = ckpt.prepare(model, optimizer, loader, scheduler)"


def refuse(accelerator: Accelerator) -> None:
    """Raise for an Accelerator whose training cannot be protected.

    Raises:
        UnsupportedError: its distributed type, by name, with the reason.
    """
    found = accelerator.distributed_type
    if found not in _SUPPORTED:
        raise UnsupportedError(
            f"expected distributed type {', '.join(each.value for each in _SUPPORTED)}, found {found.value}: "
            f"{_REASONS.get(found, 'it has not been tried')}. Train without it, or without MemCheckpointPlugin"
        )
    parallelism = getattr(accelerator, "parallelism_config", None)
    if parallelism is not None and (parallelism.tp_enabled or parallelism.cp_enabled):
        raise UnsupportedError(
            "expected data parallelism alone, found a parallelism_config with tensor or context parallelism: a rank's "
            "parameters are shards there, and sharded state is not in this version"
        )


def require_training(objects: Sequence[Any]) -> None:
    """Raise UsageError where there is nothing to train among the arguments of `prepare`."""
    models = sum(isinstance(each, nn.Module) for each in objects)
    optimizers = sum(isinstance(each, Optimizer) for each in objects)
    if not models or not optimizers:
        raise UsageError(
            f"prepare(): expected a model and its optimizer among the arguments, found {models} model(s) and "
            f"{optimizers} optimizer(s); call {_PREPARE}"
        )


@dataclass(frozen=True)
class Prepared:
    """What `accelerator.prepare` has returned, by kind, in the order in which it was given.

    Attributes:
        models: as the user has them, wrapped or not.
        bare: the same without any wrapper.
        data_parallel: the one DDP wrapper, None without.
    """

    models: list[nn.Module]
    bare: list[nn.Module]
    data_parallel: DistributedDataParallel | None
    optimizers: list[AcceleratedOptimizer]
    schedulers: list[AcceleratedScheduler]
    loaders: list[Any]

    @property
    def model(self) -> nn.Module:
        """All models as one: names of parameters begin with a model's number where there are several."""
        return self.bare[0] if len(self.bare) == 1 else nn.ModuleList(self.bare)

    @property
    def torch_optimizers(self) -> list[Optimizer]:
        return [each.optimizer for each in self.optimizers]


def sort_prepared(accelerator: Accelerator, objects: Sequence[Any]) -> Prepared:
    """Raises UnsupportedError for several DDP models."""
    models = [each for each in objects if isinstance(each, nn.Module)]
    wrappers = [each for model in models for each in _data_parallel(model)]
    if len(wrappers) > 1:
        raise UnsupportedError(
            f"expected one model with trainable parameters under DistributedDataParallel, found {len(wrappers)}: "
            "records of two reductions have no common order; train one of them, or on one process"
        )
    return Prepared(
        models,
        [accelerator.unwrap_model(model, keep_torch_compile=False) for model in models],
        wrappers[0] if wrappers else None,
        [each for each in objects if isinstance(each, AcceleratedOptimizer)],
        [each for each in objects if isinstance(each, AcceleratedScheduler)],
        list({id(each): each for each in objects if isinstance(each, DataLoader)}.values()),  # one may be given twice
    )


def _data_parallel(model: nn.Module) -> Iterator[DistributedDataParallel]:
    compiled = getattr(model, "_orig_mod", None)  # torch.compile
    inner = compiled if isinstance(compiled, nn.Module) else model
    if isinstance(inner, DistributedDataParallel):
        yield inner
