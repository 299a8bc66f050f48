"""Protection of a training's records across the loss and the return of the agent: no error of it ends a training."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from memckpt.capture.recorder import is_of_signal
from memckpt.capture.slot_writer import SlotWriter
from memckpt.errors import AgentGoneError, MemckptError, MemoryBudgetError
from memckpt.journal.events import GapEnded
from memckpt.protocol.storing import Logged, Saved, SaveFailed
from memckpt.protocol.trainer import Alarm, Begin, Cleared, Commit, Drift, Gap, Protected, Void
from memckpt.session.generation_switch import GenerationSwitch
from memckpt.session.gradient_tap import GradientTap
from memckpt.session.link import AgentLink
from memckpt.session.peers import Peers
from memckpt.session.ranks import LocalTraining
from memckpt.session.staging import Changes, RestorePoint, Staging

_log = logging.getLogger("memckpt")
#: Lines about the start, which are shown where the application configures no logging.
_start_log = logging.getLogger("memckpt.start")
#: Number of consecutive records with an exception in our hooks after which protection pauses.
_MOST_BROKEN = 3
#: Records of a generation after which all ranks have got past its begin.
SETTLED_RECORDS = 8


class Protection:
    """Delivers each record to an agent, and answers errors of that: they never reach the user's training.

    Without an agent, or after an error, training is *unprotected*: no record is staged, the gap is logged and counted,
    and each commit asks the link whether to try again. The next generation ends the gap.

    Attributes:
        unprotected_since: last record before a gap; None while records are protected.
        last_held: newest step of this attempt that a resume can begin behind: with snapshots that is not each of them.
        stored_step: newest step of which this node's part is in storage, in this attempt; None before the first.
        stored_at: when that was, or when this attempt began, by the monotonic clock.
    """

    def __init__(
        self,
        training: LocalTraining,
        link: AgentLink,
        staging: Staging,
        switch: GenerationSwitch,
        peers: Peers,
        changes: Changes,
        tap: GradientTap,
    ) -> None:
        self._training = training
        self._recorder = training.recorder
        self.link = link
        self._staging = staging
        self._switch = switch
        self._peers = peers
        self._changes = changes
        self._tap = tap
        self._told: set[str] = set()
        #: The framework's step number of a record, less the record's; the difference stays while training runs.
        self._steps_ahead = 0
        self._broken_records = 0
        self.unprotected_since: int | None = None
        self.last_held: RestorePoint | None = None
        self.stored_step: int | None = None
        self.stored_at = time.monotonic()
        self.stored_bytes = 0
        self.storing_failed = False
        #: Whether the agent has said that it does not hold what comes, until the state is written anew.
        self._gap = False
        #: Whether a generation of this attempt has been complete.
        self._has_held = False
        self.drift = DriftReports(exact=training.device.type == "cpu")

    @property
    def complete(self) -> bool:
        """Whether records are protected: by a settled generation, and by all peers that should have them."""
        if self.unprotected_since is not None or not self.link.up or not self._switch.is_open:
            return False
        settled = self._recorder.record - self._switch.began >= SETTLED_RECORDS
        return settled and (not self._peers.active or self.link.connection.whole)

    # Records

    def end_record(self, point: RestorePoint) -> None:
        """Deliver a record to the agent that there is, or a new one, and go on to the next record."""
        self._steps_ahead = point.step - point.record
        try:
            self._changes.look_at_commit()
            self.listen()
            if self.link.up:
                self._try_record(point)
            else:
                self._try_again(point)
        except AgentGoneError as error:
            self.lose_agent(point, str(error))
        except MemckptError as error:
            self._lose(point.record, str(error))
        except BaseException as error:  # the user's training goes on; behind an interrupt, too, in a notebook
            self._stumble(point.record, error)
        self.begin_next_unless_begun(point.record)

    def resume(self, writer: SlotWriter, record: int) -> None:
        """Go on behind a restored record, in its generation where that is possible."""
        try:
            self._switch.resume(writer, record, anew=self._peers.active)
        except MemoryBudgetError as error:
            # The dead attempt had written the start of the generation, and its slots do not fit.
            self._lose(record, str(error))
            self._recorder.begin_record(None, record + 1)
        except MemckptError:
            raise
        except BaseException as error:  # an interrupt, too, which leaves the next record's anchors half staged
            self._stumble(record, error)
            self.begin_next_unless_begun(record)

    def lose_agent(self, point: RestorePoint, reason: str) -> None:
        """Close the connection, and try a new agent if that is due."""
        self._steps_ahead = point.step - point.record
        self._lose(point.record, reason)
        self._try_again(point)
        self.begin_next_unless_begun(point.record)

    def _try_record(self, point: RestorePoint) -> None:
        self._broken_records = self._broken_records + 1 if self._recorder.broken else 0
        if self._broken_records == _MOST_BROKEN:
            self._broken_records = 0
            self.link.reconnection.note_stumble()
            raise MemckptError(self._recorder.broken)
        self._stage_and_commit(point)

    def _stage_and_commit(self, point: RestorePoint) -> None:
        """Stage what the record lacks, seal it, tell the agent; or write the whole state where a generation is due."""
        record, staging, switch = point.record, self._staging, self._switch
        switch.make_due_if_ranks_differ(record)
        if not switch.is_due(record):
            staging.stage_by_value(record)
        problem = switch.find_problem()
        if problem is not None:
            switch.order_generation(record, problem)  # ranks that share slots are given a later record, the same one
        if switch.is_due(record):  # asked again: the order may have made it so
            # The state of this record is written by value: the agent needs no record before it any more.
            switch.write_generation(point)
            self.last_held = point
            switch.enter_record(record + 1)
            self.end_gap(point)
        elif staging.ready and (problem is None or staging.commits_uncaptured(record)):  # uncaptured: only rank state
            # Nothing changes the slot behind the seal. Once its copies have ended the stamp is set, and the agent told.
            self._send_commit(staging.seal(point))
            if not staging.commits_uncaptured(record):
                self.last_held = point
            self._obey_copy_order(point)
            switch.warn_of_state_left_out()
            switch.enter_record(record + 1)
        else:
            self.link.send(Void(record, problem or self._recorder.problem or "no generation to write to"))

    def _send_commit(self, finish: Callable[[], Commit]) -> None:
        if not self._training.copier.asynchronous:
            self.link.send(finish())
            return
        self.link.send_later(finish)
        if not self._tap.current.holds_reductions_back and self._training.ranks.world_size > 1:
            # A reduction would imply to other ranks that this rank has committed.
            self.link.finish_sending()

    def _obey_copy_order(self, point: RestorePoint) -> None:
        """Copy the state for a checkpoint, if the agent has ordered one."""
        order = self.link.take_order(point.record)
        if order is not None:
            finish = self._staging.copy_rank_part(order, point)
            if self._training.copier.asynchronous:
                self.link.send_later(finish, caller_waits=False)
            else:
                self.link.send(finish())
        elif (coming := self.link.order) is not None:
            self._staging.expect_copy(coming)

    def end_gap(self, point: RestorePoint) -> None:
        """Note that the whole state is held after `point`: records behind it are protected."""
        if self.unprotected_since is not None:
            gap = point.record - self.unprotected_since
            what = "step was" if gap == 1 else "steps were"
            _log.warning("memckpt: protected again from step %d on; %d %s not", point.step, gap, what)
            self.unprotected_since = None
            if self._training.ranks.leads:
                self.link.tell_journal(GapEnded(point.step, gap))

    def begin_next_unless_begun(self, record: int) -> None:
        """Begin the next record, with nothing staged, unless it has begun already."""
        if self._recorder.record == record:
            self._recorder.begin_record(None, record + 1)

    # The agent: notices, loss, return

    def listen(self) -> None:
        """Handle the agent's notices, without waiting. Raises AgentGoneError if it is gone."""
        for notice in self.link.notices():
            match notice:
                case Begin():
                    self._switch.obey(notice)
                case Alarm():
                    self._gap = True
                    _log.error("memckpt: %s", notice.reason)
                    self._switch.lose_replica(notice.reason)
                case Drift():
                    if self.drift.is_finding(notice):
                        self._switch.distrust(notice)
                case Cleared():
                    self._switch.handle_cleared(notice)
                case Gap():
                    self._gap = True
                    _log.warning("memckpt: not protected until the state is written anew: %s", notice.reason)
                case Saved() | Logged():
                    self.note_stored(notice)
                case SaveFailed():
                    self.storing_failed = True
                    _log.warning("memckpt: step %d did not get to storage: %s", notice.step, notice.reason)
                case Protected():
                    self._gap = False
                    if not self._has_held and self._training.ranks.leads:
                        _start_log.info("memckpt: protected from step %d on", notice.record + self._steps_ahead)
                    self._has_held = True
                    _log.debug("memckpt: generation %d is complete", notice.generation)

    def stored_metrics(self) -> dict[str, float]:
        """Figures of storage, as :meth:`Session.metrics` has them."""
        return {
            "stored_step": float(self.stored_step or 0),
            "stored_age_s": time.monotonic() - self.stored_at,
            "stored_bytes": float(self.stored_bytes),
        }

    def note_stored(self, notice: Saved | Logged) -> None:
        """Note what the agent has written to storage."""
        self.stored_step = max(notice.step, self.stored_step or 0)
        self.stored_at = time.monotonic()
        if isinstance(notice, Saved):
            self.stored_bytes += notice.nbytes
            self.storing_failed = False

    @property
    def alarms(self) -> int:
        """Number of alarms that are on: memory does not hold what comes; the last checkpoint could not be written."""
        return int(self._gap or self.unprotected_since is not None) + int(self.storing_failed)

    def _lose(self, record: int, reason: str) -> None:
        if self.unprotected_since is None:
            self.unprotected_since = record
            _log.warning(
                "memckpt: training goes on without protection since step %d: %s", record + self._steps_ahead, reason
            )
        self.link.abandon()  # first: a commit that is being sent reads the slots
        self._staging.close()

    def _stumble(self, record: int, error: BaseException) -> None:
        """Pause protection after an unexpected exception; raise it again if it is none of ours."""
        if not isinstance(error, Exception) or is_of_signal(error):
            self._lose(record, f"{type(error).__name__}: {error}")
            self.begin_next_unless_begun(record)
            raise error
        reason = f"protecting a step failed ({type(error).__name__}: {error})"
        if reason not in self._told:
            self._told.add(reason)
            _log.warning("memckpt: %s; please report it", reason, exc_info=error)
        self._lose(record, reason)
        self.link.reconnection.note_stumble()

    def _try_again(self, point: RestorePoint) -> None:
        """Connect to a new agent if that is due. A rank that shares no slots begins a generation at once."""
        if not self.link.reconnection.due():
            return
        try:
            self.link.reconnect(self._training.live.spec(self._switch.request), self._recorder.record)
            self._peers.rejoin()
            self._peers.mark_phases(self._recorder)
            self._switch.rejoin(point.record)
            self.listen()
            self._try_record(point)
            self.link.reconnection.note_success()
        except MemckptError as error:
            self._lose(point.record, str(error))
            self.link.reconnection.note_failure(error)
        except BaseException as error:
            self._stumble(point.record, error)


class DriftReports:
    """Logs the first drift that another device's rounding explains, and tells it from findings.

    `exact`: the replica is redone on the hardware that trains, so that there must be no drift.
    """

    def __init__(self, exact: bool) -> None:
        self._exact = exact
        self.largest_ulp = 0.0

    def is_finding(self, drift: Drift) -> bool:
        """Note a drift. Returns True if rounding does not explain it."""
        before, self.largest_ulp = self.largest_ulp, max(self.largest_ulp, drift.max_ulp)
        if drift.max_ulp <= 0:
            return False
        if drift.sure or self._exact or not drift.rounded:
            return True
        if not before:
            _log.info(
                "memckpt: the replica, which is redone on the CPU, differs from the training's accelerator: %s by "
                "%g ulp at record %d; a resume is off by as much (said once; see drift_ulp)",
                drift.tensor,
                drift.max_ulp,
                drift.record,
            )
        return False


class PreemptionNotice:
    """Calls `tell` on SIGTERM, in the main thread, before the installed handler.

    Launchers send SIGTERM on ordinary restarts, too. So the agent is told, which saves meanwhile, and nothing ends.
    """

    def __init__(self, tell: Callable[[], None]) -> None:
        self._tell = tell
        self._pid = os.getpid()
        self._previous: Any = None
        self._installed = False

    def install(self) -> None:
        """Install the handler. No-op outside the main thread, where Python cannot install one."""
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.getsignal(signal.SIGTERM)
            if self._previous is not None:  # None: not installed from Python, so it could not be called
                signal.signal(signal.SIGTERM, self._received)
                self._installed = True

    def _received(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() == self._pid:  # a forked child has inherited the handler, and nothing else
            self._tell()
        if callable(self._previous):
            self._previous(number, frame)
        elif self._previous == signal.SIG_DFL:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def remove(self) -> None:
        """Give the signal back, unless another handler lies on top of ours."""
        if self._installed and threading.current_thread() is threading.main_thread():
            if signal.getsignal(signal.SIGTERM) == self._received:
                signal.signal(signal.SIGTERM, self._previous)
            self._installed = False
