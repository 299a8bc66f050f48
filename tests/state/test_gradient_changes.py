"""Changes of gradients that redo repeats: torch rounds factors to the dtype of gradients in some places only."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from memckpt.state.redo import change_values

#: Scale that has grown by a factor that is no power of two: 2 to the 8th, times 1.7 for each growth.
SCALES = [256 * 1.7**growths for growths in range(6)]


class Multiplied(TorchDispatchMode):
    """Notes on which devices products and quotients have their operands."""

    def __init__(self) -> None:
        super().__init__()
        self.devices: list[tuple[str, str]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.mul.out, torch.ops.aten.div.out):
            self.devices.append((args[0].device.type, args[1].device.type))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("scale", SCALES)
def test_unscaled_gradients_are_those_of_the_scaler(dtype: torch.dtype, scale: float) -> None:
    scaled = torch.randn(1000, generator=torch.Generator().manual_seed(1)).mul(scale).to(dtype)
    inverse = torch.tensor([scale]).double().reciprocal().float()  # as torch's scaler makes it
    used = scaled.clone()
    torch._amp_foreach_non_finite_check_and_unscale_([used], torch.zeros(1), inverse)
    assert torch.equal(change_values("unscale", inverse, scaled), used)


@pytest.mark.parametrize(("kind", "place"), [("unscale", "cpu"), ("mul", "meta"), ("div", "meta")])
def test_a_scalers_factor_stays_on_the_host(kind: str, place: str) -> None:
    """A device's product would round a factor in its own memory to bf16 first, as clipping does; a scaler does not."""
    with Multiplied() as noted:
        change_values(kind, torch.tensor([1 / SCALES[3]]), torch.empty(4, dtype=torch.bfloat16, device="meta"))
    assert noted.devices == [("meta", place)]
