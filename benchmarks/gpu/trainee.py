"""The measured training: GPT-2 sizes with AdamW in mixed precision, on random tokens drawn once."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.workloads.gpt import Training
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
    "large": Size(_gpt2(36, 1280, 20), 8, 10, period=4, eager=False),
    "1.5B": Size(_gpt2(48, 1600, 25), 8, 6, period=4, eager=False),
}


class Trainee(Training):
    """A training on the device."""

    def __init__(self, size: Size, device: torch.device) -> None:
        torch.manual_seed(0)
        self.device = device
        with device:
            model = GPT(size.model)
            tokens = torch.randint(0, 256, (size.batch, size.model.context + 1))
        super().__init__(model, (tokens[:, :-1], tokens[:, 1:]))

    def loss(self) -> Tensor:
        with torch.autocast(self.device.type, torch.bfloat16):
            return super().loss()

    @property
    def state_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors())
