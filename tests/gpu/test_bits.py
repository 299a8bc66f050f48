"""Bits that a device computes are those of the host: compressed averages, digests, changes of gradients."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch

from memckpt.capture import by_value
from memckpt.compression import (
    CompressionConfig,
    HalfPrecision,
    PowerSGD,
    Quantized8,
    RandomK,
    TopK,
    reducer_for,
)
from memckpt.compression.reduction import Bucket
from memckpt.state.encodings import decode
from memckpt.state.redo import change_values
from memckpt.state.tensors import bits_of
from tests.gpu.cases import alone
from tests.gpu.unsynchronized import no_waits
from tests.support.trainings.engine_child import use_device
from tests.support.trainings.engine_harness import Lab

COMPRESSORS = [
    TopK(ratio=0.01),
    TopK(ratio=0.9),
    RandomK(ratio=0.02),
    Quantized8(),
    PowerSGD(),
    HalfPrecision(),
    HalfPrecision(dtype="fp16"),
]
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.bool)
#: No powers of two, whose products are exact: as a scaler's whose growth is 1.7.
SCALES = [256 * 1.7**growths for growths in range(6)]
SHAPES = [(300, 500), (64, 3, 3, 3), (2048,), (70_001,), (8,)]


def compressed_averages(config: CompressionConfig, device: str) -> None:
    """What is recorded is what is averaged, on any device, and nothing waits for it."""
    alone(device)
    params = [torch.zeros(shape, device=device) for shape in SHAPES]
    reducer = reducer_for(config, params)
    sizes = [param.numel() for param in params]
    for step in range(4):
        buffer = torch.randn(sum(sizes), device=device)
        bucket = Bucket(params, buffer.split(sizes), buffer)
        with no_waits(device, step > 1):  # tensors that stay are made in the first steps
            done = reducer.average(bucket, last=True)
        for param, used, parts in zip(params, bucket.gradients, done.wait().encoded, strict=True):
            encoding = reducer.encoding(param)
            assert (parts is None) == (encoding is None)
            if parts is None or encoding is None:
                continue
            away = decode(encoding, parts, param.numel(), param.dtype)
            here = decode(encoding, [part.cpu() for part in parts], param.numel(), param.dtype)
            assert torch.equal(bits_of(away), bits_of(used.contiguous()))
            assert torch.equal(bits_of(here), bits_of(used.cpu()))
            cut = param.numel() // 3, param.numel() // 2
            host = [part.cpu() for part in parts]
            moved = decode(encoding, host, param.numel(), param.dtype, cut, torch.device(device))
            assert moved.device.type == device
            assert torch.equal(bits_of(moved), bits_of(used.reshape(-1)[slice(*cut)].contiguous()))


def digests(device: str) -> None:
    """Nothing waits for them."""
    for dtype in DTYPES:
        tensor = torch.randn(1237, 1021).to(dtype)
        away = tensor.to(device)
        by_value.sums(away)  # the keys are made
        with no_waits(device, True):
            found = [by_value.sums(away), by_value.sums(away.t())]
        assert found[0].cpu().equal(by_value.sums(tensor))
        assert found[1].cpu().equal(by_value.sums(tensor.t().contiguous()))
        away[1000, 7] = away[1000, 7] == 0
        assert not by_value.sums(away).equal(found[0])


def changes_of_gradients(device: str) -> None:
    """Redo repeats what a scaler and clipping have made of them."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for scale in SCALES:
            scaled = torch.randn(4097).mul(scale).to(device, dtype)
            inverse = torch.tensor([scale]).double().reciprocal().float()
            used = [scaled.clone(), scaled.clone()]
            torch._foreach_mul_(used[1:], inverse.to(device).reshape(()))
            assert torch.equal(change_values("mul", inverse, scaled), used[1]), (dtype, scale)
            if device == "cuda" and dtype is torch.bfloat16:
                continue  # torch's scaler refuses such gradients there
            torch._amp_foreach_non_finite_check_and_unscale_(
                used[:1], torch.zeros(1, device=device), inverse.to(device)
            )
            assert torch.equal(change_values("unscale", inverse, scaled), used[0]), (dtype, scale)


def name_of(config: CompressionConfig) -> str:
    return f"{type(config).__name__}-{getattr(config, 'dtype', '')}"


@pytest.mark.parametrize(
    "compare",
    [
        *(pytest.param(partial(compressed_averages, one), id=name_of(one)) for one in COMPRESSORS),
        digests,
        changes_of_gradients,
    ],
)
def test_bits_are_those_of_the_host(gpu_lab: Lab, device: str, compare: Callable[[str], None]) -> None:
    def body() -> None:
        use_device(device)
        torch.set_default_device("cpu")
        compare(device)

    child = gpu_lab.fork(body, "bits")
    assert child.wait() == 0, child.log.read_text()[-4000:]
