"""Tuning of a running job: what is measured, what the interval of checkpoints follows, and what else would pay.

Each rank looks at its own figures, twenty records and half a minute apart or more. Nothing here is collective, and no
setting of memory changes. The first rank of a node tells its agent the advice; rank 0 also logs it.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from memckpt.capture.copier import CopyTimes
from memckpt.config import StorageConfig
from memckpt.errors import AgentGoneError
from memckpt.journal.events import Advised
from memckpt.protocol.trainer import Observed
from memckpt.session.compressed_averages import record_redo_seconds
from memckpt.session.mode import LayoutSettings, ModeChoice, find_shortage, node_bytes
from memckpt.session.protection import Protection
from memckpt.session.rank_state import OWN, RankState
from memckpt.session.ranks import LocalTraining
from memckpt.session.staging import Staging
from memckpt.state.layout import Layout
from memckpt.state.link_time import LinkTime
from memckpt.state.spec import StateSpec
from memckpt.storage.batch import not_loggable
from memckpt.user_messages import nbytes_text, show_by_default

_log = logging.getLogger("memckpt")
#: Logger of advice, shown unless the application configures logging otherwise.
_advice = logging.getLogger("memckpt.tuning")
_start = logging.getLogger("memckpt.start")
_NAME = OWN + "tuning"
#: Steps from this duration on are not counted on where a log is mentioned: with plain fp32 it pays from 20 s on.
_LONG_STEP_SECONDS = 5.0
#: Records before the first look, which are slower than others, and least records and seconds between two looks.
FIRST_RECORDS, LEAST_RECORDS, LOOK_SECONDS = 16, 20, 30.0
#: Records whose copies from an accelerator are timed, after the first look.
_TIMED_RECORDS = 8
#: MTBF of a job of which nothing is known, and the number of failures that this guess weighs as much as.
_GUESSED_MTBF_SECONDS, _GUESS_WEIGHT = 86400.0, 0.1
#: Number of failures that an estimate of their rate remembers.
_REMEMBERED_FAILURES = 8
#: Ratio to the budget from which on a stall counts as over it.
_BAND = 1.25
#: Looks in a row in which a setting has to be the best one.
_LOOKS = 2
#: Looks in a row with a stall beyond the budget, and without advice, after which that is said.
_OVER_LOOKS = 4
#: D that is advised where redo is late only now and then.
MOST_SLOTS = 6
#: Values of T, in steps.
_PERIODS = (4, 8, 16, 32, 64, 128, 256, 512)
#: Share of training time that another T has to gain, where the stall is within the budget.
_LEAST_GAIN = 0.005


class Tuning:
    """The tuner's part in a session. All methods are no-ops with ``tuning="off"``."""

    def __init__(
        self,
        training: LocalTraining,
        mode: ModeChoice,
        protection: Protection,
        staging: Staging,
        rank_state: RankState,
    ) -> None:
        config = training.config
        self._training, self._ranks, self._clock = training, training.ranks, training.recorder.clock
        self._mode, self._protection, self._staging = mode, protection, staging
        self._link = protection.link
        self._on = config.tuning == "auto"
        self._rate = FailureRate(config.mtbf_seconds)
        advises_period = config.compression is None
        self._adviser = Adviser(config.overhead_budget, mode.lazy_settings, self._fits, advises_period)
        tensors = training.live.tensors().values()
        self._redo_seconds = record_redo_seconds(
            sum(one.numel() for one in tensors), len(tensors), training.device.type == "cpu"
        )
        #: Record of the next look; None before the first record of the attempt.
        self._next: int | None = None
        self._settings = mode.settings
        self._settled = False
        #: Times of copies, while they are taken; the record after which they are; and whether they are told.
        self._times: CopyTimes | None = None
        self._timed_until = 0
        self._has_told_times = False
        self._counted_at = time.monotonic()
        self._begin_window(0)
        if self._on:
            rank_state.provide(_NAME, self._capture, parts=lambda value: {})

    # Across attempts

    def _capture(self) -> dict[str, Any]:
        seconds = self._rate.seconds + time.monotonic() - self._counted_at
        return {"failures": self._rate.failures, "seconds": seconds, "redo": self._redo_seconds}

    def resume_rate(self, provided: Mapping[str, Any] | None) -> None:
        """Go on with the failures of earlier attempts, and count one more."""
        held = None if provided is None else provided.get(_NAME)
        if self._on and held is not None:
            self._rate.failures, self._rate.seconds = held["failures"], held["seconds"]
            self._redo_seconds = held["redo"]
            self._rate.failed()

    def set_redo_seconds(self, record_seconds: float | None) -> None:
        """Take the duration of a record's redo at a restore; None where nothing was redone."""
        if record_seconds:
            self._redo_seconds = record_seconds

    # While training runs

    def end_record(self, record: int) -> None:
        """Look, if it is time, at the end of a record."""
        if not self._on or not self._ranks.leads:
            return
        try:
            if self._next is None:
                self._begin_window(record)
                self._next = record + FIRST_RECORDS
            if record == self._timed_until:
                self._training.copier.time_copies(False)
            if record >= self._next:
                self._look_at_figures(record)
        except Exception:  # said: the user's training goes on without advice
            self._on = False
            _log.warning("memckpt: advice on settings ends: a look at the figures failed", exc_info=True)

    def _begin_window(self, record: int) -> None:
        clock = self._clock
        self._window = record, time.perf_counter(), clock.total, clock.slot_wait + clock.state_copy, clock.anchors
        self._waited_before = self._link.waited_for_redo

    def _measure(self, record: int) -> Measured:
        clock = self._clock
        since, began, total, besides, anchors = self._window
        count = record - since
        waits = clock.slot_wait + clock.state_copy
        return Measured(
            step_seconds=(time.perf_counter() - began) / count,
            stall_seconds=max(0.0, (clock.total - total - (waits - besides)) / count),
            anchor_seconds=(clock.anchors - anchors) / count,
            wait_seconds=(self._link.waited_for_redo - self._waited_before) / count,
            redo_seconds=self._redo_seconds,
            failures_per_second=self._rate.per_second,
        )

    def _look_at_figures(self, record: int) -> None:
        now = time.monotonic()
        self._rate.passed(now - self._counted_at)
        self._counted_at = now
        measured, before = self._measure(record), self._settings
        self._settings = self._mode.settings
        self._begin_window(record)
        self._next = record + max(LEAST_RECORDS, math.ceil(LOOK_SECONDS / measured.step_seconds))
        settled, self._settled = self._settled, True
        if not self._has_told_times:
            self._look_at_copies(record, measured.step_seconds)
        if not settled:  # the first steps are not like the others
            return
        if self._ranks.rank == 0 and self._link.up:
            with contextlib.suppress(AgentGoneError):  # the next commit finds that, and says so
                self._link.finish_sending()
                self._link.send(Observed(self._rate.per_second, self._redo_seconds))
        if not self._protection.complete or self._settings != before:
            self._adviser.skip_look()
        elif self._adviser.look_at(self._settings, measured):
            self._give_advice()
        elif self._ranks.rank == 0 and self._adviser.cannot_help(measured):
            _log.warning(
                "memckpt: protection takes %.1f%% of a step of %.3g s, the budget (overhead_budget) is %.1f%%, and no "
                "other redo mode, anchor_period_steps or slots makes it less",
                *(100 * measured.overhead, measured.step_seconds, 100 * self._training.config.overhead_budget),
            )

    def _look_at_copies(self, record: int, step_seconds: float) -> None:
        """Have the copies of some records timed; at the next look say what share of them hides behind compute."""
        writer, times = self._staging.writer, self._times
        if times is None or writer is None or not times.copies:
            self._times, self._timed_until = self._training.copier.time_copies(), record + _TIMED_RECORDS
            return
        self._has_told_times = True
        layout, copies = writer.layout, times.copy_seconds / _TIMED_RECORDS
        anchors = copies * layout.anchor_bytes / (layout.anchor_bytes + layout.gradient_bytes)
        waited = min(copies, times.wait_seconds / _TIMED_RECORDS)
        link = LinkTime(copies - anchors, anchors, max(step_seconds - waited, step_seconds / 1000), writer.spec.period)
        halves, ranks = torch.float32 in writer.grad_dtypes, len(self._ranks.local_ranks)
        if self._ranks.rank == 0:
            _start.info("memckpt: %s", link.describe(times.nbytes / _TIMED_RECORDS, waited, halves, ranks))

    def _give_advice(self) -> None:
        """Say what would pay, or that what was advised would not any more."""
        advice = self._adviser.advice
        line, reason = "", "no other setting would pay any more"
        if advice is not None:
            more = node_bytes(self._spec(advice.layout), self._ranks) - node_bytes(self._spec(), self._ranks)
            memory = f"{nbytes_text(abs(more))} {'less' if more < 0 else 'more'} memory on each node"
            line, reason = advice.line, f"{advice.reason}; it takes {memory}"
        if self._ranks.rank == 0:
            show_by_default(_advice)
            _advice.info("memckpt: %s", f"{line} would pay from the next start on: {reason}" if line else reason)
        self._link.finish_sending()
        self._link.tell_journal(Advised(line, reason))

    def _spec(self, settings: LayoutSettings | None = None) -> StateSpec:
        training, writer = self._training, self._staging.writer
        request = self._mode.request(training.copier.asynchronous, settings)
        if writer is None or writer.spec.mode != request.mode:
            return training.live.spec(request)
        return request.lay_out(writer.spec)  # on an H100 a look at 292 tensors took 0.25 s

    def _fits(self, settings: LayoutSettings) -> bool:
        """Whether this node has the memory for a layout, with what is held in its place now."""
        writer = self._staging.writer
        held = None if writer is None else writer.spec
        return not find_shortage(self._training.config, self._ranks, self._spec(settings), held)


def tell_when_log_pays(storage: StorageConfig | None, spec: StateSpec) -> None:
    """Log when ``storage.mode="log"`` would write no more than checkpoints alone do. Called on rank 0."""
    if storage is None or storage.mode == "log" or not_loggable(spec):
        return
    layout = Layout(spec)
    share = layout.logged_bytes / max(layout.checkpoint_bytes, 1)
    if storage.every_steps is not None:
        condition = "" if share * storage.every_steps <= 1 else None
    else:
        seconds = share * storage.min_seconds
        condition = f", where steps take {seconds:.2g} s or longer" if seconds < _LONG_STEP_SECONDS else None
    if condition is not None:
        _start.info(
            'memckpt: storage.mode="log" would have each step in storage, and write no more than checkpoints do%s: a '
            "record is %.1f%% of a checkpoint",
            condition,
            100 * share,
        )


# Rules: pure, and about one rank's own figures. Advice has to be the best in two looks in a row.


@dataclass
class FailureRate:
    """Estimate of a job's rate of failures from those that it has had; older ones are discounted, the last eight count.

    The mean of a Gamma distribution. Before the first failure it is the expected rate, which weighs as much as one
    failure where the user has given the MTBF. It weighs a tenth of one where it is a guess (one a day).
    """

    mtbf_seconds: float | None = None
    failures: float = 0.0
    seconds: float = 0.0

    def passed(self, seconds: float) -> None:
        """Count time of training."""
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


@dataclass(frozen=True)
class Measured:
    """Means over the steps since the last look.

    Attributes:
        stall_seconds: part of it in which protection kept the rank from training, waits for redo left out.
        anchor_seconds: part of the stall in which anchors were copied.
        wait_seconds: part of the step in which the rank waited for the agent's redo.
        redo_seconds: redo of one record at a restore.
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


@dataclass(frozen=True)
class Advice:
    """A setting that would pay: the line to paste, the layout that it makes, and the reason in words."""

    line: str
    layout: LayoutSettings
    reason: str


def period_cost(now: LayoutSettings, measured: Measured, period: int) -> float:
    """Share of training time that depends on T: copies of anchors, and redo of (T + 1)/2 records at a failure."""
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

    Where none is, the longest if that spares half of the budget or more, else the present one. Memory has to be there.
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
    - Lazy redo: the T of the least cost, unless compression fixes T (`advises_period`).
    """

    def __init__(
        self, budget: float, lazy: LayoutSettings, fits: Callable[[LayoutSettings], bool], advises_period: bool = True
    ) -> None:
        self._budget, self._lazy, self._fits, self._advises_period = budget, lazy, fits, advises_period
        self.advice: Advice | None = None
        #: What the last look has found, and in how many looks in a row.
        self._line, self._looks = "", 0
        #: Looks in a row that other advice takes: twice as many after each change, so that noise comes to rest.
        self._needed = _LOOKS
        #: Looks in a row with a stall beyond the budget, and whether that was said.
        self._over, self._said = 0, False

    def look_at(self, now: LayoutSettings, measured: Measured) -> bool:
        """Look at what was measured under the settings `now`. Returns whether the advice has changed."""
        found = self._without_waits(now, measured) or self._other_period(now, measured)
        line = "" if found is None else found.line
        self._looks = self._looks + 1 if line == self._line else 1
        self._line = line
        if self._looks < self._needed or line == (self.advice.line if self.advice is not None else ""):
            return False
        self.advice = found
        self._needed *= 2
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
