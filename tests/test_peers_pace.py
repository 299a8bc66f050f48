"""When records may be sent: caps, phases, and a governor on simulated links."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memckpt.peers.governor import Baseline, Governor, StepClock
from memckpt.peers.pace import Pacer, RateCap
from memckpt.state.phases import Phase

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


def test_no_cap_never_waits() -> None:
    cap = RateCap(None)
    cap.sent(1 << 40, 0.0)
    assert cap.delay(1 << 40, 0.0) == 0


# The clock


def test_step_times_are_medians_and_survive_missed_marks() -> None:
    clock = StepClock()
    assert clock.mark(7, F, ns(10.0)) is None
    clock.mark(7, B, ns(10.2))
    clock.mark(7, S, ns(10.5))
    ended = clock.mark(8, F, ns(11.0))
    assert ended is not None
    assert ended.seconds == pytest.approx(1.0)
    assert ended.backward_seconds == pytest.approx(0.3)
    ended = clock.mark(12, F, ns(15.0))  # nobody looked for three steps
    assert ended is not None
    assert ended.seconds == pytest.approx(1.0)
    assert ended.backward_seconds is None
    assert clock.mark(3, F, ns(20.0)) is None  # another attempt
    for step, at in ((4, 21.0), (5, 51.0), (6, 52.0)):
        clock.mark(step, F, ns(at))
    assert clock.step_seconds == pytest.approx(1.0)  # an evaluation of 30 s does not count


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 50), st.sampled_from([F, B, S]), st.integers(0, 10**11)), max_size=60))
def test_any_marks_are_borne(marks: list[tuple[int, Phase, int]]) -> None:
    clock, pacer = StepClock(), Pacer(None)
    for step, phase, at in marks:
        ended = clock.mark(step, phase, at)
        assert ended is None or ended.seconds > 0
        pacer.mark(step, phase, at)
        pacer.delay(1, at * 1e-9)
        pacer.state()


# Phases


def test_bulk_goes_in_forward_and_waits_in_backward() -> None:
    pacer = Pacer(None)
    now = 100.0
    for step in range(1, 6):
        pacer.mark(step, F, ns(now))
        assert pacer.delay(MIB, now + 0.01) == 0
        pacer.mark(step, B, ns(now + 0.1))
        assert 0 < pacer.delay(MIB, now + 0.11) <= 0.01
        assert pacer.state().holding
        pacer.mark(step, S, ns(now + 0.2))
        assert pacer.delay(MIB, now + 0.21) == 0
        pacer.sent(MIB, now + 0.21)
        assert not pacer.state().holding
        now += 0.3


def test_the_backward_of_any_rank_counts() -> None:
    pacer = Pacer(None)
    pacer.mark(1, F, ns(1.0), rank=0)
    pacer.mark(1, B, ns(1.0), rank=3)
    assert pacer.delay(1, 1.01) > 0
    pacer.mark(1, S, ns(1.02), rank=3)
    assert pacer.delay(1, 1.03) == 0


def test_without_marks_nothing_is_held() -> None:
    assert Pacer(None).delay(MIB, 5.0) == 0
    assert Pacer(None).state().phase == "unknown"


@settings(deadline=None)
@given(
    step_seconds=st.floats(0.001, 30.0),
    refreshed=st.floats(0.001, 2.0),
    steps=st.integers(0, 30),
)
def test_a_stuck_trainer_does_not_stop_traffic(step_seconds: float, refreshed: float, steps: int) -> None:
    """Whatever a trainer marks, pieces go; a backward that never ends, or one that begins over and over."""
    pacer, now = Pacer(None), 1000.0
    for step in range(1, steps + 1):
        pacer.mark(step, F, ns(now))
        pacer.mark(step, B, ns(now + step_seconds / 2))
        now += step_seconds
    went, looked, began = 0, now, now
    pacer.mark(steps + 1, B, ns(now))
    while now < began + 12:
        if now - looked > refreshed:
            looked = now
            pacer.mark(steps + 1, B, ns(now))
        wait = pacer.delay(1000, now)
        if wait == 0:
            pacer.sent(1000, now)
            went += 1
        now += max(wait, 0.01)
    assert went >= 10


def test_after_the_longest_hold_a_backward_holds_nothing_back() -> None:
    pacer = Pacer(None)
    for step in range(1, 5):
        pacer.mark(step, F, ns(100.0 * step))
    pacer.mark(4, B, ns(450.0))
    assert pacer.delay(MIB, 450.9) > 0
    for piece in range(100):
        assert pacer.delay(MIB, 451.1 + 0.001 * piece) == 0
        pacer.sent(MIB, 451.1 + 0.001 * piece)


def test_where_no_step_is_running_no_limit_holds() -> None:
    """Training has come to its end, or evaluates: nobody is slowed down."""
    pacer, now = limited_pacer()
    pacer.sent(1 << 30, now)
    assert pacer.delay(MIB, now + 4) > 1
    assert pacer.delay(MIB, now + 6) == 0


def limited_pacer() -> tuple[Pacer, float]:
    """A training that was slowed down by half, and the time."""
    pacer, now, step = Pacer(None), 100.0, 1000
    while pacer.state().rate_limit_bytes_per_second is None:
        pacer.mark(step, F, ns(now))
        sends = step >= 1010 and pacer.delay(1, now) < 0.002
        for piece in range(4 if sends else 0):
            pacer.sent(MIB // 4, now + 0.02 * piece)
        now += 0.15 if sends else 0.1
        step += 1
    return pacer, now


def test_a_limit_leaves_records_what_they_need() -> None:
    pacer, now = limited_pacer()
    pacer.needs(16 * MIB, 0)
    pacer.mark(5000, F, ns(now + 5000 * 0.15))
    limit = pacer.state().rate_limit_bytes_per_second
    assert limit is not None
    assert limit == pytest.approx(1.1 * 16 * MIB / 0.15, rel=0.1)


def test_where_training_waits_everything_goes_but_the_cap() -> None:
    pacer, now = Pacer(MIB), 0.0
    pacer.mark(1, B, ns(now))
    assert pacer.delay(1000, now + 0.001) > 0
    pacer.waited(0.5)
    assert pacer.delay(1000, now + 0.001) == 0
    state = pacer.state()
    assert state.overruled
    assert "waits for acknowledgements" in state.reason
    pacer.sent(MIB, now + 0.001)
    assert pacer.delay(MIB, now + 0.001) == pytest.approx(1.0, rel=0.05)  # the cap is the user's word


def test_little_room_lets_records_go_in_backward() -> None:
    pacer = Pacer(None)
    pacer.mark(1, B, ns(0.0))
    pacer.needs(MIB, waiting=2 * MIB, room=3 * MIB)
    assert pacer.delay(1000, 0.001) > 0
    pacer.needs(MIB, waiting=3 * MIB, room=3 * MIB)
    assert pacer.delay(1000, 0.001) == 0
    assert "room" in pacer.state().reason


# The governor


@dataclass
class Course:
    """What a governor did with a job."""

    seconds: list[float] = field(default_factory=list)
    limits: list[float] = field(default_factory=list)
    probes: list[bool] = field(default_factory=list)


def govern(
    governor: Governor,
    seconds: Callable[[int, float], float],
    steps: range,
    *,
    network: float = 1000.0,
    floor: float = 10.0,
) -> Course:
    """A job whose step takes `seconds(step, rate)`, while it sends as fast as it may."""
    course = Course()
    for step in steps:
        rate = 0.0 if governor.probing else min(network, max(governor.limit or network, floor))
        took = seconds(step, rate)
        course.seconds.append(took)
        course.limits.append(min(network, governor.limit or network))
        course.probes.append(governor.probing)
        binding = governor.limit is not None and governor.limit < network
        governor.step_ended(
            step + 1,
            took,
            sent=round(rate * took * 1e6),
            settled=False,
            rate=rate or network,
            floor=floor,
            binding=binding,
        )
    return course


@pytest.mark.parametrize("overhead", [0.01, 0.03, 0.1])
@pytest.mark.parametrize("base", [0.02, 1.0, 20.0])
def test_it_finds_the_rate_that_costs_what_is_allowed(overhead: float, base: float) -> None:
    """Steps that would be half as long again: sending goes down to what costs the allowed share, and no further."""
    course = govern(Governor(overhead), lambda step, rate: base * (1 + 0.5 * rate / 1000), range(1, 2000))
    late = [took for took, probe in zip(course.seconds, course.probes, strict=True) if not probe][-500:]
    assert statistics.mean(late) <= base * (1 + 1.3 * overhead)
    assert statistics.mean(course.limits[-500:]) >= 0.5 * 1000 * overhead / 0.5


def noise(kind: str, seed: int) -> Callable[[], float]:
    draw = random.Random(seed)
    kinds = {
        "even": lambda: draw.uniform(0.9, 1.1),
        "normal": lambda: draw.gauss(1, 0.05),
        "pauses": lambda: 1 + 0.02 * abs(draw.gauss(0, 1)) + (draw.random() < 0.03) * draw.uniform(0, 3),
    }
    return kinds[kind]


@pytest.mark.parametrize("kind", ["even", "normal", "pauses"])
def test_noise_alone_slows_hardly_anything_down(kind: str) -> None:
    ends = []
    for seed in range(12):
        factor = noise(kind, seed)
        course = govern(Governor(0.03), lambda step, rate: 0.3 * factor(), range(1, 1500))  # noqa: B023
        ends.append(statistics.mean(course.limits[-500:]))
    assert statistics.median(ends) >= 990
    assert min(ends) >= 400


@pytest.mark.parametrize("kind", ["even", "normal", "pauses"])
def test_noise_does_not_hide_what_traffic_costs(kind: str) -> None:
    shares = []
    for seed in range(8):
        factor = noise(kind, seed)
        course = govern(Governor(0.03), lambda step, rate: factor() * (1 + 0.5 * rate / 1000), range(1, 2500))  # noqa: B023
        shares.append(0.5 * statistics.mean(course.limits[-1000:]) / 1000)
    assert 0.01 <= statistics.median(shares) <= 0.05
    assert max(shares) <= 0.08


def test_training_that_becomes_slower_by_itself_is_not_blamed_on_traffic() -> None:
    governor = Governor(0.03)
    job = lambda step, rate: 1.0 if step < 435 else 1.5  # noqa: E731
    course = govern(governor, job, range(1, 900))
    assert governor.baseline.seconds == pytest.approx(1.5)
    assert statistics.mean(course.limits[600:]) >= 990
    assert min(course.limits) >= 500


def test_a_limit_that_is_not_needed_any_more_goes() -> None:
    governor = Governor(0.03)
    govern(governor, lambda step, rate: 1 + rate / 1000, range(1, 300))
    assert governor.limit is not None
    govern(governor, lambda step, rate: 1.0, range(300, 700))
    assert governor.limit is None


def test_what_is_still_on_its_way_and_a_slow_start_are_not_the_baseline() -> None:
    governor = Governor(0.03)
    late = {step for begin in range(25, 500, 25) for step in (begin, begin - 1)}  # the first of a probe
    for step in (1, 2, 3):  # before the first record is sent
        governor.step_ended(step, 60.0, sent=0, settled=True, rate=1.0, floor=0.0, binding=False)
    assert not governor.baseline.samples
    govern(governor, lambda step, rate: 1.4 if rate or step in late else 1.0, range(4, 500))
    assert set(governor.baseline.samples) == {1.0}


def test_records_get_what_they_need() -> None:
    course = govern(Governor(0.03), lambda step, rate: 1 + rate / 1000, range(1, 600), floor=400.0)
    assert min(course.limits) == 400


def test_probes_begin_at_the_same_steps_everywhere_and_are_rare() -> None:
    begins = []
    for first in (1, 13):
        course = govern(Governor(0.03), lambda step, rate: 1.0, range(first, 2001))
        probes = [False] * (first - 1) + course.probes
        begins.append([n + 1 for n in range(1, 2000) if probes[n] and not probes[n - 1]])
    assert begins[0][1:] == begins[1][1:]
    assert {step % 25 for step in begins[0]} == {0}
    assert sum(course.probes) <= 50
    late = [step for step in begins[0] if step > 200]
    assert late == list(range(400, 2001, 200))


def test_where_training_waits_the_limit_goes_up_and_nothing_is_judged() -> None:
    governor = Governor(0.03)
    govern(governor, lambda step, rate: 1 + rate / 1000, range(1, 300))
    before = governor.limit
    assert before is not None
    share = governor.share
    governor.overrule("training waits", 8)
    assert governor.limit is not None
    assert governor.limit > before
    course = govern(governor, lambda step, rate: 5.0, range(301, 308))
    assert not any(course.probes)
    assert course.limits == [governor.limit] * 7
    govern(governor, lambda step, rate: 1 + rate / 1000, range(308, 312))
    assert governor.share == share


def test_a_baseline_follows_small_changes() -> None:
    baseline = Baseline(0.0075)
    for seconds in [1.0] * 40 + [1.02] * 12:
        baseline.add(seconds)
    assert baseline.seconds == 1.02


def test_a_baseline_is_begun_anew_by_two_steps_that_are_far_off() -> None:
    baseline = Baseline(0.0075)
    for seconds, doubtful in [(1.0, False)] * 8 + [(1.5, True), (1.0, False), (0.5, True), (1.5, True)]:
        baseline.add(seconds)
        assert (baseline.seconds or 1.0, baseline.doubtful) == (1.0, doubtful)
    baseline.add(1.4)
    assert (baseline.seconds, baseline.doubtful) == (1.45, False)


def test_a_probe_that_training_cannot_get_through_is_given_up_and_the_next_ones_are_shorter() -> None:
    """A training that waits for what is held back is held up for three steps, once."""
    pacer, now, longest = Pacer(None), 100.0, []
    for step in range(1, 400):
        pacer.mark(step, F, ns(now))
        now += 0.01
        held = 0
        while pacer.delay(MIB, now) > 0 and (pacer.state().phase != "forward" or not goes_on(step)):
            now += 0.01
            held += 1
        if pacer.delay(MIB, now) == 0:
            pacer.sent(MIB, now)
        longest.append(held)
        now += 0.09
    assert [held for held in longest if held] == [pytest.approx(30, abs=5)]
    assert pacer.state().baseline_step_seconds == pytest.approx(0.1)


def goes_on(step: int) -> bool:
    """The first step of a probe is made; for the second, the record before it has to be acknowledged."""
    return step % 25 == 0


# All of it, on a link


@dataclass
class Link:
    """A job that computes, then reduces gradients over a link which records take a part of. Ticks of a millisecond."""

    pacer: Pacer
    marks: bool = True
    bandwidth: float = 100 * MIB
    compute: float = 0.06
    reduced: int = 4 * MIB
    record: int = 3 * MIB
    room: int = 9 * MIB
    now: float = 1000.0
    waiting: int = 0
    flying: float = 0.0
    durations: list[float] = field(default_factory=list)
    waited: float = 0.0
    most_waiting: int = 0

    def run(self, steps: int) -> None:
        for step in range(1, steps + 1):
            began = self.now
            self.pacer.mark(step, F, ns(self.now))
            while self.now < began + self.compute:
                self.tick(reducing=False)
            if self.marks:
                self.pacer.mark(step, B, ns(self.now))
            left = float(self.reduced)
            while left > 0:
                left -= self.tick(reducing=True)
            self.durations.append(self.now - began)
            while self.waiting + self.record > self.room:
                self.pacer.waited(0.001)
                self.waited += 0.001
                self.tick(reducing=False)
            self.waiting += self.record
            self.pacer.needs(self.record, self.waiting, self.room)
            self.most_waiting = max(self.most_waiting, self.waiting)

    def tick(self, *, reducing: bool) -> float:
        """A millisecond; returns the bytes that were reduced."""
        piece = 64 << 10
        while self.waiting and self.flying < 4 * piece and self.pacer.delay(piece, self.now) == 0:
            went = min(piece, self.waiting)
            self.pacer.sent(went, self.now)
            self.waiting -= went
            self.flying += went
        capacity = self.bandwidth * 0.001
        ours = min(self.flying, capacity / 2 if reducing else capacity)
        self.flying -= ours
        self.now += 0.001
        return capacity - ours


def late_share(link: Link, steps: int) -> float:
    alone = link.compute + link.reduced / link.bandwidth
    return statistics.mean(link.durations[-steps:]) / alone - 1


def test_records_go_while_the_network_is_idle() -> None:
    link = Link(Pacer(None))
    link.run(300)
    assert late_share(link, 200) < 0.03
    assert link.waited == 0
    assert link.most_waiting <= link.room
    state = link.pacer.state()
    assert state.baseline_step_seconds == pytest.approx(link.compute + link.reduced / link.bandwidth, rel=0.05)


def test_without_marks_of_backward_the_governor_slows_down() -> None:
    """The record would go right away, in forward; here forward is short and most of it meets the reductions."""
    free = Link(Pacer(None, overhead=1.0), marks=False, compute=0.01, reduced=16 * MIB)
    free.run(400)
    governed = Link(Pacer(None), marks=False, compute=0.01, reduced=16 * MIB)
    governed.run(400)
    assert governed.waited == 0
    assert governed.most_waiting <= governed.room
    state = governed.pacer.state()
    assert state.share is not None
    assert state.rate_limit_bytes_per_second is not None


def test_more_than_the_link_takes_makes_training_wait_at_full_rate() -> None:
    link = Link(Pacer(None), record=12 * MIB, room=36 * MIB)
    link.run(200)
    state = link.pacer.state()
    assert state.overruled
    assert state.rate_limit_bytes_per_second is None
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
