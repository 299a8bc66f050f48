"""Compressed averages under settings of DistributedDataParallel, and with accumulation."""

from __future__ import annotations

from typing import Any

import pytest

from memckpt.compression import CompressionConfig, HalfPrecision, PowerSGD, Quantized8, RandomK, TopK
from tests.support.trainings.engine_harness import Lab
from tests.support.trainings.killed_ranks import Death, survives
from tests.support.trainings.rank_trainings import job_of

COMPRESSORS: list[CompressionConfig] = [
    TopK(ratio=0.05),
    RandomK(ratio=0.1, seed=3),
    Quantized8(block_elements=64),
    PowerSGD(rank=2),
    HalfPrecision(),
]
SETTINGS: dict[str, dict[str, Any]] = {
    "find-unused": {"ddp": {"find_unused_parameters": True}},
    "bucket-view": {"ddp": {"gradient_as_bucket_view": True}},
    "static-graph": {"ddp": {"static_graph": True}},
    "accumulated": {"accumulate": 3},
    "unused-bucket-view-accumulated": {
        "ddp": {"find_unused_parameters": True, "gradient_as_bucket_view": True},
        "accumulate": 2,
    },
}
#: What belongs to every run.
OFTEN = {("TopK", "unused-bucket-view-accumulated")}


@pytest.mark.parametrize(
    ("compression", "setting"),
    [
        pytest.param(one, setting, id=f"{type(one).__name__}-{setting}", marks=() if often else pytest.mark.slow)
        for one in COMPRESSORS
        for setting in SETTINGS
        for often in [(type(one).__name__, setting) in OFTEN]
    ],
)
def test_resumes_exactly(lab: Lab, compression: CompressionConfig, setting: str) -> None:
    survives(lab, job_of(lab, compression=compression, **SETTINGS[setting]), [Death(1, 5, "backward")])
