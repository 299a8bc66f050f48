"""Trainings with tensors that torch treats specially, and with unexpected failures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.support.trainings.engine_child import Control
from tests.support.trainings.engine_training import CLASSES, INPUTS, Case, Training


class CacheNet(nn.Module):
    """Two buffers that an evaluation replaces: one is copied with every record, one is not."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(INPUTS, CLASSES)
        self.last = nn.Linear(CLASSES, CLASSES)
        self.register_buffer("small", torch.zeros(CLASSES), persistent=False)
        self.register_buffer("large", torch.zeros(20_000), persistent=False)
        self.register_buffer("unused", torch.zeros(20_000), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.linear(x) + self.small.clone() + self.large[:CLASSES].clone())


class InferenceTensors(Training):
    """Buffers are inference tensors: one at the start, the others from the evaluation after step 6 on."""

    def make_model(self) -> nn.Module:
        model = CacheNet()
        with torch.inference_mode():
            model.unused = torch.ones(20_000)
        return model

    def batch(self, step: int) -> float:
        if step == 6:
            with torch.inference_mode():
                self.model.small = torch.arange(CLASSES) * 0.1
                self.model.large = torch.arange(20_000) * 0.001
                self.model.unused.add_(1.0)
        return super().batch(step)


class DoubleComplexNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Parameter(torch.randn(INPUTS, 100, dtype=torch.complex128))
        self.phase = nn.Parameter(torch.randn(100, dtype=torch.complex128))
        self.last = nn.Linear(100, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.last((x.to(torch.complex128) @ self.wide * self.phase).abs().float())


class DoubleComplex(Training):
    def make_model(self) -> nn.Module:
        return DoubleComplexNet()


INFERENCE_TENSORS = Case("inference-tensors", InferenceTensors)
DOUBLE_COMPLEX = Case("double-complex", DoubleComplex)


class Mishap(Exception):
    """An exception of a kind that no code catches by name."""


def failing(owner: type, name: str, *steps: int) -> Callable[[Control], None]:
    """Make a method raise when it is first called in each of these steps."""

    def prepare(control: Control) -> None:
        original, left = getattr(owner, name), set(steps)

        def method(*args: Any, **kwargs: Any) -> Any:
            if control.step in left:
                left.remove(control.step)
                control.journal.note("mishap", step=control.step)
                raise Mishap(f"in {name}")
            return original(*args, **kwargs)

        setattr(owner, name, method)  # in a child, until its end

    return prepare
