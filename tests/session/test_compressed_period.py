"""The anchor period that goes with compressed gradients."""

from __future__ import annotations

import pytest

from memckpt.session.compression import REDO_SECONDS, period_for


@pytest.mark.parametrize(
    ("numel", "bytes_each", "on_host", "period"),
    [
        (1_000_000, 2.0, True, 8),  # 12/2 = 6
        (1_000_000, 0.06, True, 256),  # 12/0.06 = 200
        (1_000_000, 0.006, True, 512),
        (30_000_000, 0.06, True, 32),  # redo of 32 records / 2 on one core: 4.8 s
        (1_000_000_000, 0.06, True, 8),  # never less
        (1_000_000_000, 0.06, False, 128),
        (70_000_000_000, 0.06, False, 8),
    ],
)
def test_anchors_and_gradients_weigh_the_same_unless_redo_takes_too_long(
    numel: int, bytes_each: float, on_host: bool, period: int
) -> None:
    assert period_for(numel, int(numel * bytes_each), on_host) == period
    redone = numel * period / 2 / (1e8 if on_host else 2e10)
    assert redone <= REDO_SECONDS or period == 8
