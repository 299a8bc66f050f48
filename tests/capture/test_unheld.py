"""Tensors that cannot be copied and appear in a training: they are named, and end neither training nor records."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from memckpt.capture.beside.attributes import FoundObjects
from memckpt.capture.evidence import Evidence
from memckpt.capture.live_state import LiveState
from memckpt.capture.spec_request import SpecRequest
from memckpt.state.tensors import why_not_held


class Subclass(torch.Tensor):
    """A tensor of another class."""


def inside(transform: Callable[..., Any]) -> torch.Tensor:
    """A value that a transform of torch.func has leaked."""
    seen: list[torch.Tensor] = []
    transform(lambda value: (seen.append(value), value.sum())[1])(torch.ones(2, 3))
    return seen[0]


def freed() -> torch.Tensor:
    tensor = torch.ones(5)
    tensor.untyped_storage().resize_(0)
    return tensor


UNHELD: dict[str, Callable[[], torch.Tensor]] = {
    "sparse": lambda: torch.eye(4).to_sparse(),
    "csr": lambda: torch.eye(4).to_sparse_csr(),
    "meta": lambda: torch.empty(3, device="meta"),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "jagged": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
    "mkldnn": lambda: torch.ones(3, 3).to_mkldnn(),
    "subclass": lambda: torch.ones(3).as_subclass(Subclass),
    "vmap": lambda: inside(torch.func.vmap),
    "grad": lambda: inside(torch.func.grad),
    "freed": freed,
    "negated": lambda: torch.zeros(3, dtype=torch.complex64).conj().imag,
    "bits": lambda: torch.zeros(3, dtype=torch.uint16),
}
HELD: dict[str, Callable[[], torch.Tensor]] = {
    "strided": lambda: torch.ones(4, 4)[:, ::2],
    "expanded": lambda: torch.ones(1).expand(5),
    "empty": lambda: torch.empty(0),
    "conjugated": lambda: torch.ones(3, dtype=torch.complex64).conj(),
}


@pytest.mark.promise(
    "a buffer or parameter that appears in training and cannot be copied: sparse, nested, quantized, on the meta "
    "device, inside a torch.func transform, without memory"
)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", UNHELD.values(), ids=UNHELD)
def test_what_cannot_be_copied_is_left_out_by_name(make: Callable[[], torch.Tensor]) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    live = LiveState(model, [torch.optim.SGD(model.parameters(), 0.1)], {})
    inexact: list[str] = []
    objects = FoundObjects(lambda: {"model": model}, lambda: (), inexact.append, "{}")
    request = SpecRequest("lazy", 4, 3, (0,), 1)
    spec = live.spec(request)
    for place in (model, model[1]):
        place.register_buffer("odd", make())
        place.register_buffer("running_mean", make())
    for _ in range(2):
        live.follow()
        found = live.spec(request)
        Evidence(found, live).sample_state(1)
        live.describe_late()
        objects.state_dict()
    assert {one.name for one in found.by_value} == {one.name for one in spec.by_value} - {"1.running_mean"}
    assert len([one for one in live.not_carried if "cannot be copied" in one]) == 4
    # It is held again as soon as it can be.
    for place in (model, model[1]):
        place.running_mean = torch.zeros(4)
        place.odd = torch.zeros(4)
    live.follow()
    assert {"odd", "1.running_mean"} < {one.name for one in live.spec(request).by_value}
    assert not inexact


@pytest.mark.parametrize("make", HELD.values(), ids=HELD)
def test_what_can_be_copied_is_held(make: Callable[[], torch.Tensor]) -> None:
    assert why_not_held(make()) == ""
