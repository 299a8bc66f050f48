"""Standby replicas: another node redoes an owner's records, and can produce the very state of each that is
acknowledged.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from memckpt.agent.replication.standby import EXTRA_SLOTS
from memckpt.memory import budget
from memckpt.memory.region import Region
from memckpt.memory.replica import Replica
from memckpt.protocol.standby import OpenStandby, StandbyFailed, StandbyOpened, StandbyRecord, StandbyRefused
from memckpt.state.layout import Layout
from memckpt.state.records import RecordMeta, encode_meta
from tests.support.cluster.standby_lab import MODES, OPTIMIZERS, check_all, pair, refusals
from tests.support.cluster.standby_pair import HISTORY, PERIOD, RANKS, SLOTS, Pair
from tests.support.trainings.engine_optimizers import local_momentum


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("base", [0, 4])
def test_each_record_is_redone(mode: str, optimizer: str, base: int) -> None:
    with pair(mode, OPTIMIZERS[optimizer], base) as one:
        for _ in range(8):
            one.settle()
            assert one.train()
        one.settle()
        assert one.owner.acknowledged == one.watermark == one.training.record
        assert one.owner.whole
        [held] = one.end()
        assert held.standby
        assert held.history == HISTORY
        assert held.steps == tuple(10 * record for record in held.records)
        assert check_all(one, [held])[-1] == base + 8
        assert not refusals(one)


@pytest.mark.parametrize("error", [TypeError("no such argument"), OSError(24, "too many open files")])
@pytest.mark.parametrize("place", [(Replica, "__init__"), (Region, "create"), (Replica, "begin")])
def test_errors_of_foreign_code_end_a_replica_and_nothing_else(
    place: tuple[type, str], error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object) -> None:
        if place[1] != "create" or arguments[0] == "replica":
            raise error

    def fail_or_create(name: str, nbytes: int, ranges: Sequence[tuple[int, int]] | None = None) -> Region:
        fail(name)
        return create(name, nbytes, ranges)

    create = Region.create
    with pair("lazy", OPTIMIZERS["adam"]) as one, monkeypatch.context() as context:
        context.setattr(*place, fail_or_create if place[1] == "create" else fail)
        memory = memory_files()
        one.settle()
        assert f"{type(error).__name__}: {error}" in one.standby_feed.problem
        assert len(one.standbys) == 0
        assert memory_files() == memory


def memory_files() -> list[str]:
    """Of generations, that this process has open."""
    names = [os.readlink(entry.path) for entry in os.scandir("/proc/self/fd") if os.path.islink(entry.path)]
    return sorted(name for name in names if name.startswith(("/memfd:memckpt:slots", "/memfd:memckpt:replica")))


@pytest.mark.parametrize("trails", [False, True])
def test_its_memory_is_a_replica_and_slots(trails: bool) -> None:
    with pair("lazy", OPTIMIZERS["adam"], trails=trails) as one:
        one.settle()
        layout = Layout(one.training.spec())
        slots = (SLOTS + EXTRA_SLOTS + trails) * (layout.slot_bytes + layout.by_value_slot_bytes)
        expected = layout.state_bytes + slots + layout.static_bytes
        assert one.standbys.nbytes == expected


OPERATIONS = (
    "train",
    "send",
    "send a little",
    "deliver",
    "deliver one",
    "agent",
    "redo",
    "watermark",
    "lose",
    "retry",
    "new agent",
)


def carry_out(one: Pair, operation: str) -> None:
    match operation:
        case "train":
            one.train()
        case "send":
            one.send()
        case "send a little":
            one.send(1)
        case "deliver":
            one.deliver()
        case "deliver one":
            one.deliver(1)
        case "agent":
            one.agent(1)
        case "redo":
            one.redo()
        case "watermark":
            one.pass_watermark()
        case "lose":
            one.lose()
        case "retry":
            one.retry()
        case "new agent":
            one.replace_agent()
        case "generation":
            if one.training.record == one.watermark:
                one.training.begin()
                one.send_generation()


# Training is what most of it is about: else nothing ever gets ahead of anything.
WEIGHTED = (*OPERATIONS, *["train"] * 4, *["send", "deliver", "agent", "redo", "watermark"] * 2)


def play(
    mode: str,
    optimizer: str,
    wait: bool,
    trails: bool,
    begin_settled: bool,
    operations: Sequence[str],
    end_settled: bool,
) -> None:
    with pair(mode, OPTIMIZERS[optimizer], 1, wait, trails) as one:
        if begin_settled:
            one.settle()
        for operation in operations:
            carry_out(one, operation)
        if end_settled:
            # Peers keep up again: a window later the owner may be lost.
            for _ in range(PERIOD + SLOTS):
                one.settle()
                one.train()
            one.settle()
            assert one.owner.whole
            assert one.owner.acknowledged == one.training.record
        whole, watermark = one.owner.whole, one.watermark
        acknowledged = one.owner.acknowledged
        assert not any("redo of record" in reason for reason in refusals(one))
        held = one.end()
        if trails and wait and whole:
            check_repeats(one, watermark)
        records = check_all(one, held)
        event(f"{len(records)} records, {'refused' if refusals(one) else 'taken'}")
        if wait:
            # Nodes redo up to the watermark, not further: that record is common to all, if nothing newer is.
            assert watermark in records or not whole
            assert acknowledged in records or not whole
        if end_settled:
            assert records[-1] == one.training.record


def check_repeats(one: Pair, record: int) -> None:
    """The state before a record is there as well, but for a record with which all begins."""
    standby = one.standbys.find(RANKS, record, HISTORY)
    assert standby is not None
    assert record == standby.exact_from or record - 1 in standby.standing_still()
    assert (one.standbys.find(RANKS, record, HISTORY, behind=1) is None) == (record == standby.exact_from)


@pytest.mark.parametrize("mode", MODES)
def test_one_that_trails_has_the_record_before_what_is_acknowledged(mode: str) -> None:
    """However far training is ahead of that: the standby replica has got, and redone, all that it may."""
    with pair(mode, OPTIMIZERS["adam"], trails=True) as one:
        one.settle()
        for _ in range(6):
            assert one.train()
            one.settle()
        acknowledged = one.watermark
        while one.train():
            one.send()
            one.deliver()
            one.agent()
            one.redo()
        assert one.watermark == acknowledged < one.training.record - 1
        held = one.end()
        check_repeats(one, acknowledged)
        assert check_all(one, held)[0] < acknowledged


@given(
    mode=st.sampled_from(MODES),
    optimizer=st.sampled_from(sorted(OPTIMIZERS)),
    wait=st.booleans(),
    trails=st.booleans(),
    begin_settled=st.booleans(),
    operations=st.lists(st.sampled_from(WEIGHTED), max_size=60),
    end_settled=st.booleans(),
)
@settings(max_examples=40, deadline=None)
def test_whatever_happens_what_it_offers_is_right(
    mode: str, optimizer: str, wait: bool, trails: bool, begin_settled: bool, operations: list[str], end_settled: bool
) -> None:
    play(mode, optimizer, wait, trails, begin_settled, operations, end_settled)


@pytest.mark.slow
@given(
    mode=st.sampled_from(MODES),
    optimizer=st.sampled_from(sorted(OPTIMIZERS)),
    wait=st.booleans(),
    trails=st.booleans(),
    begin_settled=st.booleans(),
    operations=st.lists(st.sampled_from((*WEIGHTED, "generation")), max_size=150),
    end_settled=st.booleans(),
)
@settings(max_examples=400, deadline=None)
def test_long_histories(
    mode: str, optimizer: str, wait: bool, trails: bool, begin_settled: bool, operations: list[str], end_settled: bool
) -> None:
    play(mode, optimizer, wait, trails, begin_settled, operations, end_settled)


# What there is no replica for


@pytest.mark.parametrize("mode", MODES)
def test_a_redo_that_fails(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The owner learns of it, and its records are kept as they are from then on."""
    with pair(mode, OPTIMIZERS["adam"]) as one:
        one.settle()
        original, owners = Replica._apply, one.training.held.replica

        def fail(self: Replica, meta: RecordMeta) -> None:
            if self is not owners and meta.record == 4:
                raise ZeroDivisionError("a kernel of another kind")
            original(self, meta)

        monkeypatch.setattr(Replica, "_apply", fail)
        while not refusals(one):
            assert one.train()
            one.send()
            one.deliver()
            one.agent()
            one.pass_watermark()
            one.redo()
            one.pass_watermark()
        assert not one.owner.whole, "nothing is there any more"
        while one.training.record < 11:
            one.settle()
            one.train()
        one.settle()
        assert any("a kernel of another kind" in reason for reason in refusals(one))
        assert "a kernel of another kind" in one.standby_feed.problem
        assert one.owner.whole
        assert one.owner.acknowledged == one.training.record == 11
        assert len(one.standbys) == 0
        [window] = one.standby_feed.windows()
        assert window.records()[-PERIOD:] == [9, 10, 11]
        assert one.end() == []


@pytest.mark.parametrize("mode", ["lazy"])
def test_an_optimizer_that_nobody_finds_by_name(mode: str) -> None:
    with pair(mode, local_momentum()) as one:
        for _ in range(3):
            one.settle()
            assert one.train()
        one.settle()
        assert "cannot be imported" in one.standby_feed.problem
        assert len(one.standbys) == 0
        assert one.owner.whole
        assert one.standby_feed.kept() == (("o", (1,), 4),)


def test_an_optimizer_that_no_rank_here_uses_is_not_imported() -> None:
    with pair("lazy", OPTIMIZERS["own"]) as one:
        spec = one.training.spec()
        [named] = spec.optimizers
        foreign = msgspec.structs.replace(named, module="antigravity")
        answer, fds = one.standbys.open(
            OpenStandby((1,), "x", "a", 1, msgspec.structs.replace(spec, optimizers=(foreign,)), HISTORY)
        )
        assert isinstance(answer, StandbyRefused)
        assert "which is not imported for a peer" in answer.reason
        assert "antigravity" not in sys.modules
        assert fds == []


def test_state_that_cannot_be_read() -> None:
    with pair("lazy", OPTIMIZERS["own"]) as one:
        spec = one.training.spec()
        one.standbys.open(OpenStandby((1,), "x", "a", 1, spec, HISTORY))
        meta = encode_meta(RecordMeta(1, 1, True, (), (), b"no codec's"))
        answer = one.standbys.record(StandbyRecord((1,), "x", 1, 1, meta, {1: b""}))
        assert isinstance(answer, StandbyFailed)
        assert len(one.standbys) == 0


def test_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    with pair("lazy", OPTIMIZERS["adam"]) as one:
        monkeypatch.setattr(budget, "available_bytes", lambda: 4096)
        one.settle()
        assert "expected room" in one.standby_feed.problem
        assert len(one.standbys) == 0
        assert one.owner.whole


def test_plain_copies_go_when_a_standby_has_what_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    with pair("lazy", OPTIMIZERS["adam"]) as one:
        with monkeypatch.context() as patch:
            patch.setattr(budget, "available_bytes", lambda: 4096)
            one.settle()
        assert (len(one.standbys), len(one.standby_feed.windows())) == (0, 1)
        one.train()
        one.settle()
        one.training.begin()
        one.send_generation()
        one.train()
        one.settle()
        assert (len(one.standbys), len(one.standby_feed.windows())) == (1, 0)
        assert check_all(one, one.end())[-1] == one.training.record


def test_standbys_of_an_earlier_attempt_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    with pair("lazy", OPTIMIZERS["adam"]) as one:
        one.settle()
        needed = one.standbys.nbytes
        one.end()
        one.standbys.begin("b", 1, needed + 4096, 1)
        [standby] = one.standbys._all.values()
        answer, _ = one.standbys.open(OpenStandby((1,), "h1", "b", 1, standby.opened.spec, HISTORY))
        assert isinstance(answer, StandbyOpened)
        assert len(one.standbys) == 1


# From attempt to attempt


def test_standbys_stay_until_the_next_attempt_is_protected() -> None:
    with pair("lazy", OPTIMIZERS["adam"]) as one:
        for _ in range(4):
            one.settle()
            one.train()
        one.send()
        one.deliver()
        one.agent()
        one.redo()
        [held] = one.end()
        assert held.records == (4, 5)
        one.standbys.begin("b", 4, None, 1)
        one.standbys.begin("b", 4, None, 1)  # the plan was made once more
        [held] = one.standbys.inventory(lambda ranks: None)
        assert held.records == (4,), "what lies beyond the record that was resumed is not gone on with"
        one.standbys.watermark_advanced(4, False)
        assert len(one.standbys) == 1
        one.check(4)
        one.standbys.watermark_advanced(5, True)
        assert len(one.standbys) == 0


def test_an_attempt_that_starts_over_drops_standbys_once_it_is_protected_itself() -> None:
    with pair("lazy", OPTIMIZERS["adam"]) as one:
        one.settle()
        one.end()
        one.standbys.begin("b", None, None, 1)
        one.standbys.watermark_advanced(3, False)
        assert len(one.standbys) == 1
        one.standbys.watermark_advanced(4, True)
        assert len(one.standbys) == 0


def test_the_last_generation_goes_when_the_next_is_acknowledged() -> None:
    with pair("lazy", OPTIMIZERS["adam"]) as one:
        for _ in range(3):
            one.settle()
            one.train()
        one.settle()
        one.training.begin()
        one.send_generation()
        one.send()
        one.deliver()
        one.agent()
        assert len(one.standbys) == 2
        one.train()
        one.settle()
        assert len(one.standbys) == 1
        assert one.owner.whole
        assert check_all(one, one.end())[-1] == one.training.record


def test_a_model_that_has_changed_is_told() -> None:
    with pair("lazy", OPTIMIZERS["adam"]) as one:
        one.settle()
        one.end()
        [held] = one.standbys.inventory(lambda ranks: ("another model",))
        assert "another model" in held.problem
