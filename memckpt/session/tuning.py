"""Tuning of a running job: what is measured, and how all ranks begin with other settings after one record.

Looks are collective, at the end of the same record on every rank, twenty records and half a minute apart or more. Rank
0 decides by the rules in :mod:`memckpt.planning.tuning`. A change is first given its memory by every agent, beside what
is held: where one has no room, nothing changes anywhere. The ranks let go of it again, so that no rank owns regions of
a generation that another one may never write; its agent keeps it until they ask for it after the same record.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from memckpt.errors import AgentGoneError, MemckptError
from memckpt.journal.events import Decision, Value
from memckpt.planning.restoring import record_redo_seconds
from memckpt.planning.tuning import Change, FailureRate, Free, LayoutSettings, LayoutTuner, Measured
from memckpt.protocol.trainer import Observed, Unprepare
from memckpt.session.generation_switch import GenerationSwitch
from memckpt.session.local_training import LocalTraining
from memckpt.session.mode import ModeChoice
from memckpt.session.protection import Protection
from memckpt.session.rank_state import OWN, RankState
from memckpt.session.room import tuned_shortage
from memckpt.session.staging import Staging
from memckpt.state.spec import StateSpec
from memckpt.user_messages import show_by_default

_log = logging.getLogger("memckpt")
#: Logger of decisions, shown unless the application configures logging otherwise.
_decisions = logging.getLogger("memckpt.tuning")
_NAME = OWN + "tuning"
#: Records before the first look, which are slower than others, and least records and seconds between two looks.
FIRST_RECORDS, LEAST_RECORDS, LOOK_SECONDS = 16, 20, 30.0


@dataclass(frozen=True)
class _Look:
    """What one rank has measured: seconds for each step, under which settings, and whether protection is complete."""

    step: float
    stall: float
    anchors: float
    wait: float
    settings: LayoutSettings
    ready: bool


class Tuning:
    """The tuner's part in a session. All methods are no-ops with ``tuning="off"``.

    Args:
        training: training that is measured.
        mode: choice of the redo mode, which takes the settings.
        switch: begins generations with them.
        protection: says whether it is complete; nothing changes while it is not.
        staging: has the layout of what is held.
        rank_state: carries the settings and the failures of the run.
    """

    def __init__(
        self,
        training: LocalTraining,
        mode: ModeChoice,
        switch: GenerationSwitch,
        protection: Protection,
        staging: Staging,
        rank_state: RankState,
    ) -> None:
        config = training.config
        self._training, self._ranks, self._clock = training, training.ranks, training.clock
        self._mode, self._switch, self._protection, self._staging = mode, switch, protection, staging
        self._link = protection.link
        self._on = config.tuning == "auto"
        self._rate = FailureRate(config.mtbf_seconds)
        # What peers hold depends on T and D: other ones would leave them with nothing until all is sent anew. With
        # compression T follows from the bytes of records.
        unreplicated = config.peers is None
        self._free = Free(
            mode=config.redo == "auto",
            period=config.anchor_period_steps is None and unreplicated and config.compression is None,
            slots=config.slots is None and unreplicated,
            lazy_period=config.anchor_period("lazy"),
            lazy_slots=config.records_in_flight,
        )
        self._layout = LayoutTuner(self._free, config.overhead_budget)
        tensors = training.live.tensors().values()
        self._redo_seconds = record_redo_seconds(
            sum(one.numel() for one in tensors), len(tensors), training.device.type == "cpu"
        )
        #: Record of the next look; None before the first record of the attempt.
        self._next: int | None = None
        self._settled = self._broken = False
        self._counted_at = time.monotonic()
        self._begin_window(0)
        if self._on:
            rank_state.provide(_NAME, self._capture, parts=lambda value: {})

    # Across attempts

    def _capture(self) -> dict[str, Any]:
        settings = self._mode.tuned
        found = None if settings is None else [settings.mode, settings.period, settings.slots]
        seconds = self._rate.seconds + time.monotonic() - self._counted_at
        return {"settings": found, "failures": self._rate.failures, "seconds": seconds, "redo": self._redo_seconds}

    def adopt(self, provided: Mapping[str, Any] | None, in_memory: bool) -> None:
        """Go on with what the run has found before, as far as the user leaves it to the tuner; collective.

        Args:
            provided: what the resumed rank state holds; None where nothing is resumed.
            in_memory: whether the resumed state is held, so that these settings have their memory already.
        """
        if not self._on:
            return
        held = self._ranks.gather(None if provided is None else provided.get(_NAME))[0]
        if held is None:
            return
        self._rate.failures, self._rate.seconds = held["failures"], held["seconds"]
        self._rate.failed()
        self._redo_seconds = held["redo"]
        if held["settings"] is None:
            return
        mode, period, slots = held["settings"]
        now = self._mode.settings_when_redone
        later = self._free.mode and (now.mode, mode) == ("eager", "lazy")
        same = later or mode == now.mode
        settings = LayoutSettings(
            mode if later else now.mode,
            period if same and self._free.period else (self._free.lazy_period if later else now.period),
            slots if self._free.slots else now.slots,
        )
        if settings == now:
            return
        problem = "" if in_memory else self._first_problem(self._shortage(self._spec(settings), None))
        if not problem:
            self._mode.tune(settings, "as tuned before")
        elif self._ranks.rank == 0:
            show_by_default(_decisions)
            _decisions.info("memckpt: settings are %s, and not %s as before: %s", now, settings, problem)

    def redid(self, record_seconds: float | None) -> None:
        """Take the duration of a record's redo at a restore; None where nothing was redone."""
        if record_seconds:
            self._redo_seconds = record_seconds

    # While training runs

    def end_record(self, record: int) -> None:
        """Look, if it is time, at the end of a record; collective then."""
        if not self._on:
            return
        if self._next is None:
            self._begin_window(record)
            self._next = record + FIRST_RECORDS
        if record >= self._next:
            self._look(record)

    def _begin_window(self, record: int) -> None:
        clock = self._clock
        self._window = record, time.perf_counter(), clock.total, clock.slot_wait + clock.snapshot, clock.anchors
        self._waited_before = self._link.waited_for_redo

    def _measure(self, record: int) -> _Look:
        clock = self._clock
        since, began, total, besides, anchors = self._window
        count = record - since
        waits = clock.slot_wait + clock.snapshot
        return _Look(
            step=(time.perf_counter() - began) / count,
            stall=(clock.total - total - (waits - besides)) / count,
            anchors=(clock.anchors - anchors) / count,
            wait=(self._link.waited_for_redo - self._waited_before) / count,
            settings=self._mode.settings,
            ready=self._protection.complete,
        )

    def _look(self, record: int) -> None:
        looks = self._ranks.gather(self._measure(record))
        now = time.monotonic()
        self._rate.passed(now - self._counted_at)
        self._counted_at = now
        self._begin_window(record)
        self._next = record + max(LEAST_RECORDS, math.ceil(LOOK_SECONDS / looks[0].step))
        settled, self._settled = self._settled, True
        first = self._ranks.rank == 0
        change = self._ranks.gather(self._decide(looks, settled) if first else None)[0]
        if first and settled and self._link.up:
            self._tell(Observed(self._rate.per_second, self._redo_seconds))
        if change is not None:
            self._carry_out(record + 1, change)

    def _decide(self, looks: Sequence[_Look], settled: bool) -> Change | None:
        """Decide on rank 0; the first steps are not like the others."""
        alike = all(one.ready and one.settings == looks[0].settings for one in looks)
        if self._broken or not settled or not alike:
            self._layout.look_away()
            return None
        try:
            measured = Measured(
                step_seconds=max(one.step for one in looks),
                stall_seconds=max(0.0, *(one.stall for one in looks)),
                anchor_seconds=max(one.anchors for one in looks),
                wait_seconds=max(one.wait for one in looks),
                redo_seconds=self._redo_seconds,
                failures_per_second=self._rate.per_second,
            )
            change = self._layout.decide(looks[0].settings, measured)
            if change is None and self._layout.cannot_help(measured):
                _log.warning(
                    "memckpt: protection takes %.1f%% of a step of %.3g s, the budget (overhead_budget) is %.1f%%, and "
                    "no setting that is left to the tuner makes it less",
                    *(100 * measured.overhead, measured.step_seconds, 100 * self._training.config.overhead_budget),
                )
            return change
        except Exception as error:  # said: the user's training goes on, and other ranks wait for this one's answer
            self._broken = True
            _log.warning("memckpt: settings stay as they are from now on; please report it", exc_info=error)
            return None

    def _carry_out(self, record: int, change: Change) -> None:
        """Begin a generation with other settings after `record`, on all ranks or on none."""
        before = self._mode.settings
        problem = self._first_problem(self._prepare(record, change))
        if problem:
            self._tell(Unprepare(record))
            self._layout.no_room(before, change.settings)
            if self._ranks.rank == 0:
                show_by_default(_decisions)
                _decisions.info("memckpt: settings stay %s, %s does not fit: %s", before, change.settings, problem)
            return
        self._mode.tune(change.settings, change.reason)
        self._switch.tune(record)
        if self._ranks.rank == 0:
            old, new = _values(change.name, before), _values(change.name, change.settings)
            show_by_default(_decisions)
            _decisions.info("memckpt: %s: %s -> %s from step %d on: %s", change.name, old, new, record, change.reason)
            self._link.tell_journal(Decision(change.name, old, new, change.reason))

    def _first_problem(self, own: str) -> str:
        """The first rank's problem that has one; empty if none has; collective."""
        return next(filter(None, self._ranks.gather(own)), "")

    def _spec(self, settings: LayoutSettings) -> StateSpec:
        training = self._training
        return training.live.spec(self._mode.request(training.copier.asynchronous, settings))

    def _shortage(self, spec: StateSpec, held: StateSpec | None) -> str:
        return tuned_shortage(self._training.config, self._ranks, spec, held)

    def _prepare(self, record: int, change: Change) -> str:
        """Have the agent reserve the memory of a generation, and keep it for the generation that begins then.

        Returns:
            why that is not possible, in words; empty if it is.
        """
        try:
            writer = self._staging.writer
            if writer is None:
                return "this rank is not protected"
            spec = self._spec(change.settings)
            short = self._shortage(spec, writer.spec)
            if short:
                return short
            self._link.finish_sending()
            self._link.prepare(spec, record, reason=change.reason, whole=True, optional=True).close()
        except MemckptError as error:  # a lost agent is found at the next commit
            return str(error) or type(error).__name__
        except Exception as error:  # said: the user's training goes on, and other ranks wait for this one's answer
            _log.warning("memckpt: other settings could not be prepared; please report it", exc_info=error)
            return f"{type(error).__name__}: {error}"
        return ""

    def _tell(self, message: Observed | Unprepare) -> None:
        with contextlib.suppress(AgentGoneError):  # the next commit finds that, and says so
            self._link.finish_sending()
            self._link.send(message)


def _values(name: str, settings: LayoutSettings) -> Value:
    if name == "redo":
        return settings.mode
    return settings.slots if name == "slots" else settings.period
