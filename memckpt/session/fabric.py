"""What Lightning Fabric has wrapped: `setup()` returns models, optimizers and loaders of its own classes.

The classes are known by name, since Fabric need not be installed, and comes under two package names.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from memckpt.errors import UnsupportedError

_SUPPORTED = ("SingleDeviceStrategy", "DDPStrategy", "ModelParallelStrategy", "FSDPStrategy")
#: They derive from the supported ones without behaving like them.
_UNSUPPORTED = ("DeepSpeedStrategy", "SingleDeviceXLAStrategy")


def bare_model(model: nn.Module) -> tuple[nn.Module, DistributedDataParallel | None]:
    """The model inside of Fabric's wrapper and of DistributedDataParallel, and the latter.

    A model sharded by FSDP1 keeps its outermost wrapper, which manages its parameters.

    Raises:
        UnsupportedError: Fabric trains it by another strategy.
    """
    wrapper: Any = _uncompiled(model)
    if _is(wrapper, "_FabricModule"):
        _refuse(wrapper._strategy)
        model = wrapper._forward_module
        compiled = _uncompiled(model)
        model = compiled if isinstance(compiled, DistributedDataParallel) else model
    if not isinstance(model, DistributedDataParallel):
        return model, None
    inner: nn.Module = model.module
    return inner, model


def bare_optimizer(optimizer: Optimizer) -> Optimizer:
    """The optimizer inside of Fabric's wrapper."""
    if _is(optimizer, "_FabricOptimizer"):
        inner: Optimizer = optimizer._optimizer  # type: ignore[attr-defined]  # of Fabric's class
        return inner
    return optimizer


def bare_loader(loader: Any) -> tuple[Any, Any]:
    """The loader inside of Fabric's wrapper, and the wrapper, which counts iterations; else `loader` and None."""
    return (loader._dataloader, loader) if _is(loader, "_FabricDataLoader") else (loader, None)


def _is(found: object, name: str) -> bool:
    # Fabric derives the class of each optimizer from its own.
    return any(each.__name__ == name for each in type(found).__mro__)


def _uncompiled(model: nn.Module) -> nn.Module:
    inner = getattr(model, "_orig_mod", model)
    return inner if isinstance(inner, nn.Module) else model


def _refuse(strategy: object) -> None:
    names = {each.__name__ for each in type(strategy).__mro__}
    if names.isdisjoint(_SUPPORTED) or not names.isdisjoint(_UNSUPPORTED):
        raise UnsupportedError(
            f"expected a Fabric strategy of {', '.join(_SUPPORTED)}, found {type(strategy).__name__}; use one of them "
            "(ModelParallelStrategy for a model larger than a device), or train without memckpt"
        )
