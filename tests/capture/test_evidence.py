"""Evidence: what a sample covers, and what a comparison with it finds."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from memckpt.capture.beside.watch import _memory_of
from memckpt.capture.evidence import Evidence, Pair, _Sampler
from memckpt.capture.live_state import LiveState
from memckpt.capture.spec_request import SpecRequest
from memckpt.state import codec
from memckpt.state.tensors import same_bits


class Kinds(torch.nn.Module):
    """Parameters and buffers of several dtypes, strides and sizes; one is frozen, one is empty."""

    def __init__(self) -> None:
        super().__init__()
        self.large = torch.nn.Parameter(torch.randn(300, 200))
        self.permuted = torch.nn.Parameter(torch.randn(4, 6, 8, 8).to(memory_format=torch.channels_last))
        self.bf16 = torch.nn.Parameter(torch.randn(17).bfloat16())
        self.complex = torch.nn.Parameter(torch.randn(9, dtype=torch.complex64))
        self.scale = torch.nn.Parameter(torch.randn(()))
        self.frozen = torch.nn.Parameter(torch.randn(70, 300), requires_grad=False)
        self.empty = torch.nn.Parameter(torch.empty(0, 3))
        self.register_buffer("flags", torch.rand(12) > 0.5)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))


def taken_step() -> tuple[Kinds, torch.optim.Optimizer, LiveState, Evidence]:
    torch.manual_seed(3)
    model = Kinds()
    optimizer = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], 0.1)
    for param in model.parameters():
        param.grad = torch.randn_like(param) if param.requires_grad else None
    optimizer.step()
    live = LiveState(model, [optimizer], {})
    return model, optimizer, live, Evidence(live.spec(SpecRequest("lazy", 4, 3, (0,), 1)), live)


def differing(pairs: list[Pair] | None) -> list[str]:
    assert pairs is not None
    return [pair.name for pair in pairs if not same_bits(pair.now, pair.before)]


def sample(evidence: Evidence, record: int) -> dict[str, Any]:
    found: dict[str, Any] = codec.decode(codec.encode(evidence.sample_state(record)))
    return found


def test_an_untouched_state_equals_its_sample_and_each_tensor_is_in_it() -> None:
    model, _, _, evidence = taken_step()
    pairs = evidence.pairs(sample(evidence, 5))
    assert differing(pairs) == []
    assert pairs is not None
    names = {pair.name for pair in pairs}
    assert {name for name, param in model.named_parameters() if param.numel()} | {"flags", "count"} <= names
    assert {"large (exp_avg)", "permuted (exp_avg_sq)", "scale (step)"} <= names
    assert {pair.kind for pair in pairs} == {"parameter", "state", "buffer", "frozen"}


@pytest.mark.parametrize("first", [0, 1])
def test_whatever_comes_round_in_each_row_is_in_each_sample(first: int) -> None:
    """A stride of as many elements as a row, or of half of it, would pass it over."""
    model, _, _, evidence = taken_step()
    held = sample(evidence, 8)
    with torch.no_grad():
        model.large[:, first::100] += 1.0
    assert differing(evidence.pairs(held)) == ["large"]


def test_a_conjugated_buffer_is_compared_by_its_values() -> None:
    model, _, _, evidence = taken_step()
    model.complex.data = model.complex.data.conj()
    held = sample(evidence, 3)
    assert differing(evidence.pairs(held)) == []
    model.complex.data = model.complex.data.resolve_conj()
    assert differing(evidence.pairs(held)) == []


NAMES = ["large", "permuted", "bf16", "complex", "scale", "frozen", "flags", "count"]


@pytest.mark.parametrize("name", NAMES)
def test_one_element_that_differs_is_found_as_the_sample_comes_round(name: str) -> None:
    model, _, _, evidence = taken_step()
    tensor = getattr(model, name).data
    records = range(7, 7 + min(tensor.numel(), 400))
    before = {record: sample(evidence, record) for record in records}
    last = (-1,) * tensor.dim()
    tensor[last] = ~tensor[last] if tensor.dtype == torch.bool else tensor[last] + 1
    found = [record for record in records if differing(evidence.pairs(before[record])) == [name]]
    assert found
    whole = tensor.numel() <= 300  # then it is in each sample
    assert (len(found) == len(records)) == whole


def test_other_tensors_than_the_samples_are_no_evidence() -> None:
    _, optimizer, _, evidence = taken_step()
    held = sample(evidence, 5)
    optimizer.state.clear()
    assert evidence.pairs(held) is None


def test_a_sample_follows_tensors_that_move() -> None:
    model, optimizer, _, evidence = taken_step()
    evidence.sample_state(5)
    state = optimizer.state[model.bf16]
    state["exp_avg"] = state["exp_avg"] + 1
    model.large.data = model.large.data * 2
    held = sample(evidence, 6)
    assert differing(evidence.pairs(held)) == []
    model.large.data = model.large.data / 2
    assert differing(evidence.pairs(held)) == ["large"]


def test_small_tensors_are_in_each_sample_with_all_elements() -> None:
    """One element that is written behind the last step is found, wherever it is."""
    model = torch.nn.Linear(60, 20)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    live = LiveState(model, [optimizer], {})
    evidence = Evidence(live.spec(SpecRequest("lazy", 4, 3, (0,), 1)), live)
    held = sample(evidence, 5)
    for place in range(0, 1200, 7):
        model.weight.data.view(-1)[place] += 1.0
        assert differing(evidence.pairs(held)) == ["weight"]
        held = sample(evidence, 5)


def test_a_module_that_was_replaced_is_sampled_in_its_place() -> None:
    model = torch.nn.ModuleDict(
        {"trained": torch.nn.Linear(3, 2), "still": torch.nn.Linear(3, 2).requires_grad_(False)}
    )
    live = LiveState(model, [torch.optim.SGD(model["trained"].parameters(), 0.1)], {})
    evidence = Evidence(live.spec(SpecRequest("snapshot", 1, 2, (0,), 1)), live)
    held = sample(evidence, 1)
    model["still"] = torch.nn.Linear(3, 2).requires_grad_(False)
    live.follow()
    assert differing(evidence.pairs(held)) == ["still.weight", "still.bias"]
    assert differing(evidence.pairs(sample(evidence, 1))) == []


def test_memory_that_is_given_up_is_not_read() -> None:
    """Wrappers resize storages to nothing for a while: there is no byte at such an address."""
    given_up = torch.ones(300, 300)
    given_up.untyped_storage().resize_(0)
    assert _Sampler([given_up]).sample_tensors(1, [given_up]) == []
    assert bytes(_memory_of(given_up)) == b""
