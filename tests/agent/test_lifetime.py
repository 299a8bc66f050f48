"""When an agent saves and ends, by the clock."""

from __future__ import annotations

from contextlib import closing
from types import SimpleNamespace
from typing import Any, cast

import pytest

from memckpt.agent.lifetime import Lifetime
from memckpt.processes.event_loop import EventLoop
from tests.support.cluster.made_up_time import MadeUp


class Held:
    """What an agent holds: one state, which it can save."""

    complete_generations: tuple[str, ...] = ("one",)
    enabled = True
    saving = False
    alarm = "the disk is full"
    retry_at = 0.0

    def __init__(self, clock: MadeUp, grace_ends: float = 0.0) -> None:
        self.saved = 0
        self._clock, self._grace_ends = clock, grace_ends

    @property
    def preempted_until(self) -> float | None:
        return self._grace_ends if self._clock.now < self._grace_ends else None

    def may_save_from(self, idle_since: float) -> float:
        return max(idle_since + 3.0, self.retry_at)

    def retry_later(self) -> None:
        self.retry_at = 105.0

    def save_asked(self) -> None:
        pass

    def save_held(self, as_checkpoint: bool) -> None:
        self.saved += 1
        self.saving = True


def made(linger_seconds: float, grace_ends: float = 0.0) -> tuple[MadeUp, Any, Lifetime]:
    clock = MadeUp()
    held, host = Held(clock, grace_ends), SimpleNamespace(bytes_for_peers=lambda: 0, has_lost_file=lambda: False)
    return clock, held, Lifetime(cast(Any, held), cast(Any, host), linger_seconds, False, clock)


@pytest.mark.promise("no trainer comes back within `linger_seconds` (default 30 minutes)")
def test_what_trainers_leave_is_saved_and_lingering_ends_when_it_is_saved_without_a_turn_in_between() -> None:
    clock, held, lifetime = made(10.0)
    with closing(EventLoop(clock=clock, poller=clock)) as loop:
        loop.each_turn(lifetime.look_at_clock, lifetime.deadline)
        lifetime.trainer_came()
        loop.turn()
        lifetime.trainers_left()
        loop.turn()
        assert held.saved == 1
        assert clock.now == 103.0
        clock.now = 120.0  # lingering is over, and the writer still writes
        loop.turn()
        assert lifetime.over is None
        assert clock.waits == [None, 3000, None], "it waits for the writer, and does not turn round and round"
        held.saving = False
        loop.turn()
    assert lifetime.over == "no trainer came back within 10 s"
    assert held.saved == 1


@pytest.mark.parametrize("trainer", ["gone", "here", "finishes"])
def test_what_cannot_be_saved_is_tried_again_until_the_grace_period_ends(trainer: str) -> None:
    """Also where a trainer is still connected, in a long step, and where training finishes meanwhile."""
    clock, held, lifetime = made(1000.0, grace_ends=110.0)
    with closing(EventLoop(clock=clock, poller=clock)) as loop:
        loop.each_turn(lifetime.look_at_clock, lifetime.deadline)
        lifetime.trainer_came()
        lifetime.end_when_saved("signal SIGTERM", ordered=True)
        if trainer == "finishes":
            lifetime.end_when_saved("training finished", finishing=True)
        elif trainer == "gone":
            lifetime.trainers_left()
        saved = held.saved
        held.saving = False
        lifetime.checkpoint_failed()
        lifetime.look_at_clock()
        assert lifetime.over is None
        loop.turn()
        assert (clock.now, held.saved) == (105.0, saved + 1), "once more"
        held.saving = False
        lifetime.checkpoint_failed()
        held.retry_at = 1000.0
        loop.turn()
        assert clock.now == 110.0
    reason = "training finished" if trainer == "finishes" else "signal SIGTERM"
    assert lifetime.over == f"{reason}; what it held could not be saved: the disk is full"


def test_who_has_saved_all_does_not_wait_for_the_end_of_the_grace_period() -> None:
    _, held, lifetime = made(1000.0, grace_ends=110.0)
    lifetime.end_when_saved("signal SIGTERM", ordered=True)
    lifetime.look_at_clock()
    assert lifetime.over is None
    assert lifetime.unsaved, "it is being written"
    held.saving = False
    lifetime.look_at_clock()
    assert lifetime.over == "signal SIGTERM"
    assert not lifetime.unsaved


@pytest.mark.parametrize("ordered", [False, True])
def test_a_new_attempt_takes_back_only_an_end_that_nobody_has_ordered(ordered: bool) -> None:
    clock, held, lifetime = made(1000.0, grace_ends=110.0)
    lifetime.trainer_came()
    lifetime.end_when_saved("an end", finishing=not ordered, ordered=ordered)
    lifetime.begin_attempt(first=False)
    held.saving, clock.now = False, 110.0
    lifetime.look_at_clock()
    assert (lifetime.over is not None) is ordered


def test_an_agent_whose_run_directory_was_removed_ends() -> None:
    clock, held, lifetime = made(1800.0)
    held.enabled = False
    found = iter([True, False, True, True])
    host: Any = lifetime._host
    host.has_lost_file = lambda: next(found)
    with closing(EventLoop(clock=clock, poller=clock)) as loop:
        loop.each_turn(lifetime.look_at_clock, lifetime.deadline)
        lifetime.trainer_came()
        loop.turn()
        assert clock.waits == [None], "it looks only while no trainer is here"
        lifetime.trainers_left()
        while lifetime.over is None:
            loop.turn()
    assert lifetime.over == "its run directory was removed, and no trainer finds it any more"
    assert next(found, None) is None, "missed twice in a row, and not once"


def test_a_miss_before_a_trainer_came_back_is_forgotten() -> None:
    clock, held, lifetime = made(1800.0)
    held.enabled = False
    host: Any = lifetime._host
    host.has_lost_file = lambda: True
    lifetime.trainers_left()
    clock.now += 10.0
    lifetime.look_at_clock()
    lifetime.trainer_came()
    lifetime.trainers_left()
    clock.now += 10.0
    lifetime.look_at_clock()
    assert lifetime.over is None
    clock.now += 10.0
    lifetime.look_at_clock()
    assert lifetime.over is not None


def test_an_agent_that_is_stopped_saves_as_long_as_that_takes_and_tries_again() -> None:
    """Else than with SIGTERM there is no grace period that cuts it short, and nothing is dropped where it fails."""
    clock, held, lifetime = made(1800.0)
    with closing(EventLoop(clock=clock, poller=clock)) as loop:
        loop.each_turn(lifetime.look_at_clock, lifetime.deadline)
        lifetime.trainer_came()
        lifetime.trainers_left()
        lifetime.stop_when_saved("a user has stopped it")
        assert held.saved == 1
        held.saving = False
        assert not lifetime.checkpoint_failed()
        lifetime.look_at_clock()
        assert lifetime.over is None, "what it holds is nowhere else"
        clock.now = held.retry_at
        lifetime.look_at_clock()
        assert held.saved == 2
        lifetime.look_at_clock()
        assert lifetime.over is None, "it is being written"
        held.saving = False
        lifetime.look_at_clock()
        assert lifetime.over == "a user has stopped it"
