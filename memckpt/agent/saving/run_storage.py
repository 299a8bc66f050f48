"""The run's own storage, as an agent knows it: what is there, what is due, what was refused, and whether it logs."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from memckpt.agent.saving.jobs import Job
from memckpt.agent.saving.record_log import RecordLog, room_to_log
from memckpt.agent.saving.schedule import Schedule, alone
from memckpt.config import StorageConfig, StorageMode
from memckpt.memory.generation import Generation
from memckpt.processes.attempt import Attempt
from memckpt.processes.helper_process import WriterProcess
from memckpt.protocol.channel import AgentToTrainer
from memckpt.protocol.status import StorageStatus
from memckpt.protocol.storing import Appended, Logged, Room, Save, Saved, SaveFailed
from memckpt.state.layout import Layout
from memckpt.state.records import Timeline
from memckpt.storage.batch import not_loggable
from memckpt.storage.owner import CLAIM

_log = logging.getLogger("memckpt.agent")
#: Seconds between two looks whether a full storage has room again.
_ROOM_SECONDS = 2.0


class RunStorage:
    """Belongs to the agent's event loop. Owns the log; :meth:`RecordLog.close` it.

    Args:
        name: name of this node's parts.
        schedule: tells when checkpoints are due.
        open_log_writer: starts the process that writes records.
        tell: sends a message to all trainers of the attempt.

    Attributes:
        config: the attempt's settings; None: nothing is written.
        witness: the file without which the store is away.
        timeline: the one that the attempt trains on.
        last: the newest checkpoint.
        alarm: why the last checkpoint could not be written; empty if it could.
    """

    def __init__(
        self,
        name: str,
        schedule: Schedule,
        open_log_writer: Callable[[], WriterProcess],
        tell: Callable[[AgentToTrainer], None],
    ) -> None:
        self.schedule = schedule
        self._tell_trainers = tell
        self.log = RecordLog(name, open_log_writer, self._log_broken)
        self.config: StorageConfig | None = None
        self.url = self.witness = ""
        self.timeline: Timeline | None = None
        self.mode: StorageMode = "replica"
        #: Why records are not logged though that is configured, in words.
        self._not_logged = ""
        self.last: Saved | None = None
        self._saved_record: tuple[Timeline, int] | None = None
        self.alarm = ""
        #: Bytes that have to be free before the next checkpoint is tried; None: as far as is known there are.
        self._missing: int | None = None
        self._looked_for_room = float("-inf")

    def configure(self, config: StorageConfig | None, run_dir: Path, timeline: Timeline, claimed: bool) -> None:
        """Take a new attempt's configuration; arguments as for :meth:`Saver.configure`."""
        self.config = config
        self.witness = CLAIM if claimed else ""
        self.schedule.configure(config)
        self.url = (config.url if config is not None else None) or str(run_dir / "storage")
        if timeline != self.timeline:
            self.timeline = timeline
            self.schedule.restart()
            # The state that the last attempt has left could not be written; a copy by trainers may succeed.
            self.schedule.at_once = bool(self.alarm)
            self._missing = None
        if config is None:
            self.log.pause()
        else:
            self.log.configure(
                self.url, config.batch_steps, config.timeout_seconds, timeline, config.owner or "", self.witness
            )

    # What is due

    def due_record(self, generation: Generation, attempt: Attempt, lead: int) -> int | None:
        """The record after which a checkpoint begins now; None: not now. `lead`: records that an order is ahead."""
        # Without a checkpoint to redo it on, the log is of no use yet; one may also make room for it.
        unbased = self.mode == "log" and (not self.log.based or bool(self.log.short))
        if self.mode == "log" and self.log.too_large(generation.layout.checkpoint_bytes):
            self.schedule.at_once = True
        record = self.schedule.due_record(generation, attempt, lead, unbased)
        if self.config is not None and record is not None:
            self.schedule.began()
        return record

    def add_terms(self, job: Job) -> Save:
        """A job's message to the writer process, with its urgency and this store's room for the log and witness."""
        save, ours = job.save, job.save.url == self.url
        steps = self.config.batch_steps if self.config is not None else None
        return msgspec.structs.replace(
            save,
            urgent=save.urgent or job.own is None or self.schedule.preempted,
            reserve=room_to_log(Layout(save.spec), steps) if ours and self.mode == "log" else 0,
            witness=self.witness if ours else "",
        )

    # What is there, and what was refused

    def has(self, record: int) -> bool:
        """Whether the newest checkpoint is the one after a record of this attempt."""
        return self.last is not None and self._saved_record == (self.timeline, record)

    def forget_saved(self) -> None:
        """Forget which record that is: what comes next is of another attempt, or under another name."""
        self._saved_record = None

    def saved(self, message: Saved) -> None:
        """Note a checkpoint that is there, and tell trainers."""
        if message.untidy and (self.last is None or not self.last.untidy):
            _log.warning("step %d is in storage, which could not be tidied up: %s", message.step, message.untidy)
        self.last, self.alarm, self._missing = message, "", None
        if message.timeline is not None and message.timeline == self.timeline:
            self._saved_record = message.timeline, message.record
            self.log.checkpoint_saved(message.record)
        self.schedule.wrote(message)
        _log.info("step %d is in storage: %.3g MiB, %.2f s", message.step, message.nbytes / 2**20, message.seconds)
        self._tell_trainers(message)

    def not_saved(self, message: SaveFailed) -> None:
        """Note a checkpoint that could not be written, and tell trainers if that is news."""
        _log.error("step %d is not in storage: %s", message.step, message.reason)
        # Trainers are told once: of a full disk the message says each time how full.
        again = message.reason == self.alarm or (message.missing is not None and self._missing is not None)
        self.alarm = message.reason
        self._missing = message.missing
        self._looked_for_room = time.monotonic()
        self.schedule.failed()
        if not again:
            self._tell_trainers(message)

    def look_is_due(self) -> bool:
        """Whether to look if a full storage has room again. That costs nothing, and a snapshot does."""
        now = time.monotonic()
        due = self._missing is not None and now >= self._looked_for_room + _ROOM_SECONDS
        if due:
            self._looked_for_room = now
        return due

    def found_room(self, found: Room) -> None:
        """Take the answer of the writer process, which has looked."""
        if self._missing is None or found.url != self.url or found.free is None:
            return
        if found.free >= self._missing:
            self._missing = None
            self.schedule.now_it_may_work()

    # The log

    def log_records(self, generation: Generation) -> None:
        """Log what has been committed, if records are logged."""
        if self.config is None:
            return
        self.schedule.pace.add_record(generation.common, time.monotonic())
        self._set_mode(generation, self.config)
        if self.mode == "log":
            self.log.collect(generation)
            if self.schedule.at_once and self.log.based and alone(generation):
                self.schedule.at_once = False
                self.log.flush()

    def _set_mode(self, generation: Generation, config: StorageConfig) -> None:
        """Log records where that is configured, and a generation's tensors permit it."""
        problem = not_loggable(generation.spec) if config.mode == "log" else ""
        mode: StorageMode = "log" if config.mode == "log" and not problem else "replica"
        if problem and problem != self._not_logged:
            _log.info("records are not logged, only checkpoints are written: %s", problem)
        if mode != self.mode:
            self.log.pause()
        self.mode, self._not_logged = mode, problem
        self.schedule.logged = mode == "log"

    @property
    def _bytes_per_second(self) -> float | None:
        return self.last.nbytes / max(self.last.seconds, 1e-9) if self.last is not None else None

    def appended(self, message: Appended) -> None:
        """Take the answer of the process that writes records, and tell trainers of what is there."""
        before = self.log.written
        self.log.appended(message)
        written = self.log.written
        if written is not None and written != before and self.log.based:
            self._tell_trainers(Logged(written[1], written[0]))

    def _log_broken(self) -> None:
        """Have a checkpoint in the log's place where it was to be flushed in a grace period, and has a hole."""
        self.schedule.at_once = self.schedule.at_once or self.schedule.preempted

    def status(self, newest_step: int | None, lead: int, saving: bool) -> StorageStatus | None:
        """What the command line shows; `newest_step` is the newest that memory holds, `lead` as for a due record."""
        if self.config is None:
            return None
        config, last = self.config, self.last
        steps = [last.step] if last is not None else []
        if self.log.based and self.log.written is not None:
            steps.append(self.log.written[1])
        stored = max(steps, default=None)
        if self.mode == "log" and self.log.based:
            at_most = self.log.unwritten_at_most
        else:
            at_most = self.schedule.loses_at_most(last, lead)
        if at_most is not None and stored is not None and newest_step is not None:
            at_most = max(at_most, newest_step - stored)
        return StorageStatus(
            url=self.url,
            step=stored,
            interval_seconds=None if config.every_steps is not None else self.schedule.interval_seconds(),
            every_steps=config.every_steps,
            bytes_per_second=self._bytes_per_second,
            saving=saving,
            alarm=self.alarm or self.log.alarm,
            mode=self.mode,
            reason=self._not_logged,
            batch_steps=self.log.batch_steps if self.mode == "log" else None,
            logged=self.log.taken,
            loses_at_most=at_most,
            untidy=last.untidy if last is not None else "",
        )
