"""By-value tensors in a ring of their own: as many records of them as can be restored, and no more."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import nn

from memckpt.agent.saving.writer.record_writer import RecordWriter
from memckpt.capture import spec_request
from memckpt.capture.live_state import LiveState
from memckpt.capture.slot_writer import SlotWriter
from memckpt.capture.spec_request import SpecRequest
from memckpt.config import ErasureConfig, MemckptConfig, StorageConfig
from memckpt.errors import DamagedStateError
from memckpt.memory.generation import make_generation
from memckpt.memory.region import Allowance, GenerationRegions, Region
from memckpt.memory.slots import SlotRing
from memckpt.protocol.channel import Message
from memckpt.protocol.replication import FromNode, WantedState
from memckpt.protocol.storing import Append, LogRecord, OpenLog
from memckpt.protocol.trainer import Commit, GenerationCommit
from memckpt.recovery.restore import Restorer
from memckpt.replication.coding.blob import BlobReader, Extent, Room
from memckpt.replication.coding.code import Code
from memckpt.state.layout import Layout
from memckpt.state.records import RecordMeta, Timeline, encode_meta
from memckpt.state.redo import tensor_at
from memckpt.state.spec import StateSpec, TensorSpec
from tests.support.cluster.peers_records import RANKS, Network, Node, Records, layout_spec
from tests.support.cluster.reader_lab import check_right, closing_all
from tests.support.trainings.engine_child import Control, config
from tests.support.trainings.engine_harness import Lab
from tests.support.trainings.engine_state import MovingAverage
from tests.support.trainings.engine_training import Case
from tests.support.trainings.specs import averaged_spec, ring_spec

# What it takes


@pytest.mark.parametrize(
    "request_of", [{"mode": "eager"}, {"mode": "snapshot", "period": 1, "every": 5}, {"reads_late": True}]
)
def test_elsewhere_they_stay_as_long_as_their_record(request_of: dict[str, Any]) -> None:
    layout = Layout(averaged_spec(2, **request_of))
    assert layout.by_value_ring == layout.ring


def test_small_ones_stay_as_long_as_their_record() -> None:
    """What they take is of no account, and a log of them may be further behind."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    live = LiveState(model, [torch.optim.SGD(model.parameters(), lr=0.1)], {})
    spec = live.spec(SpecRequest(mode="lazy", period=8, slots=3, local_ranks=(0,), world_size=1))
    assert spec.by_value
    assert Layout(spec).by_value_ring == 8 + 3


@pytest.mark.parametrize(
    ("settings_of", "late"),
    [
        ({}, False),
        ({"storage": None}, False),
        ({"storage": StorageConfig(mode="log")}, True),
        ({"peers": ErasureConfig()}, True),
    ],
)
def test_who_reads_records_late(settings_of: dict[str, Any], late: bool) -> None:
    assert MemckptConfig(**settings_of).reads_late is late


def test_how_many_are_held_and_by_whom_is_of_no_account_for_what_a_state_is() -> None:
    """A checkpoint, or a log, goes on under another configuration."""
    spec = averaged_spec(2)
    assert (spec.by_value_slots, spec.shared) == (4, ("average.weight",))
    for other in ({"by_value_slots": 0}, {"shared": (), "apart": ("average.weight",)}):
        assert msgspec.structs.replace(spec, **other).content() == spec.content()


# What is promised is there


def average_spec(ranks: int, period: int, slots: int, by_value_slots: int) -> StateSpec:
    average = TensorSpec("average", (4,), "float32")
    return ring_spec(ranks, period, slots, by_value_slots=by_value_slots, by_value=(average,))


class Held:
    """One generation, with what its ranks write into it."""

    def __init__(self, spec: StateSpec, base: int) -> None:
        notify: Callable[[Message], None] = lambda message: None  # noqa: E731
        self.spec = spec
        self.generation = make_generation(1, spec, Allowance(), threads=1, notify=notify)
        window = range(base - spec.period + 1, base + 1)
        metas = tuple(encode_meta(RecordMeta(record, base, True)) for record in window)
        for rank in spec.local_ranks:
            for virtual in window:
                self.begin(rank, virtual)
            self.end(rank, base)
            for virtual in window:
                self.generation.ring.seal(virtual, rank, by_value=virtual == base)
            self.generation.start(rank, GenerationCommit(1, base, base, b"", metas if rank == 0 else ()))

    def begin(self, rank: int, record: int) -> None:
        self.generation.ring.open_for_writing(record, rank)

    def end(self, rank: int, record: int) -> None:
        self.generation.ring.open_by_value(record, rank)
        self.average(rank, record).fill_(100 * record + rank)

    def commit(self, rank: int, record: int) -> None:
        self.generation.ring.seal(record, rank)
        meta = encode_meta(RecordMeta(record, record - 1, False)) if rank == 0 else b""
        self.generation.commit(rank, Commit(1, record, record, b"", meta))

    def average(self, rank: int, record: int) -> Any:
        layout = self.generation.layout
        base = layout.by_value_base(record) + layout.by_value_offsets(rank)[0]
        return tensor_at(self.generation.regions.slots.map, base, (4,), "float32")

    def has_window(self, record: int) -> bool:
        try:
            for number in range(record - self.spec.period + 1, record + 1):
                self.generation.ring.check(number, self.spec.local_ranks)
        except DamagedStateError:
            return False
        return True


class Rings(RuleBasedStateMachine):
    """Ranks of one node that stage, commit and die, with D + 1 records' by-value tensors, and with those of all slots.

    A rank begins a record as soon as it has committed the one before, and ends it once all ranks have: backward takes
    all of them.
    """

    ours: Held

    @initialize(ranks=st.integers(1, 3), period=st.integers(1, 5), slots=st.integers(2, 4), base=st.integers(5, 9))
    def make(self, ranks: int, period: int, slots: int, base: int) -> None:
        self.ours = Held(average_spec(ranks, period, slots, slots + 1), base)
        self.all = Held(average_spec(ranks, period, slots, 0), base)
        self.done = dict.fromkeys(range(ranks), base)
        self.begun: dict[int, int] = {}
        self.ended: dict[int, int] = {}

    def teardown(self) -> None:
        if hasattr(self, "ours"):
            self.ours.generation.close()
            self.all.generation.close()

    def ranks_that(self, may: Callable[[int], bool]) -> list[int]:
        return [rank for rank in self.done if may(rank)]

    def may_begin(self, rank: int) -> bool:
        return self.begun.get(rank) != self.done[rank] + 1

    def may_end(self, rank: int) -> bool:
        return not self.may_begin(rank) and self.done[rank] == min(self.done.values()) and rank not in self.ended

    def may_commit(self, rank: int) -> bool:
        return rank in self.ended

    @precondition(lambda self: hasattr(self, "ours"))
    @rule(data=st.data(), steps=st.integers(1, 40))
    def go_on(self, data: st.DataObject, steps: int) -> None:
        """Some ranks take some of their next steps, in any order."""
        for _ in range(steps):
            moves: list[tuple[Callable[[int], bool], Callable[[int], None]]] = [
                (self.may_begin, self.begin),
                (self.may_end, self.end),
                (self.may_commit, self.commit),
            ]
            possible = [(move, rank) for may, move in moves for rank in self.ranks_that(may)]
            move, rank = data.draw(st.sampled_from(possible))
            move(rank)
            self.check()

    def begin(self, rank: int) -> None:
        self.begun[rank] = self.done[rank] + 1
        for held in (self.ours, self.all):
            held.begin(rank, self.begun[rank])

    def end(self, rank: int) -> None:
        self.ended[rank] = self.done[rank] + 1
        for held in (self.ours, self.all):
            held.end(rank, self.ended[rank])

    def commit(self, rank: int) -> None:
        self.done[rank] = self.ended.pop(rank)
        for held in (self.ours, self.all):
            held.commit(rank, self.done[rank])

    @precondition(lambda self: hasattr(self, "ours"))
    @rule()
    def die(self) -> None:
        """All ranks die, and go on from the newest record that all have committed."""
        record = min(self.done.values())
        assert record == max(self.ours.generation.producible())
        for held in (self.ours, self.all):
            held.generation.settle(record)
        self.done = dict.fromkeys(self.done, record)
        self.begun, self.ended = {}, {}

    @invariant()
    def check(self) -> None:
        if not hasattr(self, "ours"):
            return
        promised = self.ours.generation.producible()
        for record in promised:
            assert self.ours.has_window(record)
            for rank in self.done:
                assert self.ours.average(rank, record).tolist() == [100.0 * record + rank] * 4
        # Whatever could be restored with the by-value tensors of all slots can be with fewer of them.
        assert set(promised) >= {one for one in self.all.generation.producible() if self.all.has_window(one)}


Rings.TestCase.settings = settings(
    max_examples=40, stateful_step_count=8, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestRings = Rings.TestCase


@pytest.mark.promise(
    "averages and buffers are held for every record that can be restored, in whatever order ranks stage, commit and"
    " die; overwritten ones are neither promised, sent, logged nor restored"
)
def test_what_is_overwritten_is_not_promised() -> None:
    held = Held(average_spec(1, 2, 3, 4), base=2)
    with closing(held.generation):
        for record in (3, 4):
            held.begin(0, record)
            held.end(0, record)
            held.commit(0, record)
        assert held.generation.producible() == [2, 3, 4]
        held.generation.ring.open_by_value(3, 0)
        assert held.generation.producible() == [2, 4]


def test_a_record_without_its_window_is_not_promised_to_the_attempt_after_the_next() -> None:
    """One rank was a record ahead, and had begun another; the attempt that goes back dies before its first commit."""
    held = Held(average_spec(2, 2, 2, 3), base=2)
    with closing(held.generation):
        for record in (3, 4, 5, 6, 7):
            for rank in (0, 1):
                held.begin(rank, record)
            for rank in (0, 1)[: 2 - (record == 7)]:
                held.end(rank, record)
                held.commit(rank, record)
        held.begin(0, 8)
        assert held.generation.producible() == [6]
        held.generation.settle(6)
        assert not held.has_window(5)
        assert held.generation.producible() == [6]
        assert held.generation.why_not_repeated(6) == "record 5 is not held any more"


# Whoever reads records


def records_of(**other: Any) -> Records:
    """Records 2 to 12, of which by-value tensors of the newest 3 are held, gradients of the newest 8."""
    return Records(layout_spec(period=6, slots=2, by_value_slots=3, **other), base=2, newest=12)


@pytest.fixture
def records() -> Iterator[Records]:
    with closing(records_of()) as records:
        yield records


@pytest.mark.promise(
    "averages and buffers are held for every record that can be restored, in whatever order ranks stage, commit and"
    " die; overwritten ones are neither promised, sent, logged nor restored"
)
def test_a_record_without_its_by_value_tensors_is_not_sent(records: Records) -> None:
    """Its bytes would be others than those that another holder has of it."""
    with closing(records.source()) as source:
        assert [one for one in range(5, 13) if source.intact(one)] == [10, 11, 12]
        assert source.open(9) is None
        blob = source.open(10)
        assert blob is not None
        blob.release()


def test_a_state_is_handed_out_with_the_by_value_tensors_of_its_record() -> None:
    code, records, node = Code(1, 1), records_of(), Node("live")
    with closing(code), closing(records), closing(node):
        node.answering.hand_out(records.serve(12), records.duplicates())
        wanted = WantedState(RANKS, 12, FromNode("live"))
        result, regions = Network([node]).read(wanted, records.spec, code)
        with closing_all(regions):
            assert result.problem == ""
            check_right(records, result, regions, record=12)


@pytest.mark.parametrize("extent", [Extent(3, 2), Extent(4, 4), Extent(9, 3), Extent(0, 8)])
def test_bytes_that_lie_in_no_room_are_refused(extent: Extent) -> None:
    reader = BlobReader([Room(0, memoryview(bytearray(4))), Room(6, memoryview(bytearray(4)))])
    with pytest.raises(DamagedStateError, match="expected bytes within 0 to 4, 6 to 10"):
        reader._target(extent)


@pytest.mark.promise(
    "averages and buffers are held for every record that can be restored, in whatever order ranks stage, commit and"
    " die; overwritten ones are neither promised, sent, logged nor restored"
)
def test_the_log_says_when_it_was_too_late_for_by_value_tensors(records: Records, tmp_path: Any) -> None:
    spec = records.spec
    timeline = Timeline(1, "a")
    opened = OpenLog(f"{tmp_path}", "node", spec, 1, timeline, None, 100, 1 << 30, 100.0)
    writer = RecordWriter(opened, Region.open(os.dup(records.regions[0].fd)))
    with closing(writer):
        entry = {number: LogRecord(number, step, *rest) for number, (step, *rest) in records.held.items()}
        late = writer.append(Append((entry[9],), False))
        assert "by-value tensors of record 9" in late.hole
        assert late.taken is None
        in_time = writer.append(Append((entry[10], entry[11]), False))
        assert (in_time.hole, in_time.taken) == ("", 11)


@pytest.mark.promise(
    "averages and buffers are held for every record that can be restored, in whatever order ranks stage, commit and"
    " die; overwritten ones are neither promised, sent, logged nor restored"
)
def test_a_restore_looks_at_the_stamps_of_by_value_tensors() -> None:
    spec = average_spec(1, 2, 2, 3)
    layout = Layout(spec)
    region = Region.create("slots", layout.slots_bytes)
    with closing(region):
        ring = SlotRing(region, layout, 1)
        model = nn.ParameterDict({"weight": nn.Parameter(torch.zeros(4))})
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        tensors = {"weight": model["weight"], "average": torch.zeros(4)}
        restorer = Restorer(layout, GenerationRegions(layout, region, None, None), ring, tensors, [optimizer])
        ring.seal(5, 0)
        tensor_at(region.map, layout.by_value_base(5), (4,), "float32").fill_(5.0)
        restorer._restore_by_value(5, 0)
        assert tensors["average"].tolist() == [5.0] * 4
        ring.open_by_value(5 + 3, 0)
        with pytest.raises(DamagedStateError, match=r"by-value tensors of record 5.* is being written"):
            restorer._restore_by_value(5, 0)
        del restorer


# Trainings


def hold_few(control: Control) -> None:
    """Averages of the size of a test's model are held as large ones are; said where that is so."""
    spec_request.SMALL_BY_VALUE_BYTES = 0
    start = SlotWriter.start_generation

    def noting(self: SlotWriter, record: int) -> Any:
        if self.spec.by_value:
            control.journal.note("held", of=self.layout.by_value_ring, slots=self.layout.ring)
        return start(self, record)

    SlotWriter.start_generation = noting  # type: ignore[method-assign]


@pytest.mark.promise(
    "averages and buffers are held for every record that can be restored, in whatever order ranks stage, commit and"
    " die; overwritten ones are neither promised, sent, logged nor restored"
)
@pytest.mark.promise(
    "buffers and parameters, also replaced, resized, tied or late ones in modules that a new process has; "
    "averaged models outside the model"
)
@pytest.mark.parametrize("slots", [2, 3])
def test_an_average_survives_kills_anywhere(lab: Lab, slots: int) -> None:
    kills = [("in commit", 8), ("before batch", 9), ("after commit", 14), ("before step", 15), ("after step", 17)]
    attempts = lab.survives(Case("moving-average", MovingAverage), config("lazy", slots=slots), kills, prepare=hold_few)
    held = {(one["of"], one["slots"]) for attempt in attempts for one in attempt.of("held")}
    assert held == {(slots + 1, 4 + slots)}
