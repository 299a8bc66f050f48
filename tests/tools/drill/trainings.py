"""Small scripts that are drilled, as functions: they run in processes forked from the test."""

from __future__ import annotations

import os

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import memckpt
from memckpt import AgentConfig, MemckptConfig

STEPS = 30
CONFIG = MemckptConfig(redo="lazy", storage=None, agent=AgentConfig(linger_seconds=60))


class Scaled(nn.Module):
    """A model whose output is scaled by a plain attribute, which no state_dict has."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.Linear(16, 1))
        self.scale = 1.0

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.scale * self.layers(batch)  # type: ignore[no-any-return]


def loop(run_dir: str, *, cools: bool = False, seeded: bool = True, counts: bool = True) -> None:
    """A plain loop; `cools`: the attribute changes with each step; `counts`: whether it counts resumed steps."""
    torch.manual_seed(0 if seeded else int.from_bytes(os.urandom(4)))
    model = Scaled()
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    session = memckpt.attach(model, optimizer, run_dir=run_dir, resume="never", config=CONFIG)
    report, seen = session.restore(), 0
    for _ in range(report.step if report and counts else 0, STEPS):
        batch = torch.randn(32, 8)
        loss = (model(batch) - batch.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if cools:
            model.scale *= 0.99
            seen += 1
        session.commit()
    session.close()


class Noisy(Dataset[torch.Tensor]):
    """Samples with noise from a generator that nobody seeds, in whichever process loads them."""

    def __len__(self) -> int:
        return 200

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((8,), index / 200) + torch.from_numpy(np.random.default_rng().normal(size=8)).float()


def unseeded_workers(run_dir: str) -> None:
    """A loop whose loader's workers draw from the system's entropy."""
    torch.manual_seed(0)
    model = Scaled()
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    session = memckpt.attach(model, optimizer, run_dir=run_dir, config=CONFIG)
    loader = session.loader(DataLoader(Noisy(), 10, shuffle=True, num_workers=1, multiprocessing_context="fork"))
    session.restore()
    for _ in session.epochs(2):
        for batch in loader:
            (model(batch) - 1).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            session.commit()
    session.close()


def fails(run_dir: str) -> None:
    """Ends by an error of its own before the first step."""
    raise RuntimeError(f"no data in {run_dir}")


def unprotected(run_dir: str) -> None:
    """Trains nothing that memckpt would know of."""
