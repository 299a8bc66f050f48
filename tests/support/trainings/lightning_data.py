"""Ways of training, with their data and loaders, for the tests of exact resume with Lightning."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    WeightedRandomSampler,
)

from memckpt.config import CompressionConfig

BATCH_SIZE = 4
SAMPLES = 44
BATCHES = SAMPLES // BATCH_SIZE


@dataclass(frozen=True)
class Case:
    """One way of training. The defaults are the plain case."""

    name: str
    loader: str = "plain"
    workers: int = 0
    persistent: bool = False
    validation_workers: int = 0
    validate: bool = True
    datamodule: bool = False
    manual: bool = False
    scheduler: str = "cosine"
    model: str = "plain"
    ema: bool = False
    logger: bool = False
    stop_at: int | None = None
    user_hooks: bool = False
    every_n_train_steps: int | None = None
    accumulation_schedule: dict[int, int] | None = None
    compiled: bool = False
    seed_workers: bool = False
    strategy: str = "ddp"
    built_early: str | None = None
    peeks: bool = False
    attributes: tuple[str, ...] = ()
    compression: CompressionConfig | None = None
    trainer: dict[str, Any] = field(default_factory=dict)


class Augmented(Dataset[tuple[Tensor, Tensor]]):
    """Random augmentation from all three global generators."""

    def __init__(self, samples: int = SAMPLES) -> None:
        generator = torch.Generator().manual_seed(7)
        self.inputs = torch.randn(samples, 8, generator=generator)
        self.targets = torch.randn(samples, 1, generator=generator)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        noise = torch.randn(8) * 0.01 + random.random() * 0.01 + float(np.random.rand()) * 0.01
        return self.inputs[index] + noise, self.targets[index]


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    """A dataset without length and randomness."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(11)
        for _ in range(SAMPLES):
            yield torch.randn(8, generator=generator), torch.randn(1, generator=generator)


class ShuffledBatches:
    """A user's batch sampler, which draws from Python's generator."""

    def __len__(self) -> int:
        return BATCHES

    def __iter__(self) -> Iterator[list[int]]:
        order = list(range(SAMPLES))
        random.shuffle(order)
        for start in range(0, SAMPLES, BATCH_SIZE):
            yield order[start : start + BATCH_SIZE]


class StatefulBatches:
    """Not a DataLoader, but with a position of its own."""

    def __init__(self) -> None:
        self.data = Augmented()
        self.first_batch = 0
        self.next_batch = 0

    def __len__(self) -> int:
        return BATCHES

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        first, self.first_batch = self.first_batch, 0
        for batch in range(first, BATCHES):
            self.next_batch = batch + 1
            items = [self.data[batch * BATCH_SIZE + item] for item in range(BATCH_SIZE)]
            yield torch.stack([x for x, _ in items]), torch.stack([y for _, y in items])

    def state_dict(self) -> dict[str, int]:
        return {"next_batch": self.next_batch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.first_batch = state["next_batch"]


def _batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(5)
    return [(torch.randn(4, 8, generator=generator), torch.zeros(4, 1)) for _ in range(BATCHES)]


def _loader(data: Any, workers: int, persistent: bool, kind: Any = DataLoader, **arguments: Any) -> Any:
    if "batch_sampler" not in arguments:
        arguments.setdefault("batch_size", BATCH_SIZE)
    if workers:
        arguments |= {"num_workers": workers, "persistent_workers": persistent, "multiprocessing_context": "fork"}
    return kind(data, **arguments)


def train_loader(case: Case) -> Any:
    make = partial(_loader, workers=case.workers, persistent=case.persistent)
    data = Augmented()
    match case.loader:
        case "plain":
            return make(data, shuffle=True)
        case "subset":
            return make(Subset(data, torch.randperm(SAMPLES)[: SAMPLES - 8].tolist()), shuffle=True)
        case "generator":
            return make(data, shuffle=True, generator=torch.Generator().manual_seed(3))
        case "weighted":
            return make(data, sampler=WeightedRandomSampler(torch.ones(SAMPLES).tolist(), SAMPLES))
        case "replacement":
            return make(data, sampler=RandomSampler(data, replacement=True, num_samples=SAMPLES))
        case "batch_sampler":
            return make(data, batch_sampler=ShuffledBatches())
        case "unbatched":
            return make(_batches(), batch_size=None, shuffle=True)
        case "iterable":
            return make(Stream())
        case "stateful_loader":
            from torchdata.stateful_dataloader import StatefulDataLoader

            return make(data, kind=StatefulDataLoader, shuffle=True)
        case "own_loader":
            return StatefulBatches()
        case "max_size_cycle" | "min_size":
            both = {"a": make(data, shuffle=True), "b": make(Augmented(20), shuffle=True)}
            return CombinedLoader(both, case.loader)
        case "nested_sampler":
            return make(data, batch_sampler=BatchSampler(SequentialSampler(data), BATCH_SIZE, drop_last=False))
    raise KeyError(case.loader)


def validation_loader(case: Case) -> DataLoader[Any]:
    return _loader(Augmented(12), case.validation_workers, case.persistent)  # type: ignore[no-any-return]


class Data(pl.LightningDataModule):
    """The loaders, made anew at each reload; counts reloads, as its own state."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case = case
        self.reloads = 0
        self.stage = {"scale": 1.0}

    def setup(self, stage: str) -> None:
        if self.case.built_early == "datamodule":
            self.trainer.fit_loop.setup_data()  # type: ignore[union-attr]

    def train_dataloader(self) -> Any:
        self.reloads += 1
        return train_loader(self.case)

    def val_dataloader(self) -> Any:
        return validation_loader(self.case)

    def state_dict(self) -> dict[str, int]:
        return {"reloads": self.reloads}

    def load_state_dict(self, state: dict[str, int]) -> None:
        # The new process makes the current loaders once more, unless setup() has made them already.
        self.reloads = state["reloads"] - (self.case.built_early != "datamodule")
