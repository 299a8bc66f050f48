"""What goes to storage and when, as a node's agent decides it: copies, modes, grace, and who waits for an answer."""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from memckpt.agent.saving import checkpoints, jobs, record_log, schedule, state_copies
from memckpt.agent.saving import saver as saver_module
from memckpt.agent.saving.state_copies import Run
from memckpt.memory import region as region_module
from memckpt.memory.redo_news import CopyReserved
from memckpt.memory.region import Region
from memckpt.protocol.storing import Appended, RankPartCopied, Saved, SaveFailed
from memckpt.protocol.trainer import Configure, Drift
from memckpt.state.records import Timeline
from tests.support.cluster.storage_node import Clock, Filled, spec_of
from tests.support.storage.saver_node import Node

T1, T2 = Timeline(1, "a"), Timeline(2, "b")
SEVERAL_NODES = spec_of((0,), world_size=2)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    for module in (record_log, checkpoints, saver_module, schedule, jobs):
        monkeypatch.setattr(module, "time", clock)
    return clock


@pytest.fixture
def make(tmp_path: Path, clock: Clock) -> Iterator[Any]:
    made: list[Node] = []

    def make(filled: Filled | None = None, **settings: Any) -> Node:
        made.append(Node(tmp_path, clock, filled, **settings))
        return made[-1]

    yield make
    for node in made:
        node.close()


def logging_node(make: Any, **settings: Any) -> Node:
    """One that logs, has a checkpoint, and may not afford the next one for a long time."""
    node: Node = make(mode="log", min_seconds=3600, batch_steps=100, grace_seconds=25.0, **settings)
    node.checkpoint(cpu_seconds=1000.0)
    node.train(2)
    assert node.status.loses_at_most is not None
    assert len(node.orders) == 1
    return node


# Copies that take long, and orders for them


def test_rank_states_of_a_copy_stay_until_it_is_described(make: Any) -> None:
    """Trainers may be far ahead when the last one of them has copied its part."""
    node = make(Filled(spec=spec_of((0, 1)), offset=100), every_steps=10, mode="replica")
    record = node.train_until_ordered()
    assert record == 10
    node.train(60)
    assert not node.held.ledger.knows(record + 1), "those of other records must go, or memory would fill"
    assert node.held.ledger.knows(record)
    node.copy(record)
    (save,) = node.saves
    assert (save.part.record, save.part.step) == (10, 110)
    assert save.rank_states == {0: b"0 0.0", 1: b"1 0.0"}
    node.saved()
    node.train_until_ordered()
    node.train(10)
    assert not node.held.ledger.knows(record), "they are kept for one copy at a time"


@pytest.mark.parametrize("when", [{"every_steps": 1}, {"min_seconds": 3600}], ids=["by-steps", "by-time"])
def test_a_copy_whose_rank_states_are_gone_is_asked_for_again_and_earlier(make: Any, when: dict[str, int]) -> None:
    node = make(**when, mode="replica")
    assert node.train_until_ordered() == 3
    region = node.saver.state_copies._current.region
    node.held.ledger.pinned = None  # whatever has let go of them
    node.train(19)
    assert not node.held.ledger.knows(3)
    node.copy(3)
    assert node.saves == []
    assert region.fd < 0
    record = node.train_until_ordered()
    assert (node.attempt.at, record) == (21, 25)
    node.train(4)
    node.copy(record)
    assert [save.part.record for save in node.saves] == [record]


def test_an_answer_to_an_order_that_was_dropped_is_none_to_the_next_one_for_the_same_record(make: Any) -> None:
    """A generation is let go of behind the order, and trainers have filled the first region, not the second."""
    node = make(every_steps=10, mode="replica")
    record = node.train_until_ordered()
    late = RankPartCopied(record, node.order_of(record), 0.1)
    node.saver.drop_generation(node.held)
    node.saver.after_commit(node.held, node.attempt)
    again = node.orders[-1]
    assert again.record == record
    assert again.order != late.order
    node.train(record - node.attempt.at)
    node.saver.state_copies.add_part(0, late)
    assert node.saves == []
    node.copy(record)
    assert [save.part.record for save in node.saves] == [record]


def test_a_later_order_for_peers_takes_the_place_of_one_that_some_node_has_missed(make: Any) -> None:
    """Else each node would be busy with the order that another one has missed, for ever by turns."""
    node = make(every_steps=1000, mode="replica")
    node.train(1)
    taken: list[tuple[int, int | None]] = []
    for record in (5, 8):

        def take(copy: state_copies.StateCopy | None, record: int = record) -> None:
            taken.append((record, copy.record if copy is not None else None))
            if copy is not None:
                copy.region.close()

        node.saver.copy_for_peers(node.held, record, take)
    assert taken == [(5, None)]
    node.train(8)
    node.copy(8)
    assert taken == [(5, None), (8, 8)]


@pytest.fixture
def hold_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """From its call on memory is reserved in a thread, which waits; what it returns lets it go on, or fail."""
    may_go, errors = Event(), []

    def allocate(fd: int, offset: int, nbytes: int) -> None:
        assert may_go.wait(60)
        if errors:
            raise errors[0]

    def go_on(error: OSError | None = None) -> None:
        errors.extend(filter(None, [error]))
        may_go.set()

    def hold() -> Callable[..., None]:
        monkeypatch.setattr(state_copies, "AT_ONCE_BYTES", 0)
        monkeypatch.setattr(region_module, "_fallocate", allocate)
        return go_on

    yield hold
    may_go.set()


def told_of_memory(node: Node) -> CopyReserved:
    told = node.news.get(timeout=60)
    assert isinstance(told, CopyReserved)
    return told


def test_nobody_waits_while_memory_for_a_copy_is_reserved(make: Any, hold_memory: Any) -> None:
    """The event loop goes on, and no trainer gets the order before it may write there."""
    node = make(every_steps=10, mode="replica")
    go_on = hold_memory()
    node.train(6)
    assert (node.orders, node.saver.state_copies.asker) == ([], Run(node.saver._checkpoints.url))
    go_on()
    node.saver.state_copies.reserved(told_of_memory(node).order)
    assert [order.record for order in node.orders] == [10]
    node.train(4)
    node.copy(10)
    assert [save.part.record for save in node.saves] == [10]


def test_memory_that_the_kernel_refuses_later_fails_the_checkpoint_with_its_reason(make: Any, hold_memory: Any) -> None:
    node = make(every_steps=10, mode="replica")
    go_on = hold_memory()
    node.train(6)
    go_on(OSError(errno.ENOSPC, "No space left on device"))
    node.saver.state_copies.reserved(told_of_memory(node).order)
    assert (node.orders, node.saver.state_copies.asker) == ([], None)
    assert "the state cannot be copied: expected" in node.saver.alarm
    assert "memory for a copy of the state on its way to storage, found less" in node.saver.alarm


def test_a_copy_that_was_dropped_while_its_memory_was_reserved_is_not_ordered(make: Any, hold_memory: Any) -> None:
    node = make(every_steps=10, mode="replica")
    go_on = hold_memory()
    node.train(6)
    go_on()
    told = told_of_memory(node)
    region = node.saver.state_copies._current.region
    node.saver.drop_generation(node.held)
    assert region.fd < 0
    node.saver.state_copies.reserved(told.order)
    assert node.orders == []


# Modes


def test_records_are_logged_only_where_that_is_configured(make: Any) -> None:
    node = make(every_steps=20)
    for _ in range(3):
        node.checkpoint()
        assert node.mode == "replica"
    assert node.records == []


def test_several_nodes_log_where_that_is_asked_for(make: Any) -> None:
    node = make(Filled(spec=SEVERAL_NODES), every_steps=20, mode="log")
    node.train()
    assert (node.mode, node.status.reason) == ("log", "")
    assert len(node.records) == 1


def test_a_generation_whose_records_cannot_be_logged_is_not(make: Any) -> None:
    node = logging_node(make)
    assert node.mode == "log"
    node.saver.drop_generation(node.held)
    node.filled.close()
    node.filled = Filled(2, spec_of(dtype="complex128"), base=node.attempt.at)
    node.train()
    assert node.mode == "replica"
    assert "w is complex128" in node.status.reason


# Who waits for an answer


def test_an_export_of_what_is_held_is_answered_when_a_new_trainer_comes(make: Any) -> None:
    node = make(every_steps=1000)
    node.train(5)
    answers: list[Any] = []
    node.saver.save_to("beside", answers.append, node.held, training=False)
    assert [save.url for save in node.saves] == ["beside"]
    node.saver.abort()
    assert [type(answer) for answer in answers] == [SaveFailed]
    assert not node.saver.saving


def test_an_export_whose_order_died_with_its_trainers_is_made_by_the_next_ones(make: Any) -> None:
    node = make(every_steps=1000)
    node.train(5)
    answers: list[Any] = []
    node.saver.save_to("beside", answers.append, node.held, training=True)
    node.train()
    assert [order.record for order in node.orders] == [8]
    node.saver.abort()
    node.begin_attempt(T2)
    node.filled.settle(6)
    node.saver.log.branch(6, T1)
    node.attempt.at = 6
    node.train()
    assert [order.record for order in node.orders] == [8, 9]
    node.train(2)
    node.copy(9)
    node.saved()
    assert [(type(answer), answer.record) for answer in answers] == [(Saved, 9)]


def test_two_who_wait_are_both_answered_though_an_order_was_missed(make: Any) -> None:
    node = make(every_steps=1000)
    node.train(5)
    answers: dict[str, Any] = {}
    for url in ("first", "second"):
        node.saver.save_to(url, lambda answer, url=url: answers.setdefault(url, answer), node.held, training=True)
        node.train()
    node.saver.state_copies.add_part(0, RankPartCopied(8, node.orders[-1].order, 0.0, missed=True))
    for url in ("first", "second"):
        record = node.train_until_ordered()
        node.train(4)
        node.copy(record)
        assert [save.url for save in node.saves] == [url]
        node.saved()
    assert {url: type(answer) for url, answer in answers.items()} == {"first": Saved, "second": Saved}


@pytest.mark.parametrize("ordered", [False, True], ids=["before-the-order", "after-the-order"])
def test_an_export_gets_what_trainers_left_when_they_die_meanwhile(make: Any, ordered: bool) -> None:
    """Else whoever waits would have to until somebody starts the training again."""
    node = make(every_steps=1000)
    node.train(5)
    answers: list[Any] = []
    node.saver.save_to("beside", answers.append, node.held, training=True)
    node.train(int(ordered))
    assert len(node.orders) == ordered
    node.saver.save_asked(node.held)
    assert [(save.url, save.part.record) for save in node.saves] == [("beside", node.attempt.at)]
    node.saver.save_asked(node.held)
    assert len(node.saves) == 1
    node.saved()
    assert [type(answer) for answer in answers] == [Saved]


def test_a_copy_of_the_run_s_own_is_not_dropped_for_nobody(make: Any) -> None:
    node = make(every_steps=10)
    record = node.train_until_ordered()
    node.train(record - node.attempt.at)
    node.saver.save_asked(node.held)
    node.copy(record)
    assert [save.part.record for save in node.saves] == [record]


# Grace


def test_a_checkpoint_in_a_grace_period_is_given_up_at_its_end(make: Any, clock: Clock) -> None:
    node = make(min_seconds=3600, grace_seconds=25.0, mode="replica")
    for number in (1, 2):  # the first steps are stored at once, the next ones in a grace period
        record = node.train_until_ordered()
        node.train(record - node.attempt.at)
        node.copy(record)
        assert len(node.saves) == 1
        if number == 1:
            node.saved()
            node.train(2)
            assert len(node.orders) == 1
            node.saver.preempt()
    assert node.saver.deadline() == clock.now + 25.0
    clock.passes(24.9)
    node.saver.look_at_clock()
    assert node.saver.saving
    clock.passes(0.1)
    node.saver.look_at_clock()
    assert not node.saver.saving
    assert node.checkpoints[-1].closed
    assert isinstance(node.told[-1], SaveFailed)
    assert "took too long" in node.told[-1].reason


def test_the_failure_of_an_earlier_checkpoint_is_not_that_of_the_final_step(make: Any) -> None:
    node = make(min_seconds=3600, mode="replica")
    record = node.train_until_ordered()
    node.train(record - node.attempt.at)
    node.copy(record)
    node.train(2)
    node.saver.save_held(node.held, as_checkpoint=True)
    node.refused()
    assert [one.step for one in node.told if isinstance(one, SaveFailed)] == [record]
    assert node.failures == 0
    assert node.saver.saving
    node.refused("still no room")
    assert node.failures == 1
    assert not node.saver.saving


@pytest.mark.promise(
    "the state that a dead trainer leaves is written to storage, and so are the final step and the state at a SIGTERM"
)
def test_what_is_committed_while_the_record_before_is_written_is_written_then(make: Any) -> None:
    """The agent was told to end at the last step but one; then training finished."""
    node = make(min_seconds=3600, mode="replica")
    node.train(3)
    node.saver.save_held(node.held, as_checkpoint=False)
    node.train()
    for _ in range(2):  # each trainer of the node says so
        node.saver.save_held(node.held, as_checkpoint=True)
    written = []
    while node.saves:
        assert node.saver.saving
        written.append(node.saves[0].part.record)
        node.saved()
    assert written == [3, 4]
    assert not node.saver.saving


@pytest.mark.parametrize("standing", [True, False], ids=["redone", "copied-by-trainers"])
def test_a_checkpoint_that_is_redone_after_a_finding_of_the_audit_says_so(make: Any, standing: bool) -> None:
    node = make(every_steps=10, mode="replica")
    node.train(3)
    record = node.orders[-1].record
    node.held.drift = Drift(3, 2.0, "w", steps=(1, 2))
    if standing:
        node.saver.save_held(node.held, as_checkpoint=True)
    else:
        node.train(record - node.attempt.at)
        node.copy(record)
    (save,) = node.saves
    assert save.part.inexact == (
        "the audit found w off by 2 units in the last place when steps 1 to 2 were redone" if standing else ""
    )


class Replica(SimpleNamespace):
    """Stands for a replica that goes forward when it is told to."""

    def advance_to(self, record: int) -> None:
        assert record >= self.applied
        self.applied = record

    def describe_state(self) -> tuple[tuple[()], bytes]:
        return (), b""

    def freeze(self) -> None: ...

    close = freeze


def test_a_replica_stands_still_until_what_is_read_from_it_is_written(make: Any) -> None:
    """Of sharded nodes each writes two records, and its writer may still be busy with an earlier checkpoint."""
    sharded = msgspec.structs.replace(SEVERAL_NODES, replicas=(0,))
    node = make(Filled(spec=sharded), every_steps=10, mode="replica")
    record = node.train_until_ordered()
    node.train(record - node.attempt.at)
    node.copy(record)
    node.train(2)
    newest = node.attempt.at
    node.held.replica, node.held.regions.replica = Replica(applied=newest - 2), Region.create("replica", 4096)
    node.saver.save_held(node.held, as_checkpoint=True)
    written = []
    while node.saves:
        written.append((node.saves[0].part.record, node.held.replica.applied))
        node.saved()
    assert written == [(record, newest - 1), (newest - 1, newest - 1), (newest, newest)]


def test_what_is_being_written_as_training_ends_is_not_written_again(
    make: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """The record before it may be all that another node has."""
    node = make(Filled(spec=msgspec.structs.replace(SEVERAL_NODES, replicas=(0,))), every_steps=10, mode="replica")
    record = node.train_until_ordered()
    node.train(record - node.attempt.at)
    node.copy(record)
    node.saver.save_held(node.held, as_checkpoint=True)
    written = []
    with caplog.at_level(logging.INFO, "memckpt.agent"):
        while node.saves:
            written.append(node.saves[0].part.record)
            node.saved(whole=record == written[-1])
    assert written == [record, record - 1]
    assert node.status.step == record
    said = [one.getMessage().partition(":")[0] for one in caplog.records]
    assert said == [f"step {record} is in storage", f"this node's part of step {record - 1} is in storage"]


def test_a_record_that_training_has_gone_past_meanwhile_is_a_failure_and_no_end_of_the_agent(make: Any) -> None:
    """An agent that was told to leave writes what it holds; trainers that have not heard so yet train on."""
    node = make(every_steps=1000, mode="replica")
    node.train(3)
    node.saver.save_held(node.held, as_checkpoint=True)
    newest = node.attempt.at
    node.saver._checkpoints.held.append((node.held, newest, True))
    for _ in range(30):
        node.filled.commit()
    node.refused()
    assert [type(one) for one in node.told] == [SaveFailed, SaveFailed]
    assert f"expected the scalars of records {newest - 1} to {newest}" in node.told[-1].reason
    assert not node.saver.saving


@pytest.mark.parametrize("failed", [True, False])
def test_what_an_attempt_has_left_and_could_not_be_written_is_soon_written_by_the_next_one(
    make: Any, clock: Clock, failed: bool
) -> None:
    """The process that writes cannot import an optimizer of the script; trainers copy their state themselves."""
    node = make(mode="replica", min_seconds=3600)
    node.checkpoint()
    node.train(5)
    node.saver.save_held(node.held, as_checkpoint=True)
    if failed:
        node.refused("optimizer class __main__.Lion cannot be imported")
    else:
        node.saved()
    node.saver.retry_later()
    node.begin_attempt(T2)
    assert node.saver.may_save_from(clock.now) == clock.now + saver_module._RETURN_SECONDS
    orders = len(node.orders)
    node.train(5)
    assert len(node.orders) == orders + failed


def test_an_agent_that_ends_bounds_what_it_writes_already_and_what_waits_behind_that(make: Any, clock: Clock) -> None:
    node = make(min_seconds=3600, mode="replica", timeout_seconds=1800.0, grace_seconds=25.0)
    record = node.train_until_ordered()
    node.train(record - node.attempt.at)
    node.copy(record)
    node.train(2)
    assert node.saver.deadline() == clock.now + 1800.0 - 2.0
    node.saver.preempt(ending=True)
    node.saver.save_held(node.held, as_checkpoint=False)
    assert node.saver.deadline() == clock.now + 25.0
    clock.passes(20.0)
    node.saved()
    assert node.saver.deadline() == clock.now + 5.0
    clock.passes(5.0)
    node.saver.look_at_clock()
    assert not node.saver.saving
    assert node.failures == 1


def test_a_sigterm_promises_storage_only_where_there_is_one(make: Any, tmp_path: Path) -> None:
    node = logging_node(make)
    assert node.saver.preempt()
    node.saver.configure(Configure(0.0, Timeline(2, "b")), tmp_path, "n")
    assert not node.saver.preempt()


def test_in_a_grace_period_the_log_is_written_and_that_is_enough(make: Any) -> None:
    node = logging_node(make)
    node.saver.preempt()
    node.train(20)
    assert len(node.orders) == 1
    assert node.status.step == node.attempt.at - 19


def test_writing_the_log_in_a_grace_period_ends_with_it(make: Any, clock: Clock) -> None:
    node = logging_node(make)
    node.saver.preempt()
    until = clock.now + 25.0
    node.train(work=False)
    assert node.saver.deadline() == until
    clock.passes(23.9)
    node.saver.look_at_clock()
    assert not node.records[-1].closed
    clock.passes(0.1)
    node.saver.look_at_clock()
    assert node.records[-1].closed
    assert "took too long" in node.status.alarm


def lost_by_writer(node: Node) -> None:
    node.records[-1].received(Appended(None, None, 0, 0, hole="no room"))


def lost_with_writer(node: Node) -> None:
    node.records[-1].ended("it was killed")


def lost_by_being_slow(node: Node) -> None:
    node.train(node.held.layout.ring + 2, seconds=0.001, work=False)


LOST = pytest.mark.parametrize("lose", [lost_by_writer, lost_with_writer, lost_by_being_slow])


@LOST
def test_a_hole_in_the_log_in_a_grace_period_makes_a_whole_checkpoint_at_once(make: Any, lose: Any) -> None:
    node = logging_node(make)
    node.saver.preempt()
    node.train(work=False)  # what there is has been handed on, to be written
    lose(node)
    node.train(1, work=False)
    assert len(node.orders) == 2
    record = node.orders[-1].record
    node.train(max(0, record - node.attempt.at), work=False)
    node.copy(record)
    assert [save.part.record for save in node.saves] == [record]


@LOST
def test_a_hole_at_any_other_time_waits_for_what_a_checkpoint_may_cost(make: Any, lose: Any) -> None:
    node = logging_node(make)
    node.train(work=False)
    lose(node)
    node.train(10, work=False)
    assert len(node.orders) == 1


def test_nothing_is_said_of_a_hole_more_than_once(make: Any, caplog: pytest.LogCaptureFixture) -> None:
    node = logging_node(make)
    with caplog.at_level(logging.WARNING, "memckpt.agent"):
        lost_with_writer(node)
        node.train(50, seconds=0.01)
    assert [record.message for record in caplog.records if "has a hole" in record.message] == [
        f"the log has a hole behind record {node.attempt.at - 50}: it was killed"
    ]
