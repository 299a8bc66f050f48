"""When records may be sent: caps, phases, and the governor on a simulated link."""

from __future__ import annotations

import random
import statistics
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memckpt.memory.pages import Phase
from memckpt.replication.pacing.governor import StepClock
from memckpt.replication.pacing.pace import Pacer, RateCap

MIB = 1 << 20
F, B, S = Phase.FORWARD, Phase.BACKWARD, Phase.STEP


def ns(seconds: float) -> int:
    return round(seconds * 1e9)


# The rate cap


@settings(deadline=None)
@given(
    rate=st.floats(1e3, 1e10),
    changes=st.lists(st.floats(0.2, 5.0), max_size=3),
    pieces=st.lists(st.tuples(st.integers(1, 4 * MIB), st.floats(0, 0.2)), min_size=1, max_size=60),
)
def test_a_cap_is_never_exceeded_beyond_a_burst(
    rate: float, changes: list[float], pieces: list[tuple[int, float]]
) -> None:
    cap = RateCap(rate)
    highest, now, went = rate, 100.0, []
    for number, (nbytes, idle) in enumerate(pieces):
        now += idle
        if changes and number % 7 == 6:
            rate *= changes.pop()
            highest = max(highest, rate)
            cap.set_rate(rate, now)
        wait = cap.delay(nbytes, now)
        assert wait <= max(number for number, _ in pieces) * len(pieces) / min(rate, highest) + 1
        now += wait
        assert cap.delay(nbytes, now) < 1e-6
        cap.sent(nbytes, now)
        went.append((now, nbytes))
    burst = max(0.02 * highest, *(nbytes for nbytes, _ in pieces), 0)
    for first in range(len(went)):
        total = 0
        for at, nbytes in went[first:]:
            total += nbytes
            assert total <= highest * (at - went[first][0]) * (1 + 1e-6) + burst * (1 + 1e-6) + 1


def test_a_cap_is_used_up() -> None:
    cap, now, total = RateCap(10 * MIB), 0.0, 0
    while now < 1.0:
        now += cap.delay(64 << 10, now)
        cap.sent(64 << 10, now)
        total += 64 << 10
    assert 10 * MIB <= total <= 10.5 * MIB


def test_what_is_owed_stays_owed_when_the_rate_changes() -> None:
    cap = RateCap(1000.0)
    cap.sent(5000, 0.0)
    cap.set_rate(2000.0, 1.0)
    assert cap.delay(1000, 1.0) == pytest.approx(2.0)


# The clock


def test_step_times_are_medians_and_survive_missed_marks() -> None:
    clock = StepClock()
    assert clock.mark_phase(7, F, ns(10.0)) is None
    clock.mark_phase(7, B, ns(10.2))
    clock.mark_phase(7, S, ns(10.5))
    assert clock.mark_phase(8, F, ns(11.0)) == pytest.approx(1.0)
    assert clock.mark_phase(12, F, ns(15.0)) == pytest.approx(1.0)  # nobody looked for three steps
    assert clock.backward_seconds == pytest.approx(0.3)
    assert clock.mark_phase(3, F, ns(20.0)) is None  # another attempt
    for step, at in ((4, 21.0), (5, 51.0), (6, 52.0)):
        clock.mark_phase(step, F, ns(at))
    assert clock.step_seconds == pytest.approx(1.0)  # an evaluation of 30 s does not count


def test_each_backward_counts_up_to_the_longest() -> None:
    """Of gradients that are accumulated; bulk is held back in each of them."""
    clock = StepClock(longest_backward=1.0)
    for at, phase in ((0.0, F), (0.5, B), (2.0, F), (2.5, B), (3.0, S)):
        clock.mark_phase(1, phase, ns(10 + at))
    clock.mark_phase(2, F, ns(14.0))
    assert clock.backward_seconds == pytest.approx(1.5)


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 50), st.sampled_from([F, B, S]), st.integers(0, 10**11)), max_size=60))
def test_any_marks_are_borne(marks: list[tuple[int, Phase, int]]) -> None:
    clock, pacer = StepClock(), Pacer(None)
    for step, phase, at in marks:
        ended = clock.mark_phase(step, phase, at)
        assert ended is None or ended > 0
        pacer.mark_phase(step, phase, at)
        pacer.delay(1, at * 1e-9)
        assert pacer.reason


# Phases


def test_bulk_goes_in_forward_and_waits_in_backward() -> None:
    pacer = Pacer(None)
    now = 100.0
    for step in range(1, 6):
        pacer.mark_phase(step, F, ns(now))
        assert pacer.delay(MIB, now + 0.01) == 0
        pacer.mark_phase(step, B, ns(now + 0.1))
        assert 0 < pacer.delay(MIB, now + 0.11) <= 0.01
        assert pacer.holding
        pacer.mark_phase(step, S, ns(now + 0.2))
        assert pacer.delay(MIB, now + 0.21) == 0
        pacer.sent(MIB, now + 0.21)
        assert not pacer.holding
        now += 0.3


def test_the_backward_of_any_rank_counts() -> None:
    pacer = Pacer(None)
    pacer.mark_phase(1, F, ns(1.0), rank=0)
    pacer.mark_phase(1, B, ns(1.0), rank=3)
    assert pacer.delay(1, 1.01) > 0
    pacer.mark_phase(1, S, ns(1.02), rank=3)
    assert pacer.delay(1, 1.03) == 0


@settings(deadline=None)
@given(step_seconds=st.floats(0.001, 30.0), refreshed=st.floats(0.001, 2.0), steps=st.integers(0, 30))
def test_a_stuck_trainer_does_not_stop_traffic(step_seconds: float, refreshed: float, steps: int) -> None:
    """Whatever a trainer marks, pieces go; a backward that never ends, or one that begins over and over."""
    pacer, now = Pacer(None), 1000.0
    for step in range(1, steps + 1):
        pacer.mark_phase(step, F, ns(now))
        pacer.mark_phase(step, B, ns(now + step_seconds / 2))
        now += step_seconds
    went, looked, began = 0, now, now
    pacer.mark_phase(steps + 1, B, ns(now))
    while now < began + 12:
        if now - looked > refreshed:
            looked = now
            pacer.mark_phase(steps + 1, B, ns(now))
        wait = pacer.delay(1000, now)
        if wait == 0:
            pacer.sent(1000, now)
            went += 1
        now += max(wait, 0.01)
    assert went >= 10


def test_after_the_longest_hold_a_backward_holds_nothing_back() -> None:
    pacer = Pacer(None)
    for step in range(1, 5):
        pacer.mark_phase(step, F, ns(100.0 * step))
    pacer.mark_phase(4, B, ns(450.0))
    assert pacer.delay(MIB, 450.9) > 0
    for piece in range(100):
        assert pacer.delay(MIB, 451.1 + 0.001 * piece) == 0
        pacer.sent(MIB, 451.1 + 0.001 * piece)


@pytest.mark.parametrize(("step_seconds", "asks"), [(0.05, 0.002), (1.0, 0.01), (30.0, 0.02)])
def test_what_is_held_back_asks_seldom_where_steps_are_long(step_seconds: float, asks: float) -> None:
    """Each look at the marks takes the replicator's core: a probe must not slow down what it measures."""
    pacer, now = Pacer(None), 100.0
    for step in range(1, 6):
        pacer.mark_phase(step, F, ns(now))
        now += step_seconds
    pacer.mark_phase(6, F, ns(now))
    pacer.mark_phase(6, B, ns(now))
    assert pacer.delay(MIB, now) == pytest.approx(asks)


def test_where_no_step_is_running_no_limit_holds() -> None:
    """Training has come to its end, or evaluates: nobody is slowed down."""
    pacer, now = limited_pacer()
    pacer.sent(1 << 30, now)
    assert pacer.delay(MIB, now + 4) > 1
    assert pacer.delay(MIB, now + 6) == 0


def limited_pacer() -> tuple[Pacer, float]:
    """A training that was slowed down by half, and the time."""
    pacer, now, step = Pacer(None), 100.0, 1000
    while pacer.rate_limit is None:
        pacer.mark_phase(step, F, ns(now))
        sends = step >= 1010 and pacer.delay(1, now) < 0.002
        for piece in range(4 if sends else 0):
            pacer.sent(MIB // 4, now + 0.02 * piece)
        now += 0.15 if sends else 0.1
        step += 1
    return pacer, now


def test_a_limit_leaves_records_what_they_need() -> None:
    pacer, now = limited_pacer()
    pacer.needs(16 * MIB, 0)
    pacer.mark_phase(5000, F, ns(now + 5000 * 0.15))
    limit = pacer.rate_limit
    assert limit is not None
    assert limit == pytest.approx(1.1 * 16 * MIB / 0.15, rel=0.1)


def test_where_training_waits_everything_goes_but_the_cap() -> None:
    pacer, now = Pacer(MIB), 0.0
    pacer.mark_phase(1, B, ns(now))
    assert pacer.delay(1000, now + 0.001) > 0
    pacer.waited(0.5)
    assert pacer.delay(1000, now + 0.001) == 0
    assert pacer.governor.overruled
    assert "waits for acknowledgements" in pacer.reason
    pacer.sent(MIB, now + 0.001)
    assert pacer.delay(MIB, now + 0.001) == pytest.approx(1.0, rel=0.05)  # the cap is the user's word


def test_what_went_while_training_waited_is_not_owed() -> None:
    pacer, now = limited_pacer()
    pacer.mark_phase(9000, F, ns(now))
    pacer.waited(0.5)
    pacer.sent(1 << 30, now)
    for step in range(9001, 9020):
        now += 0.1
        pacer.mark_phase(step, F, ns(now))
    assert not pacer.governor.overruled
    assert pacer.rate_limit is not None
    assert pacer.delay(MIB // 4, now) == 0


def test_little_room_lets_records_go_in_backward() -> None:
    pacer = Pacer(None)
    pacer.mark_phase(1, B, ns(0.0))
    pacer.needs(MIB, waiting=2 * MIB, room=3 * MIB)
    assert pacer.delay(1000, 0.001) > 0
    pacer.needs(MIB, waiting=3 * MIB, room=3 * MIB)
    assert pacer.delay(1000, 0.001) == 0
    assert "room" in pacer.reason


# All of it, on a link


@dataclass
class Link:
    """A job that computes, then reduces gradients over a link which records take a part of. Ticks of a millisecond."""

    pacer: Pacer
    steps: bool = True  # whether there are marks at all
    marks: bool = True  # whether there are those of backward
    bandwidth: float = 100 * MIB
    compute: float = 0.06
    reduced: int = 4 * MIB
    gathered: int = 0  # bytes of parameters that are gathered in forward, layer by layer
    layers: int = 1
    kernel: int = 256 << 10  # bytes that are handed over and not on the wire
    part: float = 0.5  # of the link, that these take while something else is on it
    record: int = 3 * MIB
    room: int = 9 * MIB
    now: float = 1000.0
    waiting: int = 0
    flying: float = 0.0
    durations: list[float] = field(default_factory=list)
    waited: float = 0.0
    most_waiting: int = 0
    noise: random.Random = field(default_factory=lambda: random.Random(0))
    spread: float = 0.0  # standard deviation of the time to compute, as a share

    def run(self, steps: int) -> None:
        for step in range(1, steps + 1):
            began = self.now
            self.pacer.in_flight(round(self.flying))
            if self.steps:
                self.pacer.mark_phase(step, F, ns(self.now))
            for _ in range(self.layers):
                self.transfer(self.gathered / self.layers)
                self.work(self.compute / self.layers * max(0.0, self.noise.gauss(1, self.spread)))
            if self.marks:
                self.pacer.mark_phase(step, B, ns(self.now))
            self.transfer(self.reduced)
            self.durations.append(self.now - began)
            while self.waiting + self.record > self.room:
                self.pacer.waited(0.001)
                self.waited += 0.001
                self.tick(reducing=False)
            self.waiting += self.record
            self.pacer.needs(self.record, self.waiting, self.room)
            self.most_waiting = max(self.most_waiting, self.waiting)

    def work(self, seconds: float) -> None:
        until = self.now + seconds
        while self.now < until:
            self.tick(reducing=False)

    def transfer(self, nbytes: float) -> None:
        while nbytes > 0:
            nbytes -= self.tick(reducing=True)

    def tick(self, *, reducing: bool) -> float:
        """A millisecond; returns the bytes that were reduced."""
        piece = 64 << 10
        while self.waiting and self.flying < self.kernel and self.pacer.delay(piece, self.now) == 0:
            went = min(piece, self.waiting)
            self.pacer.sent(went, self.now)
            self.waiting -= went
            self.flying += went
        capacity = self.bandwidth * 0.001
        ours = min(self.flying, capacity * self.part if reducing else capacity)
        self.flying -= ours
        self.now += 0.001
        return capacity - ours


def late_share(link: Link, steps: int) -> float:
    alone = link.compute + (link.gathered + link.reduced) / link.bandwidth
    return statistics.mean(link.durations[-steps:]) / alone - 1


def test_records_go_while_the_network_is_idle() -> None:
    link = Link(Pacer(None))
    link.run(300)
    assert late_share(link, 200) < 0.03
    assert link.waited == 0
    assert link.most_waiting <= link.room
    state = link.pacer
    assert state.governor.baseline.seconds == pytest.approx(link.compute + link.reduced / link.bandwidth, rel=0.05)


@pytest.mark.parametrize("record", [5.3, 5.5, 5.7])
def test_the_baseline_is_learnt_where_records_are_on_their_way_in_all_of_a_step(record: float) -> None:
    """A record takes nearly as long as a step, and there is room for two only: a probe cannot last two steps."""
    nbytes = int(record * MIB)
    link = Link(Pacer(None), marks=False, bandwidth=35 * MIB, record=nbytes, room=3 * nbytes - 1)
    link.run(160)
    assert link.waited < 0.2  # the first probe was too long
    alone = link.compute + link.reduced / link.bandwidth
    learnt = link.pacer.governor.baseline.samples
    assert len(learnt) >= 5  # of the six probes that began
    assert learnt == pytest.approx([alone] * len(learnt), rel=0.05)


def test_without_marks_of_backward_the_governor_slows_down() -> None:
    """The record would go right away, in forward; here forward is short and most of it meets the reductions."""
    free = Link(Pacer(None, overhead=1.0), marks=False, compute=0.01, reduced=16 * MIB)
    free.run(400)
    governed = Link(Pacer(None), marks=False, compute=0.01, reduced=16 * MIB)
    governed.run(400)
    assert governed.waited < 0.01  # the first probe was too long
    assert governed.most_waiting <= governed.room
    state = governed.pacer
    assert state.governor.share is not None
    assert state.rate_limit is not None


def test_a_probe_in_which_training_waited_longer_than_it_took_is_none() -> None:
    pacer, now = Pacer(None), 100.0
    for step in range(1, 100):
        pacer.mark_phase(step, F, ns(now))
        now += 0.1
        if pacer.delay(MIB, now - 0.09) > 0 and step % 11 == 0:
            pacer.waited(0.04 if step < 50 else 0.2)  # a replicator that was stopped for a while finds out late
        pacer.sent(MIB, now - 0.05)
    assert len(pacer.governor.baseline.samples) >= 3
    assert min(pacer.governor.baseline.samples) == pytest.approx(0.06)


@pytest.mark.parametrize("records", [2, 3])
def test_the_baseline_is_learnt_where_a_probe_makes_training_wait(records: int) -> None:
    """There is room for fewer records than a step without traffic takes: once it is over, training waits for them."""
    link = Link(Pacer(None), record=3 * MIB, room=records * 3 * MIB - 1, reduced=6 * MIB)
    link.run(200)
    alone = link.compute + link.reduced / link.bandwidth
    learnt = link.pacer.governor.baseline.samples
    assert len(learnt) == 12
    assert learnt == pytest.approx([alone] * 12, rel=0.03)
    assert link.waited < 13 * 2 * link.record / link.bandwidth
    state = link.pacer
    assert state.governor.share is not None
    assert state.governor.share < 0.03
    assert not state.governor.overruled


@pytest.mark.parametrize("noise", [0.0, 0.015])
def test_a_slow_link_that_training_uses_in_forward_too(noise: float) -> None:
    """1 Gbit/s, and kernels that take 4 MiB at once: sent as they are made, records delay what is gathered."""

    def seconds(record: int, governed: bool) -> float:
        link = Link(
            Pacer(None), steps=governed, marks=governed, bandwidth=125e6, compute=0.7, gathered=12 * MIB, layers=2,
            reduced=6 * MIB, kernel=4 * MIB, part=0.9, record=record, room=3 * record, noise=random.Random(0),
            spread=noise,
        )  # fmt: skip
        link.run(150)
        assert link.waited == 0
        return statistics.mean(link.durations[-100:])

    alone = seconds(0, False)
    assert seconds(9 * MIB, False) > 1.05 * alone
    assert seconds(9 * MIB, True) < 1.03 * alone


def test_more_than_the_link_takes_makes_training_wait_at_full_rate() -> None:
    link = Link(Pacer(None), record=12 * MIB, room=36 * MIB)
    link.run(200)
    state = link.pacer
    assert state.governor.overruled
    assert state.rate_limit is None
    # All that the link has left is used.
    seconds = link.now - 1000.0
    sent = 200 * link.record - link.waiting
    assert sent >= 0.93 * (link.bandwidth * seconds - 200 * link.reduced)


@settings(deadline=None, max_examples=25)
@given(
    compute=st.floats(0.005, 0.1),
    reduced=st.integers(0, 8 * MIB),
    record=st.integers(1, 8 * MIB),
    marks=st.booleans(),
    cap=st.none() | st.floats(5 * MIB, 100 * MIB),
)
def test_whatever_the_job_records_arrive(
    compute: float, reduced: int, record: int, marks: bool, cap: float | None
) -> None:
    """No starvation: room runs out, and training waits, only where the link or the cap cannot take all records."""
    link = Link(Pacer(cap), marks=marks, compute=compute, reduced=reduced, record=record, room=4 * record)
    link.run(60)
    sent = 60 * record - link.waiting
    assert sent >= 55 * record
    rate = min(cap or link.bandwidth, link.bandwidth)
    idle = sum(link.durations) * rate - 60 * reduced
    if idle > 2 * 60 * record and compute > 0.02:
        assert link.waited == 0
