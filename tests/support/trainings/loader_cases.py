"""Datasets, samplers and loaders for the tests of data positions. Importable by spawned workers."""

from __future__ import annotations

import functools
import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    WeightedRandomSampler,
    get_worker_info,
)
from torchdata.stateful_dataloader import StatefulDataLoader

SAMPLES = 22
BATCH = 4
BATCHES = 6  # the last one is short


class Augmented(Dataset[Any]):
    """Draws from all three global generators for every sample; logs the indices it was asked for."""

    def __init__(self, samples: int = SAMPLES, log: Path | None = None) -> None:
        self.samples = samples
        self.log = log

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Any:
        if self.log is not None:
            with self.log.open("a") as file:
                file.write(f"{index}\n")
        return index, torch.rand(()).item(), random.gauss(0, 1), np.random.randn()


class OwnGenerator(Augmented):
    """Keeps its own generators, as augmentation libraries do."""

    def __init__(self) -> None:
        super().__init__()
        self.numpy = np.random.default_rng(5)
        self.python = random.Random(5)

    def __getitem__(self, index: int) -> Any:
        return index, self.numpy.random(), self.python.random()


class LazyGenerators(Augmented):
    """Makes its generators with its first sample, in the process that loads it."""

    def __init__(self) -> None:
        super().__init__()
        self.numpy: np.random.Generator | None = None

    def __getitem__(self, index: int) -> Any:
        if self.numpy is None:
            worker = get_worker_info()
            seed = 5 if worker is None else worker.id
            self.numpy, self.python = np.random.default_rng(seed), random.Random(seed)
            self.torch, self.legacy = torch.Generator().manual_seed(seed), np.random.RandomState(seed)
        drawn = torch.rand((), generator=self.torch).item(), self.legacy.rand()
        return index, self.numpy.random(), self.python.random(), drawn


class _Jitter:
    """A transform with a slot and with a generator of its own."""

    __slots__ = ("rng",)

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)

    def __call__(self, value: float) -> float:
        return value + self.rng.random()


class _Legacy:
    """A transform whose generators lie in a dict, and are made with the first sample."""

    def __init__(self) -> None:
        self.generators: dict[int, Any] = {}

    def __call__(self, value: float) -> float:
        generator = self.generators.setdefault(0, np.random.RandomState(6))
        return float(value + generator.rand())


_of_the_module = random.Random(8)


def _moved(value: float, draw: Callable[[], float]) -> float:
    return value + draw() + _of_the_module.random()


class Pipeline(Dataset[Any]):
    """Generators in nested transforms, in partials, and in what functions name and close over."""

    def __init__(self) -> None:
        self.samples = [(float(index), None) for index in range(2000)]
        self.transforms = {"all": [_Jitter(4), [_Legacy()], functools.partial(_moved, draw=random.Random(7).random)]}

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        jitter, (legacy,), moved = self.transforms["all"]
        return index, moved(legacy(jitter(self.samples[index][0])))


class Mixing:
    """A collate function that is an object, and is given by one of its methods."""

    def __init__(self) -> None:
        self.torch = torch.Generator().manual_seed(2)

    def together(self, samples: list[Any]) -> Any:
        return [*samples, torch.rand((), generator=self.torch).item()]


class Counting(IterableDataset[Any]):
    """A stream, divided among the workers."""

    def __init__(self, *, draws: bool) -> None:
        self.draws = draws

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        for index in range(first, SAMPLES, step):
            yield index, torch.rand(()).item() if self.draws else 0.0


class ShuffledBatches(Sampler[list[int]]):
    """A user's batch sampler that shuffles with Python's global generator."""

    def __len__(self) -> int:
        return BATCHES

    def __iter__(self) -> Iterator[list[int]]:
        order = list(range(SAMPLES))
        random.shuffle(order)
        for first in range(0, SAMPLES, BATCH):
            yield order[first : first + BATCH]


class OwnRandomBatches(ShuffledBatches):
    """Shuffles with a generator object of its own, and draws from it batch by batch."""

    def __init__(self) -> None:
        self.random = random.Random(9)

    def __iter__(self) -> Iterator[list[int]]:
        for _ in range(BATCHES):
            yield [self.random.randrange(SAMPLES) for _ in range(BATCH)]


class _OfAll(Sampler[int]):
    def __len__(self) -> int:
        return SAMPLES


class EpochCounter(_OfAll):
    """Derives its order from the number of its iterations."""

    def __init__(self) -> None:
        self.rounds = 0

    def __iter__(self) -> Iterator[int]:
        self.rounds += 1
        order = list(range(SAMPLES))
        random.Random(self.rounds).shuffle(order)
        return iter(order)


class Reshuffled(Sampler[int]):
    """Shuffles in place: each order comes from the one before."""

    def __init__(self, samples: int) -> None:
        self.order = list(range(samples))
        self.buckets = [[0, 1], [2, 3]]
        self.weights = np.ones(2)

    def __len__(self) -> int:
        return len(self.order)

    def __iter__(self) -> Iterator[int]:
        random.shuffle(self.order)
        random.shuffle(self.buckets)
        self.weights *= 2
        return iter([*self.order, self.buckets[0][0], int(self.weights[0]) % SAMPLES])


class Chunks(_OfAll):
    """Shuffles chunk by chunk, with the generator that training draws from."""

    def __iter__(self) -> Iterator[int]:
        for first in range(0, SAMPLES, 7):
            chunk = list(range(first, min(first + 7, SAMPLES)))
            random.shuffle(chunk)
            yield from (chunk[each] for each in torch.randperm(len(chunk)).tolist())


class LazyGlobal(_OfAll):
    """Draws each index from the generator that the model's dropout uses: cannot be replayed."""

    def __iter__(self) -> Iterator[int]:
        for _ in range(SAMPLES):
            yield int(torch.randint(SAMPLES, ()))


class Doubling(DataLoader[Any]):
    """A user's subclass whose __iter__ is a generator function."""

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        for batch in super().__iter__():
            yield [batch, batch]


def seeding_init(worker_id: int) -> None:
    """A user's worker_init_fn that draws and seeds."""
    np.random.seed(torch.initial_seed() % 2**32 + worker_id)
    random.random()


@dataclass(frozen=True)
class Workers:
    """Worker settings of a loader."""

    count: int = 0
    persistent: bool = False
    start: str = "fork"

    def arguments(self) -> dict[str, Any]:
        if not self.count:
            return {}
        return {"num_workers": self.count, "persistent_workers": self.persistent, "multiprocessing_context": self.start}

    def __str__(self) -> str:
        return f"{self.count}{'-persistent' if self.persistent else ''}" + (
            f"-{self.start}" if self.start != "fork" else ""
        )


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(3)


MAKERS: dict[str, Callable[[dict[str, Any]], DataLoader[Any]]] = {
    "sequential": lambda kw: DataLoader(Augmented(), BATCH, **kw),
    "shuffle": lambda kw: DataLoader(Augmented(), BATCH, shuffle=True, **kw),
    "own-generator": lambda kw: DataLoader(Augmented(), BATCH, shuffle=True, generator=generator(), **kw),
    "weighted": lambda kw: DataLoader(
        Augmented(), BATCH, sampler=WeightedRandomSampler([1.0] * SAMPLES, SAMPLES), **kw
    ),
    "replacement": lambda kw: DataLoader(
        Augmented(),
        BATCH,
        sampler=RandomSampler(range(SAMPLES), replacement=True, num_samples=70, generator=generator()),
        drop_last=True,
        **kw,
    ),
    "batch-sampler": lambda kw: DataLoader(Augmented(), batch_sampler=ShuffledBatches(), **kw),
    "random-object": lambda kw: DataLoader(Augmented(), batch_sampler=OwnRandomBatches(), **kw),
    "distributed": lambda kw: DataLoader(
        Augmented(2 * SAMPLES), BATCH, sampler=DistributedSampler(range(2 * SAMPLES), num_replicas=2, rank=1), **kw
    ),
    "epoch-counter": lambda kw: DataLoader(Augmented(), BATCH, sampler=EpochCounter(), **kw),
    "reshuffled": lambda kw: DataLoader(Augmented(), BATCH, sampler=Reshuffled(SAMPLES), **kw),
    "chunks": lambda kw: DataLoader(Augmented(), BATCH, sampler=Chunks(), **kw),
    "unbatched": lambda kw: DataLoader(Augmented(7), batch_size=None, shuffle=True, **kw),
    "stateful": lambda kw: StatefulDataLoader(Augmented(), BATCH, shuffle=True, **kw),
    "dataset-generators": lambda kw: DataLoader(OwnGenerator(), BATCH, shuffle=True, **kw),
    "lazy-generators": lambda kw: DataLoader(LazyGenerators(), BATCH, shuffle=True, **kw),
    "pipeline": lambda kw: DataLoader(Pipeline(), BATCH, shuffle=True, collate_fn=Mixing().together, **kw),
    "generator-iter": lambda kw: Doubling(Augmented(), BATCH, shuffle=True, **kw),
    "init-fn": lambda kw: DataLoader(Augmented(), BATCH, shuffle=True, worker_init_fn=seeding_init, **kw),
    "iterable": lambda kw: DataLoader(Counting(draws=bool(kw)), BATCH, **kw),
}


def make(name: str, workers: Workers) -> DataLoader[Any]:
    return MAKERS[name](workers.arguments())


def loaded(log: Path) -> list[int]:
    return [int(line) for line in log.read_text().split()] if log.exists() else []


def kill_myself() -> None:
    os.kill(os.getpid(), 9)
