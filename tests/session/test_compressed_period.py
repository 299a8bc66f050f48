"""The anchor period that goes with compressed gradients."""

from __future__ import annotations

import pytest

from memckpt.session.compressed_averages import REDO_SECONDS, period_for


@pytest.mark.parametrize(
    ("numel", "bytes_each", "params", "on_host", "period"),
    [
        (1_000_000, 2.0, 10, True, 8),  # 12/2 = 6
        (1_000_000, 0.06, 10, True, 256),  # 12/0.06 = 200
        (100_000, 0.006, 10, True, 256),  # 512 records / 2 of 522 pieces: 13 s
        (100_000, 0.006, 1000, True, 64),
        (30_000_000, 0.06, 100, True, 16),  # 32 records / 2 on one core: 4.8 s, and 0.2 s for pieces
        (1_000_000_000, 0.06, 100, True, 8),  # never less
        (1_000_000_000, 0.06, 100, False, 64),
        (70_000_000_000, 0.06, 100, False, 8),
    ],
)
def test_anchors_and_gradients_weigh_the_same_unless_redo_takes_too_long(
    numel: int, bytes_each: float, params: int, on_host: bool, period: int
) -> None:
    assert period_for(numel, int(numel * bytes_each), params, on_host) == period
    redone = numel * period / 2 / (1e8 if on_host else 2e10)
    assert redone <= REDO_SECONDS or period == 8
