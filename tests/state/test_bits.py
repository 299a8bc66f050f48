"""Tensors compared by their bits, whole and in pieces, and filled with values."""

from __future__ import annotations

import math

import pytest
import torch

from memckpt.state import tensors
from memckpt.state.tensors import Distance, fill, same_bits


def test_equal_bits_are_equal_whatever_they_mean() -> None:
    nan = torch.tensor([math.nan, math.inf, -0.0])
    assert same_bits(nan, nan.clone())
    assert not same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert not same_bits(torch.zeros(2), torch.zeros(2, dtype=torch.float64))
    assert not same_bits(torch.zeros(2), torch.zeros(3))
    assert same_bits(torch.zeros(3, 4).t(), torch.zeros(4, 3))


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.complex64]
)
def test_a_distance_counts_the_elements_that_differ(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensors, "_CHUNK", 7)  # several chunks, the last one short
    held = torch.ones(30).to(dtype)
    found = held.clone()
    distance = Distance()
    distance.add(found, held)
    assert (distance.elements, distance.differing, distance.ulp, distance.relative) == (30, 0, 0.0, 0.0)
    found[3] = 0
    found[29] = 0
    distance.add(found, held)
    assert (distance.elements, distance.differing) == (60, 2)
    assert distance.ulp > 0
    assert distance.relative == pytest.approx(1.0)


def test_a_distance_is_relative_to_the_largest_value_of_all_pieces() -> None:
    distance = Distance()
    distance.add(torch.tensor([1.0]), torch.tensor([1.0 + 2**-10]))
    distance.add(torch.tensor([8.0]), torch.tensor([8.0]))
    assert distance.relative == pytest.approx(2**-13)


@pytest.mark.parametrize(
    ("found", "held"),
    [
        (torch.tensor([math.nan]), torch.tensor([1.0])),
        (torch.tensor([1.0]), torch.tensor([math.inf])),
        (torch.zeros(2), torch.zeros(3)),
        (torch.zeros(2), torch.zeros(2, dtype=torch.float16)),
    ],
)
def test_what_is_no_rounding_is_infinitely_far(found: torch.Tensor, held: torch.Tensor) -> None:
    distance = Distance()
    distance.add(found, held)
    assert distance.differing
    assert distance.relative == math.inf


def test_tensors_without_elements_are_equal() -> None:
    distance = Distance()
    distance.add(torch.zeros(0, 3), torch.zeros(0, 3))
    assert (distance.elements, distance.differing, distance.relative) == (0, 0, 0.0)


def test_a_tensor_whose_elements_share_memory_is_filled() -> None:
    live = torch.zeros(3, 1).expand(2, 3, 4)
    fill(live, torch.arange(3.0).view(3, 1).expand(2, 3, 4).contiguous())
    assert torch.equal(live, torch.arange(3.0).view(3, 1).expand(2, 3, 4))
