"""The accelerators' copier on the late device, whose order of events shows each race: streams, commits, graphs."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from memckpt.capture.copier import AcceleratorCopier
from tests.support.late import device as late
from tests.support.late.children import run_in_child

#: Elements of tensors: some side by side are small.
SIZES = (700, 30, 3, 5, 5, 7, 1, 700, 20)


def copier_of() -> AcceleratorCopier:
    AcceleratorCopier.BUCKET_BYTES, AcceleratorCopier.PART_BYTES = 1 << 8, 1 << 10
    AcceleratorCopier.SMALL_BYTES, AcceleratorCopier.FEWEST = 1 << 6, 3
    return AcceleratorCopier(torch.device("late", 0))


def on(stream: torch.Stream) -> Any:
    return torch.get_device_module("late").stream(stream)


class Slot:
    """Places in page-locked memory, padded as a slot's are: most lie side by side."""

    def __init__(self, draw: random.Random) -> None:
        self._draw, self._end = draw, 0
        self._memory = torch.full((1 << 17,), -1.0, pin_memory=True)
        self._others: list[torch.Tensor] = []

    def place(self, numel: int) -> torch.Tensor:
        start, behind = self._end, self._end + -(-numel // 16) * 16
        self._end = behind + self._draw.choice([0, 0, 0, 16])
        self._others.append(self._memory[behind : self._end])
        return self._memory[start : start + numel]

    def is_untouched_beside_places(self) -> bool:
        return bool(torch.cat([*self._others, self._memory[self._end :]]).eq(-1).all())


def begin_copy(copier: AcceleratorCopier, source: torch.Tensor, slot: Slot | None = None) -> torch.Tensor:
    place = torch.full((source.numel(),), -1.0, pin_memory=True) if slot is None else slot.place(source.numel())
    copier.copy(place, source)
    return place


def copies_begin_and_sources_change_on_any_stream() -> None:
    """Sources are freed at once, changed on their own stream behind the wait, or read by the host behind a token."""
    streams = [torch.accelerator.current_stream(), torch.Stream("late"), torch.Stream("late")]
    for seed in range(20):
        draw, copier = random.Random(seed), copier_of()
        slot = Slot(draw) if seed % 2 else None
        late.be_slow(*draw.choice([(0, 200), (100, 0)]))
        begun: list[tuple[torch.Tensor, float, int]] = []
        kept: list[tuple[torch.Tensor, torch.Stream]] = []
        for value in range(1, 60):
            stream = draw.choice(streams)
            with on(stream):
                match draw.choice(["copy", "copy", "copy", "change", "read", "look"]):
                    case "copy":
                        source = torch.full((draw.choice([1, 10, 100, 700]),), float(value), device="late")
                        begun.append((begin_copy(copier, source, slot), value, copier.ticket()))
                        kept += [(source, stream)] if draw.random() < 0.5 else []
                        del source
                    case "change":
                        late.take_waits()
                        copier.wait_before_changes()
                        assert late.take_waits() == {}
                        for changed, made_on in kept:
                            if made_on == stream:
                                changed.zero_()
                        kept = [each for each in kept if each[1] != stream]
                    case "read":
                        wait = copier.token()
                        expected = [*begun]
                        begun.append(
                            (begin_copy(copier, torch.full((1,), float(value), device="late")), value, 1 << 60)
                        )
                        wait()
                        assert all(place.eq(held).all() for place, held, _ in expected)
                    case "look":
                        late.take_waits()
                        done = copier.done()
                        assert late.take_waits() == {}
                        assert all(place.eq(held).all() for place, held, ticket in begun if ticket <= done)
        copier.token()()
        assert all(place.eq(held).all() for place, held, _ in begun)
        assert slot is None or slot.is_untouched_beside_places()
        copier.wait_before_changes()
        kept.clear()
        torch.accelerator.synchronize()
    assert late.races() == []


def commits_outside_of_the_streams_that_train() -> None:
    """One stream steps, or two do; a commit without a backward since reads buffers that they may have changed."""
    outside, *trained = torch.accelerator.current_stream(), torch.Stream("late"), torch.Stream("late")
    late.be_slow(100, 100)
    copier = copier_of()
    for steps in (1, 2):
        weights = [torch.zeros(300, device="late") for _ in trained]
        for stream in trained:
            stream.wait_stream(outside)
        for number in range(1, 4):
            for stream, weight in zip(trained[:steps], weights, strict=False):
                with on(stream):
                    copier.wait_before_changes()  # before an optimizer steps
                    weight.fill_(float(number))
            for _ in range(2):
                with copier.behind_training():
                    places = [begin_copy(copier, weight) for weight in weights[:steps]]
                    copier.wait_before_changes()
                for stream, weight in zip(trained[:steps], weights, strict=False):
                    with on(stream):  # the next forward may change buffers
                        weight.add_(0.5)
                        weight.sub_(0.5)
                copier.token()()
                assert all(place.eq(number).all() for place in places)
        torch.accelerator.synchronize()
        del weights
    assert late.races() == []


def no_memory(*sizes: Any, **options: Any) -> torch.Tensor:
    raise torch.OutOfMemoryError("expected a few bytes of the device, found no memory")


def what_is_copied_as_it_is_may_change_at_once() -> None:
    """Without memory for a copy on the device, the stream that changes it waits; the host does not."""
    late.be_slow(0, 500)
    for refused in (False, True, False):
        copier, slot = copier_of(), Slot(random.Random(3))
        sources = [torch.full((size,), float(value), device="late") for value, size in enumerate(SIZES, 1)]
        sources.append(torch.full((9,), 1.0 + len(SIZES)))
        places = [slot.place(len(source)) for source in sources]
        late.take_waits()
        with mock.patch.multiple(torch, empty=no_memory, zeros=no_memory) if refused else contextlib.nullcontext():
            copier.copy_as_they_are(places, sources)
        for source in sources:
            source.zero_()
        assert late.take_waits() == {}
        copier.token()()
        assert [place.unique().tolist() for place in places] == [[float(value)] for value in range(1, 2 + len(SIZES))]
        assert slot.is_untouched_beside_places()
        copier.wait_before_changes()
    assert late.races() == []


def a_launch_for_which_the_device_has_no_memory_is_whole() -> None:
    copier, slot = copier_of(), Slot(random.Random(3))
    copier.BUCKET_BYTES = 1 << 20
    sources = [torch.full((size,), float(value), device="late") for value, size in enumerate(SIZES, 1)]
    places = [begin_copy(copier, source, slot) for source in sources]
    ticket = copier.ticket()
    with mock.patch.multiple(torch, empty=no_memory, zeros=no_memory):
        copier.wait_before_changes()
    for source in sources:
        source.zero_()
    assert copier.ticket() == ticket
    copier.token()()
    assert copier.done() == ticket
    assert [place.unique().tolist() for place in places] == [[float(value)] for value in range(1, 1 + len(SIZES))]
    assert late.races() == []


def few_small_tensors_wait_for_no_more_than_some_launches() -> None:
    """Else a gradient of a killed backward that has landed would not be known to have."""
    copier = copier_of()
    copier.FEWEST = 100
    begin_copy(copier, torch.ones(3, device="late"))
    tickets = []
    for _ in range(2 * copier.PARTIAL):
        begin_copy(copier, torch.ones(700, device="late"))
        tickets.append(copier.ticket())
    copier.token()()
    assert tickets == [1] * (copier.PARTIAL + 1) + list(range(2, 1 + copier.PARTIAL))
    copier.wait_before_changes()


class Copied(TorchDispatchMode):
    """Notes the bytes of each launch of a copy."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            self.nbytes.append(args[1].nbytes)
        return func(*args, **(kwargs or {}))


def no_launch_is_long() -> None:
    """Reads of the user's program meanwhile wait behind one launch, not behind a whole tensor."""
    copier = copier_of()
    large, small = torch.arange(1500.0, device="late").view(50, 30).t(), torch.ones(3, device="late")
    places = [torch.zeros(each.shape, pin_memory=True) for each in (large, small)]
    with Copied() as noted:
        for place, source in zip(places, (large, small), strict=True):
            copier.copy(place, source)
        copier.token()()
    assert sorted(noted.nbytes) == sorted([copier.PART_BYTES] * 5 + [6000 - 5 * copier.PART_BYTES, 12])
    assert all(torch.equal(place, each.cpu()) for place, each in zip(places, (large, small), strict=True))
    copier.wait_before_changes()


def memory_is_its_owners_again_before_copies_have_ended() -> None:
    """No allocator waits for the copies: the host is a step ahead of them, and would need that memory twice."""
    copier, sizes = copier_of(), set()
    places = [[torch.full((700,), -1.0, pin_memory=True) for _ in range(3)] for _ in range(4)]
    held = torch.ops.late.hold(copier._stream.stream_id)
    for number, row in enumerate(places):
        sources = [torch.full((700,), float(number), device="late") for _ in row]
        for place, source in zip(row, sources, strict=True):
            copier.copy(place, source)
        copier.wait_before_changes()
        del source, sources
        sizes.add(late.memory_sizes())
    assert copier.done() == 0
    torch.ops.late.go_on(held)
    copier.token()()
    assert all(place.eq(number).all() for number, row in enumerate(places) for place in row)
    assert len(sizes) == 1
    assert late.memory_sizes()[1] == 0
    assert late.races() == []


def nothing_is_launched_or_waited_for_in_a_graph() -> None:
    module: Any = torch.get_device_module("late")
    recording = [True]
    module.is_current_stream_capturing = lambda: recording[0]
    copier = copier_of()
    begin_copy(copier, torch.ones(4, device="late"))
    copier.wait_before_changes()
    assert (copier.done(), copier.ticket()) == (0, 1)
    assert copier.recording_graph()
    recording[0] = False
    copier.wait_before_changes()
    copier.token()()
    assert copier.done() == 1


@pytest.mark.usefixtures("only_late")
@pytest.mark.parametrize(
    "body",
    [
        copies_begin_and_sources_change_on_any_stream,
        commits_outside_of_the_streams_that_train,
        what_is_copied_as_it_is_may_change_at_once,
        a_launch_for_which_the_device_has_no_memory_is_whole,
        few_small_tensors_wait_for_no_more_than_some_launches,
        memory_is_its_owners_again_before_copies_have_ended,
        no_launch_is_long,
        nothing_is_launched_or_waited_for_in_a_graph,
    ],
    ids=lambda body: body.__name__,
)
def test_copier(body: Callable[[], None], tmp_path: Path) -> None:
    run_in_child(body, tmp_path / "log")
