"""Digests of tensors on a device: those that the host would take, and nothing waits for them."""

from __future__ import annotations

import torch

from memckpt.capture import by_value
from tests.gpu.unsynchronized import no_waits
from tests.support.trainings.engine_child import use_device
from tests.support.trainings.engine_harness import Lab

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.bool)


def compare(device: str) -> None:
    use_device(device)
    torch.set_default_device("cpu")
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


def test_sums_are_those_of_the_host(gpu_lab: Lab, device: str) -> None:
    child = gpu_lab.fork(lambda: compare(device), "digests")
    assert child.wait() == 0, child.log.read_text()[-4000:]
