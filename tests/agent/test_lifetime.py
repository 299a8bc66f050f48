"""When an agent saves and ends, by the clock."""

from __future__ import annotations

from contextlib import closing
from types import SimpleNamespace
from typing import Any

from memckpt.agent.lifetime import Lifetime
from memckpt.processes.event_loop import EventLoop
from tests.processes.test_event_loop import MadeUp


class Held:
    """What an agent holds: one state, which it can save."""

    complete_generations = ("one",)
    enabled = True
    saving = False

    def __init__(self) -> None:
        self.saved = 0

    def save_at(self, idle_since: float) -> float:
        return idle_since + 3.0

    def save_asked(self) -> None:
        pass

    def save_held(self, as_checkpoint: bool) -> None:
        self.saved += 1
        self.saving = True


def test_what_trainers_leave_is_saved_and_lingering_ends_when_it_is_saved_without_a_turn_in_between() -> None:
    clock = MadeUp()
    held: Any = Held()
    host: Any = SimpleNamespace(bytes_for_peers=lambda: 0)
    lifetime = Lifetime(held, host, 10.0, False, clock)
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
