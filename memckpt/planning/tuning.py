"""Rules of the tuner: what to set, given what a running job has measured. Pure; times are in seconds.

Each rule is steady under noise: it moves only where its target has stayed away from what is set, beyond a band and in
several looks in a row. So a job whose conditions stay the same comes to rest.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from memckpt.config import RedoMode
from memckpt.planning.checks import LONGEST_SECONDS, require_number, require_seconds
from memckpt.planning.intervals import young_interval

#: MTBF of a job of which nothing is known, and the number of failures that this guess weighs as much as.
_GUESSED_MTBF_SECONDS, _GUESS_WEIGHT = 86400.0, 0.1
#: Number of failures that an estimate of their rate remembers.
_REMEMBERED_FAILURES = 8
#: Ratio of target to value up to which a value stays, and by which it moves at most.
_BAND, _LARGEST_STEP = 1.25, 4.0
#: Looks in a row in which a target has to be beyond the band.
_LOOKS = 2
#: Looks for which nothing is changed: after a change, and after one for which there was no room.
_REST_LOOKS, _NO_ROOM_LOOKS = 1, 20
#: Looks in a row with a stall beyond the budget after which nothing will be changed any more.
_OVER_LOOKS = 4
#: D up to which slots are added where redo is late only now and then.
MOST_SLOTS = 6
#: Values of T, in steps.
_PERIODS = (4, 8, 16, 32, 64, 128, 256, 512)
#: Least gain for which T changes: a share of training time, and a share of the cost that depends on T. A longer T takes
#: memory, whose first use takes time, too: it has to gain more, unless the stall is over the budget.
_LEAST_GAIN, _LEAST_RELATIVE_GAIN, _LEAST_GAIN_OF_MEMORY = 0.001, 0.1, 0.0025


@dataclass
class FailureRate:
    """Estimate of a job's rate of failures from those that it has had; the last eight count most.

    The mean of a Gamma distribution: before the first failure it is the expected rate, which weighs as much as one
    failure where the user has given the MTBF, and a tenth of one where it is a guess (one a day).

    Attributes:
        mtbf_seconds: MTBF that the user expects; None: a guess.
        failures: number of failures, older ones discounted.
        seconds: time in which they happened, discounted alike.
    """

    mtbf_seconds: float | None = None
    failures: float = 0.0
    seconds: float = 0.0

    def passed(self, seconds: float) -> None:
        """Count time of training."""
        require_seconds("seconds", seconds)
        self.seconds += seconds

    def failed(self) -> None:
        """Count a failure."""
        kept = 1 - 1 / _REMEMBERED_FAILURES
        self.failures, self.seconds = self.failures * kept + 1, self.seconds * kept

    @property
    def per_second(self) -> float:
        """The estimated rate, above 0."""
        known = self.mtbf_seconds is not None
        mtbf, weight = (self.mtbf_seconds, 1.0) if known else (_GUESSED_MTBF_SECONDS, _GUESS_WEIGHT)
        assert mtbf is not None
        return (self.failures + weight) / (self.seconds + weight * mtbf)


class Follower:
    """A value that follows a noisy target in steps.

    It moves where the target has been more than 25% above it, or below it, in two looks in a row; then to the target,
    by a factor of four at most. Targets that stay within 25% of each other move it in one direction only, and once it
    has got there no more.

    Attributes:
        value: the value; None before the first look.
    """

    def __init__(self, value: float | None = None) -> None:
        self.value = value
        self._above = self._looks = 0

    def follow(self, target: float) -> bool:
        """Look at the target. Returns whether the value has moved."""
        require_number("target", target, 0, math.inf, above=True)
        if self.value is None:
            self.value = target
            return True
        above = (target > self.value * _BAND) - (target < self.value / _BAND)
        self._looks = self._looks + 1 if above and above == self._above else abs(above)
        self._above = above
        if self._looks < _LOOKS:
            return False
        self._looks = 0
        self.value = min(self.value * _LARGEST_STEP, max(self.value / _LARGEST_STEP, target))
        return True


def checkpoint_interval(
    cost_seconds: float, failures_per_second: float, repeated_share: float, least_seconds: float
) -> float:
    """Best time from one checkpoint to the next, in seconds.

    Source: Young (1974), with the part of an interval that a failure costs: all of it where steps are trained again,
    the time of their redo where records between checkpoints are logged.

    Args:
        cost_seconds: training time that a checkpoint costs.
        failures_per_second: rate of failures.
        repeated_share: seconds that a lost second of training costs, above 0.
        least_seconds: interval below which checkpoints cost more than their budget.

    Returns:
        the interval, at most a hundred years, as every time here.
    """
    require_number("failures_per_second", failures_per_second, 0, 1e6, "per second", above=True)
    require_number("repeated_share", repeated_share, 0, 1, above=True)
    mttf_seconds = min(LONGEST_SECONDS, 1 / (failures_per_second * repeated_share))
    return min(LONGEST_SECONDS, max(least_seconds, young_interval(cost_seconds, mttf_seconds)))


@dataclass(frozen=True)
class LayoutSettings:
    """Settings that a generation is laid out by.

    Attributes:
        mode: redo mode.
        period: T, in steps.
        slots: D, records in flight.
    """

    mode: RedoMode
    period: int
    slots: int

    def __str__(self) -> str:
        return f"{self.mode}, T={self.period}, D={self.slots}"


@dataclass(frozen=True)
class Free:
    """Settings that the user has left to the tuner, and T and D after a change to lazy redo."""

    mode: bool
    period: bool
    slots: bool
    lazy_period: int
    lazy_slots: int


@dataclass(frozen=True)
class Measured:
    """Means over the steps since the last look; of several ranks, the largest.

    Attributes:
        step_seconds: duration of a step.
        stall_seconds: part of it in which protection kept the rank from training, waits for redo left out.
        anchor_seconds: part of the stall in which anchors were copied.
        wait_seconds: part of the step in which the rank waited for the agent's redo.
        redo_seconds: redo of one record at a restore.
        failures_per_second: rate of failures.
    """

    step_seconds: float
    stall_seconds: float
    anchor_seconds: float
    wait_seconds: float
    redo_seconds: float
    failures_per_second: float

    @property
    def overhead(self) -> float:
        """Share of a step that protection takes, waits for redo included."""
        return (self.stall_seconds + self.wait_seconds) / self.step_seconds

    def __post_init__(self) -> None:
        require_seconds("step_seconds", self.step_seconds, zero=False)
        for name in ("stall_seconds", "anchor_seconds", "wait_seconds", "redo_seconds"):
            require_seconds(name, getattr(self, name))
        require_number("failures_per_second", self.failures_per_second, 0, 1e6, "per second")


@dataclass(frozen=True)
class Change:
    """A decision: the setting that changes, the settings after it, and the reason in words."""

    name: str
    settings: LayoutSettings
    reason: str


def period_cost(now: LayoutSettings, measured: Measured, period: int) -> float:
    """Share of training time that depends on T: copies of anchors, and redo of half a window at each failure.

    Source: docs/design.md, "A step, as time passes": a step copies a T-th of the state, a restore redoes (T + 1)/2
    records.
    """
    copies = measured.anchor_seconds * now.period / period / measured.step_seconds
    return copies + measured.failures_per_second * (period + 1) / 2 * measured.redo_seconds


def best_period(now: LayoutSettings, measured: Measured, budget: float, below: float = math.inf) -> int:
    """T with the least cost, among those within the overhead budget; one that is shorter has to be well within.

    Where none is, the longest if that spares half of the budget or more, else the present one.

    Args:
        now: settings under which `measured` was measured.
        measured: measurements.
        budget: share of a step's time that protection may cost.
        below: T, in steps, that a T other than the present one has to be below.
    """
    others = measured.stall_seconds - measured.anchor_seconds

    def stall_share(period: int) -> float:
        return (others + measured.anchor_seconds * now.period / period) / measured.step_seconds

    periods = sorted({now.period, *(one for one in _PERIODS if one < below)})
    within = [one for one in periods if stall_share(one) <= (budget / _BAND if one < now.period else budget)]
    if within:
        return min(within, key=lambda period: period_cost(now, measured, period))
    longest = periods[-1]
    return longest if stall_share(now.period) - stall_share(longest) >= budget / 2 else now.period


class LayoutTuner:
    """Decides on redo mode, T and D.

    - Eager redo for which training waits longer than the budget gets more slots, then becomes lazy, once.
    - T of lazy redo becomes the one with the least cost, in steps by a factor of four at most.

    Args:
        free: what may be changed.
        budget: share of a step's time that protection may cost.
    """

    def __init__(self, free: Free, budget: float) -> None:
        require_number("overhead_budget", budget, 0, 1, above=True)
        self._free = free
        self._budget = budget
        self._rest = 0
        self._wanted: tuple[str, bool] | None = None
        #: Looks in a row with a stall beyond the budget, and whether that was said.
        self._over, self._said = 0, False
        #: The shortest T for which there was no room.
        self._no_room_from = math.inf

    def decide(self, now: LayoutSettings, measured: Measured) -> Change | None:
        """Look at what was measured under the settings `now`; None: they stay."""
        if self._rest:
            self._rest -= 1
            return None
        change = self._without_waits(now, measured) or self._other_period(now, measured)
        wanted = None if change is None else (change.name, change.settings.period > now.period)
        if wanted is None or wanted != self._wanted:
            self._wanted = wanted
            return None
        self._wanted, self._rest, self._over = None, _REST_LOOKS, 0
        return change

    def cannot_help(self, measured: Measured) -> bool:
        """Whether the stall has been beyond the budget for long, and nothing was changed; true once.

        To be asked at each look at which nothing changes.
        """
        if self._wanted is not None:
            return False  # a change is considered
        self._over = self._over + 1 if measured.overhead > self._budget * _BAND else 0
        if self._said or self._over < _OVER_LOOKS:
            return False
        self._said = True
        return True

    def look_away(self) -> None:
        """Leave a look out, whose figures are not like those of other looks: two in a row are counted anew."""
        self._wanted = None

    def no_room(self, now: LayoutSettings, refused: LayoutSettings) -> None:
        """Rest: there was no memory for the last change; a T as long as the refused one is not asked for again."""
        self._rest = _NO_ROOM_LOOKS
        if (now.mode, now.slots) == (refused.mode, refused.slots) and refused.period > now.period:
            self._no_room_from = min(self._no_room_from, refused.period)

    def _without_waits(self, now: LayoutSettings, measured: Measured) -> Change | None:
        share = measured.wait_seconds / measured.step_seconds
        if now.mode != "eager" or share <= self._budget:
            return None
        waits = f"training waits {share:.1%} of its time for the agent's redo, the budget is {self._budget:.1%}"
        if self._free.slots and now.slots < MOST_SLOTS:
            return Change("slots", replace(now, slots=MOST_SLOTS), waits)
        if self._free.mode:
            lazy = LayoutSettings("lazy", self._free.lazy_period, self._free.lazy_slots)
            return Change("redo", lazy, waits)
        return None

    def _other_period(self, now: LayoutSettings, measured: Measured) -> Change | None:
        if now.mode != "lazy" or not self._free.period:
            return None
        best = best_period(now, measured, self._budget, self._no_room_from)
        best = int(min(now.period * _LARGEST_STEP, max(now.period / _LARGEST_STEP, best)))
        cost, less = (period_cost(now, measured, period) for period in (now.period, best))
        over = measured.stall_seconds / measured.step_seconds - self._budget
        gain = cost - less
        least = _LEAST_GAIN_OF_MEMORY if best > now.period and over <= 0 else _LEAST_GAIN
        if best == now.period or gain <= max(least, _LEAST_RELATIVE_GAIN * cost):
            return None
        copies = measured.anchor_seconds / measured.step_seconds
        reason = f"copies of anchors take {copies:.2%} of training time, redo after failures {cost - copies:.2%}"
        if over > 0:
            reason += f"; the stall of {over + self._budget:.1%} is over the budget of {self._budget:.1%}"
        return Change("anchor_period_steps", replace(now, period=best), reason)
