"""Tuning of a running job: what is measured, what the interval of checkpoints follows, and what else would pay.

Each rank looks at its own figures, twenty records and half a minute apart or more. Nothing here is collective, and no
setting of memory changes. The first rank of a node tells its agent the advice; rank 0 also logs it.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Mapping
from typing import Any

from memckpt.config import StorageConfig
from memckpt.errors import AgentGoneError
from memckpt.journal.events import Advised
from memckpt.planning.restoring import record_redo_seconds
from memckpt.planning.tuning import Adviser, FailureRate, LayoutSettings, Measured
from memckpt.protocol.trainer import Observed
from memckpt.session.mode import ModeChoice, find_shortage, node_bytes
from memckpt.session.protection import Protection
from memckpt.session.rank_state import OWN, RankState
from memckpt.session.ranks import LocalTraining
from memckpt.session.staging import Staging
from memckpt.state.layout import Layout
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


class Tuning:
    """The tuner's part in a session. All methods are no-ops with ``tuning="off"``.

    Args:
        training: training that is measured.
        mode: choice of the redo mode, which has the settings.
        protection: says whether it is complete; a look at less is left out.
        staging: has the layout of what is held.
        rank_state: carries the failures of the run.
    """

    def __init__(
        self,
        training: LocalTraining,
        mode: ModeChoice,
        protection: Protection,
        staging: Staging,
        rank_state: RankState,
    ) -> None:
        config = training.config
        self._training, self._ranks, self._clock = training, training.ranks, training.clock
        self._mode, self._protection, self._staging = mode, protection, staging
        self._link = protection.link
        self._on = config.tuning == "auto"
        self._rate = FailureRate(config.mtbf_seconds)
        lazy = LayoutSettings("lazy", config.anchor_period("lazy"), config.records_in_flight)
        self._adviser = Adviser(config.overhead_budget, lazy, self._fits, advises_period=config.compression is None)
        tensors = training.live.tensors().values()
        self._redo_seconds = record_redo_seconds(
            sum(one.numel() for one in tensors), len(tensors), training.device.type == "cpu"
        )
        #: Record of the next look; None before the first record of the attempt.
        self._next: int | None = None
        self._settings = mode.settings
        self._settled = False
        self._counted_at = time.monotonic()
        self._begin_window(0)
        if self._on:
            rank_state.provide(_NAME, self._capture, parts=lambda value: {})

    # Across attempts

    def _capture(self) -> dict[str, Any]:
        seconds = self._rate.seconds + time.monotonic() - self._counted_at
        return {"failures": self._rate.failures, "seconds": seconds, "redo": self._redo_seconds}

    def resume_rate(self, provided: Mapping[str, Any] | None) -> None:
        """Go on with the failures of earlier attempts, and count one more.

        Args:
            provided: what the resumed rank state holds; None where nothing is resumed.
        """
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
        if not self._on or self._ranks.rank != self._ranks.local_ranks[0]:
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

    def _measure(self, record: int) -> Measured:
        clock = self._clock
        since, began, total, besides, anchors = self._window
        count = record - since
        waits = clock.slot_wait + clock.snapshot
        return Measured(
            step_seconds=(time.perf_counter() - began) / count,
            stall_seconds=max(0.0, (clock.total - total - (waits - besides)) / count),
            anchor_seconds=(clock.anchors - anchors) / count,
            wait_seconds=(self._link.waited_for_redo - self._waited_before) / count,
            redo_seconds=self._redo_seconds,
            failures_per_second=self._rate.per_second,
        )

    def _look(self, record: int) -> None:
        now = time.monotonic()
        self._rate.passed(now - self._counted_at)
        self._counted_at = now
        measured, before = self._measure(record), self._settings
        self._settings = self._mode.settings
        self._begin_window(record)
        self._next = record + max(LEAST_RECORDS, math.ceil(LOOK_SECONDS / measured.step_seconds))
        settled, self._settled = self._settled, True
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
        training = self._training
        return training.live.spec(self._mode.request(training.copier.asynchronous, settings))

    def _fits(self, settings: LayoutSettings) -> bool:
        """Whether this node has the memory for a layout, with what is held in its place now."""
        writer = self._staging.writer
        held = None if writer is None else writer.spec
        return not find_shortage(self._training.config, self._ranks, self._spec(settings), held)


def tell_when_log_pays(storage: StorageConfig | None, spec: StateSpec) -> None:
    """Log when ``storage.mode="log"`` would write no more than checkpoints alone do. Called on rank 0.

    Args:
        storage: settings of storage; None: nothing is written.
        spec: layout of the state.
    """
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
