"""What the auditor takes for a difference: bits on a CPU, more than rounding where another device has computed."""

from __future__ import annotations

import math

import pytest
import torch

from memckpt.recovery.auditor import _distance

STEPS = 8
VALUES = torch.randn(4096, generator=torch.Generator().manual_seed(3))


def rounded(values: torch.Tensor) -> torch.Tensor:
    """As another device may have made them in some steps: the last places differ."""
    return values * (1 + torch.finfo(values.dtype).eps * torch.linspace(-4, 4, len(values)))


@pytest.mark.parametrize(("steps", "expected"), [(0, True), (STEPS, False)])
def test_rounding_is_a_difference_on_the_same_device_only(steps: int, expected: bool) -> None:
    assert (_distance(rounded(VALUES), VALUES, steps) > 0) == expected


@pytest.mark.parametrize("factor", [1 - 1e-2 * 1e-2 * STEPS, 1.001])
def test_a_weight_decay_that_was_left_out_is_more_than_rounding(factor: float) -> None:
    assert _distance(VALUES * factor, VALUES, STEPS) > 0


def test_one_element_that_was_changed_is_more_than_rounding() -> None:
    changed = VALUES.clone()
    changed[1234] *= 1.25
    assert _distance(changed, VALUES, STEPS) > 0


def test_nans_and_numbers_that_are_flushed_to_zero_are_no_difference() -> None:
    odd = torch.tensor([math.nan, 1e-42, 0.0, 1.0])
    assert _distance(odd, torch.tensor([-math.nan, 0.0, -0.0, 1.0]), 0) == 0
    assert _distance(odd, torch.tensor([1.0, 0.0, 0.0, 1.0]), STEPS) > 0


@pytest.mark.parametrize(("found", "held"), [(None, VALUES), (VALUES, VALUES[:7]), (3, 4), (3, 3.0), (None, 0)])
def test_what_cannot_be_compared_is_as_far_as_can_be(found: object, held: object) -> None:
    assert _distance(found, held, STEPS) == math.inf
