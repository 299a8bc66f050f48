"""Compressors on a device: what they record is what they average, on any device, and nothing waits for them."""

from __future__ import annotations

import pytest
import torch

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
SHAPES = [(300, 500), (64, 3, 3, 3), (2048,), (70_001,), (8,)]


def compress(config: CompressionConfig, device: str) -> None:
    use_device(device)
    torch.set_default_device("cpu")
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


@pytest.mark.parametrize("config", COMPRESSORS, ids=lambda one: f"{type(one).__name__}-{getattr(one, 'dtype', '')}")
def test_records_decode_to_what_is_used(gpu_lab: Lab, device: str, config: CompressionConfig) -> None:
    child = gpu_lab.fork(lambda: compress(config, device), "compress")
    assert child.wait() == 0, child.log.read_text()[-4000:]
