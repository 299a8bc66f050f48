"""The Trainer's prepared loader: Accelerate's DataLoaderShard around a torch DataLoader.

The shard reads one batch ahead of the one it hands out, and the Trainer takes the batches of a whole accumulation
before it trains on the first. Only the torch loader inside is modified.
"""

from __future__ import annotations

from typing import Any

import torch
from accelerate.data_loader import DataLoaderShard, SeedableRandomSampler
from torch.utils.data import DataLoader

from memckpt.capture import data as dataloader
from memckpt.errors import UnsupportedError


class Follower:
    """Follows the torch loader inside the Trainer's own; `release` restores it.

    `accumulated` batches are taken before the first of them is trained on. Raises UnsupportedError for another loader.
    """

    def __init__(self, prepared: Any, accumulated: int) -> None:
        self._loader = _inside(prepared)
        _make_generator(self._loader)
        dataloader.graft(self._loader, lookahead=accumulated + 1)
        self._held: dict[str, Any] | None = None

    def position(self, trained: int | None) -> dict[str, Any]:
        """The position to continue at, as plain values.

        Args:
            trained: number of batches of this epoch that were trained on; None: the next epoch is about to begin.

        Raises:
            DataPositionError: later batches were fetched too long ago to be remembered.
        """
        if trained is None:
            return {"between": True, "position": dataloader.position(self._loader, exhausted=True)}
        ahead = dataloader.handed_out(self._loader) - trained
        return {"between": False, "position": dataloader.position(self._loader, ahead=ahead)}

    def resume(self, held: dict[str, Any]) -> None:
        """Make the next epoch continue at the position `held`; global generators may move until training restores them.

        Raises as :func:`memckpt.capture.data.resume`.
        """
        self._held = held
        start = dataloader.recreate_persistent_iterator if held["between"] else dataloader.resume
        start(self._loader, held["position"])

    def go_live(self) -> None:
        """Restore the loader's own generators: the batches fetched ahead have been fetched again."""
        assert self._held is not None
        dataloader.go_live(self._loader)
        # An attempt to fetch beyond the last batch may have moved them since.
        dataloader.restore_generators(self._loader, self._held["position"])

    def unreplayable(self) -> str | None:
        """One line on why an exact resume of this loader cannot be promised; None if no reason is known."""
        return dataloader.unreplayable(self._loader)

    def remark(self) -> str | None:
        """One line on what a resume of this loader rests on; None if there is nothing to say."""
        return dataloader.remark(self._loader)

    def release(self) -> None:
        """Restore the loader."""
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
    """Create the generator that Accelerate's sampler makes at its first iteration, so that a resume can restore it."""
    sampler: Any = loader.batch_sampler
    while sampler is not None and not isinstance(sampler, SeedableRandomSampler):
        sampler = getattr(sampler, "batch_sampler", None) or getattr(sampler, "sampler", None)
    if sampler is not None and sampler.generator is None:
        sampler.generator = torch.Generator(device=torch.get_default_device())
        sampler.generator.manual_seed(sampler.initial_seed)
