"""The Trainer's prepared loader: Accelerate's DataLoaderShard around a torch DataLoader.

The shard reads one batch ahead of what it hands out, and the Trainer takes the batches of a whole accumulation before
it trains on the first. Only the torch loader inside is touched.
"""

from __future__ import annotations

from typing import Any

import torch
from accelerate.data_loader import DataLoaderShard, SeedableRandomSampler
from torch.utils.data import DataLoader

from memckpt import dataloader
from memckpt.errors import UnsupportedError


class Follower:
    """Follows the loader inside `prepared`; `release` gives it back as it was.

    Args:
        prepared: the Trainer's.
        accumulated: how many batches the Trainer takes before it trains on the first of them.

    Raises:
        UnsupportedError: `prepared` is not a DataLoaderShard around a torch DataLoader.
    """

    def __init__(self, prepared: Any, accumulated: int) -> None:
        self._loader = _inside(prepared)
        _make_generator(self._loader)
        dataloader.graft(self._loader, lookahead=accumulated + 1)
        self._held: dict[str, Any] | None = None

    def position(self, trained: int | None) -> dict[str, Any]:
        """Where to go on, as plain values.

        Args:
            trained: how many batches of this epoch have been trained on; None: the next epoch is to begin.

        Raises:
            DataPositionError: those after them were fetched so long ago that nothing is known of it any more.
        """
        if trained is None:
            return {"between": True, "position": dataloader.position(self._loader, exhausted=True)}
        ahead = dataloader.handed_out(self._loader) - trained
        return {"between": False, "position": dataloader.position(self._loader, ahead=ahead)}

    def resume(self, held: dict[str, Any]) -> None:
        """Let the next epoch go on at the position `held`; global generators may move until training sets them.

        Raises:
            DataPositionError: see :func:`memckpt.dataloader.resume`.
        """
        self._held = held
        start = dataloader.recreate_persistent_iterator if held["between"] else dataloader.resume
        start(self._loader, held["position"])

    def go_live(self) -> None:
        """What had been fetched ahead has been fetched again: put the loader's own generators back."""
        assert self._held is not None
        dataloader.go_live(self._loader)
        # An attempt to fetch beyond the last batch may have moved them since.
        dataloader.restore_generators(self._loader, self._held["position"])

    def unreplayable(self) -> str | None:
        """One line on why this loader cannot be promised to resume exactly; None if nothing is known against it."""
        return dataloader.unreplayable(self._loader)

    def release(self) -> None:
        """Make the loader what it was."""
        dataloader.release(self._loader)


def _inside(prepared: Any) -> DataLoader[Any]:
    # Not isinstance(): Accelerate's adapters claim the class of the loader that they hold.
    if not issubclass(type(prepared), DataLoaderShard) or not isinstance(prepared.base_dataloader, DataLoader):
        raise UnsupportedError(
            f"expected a train dataloader that Accelerate has prepared as a DataLoaderShard, found "
            f'{type(prepared).__name__}; set accelerator_config={{"dispatch_batches": False}}, and return a torch '
            "DataLoader from get_train_dataloader()"
        )
    loader: DataLoader[Any] = prepared.base_dataloader
    return loader


def _make_generator(loader: DataLoader[Any]) -> None:
    """Make now what Accelerate's sampler makes when it is first iterated, so that a resume finds it there."""
    sampler: Any = loader.batch_sampler
    while sampler is not None and not isinstance(sampler, SeedableRandomSampler):
        sampler = getattr(sampler, "batch_sampler", None) or getattr(sampler, "sampler", None)
    if sampler is not None and sampler.generator is None:
        sampler.generator = torch.Generator(device=torch.get_default_device())
        sampler.generator.manual_seed(sampler.initial_seed)
