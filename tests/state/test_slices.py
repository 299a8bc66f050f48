"""Slices of a state: each tensor is in one of them, and together they are the state."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from memckpt.config import RedoMode
from memckpt.session.resume.chosen import exchange_slices
from memckpt.state.layout import ALIGN, Layout
from memckpt.state.slices import assign_slices, cut_to_slice, join_slices
from memckpt.state.spec import OwnerSpec, ParamSpec, StateSpec, StateTensorSpec, TensorSpec, problem_of
from tests.support.cluster.thread_ranks import on_ranks
from tests.support.trainings.specs import an_optimizer

SHAPES = [(300, 40), (5, 7), (64, 64), (64,), (1000,), (), (96, 16), (96,)]


def spec_of(mode: RedoMode) -> StateSpec:
    """Adam's state of some parameters, and frozen ones."""

    def param(tensor: TensorSpec) -> ParamSpec:
        step = StateTensorSpec("step", (), "float32", False, True)
        owner = OwnerSpec(0, 0, (step, StateTensorSpec("exp_avg", tensor.shape, "float32", True, False)))
        return ParamSpec(tensor, (owner,), False, 0)

    stepped, frozen = ([TensorSpec(f"{kind}{i}", one, "float32") for i, one in enumerate(SHAPES)] for kind in "pf")
    params = tuple(map(param, stepped))
    return StateSpec(params, (an_optimizer(0, 1),), tuple(frozen), (), mode, 4, 3, (0,), 7)


def cut(spec: StateSpec, count: int) -> list[StateSpec]:
    kinds = [one.tensor for one in spec.params], spec.static
    slices = {k: v for kind in kinds for k, v in assign_slices({one.name: one.nbytes for one in kind}, count).items()}
    return [cut_to_slice(spec, number, count, slices.get) for number in range(count)]


@pytest.mark.parametrize("mode", ["lazy", "eager"])
@pytest.mark.parametrize("count", [2, 3, 7])
def test_nodes_hold_each_tensor_once_and_an_equal_share_of_bytes(mode: RedoMode, count: int) -> None:
    spec = spec_of(mode)
    parts = cut(spec, count)
    assert not any(map(problem_of, parts))
    for tensors in zip(*(part.params for part in parts), strict=True):
        assert sum(not one.tensor.elsewhere for one in tensors) == 1 or not tensors[0].tensor.shape
    whole, *shares = map(Layout, [spec, *parts])
    numbers = (count - 1) * ALIGN  # a single number is on all nodes
    assert sum(each.gradient_bytes for each in shares) == whole.gradient_bytes + numbers
    assert max(each.gradient_bytes for each in shares) < whole.gradient_bytes / 1.5
    assert max(each.static_bytes for each in shares) < whole.static_bytes / 1.3
    assert len({part.sharding() for part in [spec, *parts]}) == count + 1


@pytest.mark.parametrize("count", [2, 5])
def test_slices_join_to_the_whole(count: int) -> None:
    spec = spec_of("lazy")
    whole = join_slices(cut(spec, count))
    assert [(one.tensor.name, one.tensor.shape) for one in whole.params] == [
        (one.tensor.name, one.tensor.shape) for one in spec.params
    ]
    assert [one.owners for one in whole.params] == [one.owners for one in spec.params]
    with pytest.raises(ValueError, match="in one of them, found none"):
        join_slices(cut(spec, count)[1:])


@pytest.mark.parametrize("kind", ["p", "f"], ids=["stepped", "frozen"])
def test_a_tensor_that_no_node_has_is_named_on_all_ranks(kind: str) -> None:
    """Two of three nodes have restored their slices."""
    parts = cut(spec_of("lazy"), 3)
    whole = {one.name: torch.zeros(shape) for shape, one in zip(2 * SHAPES, spec_of("lazy").tensors(), strict=True)}
    parts = [replace(part, static=()) if kind == "p" else replace(part, params=()) for part in parts]

    def exchange(ranks: Any) -> str:
        chosen: Any = SimpleNamespace(tensors_spec=parts[ranks.rank], spec=parts[ranks.rank])
        live: Any = SimpleNamespace(tensors=lambda: whole, optimizers=[])
        return exchange_slices(chosen, live, ranks)

    lost = sorted(one.name for one in parts[2].tensors() if one.shard is not None and not one.elsewhere)
    assert lost[0].startswith(kind)
    assert on_ranks(2, exchange) == [f"{lost[0]} is in no node's slice"] * 2


@given(st.dictionaries(st.text(max_size=3), st.integers(0, 1000)), st.integers(1, 5))
def test_slices_are_balanced_and_do_not_depend_on_the_order(sizes: dict[str, int], count: int) -> None:
    found = assign_slices(sizes, count)
    assert found == assign_slices(dict(reversed(sizes.items())), count)
    loads = [sum(sizes[name] for name, number in found.items() if number == each) for each in range(count)]
    assert max(loads) - min(loads) <= max(sizes.values(), default=0)


def test_snapshots_are_whole_on_each_node() -> None:
    spec = spec_of("snapshot")
    assert not any(one.elsewhere for one in cut(spec, 3)[1].tensors())
