"""Protection of a training's records while agents come and go: what the agent says, its loss and its return."""

from __future__ import annotations

import logging

from memckpt.capture.slot_writer import SlotWriter
from memckpt.errors import AgentGoneError, MemckptError, MemoryBudgetError
from memckpt.protocol.trainer import Alarm, Begin, Drift, Gap, Logged, Protected, Saved, SaveFailed
from memckpt.session.drift import DriftReports
from memckpt.session.generation_switch import GenerationSwitch
from memckpt.session.link import AgentLink
from memckpt.session.local_training import LocalTraining
from memckpt.session.peers import Peers
from memckpt.session.reconnection import Reconnection
from memckpt.session.staging import RestorePoint, Staging

_log = logging.getLogger("memckpt")
#: So many records in a row in which something of ours has raised are worth a pause.
_MOST_BROKEN = 3


class Protection:
    """Ends each record, whatever becomes of the agent: nothing here raises into the user's training.

    Without an agent, or behind an error, training goes on *unprotected*: no record is staged, the gap is told and
    counted, and each commit asks `reconnection` whether to try again. A generation that is written ends the gap.

    Args:
        training: that is protected.
        link: connection to the agent.
        staging: what is written to; dropped with the agent.
        switch: brings records to generations.
        peers: told of a new agent.
        reconnection: decides when a new agent is tried.

    Attributes:
        unprotected_since: last record that was protected; None while all are.
        stored_step: newest step that this attempt's agent has brought to storage; None before the first.
        drift: what the audit has found.
    """

    def __init__(
        self,
        training: LocalTraining,
        link: AgentLink,
        staging: Staging,
        switch: GenerationSwitch,
        peers: Peers,
        reconnection: Reconnection,
    ) -> None:
        self._training = training
        self._recorder = training.recorder
        self._link = link
        self._staging = staging
        self._switch = switch
        self._peers = peers
        self._reconnection = reconnection
        self._told: set[str] = set()
        self._broken_records = 0
        self.unprotected_since: int | None = None
        self.stored_step: int | None = None
        self.drift = DriftReports(exact=training.device.type == "cpu")

    # Records

    def end_record(self, point: RestorePoint) -> None:
        """End a record, and go on to the next one."""
        try:
            self._switch.look_for_changes()
            self.listen()
            if not self._link.up:
                self._try_again(point)
            else:
                self._end_record(point)
        except AgentGoneError as error:
            self.lose_agent(point, str(error))
        except MemckptError as error:
            self._lose(point.record, str(error))
        except Exception as error:  # whatever it is, the user's training goes on
            self._stumble(point.record, error)
        self.leave_record(point.record)

    def resume(self, writer: SlotWriter, record: int) -> None:
        """Go on from a held generation, whose state after `record` is back.

        Raises:
            AgentGoneError: the agent is gone.
        """
        try:
            self._switch.resume(writer, record, anew=self._peers.active)
        except MemoryBudgetError as error:
            # The dead attempt had written a generation's start, and there is no room for its records.
            self._lose(record, str(error))
            self._recorder.begin(None, record + 1)

    def capture_last(self, point: RestorePoint) -> None:
        """Have the final step held, before it goes to storage."""
        if self._switch.capture_last(point):
            self._end_gap(point)

    def lose_agent(self, point: RestorePoint, reason: str) -> None:
        """The agent is gone: a new one is tried at once, if it is time for that."""
        self._lose(point.record, reason)
        self._try_again(point)
        self.leave_record(point.record)

    def _end_record(self, point: RestorePoint) -> None:
        self._broken_records = self._broken_records + 1 if self._recorder.broken else 0
        if self._broken_records == _MOST_BROKEN:
            self._broken_records = 0
            self._reconnection.stumbled()
            raise MemckptError(self._recorder.broken)
        if self._switch.end_record(point):
            self._end_gap(point)

    def _end_gap(self, point: RestorePoint) -> None:
        if self.unprotected_since is not None:
            gap = point.record - self.unprotected_since
            _log.warning("memckpt: protected again from step %d on; %d steps were not", point.step, gap)
            self.unprotected_since = None

    def leave_record(self, record: int) -> None:
        """Begin the record behind `record`, where nothing has begun it yet. Nothing is staged in it."""
        if self._recorder.record == record:
            self._recorder.begin(None, record + 1)

    # The agent's news, its loss and its return

    def listen(self) -> None:
        """Take what the agent has said, without waiting. Raises AgentGoneError if it is gone."""
        for notice in self._link.notices():
            match notice:
                case Begin():
                    self._switch.obey(notice)
                case Alarm():
                    _log.error("memckpt: %s", notice.reason)
                    self._switch.lose_replica(notice.reason)
                case Drift():
                    if self.drift.wants_rewrite(notice):
                        self._recorder.fail(f"drift in {notice.tensor}")
                case Gap():
                    _log.warning("memckpt: not protected until the state is written anew: %s", notice.reason)
                case Saved() | Logged():
                    self.stored_step = max(notice.step, self.stored_step or 0)
                case SaveFailed():
                    _log.warning("memckpt: step %d did not get to storage: %s", notice.step, notice.reason)
                case Protected():
                    _log.debug("memckpt: generation %d is complete", notice.generation)

    def _lose(self, record: int, reason: str) -> None:
        if self.unprotected_since is None:
            self.unprotected_since = record
            _log.warning("memckpt: training goes on without protection since step %d: %s", record, reason)
        self._staging.close()
        self._link.abandon()

    def _stumble(self, record: int, error: Exception) -> None:
        """Something of ours, or of torch, has raised that nobody has thought of: no protection for a while."""
        reason = f"protecting a step failed ({type(error).__name__}: {error})"
        if reason not in self._told:
            self._told.add(reason)
            _log.warning("memckpt: %s; please report it", reason, exc_info=error)
        self._lose(record, reason)
        self._reconnection.stumbled()

    def _try_again(self, point: RestorePoint) -> None:
        """Start a new agent and, when nobody shares this rank's slots, a new generation at once."""
        if not self._reconnection.due():
            return
        try:
            self._link.reconnect(self._training.live.spec(self._switch.request), self._recorder.record)
            self._peers.rejoin()
            self._peers.mark_phases(self._recorder)
            self._switch.rejoin(point.record)
            self.listen()
            self._end_record(point)
            self._reconnection.succeeded()
        except MemckptError as error:
            self._lose(point.record, str(error))
            self._reconnection.failed(error)
        except Exception as error:
            self._stumble(point.record, error)
