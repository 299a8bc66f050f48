"""The late device is one: its kernels run later, its memory is reused at once, and it finds races and waits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from memckpt.state import codec, rng
from tests.support.late import device as late
from tests.support.late.children import run_in_child

SLOW_US = 20_000


def streams() -> tuple[torch.Stream, torch.Stream]:
    """The default stream, and another."""
    return torch.accelerator.current_stream(), torch.Stream("late")


def kernels_are_late_and_exact() -> None:
    late.be_slow(compute=SLOW_US)
    host = torch.full((1000,), 7.0, pin_memory=True)
    taken = torch.empty(1000, pin_memory=True)
    there = host.to("late", non_blocking=True)
    taken.copy_(there.mul_(2).cumsum(0), non_blocking=True)
    assert not torch.equal(taken, torch.full((1000,), 14.0).cumsum(0))
    assert late.take_waits() == {}
    torch.accelerator.synchronize()
    assert torch.equal(taken, torch.full((1000,), 14.0).cumsum(0))
    assert late.take_waits() == {"synchronize": 1}


def operators_of_a_model() -> None:
    torch.manual_seed(1)
    convolution = torch.nn.Conv2d(3, 8, 3, stride=2, bias=True)
    moved = torch.nn.Conv2d(3, 8, 3, stride=2, bias=True)
    moved.load_state_dict(convolution.state_dict())
    moved.to("late")
    x = torch.randn(2, 3, 9, 9)
    convolution(x).square().sum().backward()
    moved(x.to("late")).square().sum().backward()
    for here, there in zip(convolution.parameters(), moved.parameters(), strict=True):
        assert torch.allclose(here.grad, there.grad.cpu(), rtol=1e-5)  # type: ignore[union-attr, arg-type]
    q = torch.randn(2, 4, 8, 16)
    there = functional.scaled_dot_product_attention(*[q.to("late")] * 3, is_causal=True)
    assert torch.allclose(functional.scaled_dot_product_attention(q, q, q, is_causal=True), there.cpu(), atol=1e-6)
    with torch.autocast("late", torch.bfloat16):
        assert (q.to("late") @ q.to("late").mT).dtype == torch.bfloat16
    other = q.to("late:1")
    assert other.device.index == 1
    assert torch.equal((other + 1).to("late:0").cpu(), q + 1)


def random_numbers_repeat_from_a_state() -> None:
    torch.manual_seed(3)
    first = torch.rand(5, device="late")
    state = torch.get_device_module("late").get_rng_state()
    drawn = functional.dropout(torch.ones(64, device="late"), 0.5)
    assert late.take_waits() == {}
    assert not torch.equal(torch.get_device_module("late").get_rng_state(), state)  # moves at the launch
    torch.get_device_module("late").set_rng_state(state)
    assert torch.equal(functional.dropout(torch.ones(64, device="late"), 0.5).cpu(), drawn.cpu())
    torch.manual_seed(3)
    assert torch.equal(torch.rand(5, device="late").cpu(), first.cpu())


def waits_are_counted() -> None:
    there = torch.ones(1000, device="late")
    assert late.take_waits() == {}
    float(there.sum())
    there.cpu()
    there.copy_(torch.ones(1000))
    torch.empty(1000).copy_(there, non_blocking=True)
    there.nonzero()
    event = torch.Event("late")
    event.record()
    event.synchronize()
    torch.accelerator.current_stream().synchronize()
    kinds = ("item", "copy to the host", "copy from the host", "copy to pageable memory", "event.synchronize")
    expected = [*kinds, "stream.synchronize", "aten::nonzero looks at its result"]
    assert {name: count for name, count in late.take_waits().items() if name in expected} == dict.fromkeys(expected, 1)


def unordered_use_is_a_race() -> None:
    main, side = streams()
    there = torch.zeros(1000, device="late")
    with torch.late.stream(side):  # type: ignore[attr-defined]
        there.add_(1)
    assert any("aten::add.out on stream 1" in race and "aten::zero_ on stream 0" in race for race in late.races())
    known = len(late.races())
    main.wait_stream(side)
    side.wait_stream(main)
    found, scale = torch.zeros(1, device="late"), torch.ones(1, device="late")
    torch._amp_foreach_non_finite_check_and_unscale_([there[:500]], found, scale)
    with torch.late.stream(side):  # type: ignore[attr-defined]
        there[500:].mul(2)  # other bytes
    assert len(late.races()) == known
    with torch.late.stream(side):  # type: ignore[attr-defined]
        there[:500].mul(2)
    assert "reads 2000 bytes that aten::_amp_foreach_non_finite_check_and_unscale_ on" in late.races()[-1]


def memory_that_is_freed_under_a_reader_is_found() -> None:
    main, side = streams()
    late.be_slow(others=SLOW_US)
    taken = torch.empty(1000, pin_memory=True)
    for recorded in (True, False):
        source = torch.ones(1000, device="late")
        side.wait_stream(main)
        with torch.late.stream(side):  # type: ignore[attr-defined]
            taken.copy_(source, non_blocking=True)
        if recorded:
            source.record_stream(side)
        del source
        used = torch.zeros(1000, device="late")
        del used
        torch.accelerator.synchronize()
        assert torch.equal(taken, torch.ones(1000)) == recorded
        assert bool(late.races()) != recorded
    assert "the next owner of freed memory on stream 0 writes" in late.races()[0]


def a_rank_comes_back_on_another_card() -> None:
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


BODIES = [
    a_rank_comes_back_on_another_card,
    kernels_are_late_and_exact,
    operators_of_a_model,
    random_numbers_repeat_from_a_state,
    waits_are_counted,
    unordered_use_is_a_race,
    memory_that_is_freed_under_a_reader_is_found,
]


@pytest.mark.usefixtures("only_late")
@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_late_device(body: Callable[[], None], tmp_path: Path) -> None:
    run_in_child(body, tmp_path / "log")
