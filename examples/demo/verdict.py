"""Bitwise comparison of the final states of two runs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor


@dataclass(frozen=True)
class Comparison:
    """Comparison of one kind of state in both runs.

    Attributes:
        kind: kind of state: parameters, optimizer state, ...
        tensors, nbytes: number of tensors compared, and their bytes.
        differing: names of those that differ.
    """

    kind: str
    tensors: int
    nbytes: int
    differing: tuple[str, ...]

    @property
    def equal(self) -> bool:
        return not self.differing


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether all bits are equal. Stricter than ``==``: 0.0 and -0.0 differ, NaNs with equal bits are equal."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(one.contiguous().view(-1).view(torch.uint8), other.contiguous().view(-1).view(torch.uint8))


def compare_states(one: Path, other: Path) -> list[Comparison]:
    """Compare two files that `train` wrote."""
    first, second = (torch.load(path, weights_only=True) for path in (one, other))
    return [_compare(kind, first.get(kind, {}), second.get(kind, {})) for kind in {**first, **second}]


def _compare(kind: str, one: dict[str, Tensor], other: dict[str, Tensor]) -> Comparison:
    common = {name for name in one if name in other and same_bits(one[name], other[name])}
    differing = tuple(name for name in {**one, **other} if name not in common)
    return Comparison(kind, len(one), sum(tensor.nbytes for tensor in one.values()), differing)


def compare_losses(one: dict[int, str], other: dict[int, str]) -> Comparison:
    """Compare the loss of every step; its text is exact."""
    differing = tuple(f"step {step}" for step in sorted({*one, *other}) if one.get(step) != other.get(step))
    return Comparison("loss of each step", len(one), 8 * len(one), differing)
