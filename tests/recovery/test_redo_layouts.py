"""Redo in the memory format of training: kernels round by the order of elements in memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from memckpt.capture.live_state import LiveState
from memckpt.capture.spec_request import SpecRequest
from memckpt.state import codec
from memckpt.state.layout import Layout
from memckpt.state.optimizers import hyperparameters
from memckpt.state.records import RecordMeta, SubStep
from memckpt.state.redo import RedoGroup, RedoTarget

CASES = {
    "sgd fused": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "fused": True}),
    "adam fused": (torch.optim.AdamW, {"fused": True}),
    "adam foreach": (torch.optim.Adam, {"foreach": True}),
    "sums over rows": (torch.optim.Adafactor, {}),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("kept", ["channels_last", "row by row"])
def test_a_permuted_parameter_is_stepped_in_its_memory_format(name: str, kept: str) -> None:
    kind, settings = CASES[name]
    numbers = torch.Generator().manual_seed(4)
    model = torch.nn.Conv2d(3, 5, 3, bias=False).to(memory_format=torch.channels_last)
    optimizer: Any = kind(model.parameters(), **settings)
    start = model.weight.detach().clone(memory_format=torch.contiguous_format)
    layout = Layout(LiveState(model, [optimizer], {}).spec(SpecRequest("lazy", 4, 3, (0,), 1)))
    metas, gradients = [], {}
    for number in range(1, 5):
        metas.append(RecordMeta(number, number - 1, False, (SubStep(0, 0, codec.encode(hyperparameters(optimizer))),)))
        gradients[number] = torch.randn(5, 3, 3, 3, generator=numbers)
        model.weight.grad = gradients[number].to(memory_format=torch.channels_last)
        optimizer.step()
    if kept == "channels_last":
        start = start.to(memory_format=torch.channels_last)
    target = RedoTarget(0, 0, start.numel(), torch.nn.Parameter(start))
    group = RedoGroup(layout, [target], lambda _, groups: kind(groups))
    with torch.no_grad():
        group.apply_all(metas, lambda meta, *_: gradients[meta.record])
    assert target.parameter.data_ptr() == start.data_ptr()
    assert torch.equal(target.parameter, model.weight)
    for key, value in optimizer.state[model.weight].items():
        assert torch.equal(target.states[0][key], value), key
