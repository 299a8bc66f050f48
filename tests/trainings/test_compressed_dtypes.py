"""Compressors with parameters of each dtype that they take: what is recorded is what is used, bit for bit."""

from __future__ import annotations

import hashlib
import math
import os
from typing import Any

import pytest
import torch
from torch import nn

from memckpt import compression
from memckpt.compression import CompressionConfig, HalfPrecision, PowerSGD, Quantized8, RandomK, TopK
from memckpt.compression.reduction import Bucket, Reducer
from memckpt.state.encodings import decode, fits
from memckpt.state.tensors import bits_of
from tests.support.cluster.sharded_cases import Setup, ShardedJob
from tests.support.cluster.sharded_cases import job_of as sharded_job_of
from tests.support.trainings.engine_child import config
from tests.support.trainings.engine_harness import Lab
from tests.support.trainings.killed_ranks import Death, logs, results, run, survives
from tests.support.trainings.rank_trainings import job_of

TYPES = [torch.bfloat16, torch.float16, torch.float64]
#: Each with each of its dtypes but float32, for which there are tests of their own.
TAKEN: list[tuple[CompressionConfig, torch.dtype]] = [
    *(
        (chosen, dtype)
        for dtype in TYPES
        for chosen in (
            TopK(ratio=0.05, min_elements=16),
            RandomK(ratio=0.1, min_elements=16),
            Quantized8(block_elements=64, min_elements=16),
            PowerSGD(rank=2, min_elements=16),
        )
    ),
    (HalfPrecision(), torch.float64),
    (HalfPrecision(dtype="fp16"), torch.float64),
]
IDS = [f"{type(chosen).__name__}-{str(dtype).removeprefix('torch.')}" for chosen, dtype in TAKEN]


def averaged(reducer: Reducer, params: list[Any], step: int) -> list[torch.Tensor]:
    """The averages of one backward; checks that each encoding has their bits."""
    rank = torch.distributed.get_rank()
    numbers = torch.Generator().manual_seed(10 * step + rank)
    buffer = torch.cat([torch.randn(one.numel(), generator=numbers).to(one.dtype) for one in params])
    gradients = list(buffer.split([one.numel() for one in params]))
    for param, gradient, parts in zip(
        params, gradients, reducer.average(Bucket(params, gradients, buffer), True).wait().encoded, strict=True
    ):
        encoding = reducer.encoding(param)
        assert (parts is None) is (encoding is None)
        if encoding is not None and parts is not None:
            assert fits(encoding, parts, param.numel(), param.dtype)
            decoded = decode(encoding, parts, param.numel(), param.dtype)
            assert torch.equal(bits_of(decoded), bits_of(gradient))
    return [gradient.clone() for gradient in gradients]


@pytest.mark.promise(
    "compressed gradients: protection changes no bit, and resumes from memory, the log and peers are exact"
)
def test_what_is_recorded_is_what_is_used(lab: Lab) -> None:
    """Three backwards each, as what one leaves out belongs to the next; both ranks get the same bits."""
    job = sharded_job_of(lab, Setup("plain", 2), config())

    def body(job: ShardedJob, rank: int) -> None:
        job.join(rank)
        digest = hashlib.blake2b()
        for (chosen, dtype), name in zip(TAKEN, IDS, strict=True):
            params = [nn.Parameter(torch.zeros(size, dtype=dtype)) for size in ((24, 40), (12,), (40,))]
            reducer = compression.state(chosen, params)
            carried = reducer.carried(params)
            assert reducer.encoding(params[0]) is not None, name
            small = [position for position, one in enumerate(params) if reducer.encoding(one) is None]
            for step in range(3):
                found = averaged(reducer, params, step)
                assert all(one.dtype is dtype and bool(one.isfinite().all()) for one in found), name
                for position in small:  # averaged as it is
                    assert digest_of(found[position]) == digest_of(plainly(params, position, step, dtype)), name
                for one in found:
                    digest.update(digest_of(one))
            assert all(bool(one.isfinite().all()) for one in carried.values()), name
        (job.directory / f"digest-{rank}").write_text(digest.hexdigest())
        os._exit(0)  # taking gloo's groups down has been seen to hang

    assert run(lab, job, body) == [0, 0], logs(lab)[-3000:]
    assert len({(job.directory / f"digest-{rank}").read_text() for rank in range(2)}) == 1


def plainly(params: list[Any], position: int, step: int, dtype: torch.dtype) -> torch.Tensor:
    """The average of two ranks' gradients without compression; exact in its dtype but for one rounding of the sum."""
    found = []
    for rank in range(2):
        numbers = torch.Generator().manual_seed(10 * step + rank)
        found.append([torch.randn(one.numel(), generator=numbers).to(dtype) for one in params][position])
    return (found[0] + found[1]) / 2


def digest_of(tensor: torch.Tensor) -> bytes:
    return hashlib.blake2b(bits_of(tensor).numpy().tobytes()).digest()


@pytest.mark.parametrize(
    ("chosen", "dtype"),
    [
        pytest.param(*each, id=name, marks=() if name == "TopK-bfloat16" else pytest.mark.slow)
        for each, name in zip(TAKEN, IDS, strict=True)
    ],
)
def test_resumes_exactly(lab: Lab, chosen: CompressionConfig, dtype: torch.dtype) -> None:
    # Adam divides by zero in float16.
    job = job_of(lab, compression=chosen, dtype=dtype, last_step=9, optimizer=sgd)
    last = survives(lab, job, [Death(0, 4, "backward")])
    for found in results(last):
        assert all(math.isfinite(float.fromhex(loss)) for loss in found["losses"].values())


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.05, momentum=0.9)
