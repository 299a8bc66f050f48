"""What a running job follows, and what it advises, given what it has measured. Pure; times are in seconds.

The interval of checkpoints follows its target. Redo mode, T and D take memory, so nothing changes them while training
runs: the adviser says what else would pay. Both act on two looks in a row only, so that noise changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
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
#: Looks in a row in which a target has to be beyond the band, or a setting has to be the best one.
_LOOKS = 2
#: Looks in a row with a stall beyond the budget, and without advice, after which that is said.
_OVER_LOOKS = 4
#: D that is advised where redo is late only now and then.
MOST_SLOTS = 6
#: Values of T, in steps.
_PERIODS = (4, 8, 16, 32, 64, 128, 256, 512)
#: Share of training time that another T has to gain, where the stall is within the budget.
_LEAST_GAIN = 0.005


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


@dataclass(frozen=True)
class Measured:
    """Means over the steps since the last look.

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
class Advice:
    """A setting that would pay: the line to paste, the layout that it makes, and the reason in words."""

    line: str
    layout: LayoutSettings
    reason: str


def period_cost(now: LayoutSettings, measured: Measured, period: int) -> float:
    """Share of training time that depends on T: copies of anchors, and redo of half a window at each failure.

    Source: docs/design.md, "A record's life": a step copies a T-th of the state, a restore redoes (T + 1)/2
    records.
    """
    copies = measured.anchor_seconds * now.period / period / measured.step_seconds
    return copies + measured.failures_per_second * (period + 1) / 2 * measured.redo_seconds


def stall_share(now: LayoutSettings, measured: Measured, period: int) -> float:
    """Share of a step in which protection would stall training with another T."""
    others = measured.stall_seconds - measured.anchor_seconds
    return (others + measured.anchor_seconds * now.period / period) / measured.step_seconds


def best_period(
    now: LayoutSettings,
    measured: Measured,
    budget: float,
    fits: Callable[[LayoutSettings], bool] = lambda layout: True,
) -> int:
    """T with the least cost, among those within the overhead budget; one that is shorter has to be well within.

    Where none is, the longest if that spares half of the budget or more, else the present one.

    Args:
        now: settings under which `measured` was measured.
        measured: measurements.
        budget: share of a step's time that protection may cost.
        fits: whether there is memory for a layout. A shorter T takes less than the present one.
    """

    def is_within(period: int) -> bool:
        return stall_share(now, measured, period) <= (budget / _BAND if period < now.period else budget)

    def first_that_fits(best_first: Iterable[int]) -> int:
        return next(one for one in best_first if one <= now.period or fits(replace(now, period=one)))

    periods = sorted({now.period, *_PERIODS}, reverse=True)
    if within := sorted(filter(is_within, periods), key=lambda period: period_cost(now, measured, period)):
        within.append(now.period)
        return first_that_fits(within)
    longest = first_that_fits(periods)
    spared = stall_share(now, measured, now.period) - stall_share(now, measured, longest)
    return longest if spared >= budget / 2 else now.period


class Adviser:
    """Says which other redo mode, T or D would pay.

    - Eager redo for which training waits longer than the budget: more slots, else lazy redo.
    - Lazy redo: the T of the least cost.

    Args:
        budget: share of a step's time that protection may cost.
        lazy: layout of lazy redo.
        fits: whether there is memory for a layout in place of the present one.
        advises_period: whether T is free: with compression it follows from the bytes of records.

    Attributes:
        advice: what would pay; None where nothing would.
    """

    def __init__(
        self, budget: float, lazy: LayoutSettings, fits: Callable[[LayoutSettings], bool], advises_period: bool = True
    ) -> None:
        require_number("overhead_budget", budget, 0, 1, above=True)
        self._budget, self._lazy, self._fits, self._advises_period = budget, lazy, fits, advises_period
        self.advice: Advice | None = None
        #: What the last look has found, and in how many looks in a row.
        self._line, self._looks = "", 0
        #: Looks in a row with a stall beyond the budget, and whether that was said.
        self._over, self._said = 0, False

    def look_at(self, now: LayoutSettings, measured: Measured) -> bool:
        """Look at what was measured under the settings `now`. Returns whether the advice has changed."""
        found = self._without_waits(now, measured) or self._other_period(now, measured)
        line = "" if found is None else found.line
        self._looks = self._looks + 1 if line == self._line else 1
        self._line = line
        if self._looks < _LOOKS or line == (self.advice.line if self.advice is not None else ""):
            return False
        self.advice = found
        return True

    def skip_look(self) -> None:
        """Leave a look out, whose figures are not like those of others: two in a row are counted anew."""
        self._line, self._looks = "", 0

    def cannot_help(self, measured: Measured) -> bool:
        """Whether the stall has been beyond the budget for long, and nothing is advised; true once."""
        if self._line or self.advice is not None:
            return False
        self._over = self._over + 1 if measured.overhead > self._budget * _BAND else 0
        if self._said or self._over < _OVER_LOOKS:
            return False
        self._said = True
        return True

    def _without_waits(self, now: LayoutSettings, measured: Measured) -> Advice | None:
        share = measured.wait_seconds / measured.step_seconds
        if now.mode != "eager" or share <= self._budget:
            return None
        waits = f"training waits {share:.1%} of its time for the agent's redo, the budget is {self._budget:.1%}"
        more = replace(now, slots=MOST_SLOTS)
        if now.slots < MOST_SLOTS and self._fits(more):
            return Advice(f"slots={MOST_SLOTS}", more, waits)
        return Advice('redo="lazy"', self._lazy, waits) if self._fits(self._lazy) else None

    def _other_period(self, now: LayoutSettings, measured: Measured) -> Advice | None:
        if now.mode != "lazy" or not self._advises_period:
            return None
        # Another T than the one advised before has to gain as much once more.
        before = now.period if self.advice is None else self.advice.layout.period
        best = best_period(now, measured, self._budget, self._fits)
        gain = period_cost(now, measured, before) - period_cost(now, measured, best)
        if gain <= _LEAST_GAIN and stall_share(now, measured, before) <= self._budget:
            best = before
        if best == now.period:
            return None
        copies = measured.anchor_seconds / measured.step_seconds
        redo = period_cost(now, measured, now.period) - copies
        reason = f"copies of anchors take {copies:.2%} of training time, redo after failures {redo:.2%}"
        stall = measured.stall_seconds / measured.step_seconds
        if stall > self._budget:
            reason += f"; the stall of {stall:.1%} is over the budget of {self._budget:.1%}"
        return Advice(f"anchor_period_steps={best}", replace(now, period=best), reason)
