"""Changes of gradients on a device: redo repeats what a scaler and clipping have made of them, bit for bit."""

from __future__ import annotations

import torch

from memckpt.state.redo import change_values
from tests.support.trainings.engine_child import use_device
from tests.support.trainings.engine_harness import Lab

#: No powers of two, whose products are exact: as a scaler's whose growth is 1.7.
SCALES = [256 * 1.7**growths for growths in range(6)]


def compare(device: str) -> None:
    use_device(device)
    torch.set_default_device("cpu")
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


def test_gradients_are_what_training_made_of_them(gpu_lab: Lab, device: str) -> None:
    child = gpu_lab.fork(lambda: compare(device), "changes")
    assert child.wait() == 0, child.log.read_text()[-4000:]
