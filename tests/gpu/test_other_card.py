"""A rank that comes back on another card draws the same numbers there, and finds its tensors there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from memckpt.state import codec, rng
from tests.gpu.test_late_device import built, run_in_child  # noqa: F401  # a fixture


def comes_back_on_another_card() -> None:
    def draws(device: torch.device) -> list[list[float]]:
        other = torch.device("late", 1 - device.index)
        return [torch.rand(3, device=each).tolist() for each in (device, other, torch.device("cpu"))]

    was, now = torch.device("late", 1), torch.device("late", 0)
    codec.use_device(was)
    held = codec.encode(rng.capture())
    rate = codec.encode({"lr": torch.tensor(0.5, device=was)})
    first = draws(was)
    codec.use_device(now)
    rng.restore(codec.decode(held))
    again = draws(now)
    assert again[0] == first[0]
    assert again[2] == first[2]
    assert codec.decode(rate)["lr"].device == now
    with rng.preserved(), rng.other_streams():
        assert draws(now)[0] != draws(now)[0]
    state = rng.capture()
    with rng.other_streams():
        assert not {tuple(each) for each in draws(now)} & {tuple(each) for each in again}
    assert rng.capture() == state
    codec.use_device(None)
    assert codec.decode(rate)["lr"].device.type == "cpu"


@pytest.mark.promise("global generators of torch, numpy, Python; of the rank's own accelerator, on whichever card")
def test_a_rank_comes_back_on_another_card(tmp_path: Path) -> None:
    run_in_child(comes_back_on_another_card, tmp_path / "log")
