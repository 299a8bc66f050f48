"""The measured training: GPT-2 sizes with AdamW in mixed precision, on random tokens drawn once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from examples.gpt import GPT, GPTConfig


@dataclass(frozen=True)
class Size:
    """A model and the amount of measurement.

    Attributes:
        batch: sequences per step.
        steps: timed steps in a block.
        period: T of lazy redo, which determines the host memory needed.
        eager: whether eager redo is measured, too.
    """

    model: GPTConfig
    batch: int
    steps: int
    period: int = 8
    eager: bool = True


def _gpt2(layers: int, width: int, heads: int) -> GPTConfig:
    return GPTConfig(layers=layers, width=width, heads=heads, context=1024, vocabulary=50_304, dropout=0.0)


SIZES = {
    "tiny": Size(GPTConfig(layers=2, width=64, heads=2, context=64, dropout=0.0), 4, 3),
    "small": Size(_gpt2(12, 768, 12), 16, 20),
    "medium": Size(_gpt2(24, 1024, 16), 16, 10),
    "1.5B": Size(_gpt2(48, 1600, 25), 8, 6, period=4, eager=False),
}


class Trainee:
    """A model, its optimizer and a batch on the device."""

    def __init__(self, size: Size, device: torch.device) -> None:
        torch.manual_seed(0)
        self.device = device
        self.batch = size.batch
        with device:
            self.model = GPT(size.model)
            self.tokens = torch.randint(0, 256, (size.batch, size.model.context + 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)

    def step(self) -> None:
        with torch.autocast(self.device.type, torch.bfloat16):
            loss = self.model.loss(self.tokens[:, :-1], self.tokens[:, 1:])
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        """The tensors of a checkpoint."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def tensors(self) -> Iterator[Tensor]:
        """Parameters and element-wise optimizer state: 12 bytes a parameter."""
        for param in self.model.parameters():
            yield param.detach()
            for value in self.optimizer.state[param].values():
                if isinstance(value, Tensor) and value.dim():
                    yield value

    @property
    def state_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors())
