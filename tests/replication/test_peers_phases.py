"""Phase marks: what a trainer writes into shared memory and what the other process reads there."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from memckpt.capture.copier import copier_for
from memckpt.capture.phases import PhaseMarks, StallClock
from memckpt.capture.taps.ddp import BucketTap
from memckpt.capture.taps.tap import StepTap, StreamingTap
from memckpt.errors import DamagedStateError
from memckpt.memory.pages import Phase, PhaseReader, PhasesPage, PhaseWriter
from memckpt.memory.region import Region

F, B, S = Phase.FORWARD, Phase.BACKWARD, Phase.STEP


@pytest.fixture
def page() -> Iterator[PhasesPage]:
    page = PhasesPage.create(3)
    yield page
    page.close()


# The page


def test_marks_are_read_once_in_their_order(page: PhasesPage) -> None:
    theirs = PhasesPage.open(os.dup(page.fd))
    reader = PhaseReader(theirs)
    first, last = PhaseWriter(page, 0), PhaseWriter(page, 2)
    assert reader.read() == []
    first.write_mark(1, F)
    last.write_mark(1, F)
    first.write_mark(1, B)
    marks = reader.read()
    assert [(m.position, m.step, m.phase) for m in marks] == [(0, 1, F), (0, 1, B), (2, 1, F)]
    assert marks[0].ns <= marks[1].ns
    assert reader.read() == []
    theirs.close()


def test_whoever_comes_later_goes_on(page: PhasesPage) -> None:
    """A replicator that starts in the middle reads from the newest mark on; the next attempt's rank writes on."""
    PhaseWriter(page, 0).write_mark(7, F)
    again = PhaseWriter(page, 0)
    reader = PhaseReader(page)
    again.write_mark(8, B)
    assert [(m.step, m.phase) for m in reader.read()] == [(7, F), (8, B)]


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 700), max_size=8))
def test_a_reader_that_is_overtaken_reads_the_newest(bursts: list[int]) -> None:
    page = PhasesPage.create(1)
    writer, reader, step = PhaseWriter(page, 0), PhaseReader(page), 0
    for burst in bursts:
        for _ in range(burst):
            step += 1
            writer.write_mark(step, F)
        steps = [mark.step for mark in reader.read()]
        assert steps == list(range(step - len(steps) + 1, step + 1))
        assert len(steps) >= min(burst, 100)
    page.close()


def test_an_entry_that_is_being_written_is_not_read(page: PhasesPage) -> None:
    """Whichever of its words are there already, and in whatever order."""
    writer, reader = PhaseWriter(page, 0), PhaseReader(page)
    for step in range(1, 300):  # so that there is an older entry in its place
        writer.write_mark(step, B)
    reader.read()
    at = 300 % 256 * 4
    old = page.words[at : at + 4].tolist()
    writer.write_mark(300, F)
    new = page.words[at : at + 4].tolist()
    for there in range(15):
        for word in range(4):
            page.words[at + word] = new[word] if there >> word & 1 else old[word]
        assert reader.read() == [], there
    page.words[at : at + 4] = memoryview(bytes(b"".join(w.to_bytes(8, "little") for w in new))).cast("Q")
    assert [mark.step for mark in reader.read()] == [300]


WRITE_MANY = """
import os, sys
from memckpt.memory.pages import PhasesPage, PhaseWriter
page = PhasesPage.open(os.open(sys.argv[1], os.O_RDWR))
writer = PhaseWriter(page, 0)
for step in range(1, int(sys.argv[2]) + 1):
    writer.write_mark(step, step % 3 + 1)
"""


def test_another_process_reads_whole_marks_only() -> None:
    page = PhasesPage.create(1)
    reader, last = PhaseReader(page), 0
    arguments = [f"/proc/{os.getpid()}/fd/{page.fd}", "100000"]
    child = subprocess.Popen([sys.executable, "-c", WRITE_MANY, *arguments])
    seen = 0
    while last < 100_000:
        assert not child.poll()
        for mark in reader.read():
            assert mark.step > last
            assert mark.phase == mark.step % 3 + 1
            last = mark.step
            seen += 1
    assert child.wait(20) == 0
    page.close()
    assert seen > 100


def test_what_is_no_page_is_refused() -> None:
    region = Region.create("test", 4096)
    with pytest.raises(DamagedStateError, match="phase marks"):
        PhasesPage.open(os.dup(region.fd))
    region.close()
    page = PhasesPage.create(2)
    with pytest.raises(ValueError, match="position"):
        PhaseWriter(page, 2)
    page.close()
    page.close()


def test_closed_and_forked_pages_are_not_written(page: PhasesPage) -> None:
    writer = PhaseWriter(page, 0)
    child = os.fork()
    if child == 0:
        writer.write_mark(1, F)  # nothing is mapped here
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert PhaseReader(page).read() == []
    page.close()
    writer.write_mark(2, F)


# The trainer's marks


class FakeRecorder:
    """What taps use of a recorder."""

    def __init__(self, marks: PhaseMarks) -> None:
        self.marks = marks
        self.clock = StallClock()
        self.staged = 0

    def backward_runs(self) -> bool:
        self.marks.gradient_seen()
        return True

    def gradient_seen(self, look: bool = True) -> None:
        pass

    def stage(self, param: Any, gradient: Any) -> None:
        self.staged += 1

    def note_versions(self) -> None:
        pass


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def loss(net: nn.Module) -> torch.Tensor:
    result: torch.Tensor = net(torch.ones(2, 8)).square().sum()
    return result


def read(reader: PhaseReader) -> list[tuple[int, Phase]]:
    return [(mark.step, mark.phase) for mark in reader.read()]


@pytest.mark.parametrize("tap", ["streaming", "step"])
def test_backwards_are_marked_from_their_first_gradient_to_their_end(page: PhasesPage, tap: str) -> None:
    reader, marks = PhaseReader(page), PhaseMarks(PhaseWriter(page, 0), 5)
    net = model()
    recorder: Any = FakeRecorder(marks)
    params = list(net.parameters())
    hooks = StreamingTap(params, recorder, copier_for(torch.device("cpu"))) if tap == "streaming" else None
    installed = hooks or StepTap(params, recorder)
    installed.install()
    assert read(reader) == [(5, F)]
    inside: list[list[tuple[int, Phase]]] = []
    params[0].register_post_accumulate_grad_hook(lambda _: inside.append(read(reader)))
    for _ in range(2):  # two micro-batches
        loss(net).backward()  # type: ignore[no-untyped-call]
    assert inside == [[(5, B)], [(5, S), (5, B)]]
    assert read(reader) == [(5, S)]
    marks.step_ended(5)
    assert read(reader) == [(6, F)]
    marks.remove()
    loss(net).backward()  # type: ignore[no-untyped-call]
    assert read(reader) == []


def test_a_backward_within_a_backward(page: PhasesPage) -> None:
    """Of reentrant checkpointing: whatever is marked within, the end is the end."""
    reader, marks = PhaseReader(page), PhaseMarks(PhaseWriter(page, 0), 1)
    net = model()
    recorder: Any = FakeRecorder(marks)
    StreamingTap(list(net.parameters()), recorder, copier_for(torch.device("cpu"))).install()
    start = torch.ones(2, 8, requires_grad=True)
    checkpoint(net, start, use_reentrant=True).square().sum().backward()
    found = read(reader)
    assert found[:2] == [(1, F), (1, B)]
    assert found[-1] == (1, S)


def test_a_backward_that_raises_is_over_with_the_step(page: PhasesPage) -> None:
    reader, marks = PhaseReader(page), PhaseMarks(PhaseWriter(page, 0), 1)
    net = model()
    recorder: Any = FakeRecorder(marks)
    StreamingTap(list(net.parameters()), recorder, copier_for(torch.device("cpu"))).install()

    def fail(gradient: torch.Tensor) -> None:
        raise RuntimeError("of the user's")

    handle = net[0].weight.register_hook(fail)
    with pytest.raises(RuntimeError, match="of the user's"):
        loss(net).backward()  # type: ignore[no-untyped-call]
    handle.remove()
    marks.step_ended(1)
    loss(net).backward()  # type: ignore[no-untyped-call]
    assert read(reader) == [(1, F), (1, B), (2, F), (2, B), (2, S)]


def test_under_ddp_the_end_is_behind_its_reductions(page: PhasesPage) -> None:
    reader, marks = PhaseReader(page), PhaseMarks(PhaseWriter(page, 0), 1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        net = DistributedDataParallel(model())
        recorder: Any = FakeRecorder(marks)
        before: list[list[tuple[int, Phase]]] = []
        tap = BucketTap(net, recorder, copier_for(torch.device("cpu")), lambda: before.append(read(reader)))
        tap.install()
        done: list[bool] = []

        def slow(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
            work = dist.all_reduce(bucket.buffer(), async_op=True)

            def reduced(future: torch.futures.Future[Any]) -> torch.Tensor:
                done.append(read(reader) == [])
                tensor: torch.Tensor = future.value()[0]
                return tensor

            return work.get_future().then(reduced)

        net.register_comm_hook(None, slow)
        loss(net).backward()  # type: ignore[no-untyped-call]
        assert before[0] == [(1, F), (1, B)]
        assert done
        assert all(done)
        assert read(reader) == [(1, S)]
        assert recorder.staged == 4
    finally:
        dist.destroy_process_group()


def test_what_goes_wrong_stops_the_marks_and_not_the_training(
    page: PhasesPage, caplog: pytest.LogCaptureFixture
) -> None:
    marks = PhaseMarks(PhaseWriter(page, 0), 1)
    marks.gradient_seen()  # no backward runs: torch takes no callback
    assert "phases are no longer marked" in caplog.text
    caplog.clear()
    marks.gradient_seen()
    marks.step_ended(1)
    assert not caplog.records
    other = PhaseMarks(PhaseWriter(page, 1), 1)
    page.words.release()
    other.step_ended(1)
    assert "phases are no longer marked" in caplog.text
