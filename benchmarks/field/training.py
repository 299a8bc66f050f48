"""What every arm trains: a small GPT with dropout, shuffled text, clipping and a schedule, from one seed."""

from __future__ import annotations

import hashlib
import math
import pickle
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Subset

from benchmarks.field.gate import Gate
from examples.gpt import GPT, SIZES, Corpus

SEED = 537
#: Sequences in a batch: 256 tokens.
BATCH = 4
LEARNING_RATE = 1e-3
CLIP = 1.0


def make_model(size: str) -> GPT:
    torch.manual_seed(SEED)
    return GPT(SIZES[size])


def make_optimizer(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), LEARNING_RATE)


def make_schedule(optimizer: torch.optim.Optimizer, steps: int) -> torch.optim.lr_scheduler.LambdaLR:
    """A cosine from the whole learning rate to a tenth of it."""
    return torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: 0.55 + 0.45 * math.cos(math.pi * min(1.0, step / steps))
    )


def make_data(size: str, batches: int) -> Dataset[tuple[Tensor, Tensor]]:
    """As many windows of text as an epoch has batches for."""
    return Subset(Corpus(SIZES[size].context), range(batches * BATCH))


def make_loader(size: str, batches: int, own_generator: bool = False) -> DataLoader[tuple[Tensor, Tensor]]:
    """A shuffled loader; `own_generator`: its iterators do not draw from the model's generator."""
    generator = torch.Generator().manual_seed(SEED) if own_generator else None
    return DataLoader(make_data(size, batches), BATCH, shuffle=True, generator=generator)


def make_stateful_loader(size: str, batches: int) -> Any:
    """A loader with a state, of torchdata.

    Its iterators draw a number each, and a resume makes one more: from the model's generator or the sampler's this
    would change what comes after, so it has one of its own.
    """
    from torchdata.stateful_dataloader import StatefulDataLoader
    from torchdata.stateful_dataloader.sampler import RandomSampler

    data = make_data(size, batches)
    sampler = RandomSampler(data, generator=torch.Generator().manual_seed(SEED))
    return StatefulDataLoader(data, BATCH, sampler=sampler, generator=torch.Generator().manual_seed(SEED))


def digests_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """Digests of the parameters and of the optimizer's state."""
    held = optimizer.state_dict()["state"]
    return {
        "parameters": _digest(param for _, param in sorted(model.named_parameters())),
        "optimizer": _digest(held[index][name] for index in sorted(held) for name in sorted(held[index])),
    }


def _digest(tensors: Iterable[Tensor]) -> str:
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().numpy().tobytes())
    return found.hexdigest()[:16]


class Training:
    """A plain training; :meth:`take_step` is a step of it.

    Args:
        size: of the model, a name in `examples.gpt.SIZES`.
        epochs, batches: epochs, and batches in each.
        stateful: whether the loader has a state.
    """

    def __init__(self, size: str, epochs: int, batches: int, stateful: bool = False) -> None:
        self.steps = epochs * batches
        self.model = make_model(size)
        self.optimizer = make_optimizer(self.model)
        self.schedule = make_schedule(self.optimizer, self.steps)
        self.loader: Any = make_stateful_loader(size, batches) if stateful else make_loader(size, batches)

    @property
    def step(self) -> int:
        """Steps taken, by the schedule's count."""
        return int(self.schedule.last_epoch)

    def batches(self) -> Iterator[Any]:
        """The batches of all epochs that are left; the loader knows its place."""
        while self.step < self.steps:
            yield from self.loader

    def take_step(self, batch: Any, gate: Gate, guard: AbstractContextManager[Any] | None = None) -> None:
        """Take a step and report it; its optimizer steps under `guard`."""
        step = self.step + 1
        loss = self.model.loss(*batch)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        with nullcontext() if guard is None else guard:
            self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        gate.end(step, loss.detach(), batch)

    def state_dict(self) -> dict[str, Any]:
        """Everything that this training consists of, for those who save what they are given."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            **self.surroundings(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put a state back."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.load_surroundings(state)

    def surroundings(self) -> dict[str, Any]:
        """What stands beside model and optimizer; the loader's state as bytes, since its parts come and go."""
        return {
            "schedule": self.schedule.state_dict(),
            "loader": pickle.dumps(self.loader.state_dict()),
            "generator": torch.get_rng_state(),
        }

    def load_surroundings(self, state: dict[str, Any]) -> None:
        """Put that back."""
        self.schedule.load_state_dict(state["schedule"])
        self.loader.load_state_dict(pickle.loads(state["loader"]))
        torch.set_rng_state(state["generator"])

    def finish(self, gate: Gate) -> None:
        """Report the final state."""
        gate.finished(digests_of(self.model, self.optimizer))
