"""Standby replicas that fall behind: nothing is overwritten that they need, and nothing is offered that is not
exact.
"""

from __future__ import annotations

import threading

import pytest

from memckpt.agent.replication.standby import EXTRA_SLOTS
from memckpt.memory.replica import Replica
from memckpt.replication.transport.wire import NotStored
from memckpt.state.records import RecordMeta
from tests.support.cluster.standby_lab import MODES, OPTIMIZERS, check_all, pair, refusals, stored
from tests.support.cluster.standby_pair import PERIOD, SLOTS, wait_idle


@pytest.mark.parametrize("mode", MODES)
def test_a_record_is_acknowledged_when_the_one_two_before_is_applied(mode: str) -> None:
    with pair(mode, OPTIMIZERS["adam"]) as one:
        one.settle()
        for _ in range(2):
            assert one.train()
        one.send()
        one.deliver()
        assert stored(one)[-1] == 3  # its base is 1: two more may be there
        one.agent()
        one.redo()
        one.pass_watermark()
        assert one.train()
        one.send()
        one.deliver()
        assert stored(one)[-1] == 3
        one.settle()
        assert stored(one)[-1] == 4
        assert not refusals(one)


@pytest.mark.parametrize("mode", MODES)
def test_slots_that_are_needed_are_not_overwritten(mode: str) -> None:
    """Training does not wait, and redo here stands still: what does not fit is refused, and comes again."""
    with pair(mode, OPTIMIZERS["adam"], 1, wait=False) as one:
        one.settle()
        for _ in range(SLOTS + EXTRA_SLOTS + 1):
            assert one.train()
            one.send()
            one.deliver()
        assert "records behind" in refusals(one)[0]
        assert len(refusals(one)) == 1, "what is still on its way is not answered"
        one.settle()
        assert one.owner.acknowledged == one.training.record
        assert one.owner.whole
        assert check_all(one, one.end())[-1] == one.training.record


@pytest.mark.parametrize("mode", MODES)
def test_what_is_skipped_makes_it_useless_for_a_period(mode: str) -> None:
    with pair(mode, OPTIMIZERS["own"], 1, wait=False) as one:
        one.settle()
        assert one.train()
        one.settle()
        for _ in range(PERIOD + SLOTS + 2):
            assert one.train()  # the first of these are gone from the owner's slots before anything is sent
        first = one.training.record - (PERIOD if mode == "lazy" else 0) - SLOTS + 1
        one.send()
        one.deliver()
        one.agent()
        one.redo()
        assert set(range(3, first)).isdisjoint(stored(one))
        for _ in range(PERIOD + 1):
            one.settle()
            assert one.train()
        one.settle()
        assert one.owner.whole
        run = [record for record in stored(one) if record >= first]
        records = check_all(one, one.end())
        assert records[-1] == one.training.record
        assert min(records) >= run[0] + PERIOD - 1


@pytest.mark.parametrize("count", [PERIOD - 1, PERIOD])
def test_it_offers_nothing_while_its_state_is_not_exact(count: int) -> None:
    with pair("eager", OPTIMIZERS["adam"], 1, wait=False) as one:
        one.settle()
        for _ in range(SLOTS + 5):
            assert one.train()
        one.send()  # what is left in the slots
        assert one.deliver(count) == count
        one.agent()
        one.redo()
        assert one.owner.whole == (count == PERIOD)
        records = check_all(one, one.end())
        assert records == [one.training.record] * (count == PERIOD)


@pytest.mark.parametrize("count", [PERIOD - 1, PERIOD])
def test_what_waits_is_let_go_of_when_what_follows_is_lost(count: int) -> None:
    """All slots hold records that are yet to be redone, and the owner has gone on far beyond them."""
    with pair("eager", OPTIMIZERS["adam"], 1, wait=False) as one:
        one.settle()
        one.answers.clear()
        for _ in range(SLOTS + EXTRA_SLOTS):
            assert one.train()
            one.send()
            one.deliver()
        for _ in range(SLOTS + EXTRA_SLOTS):
            assert one.train()
        one.send()
        one.deliver()
        assert [answer.nothing for answer in one.answers if isinstance(answer, NotStored)] == [True]
        assert not one.owner.whole
        one.agent()
        one.redo()
        one.retry()
        one.send()
        one.deliver(2 + count)  # behind what opens it and what is sent once
        one.agent()
        one.redo()
        assert check_all(one, one.end()) == [one.training.record] * (count == PERIOD)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("behind", range(SLOTS))
def test_one_that_begins_anew_is_told_no_watermark(mode: str, behind: int, optimizer: str) -> None:
    """Its agent may be the one that would lead: training waits for this very standby replica."""
    with pair(mode, OPTIMIZERS[optimizer]) as one:
        for _ in range(5):
            one.settle()
            assert one.train()
        one.settle()
        for _ in range(behind):
            one.train()
        one.replace_agent()
        for _ in range(3):
            one.settle()
        assert one.owner.acknowledged == one.training.record
        while not one.owner.whole:
            assert one.train()
            one.settle()
        assert len(one.standbys) == 1, refusals(one)
        assert check_all(one, one.end())[-1] == one.training.record


def test_a_skip_while_a_record_is_redone(monkeypatch: pytest.MonkeyPatch) -> None:
    """It counts when that one is done: what it reads is not overwritten before."""
    entered, go_on = threading.Event(), threading.Event()
    original = Replica._apply

    def wait(self: Replica, meta: RecordMeta) -> None:
        entered.set()
        assert go_on.wait(60)
        original(self, meta)

    with pair("lazy", OPTIMIZERS["adam"]) as one:
        one.settle()
        monkeypatch.setattr(Replica, "_apply", wait)
        for _ in range(2):
            assert one.train()
        one.send()
        one.deliver()
        one.agent()
        one.pass_watermark()
        [standby] = one.standbys._all.values()
        replica = standby.generation.replica
        assert replica is not None
        assert entered.wait(60)
        standby.skip(7)
        assert replica.applied == 1
        go_on.set()
        wait_idle(replica)
        assert replica.applied == 7


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("late", range(PERIOD + 1))
def test_what_is_on_its_way_when_it_is_made_is_not_taken(mode: str, late: int) -> None:
    """The owner sends it once more, from the first: what comes before it was refused."""
    with pair(mode, OPTIMIZERS["adam"], PERIOD) as one:
        one.send()
        one.deliver(2 + late)  # behind what opens it and what is sent once
        one.agent()
        one.deliver()
        assert not stored(one)
        assert one.train()
        one.settle()
        assert one.owner.whole
        assert check_all(one, one.end())[-1] == one.training.record == one.owner.acknowledged


@pytest.mark.parametrize("count", [1, PERIOD - 1, PERIOD])
def test_an_owner_that_begins_anew_hears_what_came_too_late(count: int) -> None:
    """Records that were left out are in its slots yet, and of no use where later ones are: not all is whole."""
    with pair("lazy", OPTIMIZERS["adam"], 1, wait=False) as one:
        for _ in range(PERIOD + SLOTS):
            one.settle()
            assert one.train()
        one.settle()
        newest = one.training.record
        assert one.train()
        assert one.train()
        one.owner._leave_out(one.owner._streams[0], one.owner._generations[-1], newest + 1)
        for _ in range(count - 1):
            assert one.train()
        one.settle()
        one.replace_owner()
        one.settle()
        assert one.owner.acknowledged == one.training.record == newest + 1 + count
        assert one.owner.whole == (count == PERIOD)
        records = check_all(one, one.end())
        assert (one.training.record in records) == (count == PERIOD)
