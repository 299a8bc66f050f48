"""Marks of what has landed in a slot: at no moment do they vouch for bytes that are being written."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from memckpt.capture.copier import Copier, HostCopier
from memckpt.capture.live_state import LiveState
from memckpt.capture.phases import StallClock
from memckpt.capture.recorder import Recorder
from memckpt.capture.slot_writer import SlotWriter
from memckpt.capture.spec_request import SpecRequest
from memckpt.memory.region import GenerationRegions, Region
from memckpt.memory.slots import Landings
from memckpt.state.layout import Layout
from tests.support.faults.deferred_copier import DeferredCopier

GENERATION, RECORD = 3, 9


@dataclasses.dataclass
class Bench:
    """A recorder that stages into slots of its own."""

    params: list[torch.nn.Parameter]
    optimizer: torch.optim.Optimizer
    recorder: Recorder
    writer: SlotWriter
    region: Region

    def begin(self, record: int) -> None:
        self.writer.landings.open(record, "streaming")
        self.recorder.begin_record(self.writer, record)

    def stage(self, index: int, value: float) -> None:
        param = self.params[index]
        param.grad = torch.full_like(param, value)
        self.recorder.stage(param, param.grad)

    def found(self, record: int) -> dict[int, tuple[int, float]]:
        """What somebody else finds in the slot: by parameter the firing and the gradient, of those that are marked."""
        reader = Landings(self.region, self.writer.layout, GENERATION, 0)
        try:
            if reader.tap(record) is None:
                return {}
            places = self.writer.gradient_places
            views = {one.param: places.view(record, 0, 0, one.param) for one in reader.landed(record)}
            assert all(len(view.unique()) == 1 for view in views.values()), "half of a gradient is taken for whole"
            return {one.param: (one.firing, views[one.param].flatten()[0].item()) for one in reader.landed(record)}
        finally:
            reader.close()


@contextmanager
def made_bench(copier: Copier) -> Iterator[Bench]:
    model = torch.nn.ParameterList([torch.zeros(4, 3) for _ in range(5)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    live = LiveState(model, [optimizer], {})
    spec = live.spec(SpecRequest(mode="lazy", period=2, slots=2, local_ranks=(0,), world_size=1))
    layout = Layout(spec)
    region = Region.create("slots", layout.slots_bytes)
    writer = SlotWriter(GenerationRegions(layout, region, None, None), GENERATION, live, 0, copier)
    try:
        yield Bench(list(model), optimizer, Recorder(live, copier, StallClock()), writer, region)
    finally:
        writer.close()


@pytest.fixture(params=[HostCopier, DeferredCopier])
def copier(request: pytest.FixtureRequest) -> Copier:
    made: Copier = request.param()
    return made


@pytest.fixture
def bench(copier: Copier) -> Iterator[Bench]:
    with made_bench(copier) as made:
        yield made


def settle(bench: Bench, copier: Copier) -> None:
    """Let copies that are on their way arrive, and have the recorder look."""
    copier.token()()
    bench.recorder.gradients.mark_landed()


def test_what_was_changed_before_the_step_is_not_as_backward_made_it(bench: Bench, copier: Copier) -> None:
    bench.begin(RECORD)
    for index in range(3):
        bench.stage(index, 1.0)
    gradient = bench.params[1].grad
    gradient.mul_(2)  # noted by its counter, and staged again at the step
    bench.recorder.optimizer_stepping(0, bench.optimizer)
    bench.recorder.optimizer_stepped(0, bench.optimizer)
    settle(bench, copier)
    assert bench.found(RECORD) == {0: (1, 1.0), 2: (1, 1.0)}
    bench.stage(0, 5.0)  # behind the step: in a place of its own, or nowhere
    settle(bench, copier)
    assert bench.found(RECORD)[0] == (1, 1.0)


@pytest.mark.promise("a partly copied gradient is never taken for complete")
@pytest.mark.parametrize("seed", range(40))
def test_no_copy_on_its_way_is_taken_for_whole(seed: int) -> None:
    """Copies that arrive late, in parts and behind others, and gradients that are made again meanwhile."""
    draw, copier = random.Random(seed), DeferredCopier()
    newest: dict[int, tuple[int, float]] = {}
    with made_bench(copier) as bench:
        bench.begin(RECORD)
        for moment in range(1, 60):
            match draw.choice(["stage", "stage", "arrive", "look"]):
                case "stage":
                    index = draw.randrange(5)
                    newest[index] = newest.get(index, (0, 0.0))[0] + 1, float(moment)
                    bench.stage(index, float(moment))
                case "arrive":
                    with copier._lock:
                        copier.made[1] += copier._make(draw.randint(0, len(copier._begun)))
                case "look":
                    bench.recorder.gradients.mark_landed()
            assert bench.found(RECORD).items() <= newest.items()
        settle(bench, copier)
        assert bench.found(RECORD) == newest


def test_a_copy_that_is_being_made_is_not_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainer may die in the middle of a copy over a gradient that had landed."""
    copier = HostCopier()
    seen = []
    with made_bench(copier) as bench:
        bench.begin(RECORD)
        bench.stage(0, 1.0)
        original = copier.copy

        def half(destination: torch.Tensor, source: torch.Tensor) -> None:
            destination[:2].copy_(source[:2])
            seen.append(bench.found(RECORD))
            original(destination, source)

        monkeypatch.setattr(copier, "copy", half)
        bench.stage(0, 2.0)
        bench.stage(1, 3.0)
        assert seen == [{}, {0: (2, 2.0)}]
        assert bench.found(RECORD) == {0: (2, 2.0), 1: (1, 3.0)}
