"""The Trainer's prepared loader: Accelerate's DataLoaderShard around a torch DataLoader.

The shard reads one batch ahead of what it hands out, and the Trainer takes the batches of a whole accumulation before
it trains on the first. Only the torch loader inside is touched.
"""

from __future__ import annotations

from typing import Any

import torch
from accelerate.data_loader import DataLoaderShard, SeedableRandomSampler
from torch.utils.data import DataLoader

from memckpt.capture.dataloader import Lookahead
from memckpt.errors import UnsupportedError

Position = dict[str, Any]


def follow(prepared: Any) -> Lookahead:
    """Follow the loader inside `prepared`.

    Raises:
        UnsupportedError: `prepared` is not a DataLoaderShard around a torch DataLoader.
    """
    # Not isinstance(): Accelerate's adapters claim the class of the loader that they hold.
    if not issubclass(type(prepared), DataLoaderShard) or not isinstance(prepared.base_dataloader, DataLoader):
        raise UnsupportedError(
            f"expected a train dataloader that Accelerate has prepared as a DataLoaderShard, found "
            f'{type(prepared).__name__}; set accelerator_config={{"dispatch_batches": False}}, and return a torch '
            "DataLoader from get_train_dataloader()"
        )
    loader: DataLoader[Any] = prepared.base_dataloader
    _make_generator(loader)
    return Lookahead(loader)


def _make_generator(loader: DataLoader[Any]) -> None:
    """Make now what Accelerate's sampler makes when it is first iterated, so that a resume finds it there."""
    sampler: Any = loader.batch_sampler
    while sampler is not None and not isinstance(sampler, SeedableRandomSampler):
        sampler = getattr(sampler, "batch_sampler", None) or getattr(sampler, "sampler", None)
    if sampler is not None and sampler.generator is None:
        sampler.generator = torch.Generator(device=torch.get_default_device())
        sampler.generator.manual_seed(sampler.initial_seed)
