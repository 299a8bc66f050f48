"""Redo side by side and in any memory format: the bits of training, and nothing is lost on the way."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from memckpt.capture.live_state import LiveState
from memckpt.capture.spec_request import SpecRequest
from memckpt.recovery.restore import RedoThreads
from memckpt.state import codec
from memckpt.state.layout import Layout
from memckpt.state.optimizers import ELEMENTWISE, hyperparameters
from memckpt.state.records import RecordMeta, SubStep
from memckpt.state.redo import RedoGroup, RedoTarget
from memckpt.state.spec import OptimizerSpec, OwnerSpec, ParamSpec, StateSpec, TensorSpec
from tests.support.cluster import processes

SIZES = [40_000, 3, 1, 70_001, 512, 33, 100_000, 5]
GROUPS = codec.encode(hyperparameters(torch.optim.Adam([torch.nn.Parameter(torch.zeros(1))], 0.01)))
METAS = [RecordMeta(number, number - 1, False, (SubStep(0, 0, GROUPS),)) for number in range(1, 6)]


def layout_of(whole: bool = False) -> Layout:
    params = tuple(
        ParamSpec(TensorSpec(f"p{index}", (size,), "float32"), (OwnerSpec(0, 0, ()),), whole, 0)
        for index, size in enumerate(SIZES)
    )
    optimizer = OptimizerSpec("torch.optim.adam", "Adam", b"", (len(SIZES),), 1)
    return Layout(StateSpec(params, (optimizer,), (), (), "lazy", 4, 3, (0,), 1))


def gradient(meta: RecordMeta, _: SubStep, param: int, cut: Any = None, /) -> torch.Tensor:
    return torch.randn(SIZES[param], generator=torch.Generator().manual_seed(1000 * meta.record + param))


def redone(threads: int, whole: bool = False, redo_with: Callable[..., torch.Tensor] = gradient) -> list[torch.Tensor]:
    """Parameters and their state after all records, with a group for each parameter."""
    layout = layout_of(whole)
    targets = [RedoTarget(index, 0, size, torch.nn.Parameter(torch.ones(size))) for index, size in enumerate(SIZES)]
    order: list[int] = []
    with torch.no_grad(), RedoThreads(layout, threads) as running:
        for target in targets:
            group = RedoGroup(layout, [target], lambda _, groups: torch.optim.Adam(groups))
            redo = partial(group.apply_all, METAS, redo_with)
            running.run([target], redo, partial(order.append, target.param))
        running.wait()
    assert order == list(range(len(SIZES)))
    return [one for target in targets for one in (target.parameter, *target.states[0].values())]


@pytest.mark.promise("CPU, bf16 or fp16 parameters")
@pytest.mark.parametrize("whole", [False, True])
def test_threads_change_no_bit(whole: bool) -> None:
    before = torch.get_num_threads()
    alone, together = redone(1, whole), redone(3, whole)
    assert all(map(torch.equal, alone, together))
    assert torch.get_num_threads() == before


#: Beyond what one of many threads takes at once, and no multiple of a vector.
_ELEMENTS = 768 * 768 + 3
_OPTIONS: dict[str, dict[str, Any]] = {
    "SGD": {"momentum": 0.9},
    "RMSprop": {"momentum": 0.9},
    "Adam": {"amsgrad": True},
}
_NAMES = [each.__name__ for each in ELEMENTWISE]
_FUSED = ("Adagrad", "Adam", "AdamW", "SGD")


def stepped(name: str, how: dict[str, bool], threads: int, cut: int = _ELEMENTS) -> torch.Tensor:
    """A parameter behind two steps of an optimizer that had it in pieces of `cut` elements, with so many threads."""
    generator = torch.Generator().manual_seed(7)
    values, *gradients = (torch.randn(_ELEMENTS, generator=generator) for _ in range(3))
    torch.set_num_threads(threads)
    pieces = [torch.nn.Parameter(piece.clone()) for piece in values.split(cut)]
    optimizer = getattr(torch.optim, name)(pieces, lr=0.01, **_OPTIONS.get(name, {}), **how)
    for gradient in gradients:
        for piece, part in zip(pieces, gradient.split(cut), strict=True):
            piece.grad = part.clone()
        optimizer.step()
    return torch.cat([piece.detach() for piece in pieces])


@pytest.mark.parametrize(
    ("name", "how"),
    [
        *((name, {"foreach": value}) for name in _NAMES for value in (True, False)),
        *((name, {"fused": True}) for name in _FUSED),
    ],
    ids=str,
)
def test_a_piece_has_the_bits_of_the_whole_whatever_shared_its_step(name: str, how: dict[str, bool]) -> None:
    """A step of many threads cuts a tensor where no vector ends; redo takes other pieces, each in one thread."""
    before = torch.get_num_threads()
    try:
        alone = stepped(name, how, 1)
        for threads, cut in [(3, _ELEMENTS), (7, _ELEMENTS), (10, _ELEMENTS), (1, 65_536)]:
            assert torch.equal(stepped(name, how, threads, cut), alone), (threads, cut)
    finally:
        torch.set_num_threads(before)


def test_a_child_of_the_tests_has_threads_of_its_own() -> None:
    """It would wait for those that this process has begun, or crash (`_end_openmp_threads` of conftest.py)."""
    before = torch.get_num_threads()
    try:
        stepped("Adam", {"fused": True}, 3)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                processes.die_after(60.0)
                nn.BatchNorm1d(64)(torch.randn(40_000, 64))
                code = 0
            finally:
                os._exit(code)
        assert os.waitpid(child, 0)[1] == 0
    finally:
        torch.set_num_threads(before)


def test_only_what_may_be_cut_leaves_the_calling_thread() -> None:
    seen: set[str] = set()

    def noting(meta: RecordMeta, sub_step: SubStep, param: int, cut: Any = None, /) -> torch.Tensor:
        seen.add(threading.current_thread().name)
        return gradient(meta, sub_step, param)

    redone(3, True, noting)
    assert seen == {"MainThread"}
    seen.clear()
    redone(3, False, noting)
    assert seen
    assert "MainThread" not in seen


@pytest.mark.parametrize("threads", [1, 3])
def test_a_failure_reaches_the_caller_and_ends_the_threads(threads: int) -> None:
    def failing(meta: RecordMeta, sub_step: SubStep, param: int, cut: Any = None, /) -> torch.Tensor:
        if (meta.record, param) == (3, 4):
            raise ValueError("record 3 is damaged")
        return gradient(meta, sub_step, param)

    before = torch.get_num_threads()
    with pytest.raises(ValueError, match="record 3 is damaged"):
        redone(threads, redo_with=failing)
    assert not [one for one in threading.enumerate() if one.name.startswith("memckpt-redo")]
    assert torch.get_num_threads() == before


@pytest.mark.parametrize("threads", [1, 3])
def test_hooks_of_all_optimizers_do_not_see_redo(threads: int) -> None:
    seen: list[object] = []
    handle = register_optimizer_step_post_hook(lambda *args: seen.append(args))
    try:
        redone(threads)
        assert seen == []
        param = torch.nn.Parameter(torch.ones(1))
        param.grad = torch.ones(1)
        torch.optim.SGD([param]).step()
        assert len(seen) == 1, "the hook is there again"
    finally:
        handle.remove()


# Memory formats: kernels round by the order of elements in memory


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
