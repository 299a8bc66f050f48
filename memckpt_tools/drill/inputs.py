"""What the model is given, and the loaders that data come from: by these a difference is traced to the data."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import xxhash
from torch import nn
from torch.utils.data import DataLoader

from memckpt.capture.digests import digest, on_host, sums


class InputTap:
    """Digests of the tensors that the first module called in a step is given, while it trains.

    Args:
        model: hooks are registered on it and its modules until the first step is over, then on one of them.
    """

    def __init__(self, model: nn.Module) -> None:
        self._entry: nn.Module | None = None
        self._noted: list[str] = []
        self._handles = {
            id(module): module.register_forward_pre_hook(self._called, with_kwargs=True) for module in model.modules()
        }

    def _called(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling() or not module.training or not torch.is_grad_enabled():
            return
        if self._entry is None:
            self._entry = module
        if module is self._entry:
            found = xxhash.xxh3_128()
            for tensor in _tensors((args, kwargs)):
                here = tensor.detach()
                found.update(digest(here) if on_host(here) else sums(here).cpu().numpy().tobytes())
            self._noted.append(found.hexdigest())

    def take(self) -> dict[str, str]:
        """Digests since the last call, by the name of the module that was called."""
        noted, self._noted = self._noted, []
        if self._entry is None:
            return {}
        for key in [key for key in self._handles if key != id(self._entry)]:
            self._handles.pop(key).remove()
        return {f"of {type(self._entry).__qualname__}": ".".join(noted)}

    def close(self) -> None:
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        if value.layout is torch.strided:
            yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _tensors(each)
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _tensors(each)


def loaders() -> tuple[str, ...]:
    """The loaders that are alive, each by its dataset and number of workers."""
    found = set()
    for each in gc.get_objects():
        if issubclass(type(each), DataLoader):
            dataset, workers = each.dataset, each.num_workers
            while type(dataset).__module__.startswith("torch.") and hasattr(dataset, "dataset"):
                dataset = dataset.dataset  # a Subset's
            found.add(f"{type(dataset).__qualname__} ({workers} worker{'' if workers == 1 else 's'})")
    return tuple(sorted(found))
