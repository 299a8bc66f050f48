"""What goes to storage and when: checkpoints, and the log between them. The writing itself is done by other processes.

While training runs, a checkpoint begins with a snapshot (:mod:`memckpt.checkpointing.snapshots`), which costs trainers
one copy of the state at most. When no trainer runs, nothing is copied: the replica, or the ring, stands still. In log
mode the records between checkpoints are written, too (:mod:`memckpt.checkpointing.record_log`).
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Literal

import msgspec

from memckpt.checkpointing.askers import Done, Export, Peers, Run
from memckpt.checkpointing.flow import Answer, carry_on
from memckpt.checkpointing.job_maker import JobMaker, standing_still
from memckpt.checkpointing.record_log import RecordLog, record_bytes, room_to_log, snapshot_bytes
from memckpt.checkpointing.schedule import Schedule, alone
from memckpt.checkpointing.snapshots import Snapshot, Snapshots
from memckpt.checkpointing.storage_mode import Measured, choose_mode
from memckpt.checkpointing.writer_jobs import Job, WriterJobs
from memckpt.config import StorageConfig, StorageMode
from memckpt.errors import AgentError, MemckptError
from memckpt.node.attempt import Attempt
from memckpt.node.generation import Generation
from memckpt.processes.helper_process import HelperProcess
from memckpt.protocol.trainer import (
    Logged,
    Message,
    ReplicaCopied,
    Saved,
    SaveFailed,
    SnapshotTaken,
    StorageStatus,
)
from memckpt.protocol.writer import (
    Announced,
    Appended,
    Room,
)
from memckpt.state.layout import Layout
from memckpt.state.records import Timeline
from memckpt.storage.batch import not_loggable
from memckpt.storage.owner import CLAIM

_log = logging.getLogger("memckpt.agent")
#: A trainer that died may be back at once; then memory serves, and nothing need be written.
_RETURN_SECONDS = 3.0
#: What is held with no trainer could not be saved: a disk may have room again after so long.
_RETRY_SECONDS = 60.0
#: How often to look whether a full storage has room again.
_ROOM_SECONDS = 2.0


#: Starts a process that writes; what it answers goes to the first function, the reason of its end to the second.
StartWriter = Callable[
    [Literal["checkpoints", "records"], Callable[[Message], None], Callable[[str], None]], HelperProcess
]


class Saver:
    """Belongs to the agent's event loop. Nothing here waits for storage; a replica that is busy with a record is
    waited for where it must stand still.

    Args:
        node: this node's name, or what its parts of a checkpoint are called beside others of the same node.
        order: sends a message, with a descriptor, to all trainers of the attempt.
        tell: sends them one without.
        start_writer: starts a process that writes.
        failed: called when a checkpoint could not be written, and nothing that is held is still to be written.
        announce: tells whoever saves other shards on this node that a checkpoint is taken after a record.
        hurried: tells them how many records ahead an order has to be.
    """

    def __init__(
        self,
        node: str,
        order: Callable[[Message, int], None],
        tell: Callable[[Message], None],
        start_writer: StartWriter,
        failed: Callable[[], None],
        announce: Callable[[int], None] = lambda record: None,
        hurried: Callable[[int], None] = lambda lead: None,
    ) -> None:
        self._failed = failed
        self._tell_siblings = announce
        self._tell_trainers = tell
        self._jobs = WriterJobs(lambda: start_writer("checkpoints", self._checkpoints_said, self._checkpoints_ended))
        self._making = JobMaker(node)
        self._snapshots = Snapshots(order, hurried)
        self._log = RecordLog(
            node, lambda: start_writer("records", self._records_said, self._records_ended), self._log_broken
        )
        self._schedule = Schedule(self._announce, self._look)
        self._config: StorageConfig | None = None
        self._url = self._witness = ""
        self._timeline: Timeline | None = None
        self._mode: StorageMode = "replica"
        self._mode_reason = ""
        #: The generation that the mode was chosen for.
        self._mode_of: int | None = None
        self._last: Saved | None = None
        self._saved_record: tuple[Timeline, int] | None = None
        #: Why the last checkpoint could not be written; empty if it could.
        self.alarm = ""
        self._retry_at = float("-inf")
        #: Bytes that have to be free before the next checkpoint is tried; None: as far as is known there are.
        self._missing: int | None = None
        self._looked_for_room = float("-inf")
        #: Exports that wait for the next commit.
        self._asked: deque[Export] = deque()
        #: What is still to be written of a generation that stands still, oldest first; whether training has ended.
        self._held_waiting: deque[tuple[Generation, int, bool]] = deque()
        self._saving_held = False
        #: The generation whose records are being flushed to the log because it stands still; the answer: they are.
        self._flushing: tuple[Generation, Answer[None]] | None = None

    def configure(
        self,
        config: StorageConfig | None,
        run_dir: Path,
        timeline: Timeline,
        threads: int,
        search_path: tuple[str, ...] = (),
        claimed: bool = False,
    ) -> None:
        """What a new attempt's configuration says (None: nothing is written), and the timeline it trains on.

        `claimed`: the run has claimed its store, so that one without a claim is not it.
        """
        self._config = config
        self._witness = CLAIM if claimed else ""
        self._schedule.configure(config)
        self._url = (config.url if config is not None else None) or str(run_dir / "storage")
        self._making.configure(config or StorageConfig(), timeline, threads, search_path)
        if timeline != self._timeline:
            self._timeline = timeline
            self._schedule.restart()
            self._retry_at = float("-inf")
            self._missing = None
            self._flushing = None
            self._held_waiting.clear()
            self._mode_of = None
        if config is None:
            self._log.pause()
        else:
            self._jobs.warm()
            self._log.configure(
                self._url, config.batch_steps, config.timeout_seconds, timeline, config.owner or "", self._witness
            )

    @property
    def attempt_number(self) -> int:
        """Number of the attempt whose parts are written; 0: none is known."""
        return self._making.attempt_number

    def configure_like(self, other: Saver, name: str) -> None:
        """Write for the attempt that another saver knows, under this name; for ranks that are not here."""
        self._saved_record = None  # of another attempt, or under another name
        self._making.rename(name)
        self._making.configure_like(other._making)

    def rename(self, name: str) -> None:
        """What the parts are called from the next attempt on, which :meth:`configure` then tells of."""
        self._making.rename(name)
        self._log.rename(name)

    def resumed(self, record: int, follows: Timeline | None) -> None:
        """The attempt goes on behind a record that memory holds, and that was made on the timeline `follows`."""
        if follows is not None:
            self._log.branch(record, follows)

    @property
    def enabled(self) -> bool:
        return self._config is not None

    @property
    def saving(self) -> bool:
        return self._jobs.busy or self._flushing is not None or bool(self._held_waiting)

    def preempt(self) -> bool:
        """Somebody got SIGTERM: save at once, within the grace period. False where nothing is to be written."""
        if self._config is None:
            return False
        self._schedule.preempt(self._config.grace_seconds)
        return True

    # While training runs

    def after_commit(self, generation: Generation, attempt: Attempt) -> None:
        """A record was committed: log it, and begin with a checkpoint if one is due."""
        if not generation.complete:
            return
        if self._config is not None:
            self._log_records(generation)
        if self._snapshots.asker is not None or self._jobs.busy:
            return
        if self._asked:
            export = self._asked.popleft()
            record = export.record or attempt.newest_record + self._snapshots.lead
            carry_on(self._save_ahead(export, generation, record))
            return
        self._look_for_room()
        # Without a checkpoint to redo it on, the log is of no use yet; one may also make room for it.
        unbased = self._mode == "log" and (not self._log.based or bool(self._log.short))
        if self._mode == "log" and self._log.too_large(snapshot_bytes(generation.layout)):
            self._schedule.at_once = True
        due = self._schedule.due_record(generation, attempt, self._snapshots.lead, unbased)
        if self._config is not None and due is not None:
            self._choose_mode(generation, self._config)
            self._schedule.began()
            carry_on(self._save_ahead(Run(self._url), generation, due))

    def _look_for_room(self) -> None:
        """The storage is full: see now and then whether it still is. That costs nothing, and a snapshot does."""
        now = time.monotonic()
        if self._missing is not None and now >= self._looked_for_room + _ROOM_SECONDS:
            self._looked_for_room = now
            self._jobs.look_for_room(self._url, self._witness)

    def _found_room(self, found: Room) -> None:
        if (
            self._missing is not None
            and found.url == self._url
            and found.free is not None
            and found.free >= self._missing
        ):
            self._missing = None
            self._schedule.now_it_may_work()

    def _log_records(self, generation: Generation) -> None:
        assert self._config is not None
        self._schedule.pace.note(min(generation.committed.values()), time.monotonic())
        if self._mode_of != generation.number:
            self._choose_mode(generation, self._config)
        if self._mode == "log":
            self._log.collect(generation)
            if self._schedule.at_once and self._log.based and alone(generation):
                self._schedule.at_once = False
                self._log.flush()

    def _announce(self, record: int, elsewhere: bool) -> None:
        assert self._timeline is not None
        self._tell_siblings(record)
        if elsewhere:
            self._jobs.announce(self._url, self._timeline, record, self._witness)

    def hurry(self, lead: int) -> None:
        """Give orders so many records ahead, if not earlier: parts of one checkpoint are chosen alike."""
        self._snapshots.lead = max(self._snapshots.lead, lead)

    def announced(self, record: int) -> None:
        """Whoever saves the first rank takes a checkpoint after this record."""
        self._schedule.announced(record)

    def _look(self) -> None:
        assert self._timeline is not None
        self._jobs.look(self._url, self._timeline)

    def _choose_mode(self, generation: Generation, config: StorageConfig) -> None:
        layout, last = generation.layout, self._last
        measured = Measured(
            record_bytes=record_bytes(layout),
            checkpoint_bytes=snapshot_bytes(layout),
            step_seconds=self._schedule.pace.seconds,
            bytes_per_second=last.nbytes / max(last.seconds, 1e-9) if last is not None else None,
            interval_steps=self._schedule.interval_steps(),
        )
        impossible = not_loggable(generation.spec)
        if config.mode == "auto" and not alone(generation):
            impossible = "with several nodes that has to be asked for, since each measures for itself"
        self._mode_of = generation.number
        known = measured.step_seconds is not None and measured.bytes_per_second is not None
        if config.mode == "auto" and self._mode_reason and not known and not impossible:
            return  # a new attempt goes on as the one before has found right
        mode, reason = choose_mode(config.mode, impossible, measured)
        if mode != self._mode:
            _log.info("storage mode %s: %s", mode, reason)
            self._log.pause()
        self._mode, self._mode_reason = mode, reason

    # A checkpoint on its way: copied (where training runs), described, written, told

    async def _save_ahead(self, asker: Run | Export, generation: Generation, record: int) -> None:
        """Save the state after a record that lies ahead, while training goes on."""
        try:
            snapshot = await self._snapshots.take(asker, generation, record)
        except (MemckptError, OSError, RuntimeError) as error:
            snapshot = SaveFailed(generation.newest_step() or 0, f"no snapshot can be taken: {error}")
        match snapshot:
            case Snapshot():
                if isinstance(asker, Run):
                    self._schedule.copied(snapshot.seconds)
                await self._write(asker, self._making.of_snapshot(snapshot, asker.url))
            case SaveFailed():
                self._tell(asker, snapshot)
            case None:
                self._want_again(asker)

    async def _save_standing(
        self, asker: Run | Export, generation: Generation, record: int, last: bool = False
    ) -> None:
        """Save the state after a record that stands still in memory; `last`: training has ended."""
        try:
            job = self._making.of_held(generation, record, asker.url, last=last)
        except MemckptError as error:
            self._tell(asker, SaveFailed(generation.newest_step() or 0, str(error)))
        else:
            await self._write(asker, job)

    async def _write(self, asker: Run | Export, job: Job) -> None:
        """Have the writer process write and commit a checkpoint, and tell who asked for it."""
        save, ours = job.save, job.save.url == self._url
        steps = self._config.batch_steps if self._config is not None else None
        save = msgspec.structs.replace(
            save,
            urgent=save.urgent or job.own is None or self._schedule.preempted,
            reserve=room_to_log(Layout(save.spec), steps) if ours and self._mode == "log" else 0,
            witness=self._witness if ours else "",
        )
        outcome = await self._jobs.write(replace(job, save=save), asker, self._schedule.limit_seconds)
        if outcome is not None:
            self._tell(asker, outcome)
        elif isinstance(asker, Export):  # of the run's own nobody need know: memory has it
            asker.done(SaveFailed(save.part.step, "training has resumed meanwhile; try again"))

    def _tell(self, asker: Run | Export, outcome: Saved | SaveFailed) -> None:
        match asker, outcome:
            case Export(), _:
                asker.done(outcome)
            case Run(), Saved():
                self._saved(outcome)
            case Run(), SaveFailed():
                self._not_saved(outcome)

    def _want_again(self, asker: Run | Export) -> None:
        match asker:
            case Run():
                self._schedule.again()
            case Export():
                self._asked.appendleft(replace(asker, record=None))

    def _saved(self, message: Saved) -> None:
        """A checkpoint is in the run's storage."""
        if message.untidy and (self._last is None or not self._last.untidy):
            _log.warning("step %d is in storage, which could not be tidied up: %s", message.step, message.untidy)
        self._last, self.alarm, self._missing = message, "", None
        if message.timeline is not None and message.timeline == self._timeline:
            self._saved_record = message.timeline, message.record
            self._log.checkpoint_saved(message.record)
        self._schedule.wrote(message)
        _log.info("step %d is in storage: %d MiB, %.2f s", message.step, message.nbytes >> 20, message.seconds)
        self._tell_trainers(message)

    def _not_saved(self, message: SaveFailed) -> None:
        """A checkpoint could not be written to the run's storage."""
        _log.error("step %d is not in storage: %s", message.step, message.reason)
        # Trainers are told once: of a full disk the message says each time how full.
        again = message.reason == self.alarm or (message.missing is not None and self._missing is not None)
        self.alarm = message.reason
        self._missing = message.missing
        self._looked_for_room = time.monotonic()
        self._schedule.failed()
        if not again:
            self._tell_trainers(message)
        if not self._held_waiting and not self._jobs.reads_held:  # else what is held is still to come
            self._failed()

    def copy_for_peers(self, generation: Generation, record: int, taken: Callable[[Snapshot | None], None]) -> None:
        """Have the state after a record copied, if nothing else is just being copied.

        Args:
            generation: the one that is held.
            record: a little ahead.
            taken: gets the copy, which it owns; None if there is none.
        """
        if self._snapshots.asker is not None:
            taken(None)
        else:
            carry_on(self._copy_for_peers(generation, record, taken))

    async def _copy_for_peers(
        self, generation: Generation, record: int, taken: Callable[[Snapshot | None], None]
    ) -> None:
        try:
            snapshot = await self._snapshots.take(Peers(), generation, record)
        except (MemckptError, OSError, RuntimeError) as error:
            snapshot = SaveFailed(generation.newest_step() or 0, str(error))
        if isinstance(snapshot, SaveFailed):
            _log.warning("no state is copied for peers: %s", snapshot.reason)
            snapshot = None
        taken(snapshot)

    def snapshot_taken(self, rank: int, message: SnapshotTaken) -> None:
        """A trainer has copied its part of a snapshot, or could not."""
        self._snapshots.taken(rank, message)

    def replica_copied(self, message: ReplicaCopied) -> None:
        """The redo thread has copied the replica, or could not."""
        self._snapshots.copied(message)

    def forget(self, generation: Generation) -> None:
        """A generation is about to be closed: nothing of it may be used any more."""
        self._snapshots.drop_of(generation)
        self._log.forget(generation)
        if self._flushing is not None and self._flushing[0] is generation:
            self._flushing = None
        self._held_waiting = deque(one for one in self._held_waiting if one[0] is not generation)

    # When no trainer runs

    def save_held(self, generation: Generation, as_checkpoint: bool, record: int | None = None) -> None:
        """Write the newest record that stands still in memory, unless it is there already.

        Args:
            generation: which holds it.
            as_checkpoint: write it as a whole, though the log could do with a few records: training has ended.
            record: the one that all ranks of the job have, where that is known; a later one is not written.
        """
        if self._config is None or self._timeline is None or self._jobs.reads_held:
            return
        self._snapshots.drop(again=True)
        records = [one for one in standing_still(generation) if record is None or one <= record]
        committed = min(generation.committed.values(), default=0)
        if generation.ring.disagreed(committed):
            _log.warning("record %d does not go to storage: its ranks do not agree on what is held once", committed)
        if not records or self._saved_record == (self._timeline, records[-1]):
            return
        if self._mode == "log":
            self._log.collect(generation)
            # Of several nodes each knows of its own part only: a checkpoint is the surer way.
            enough = alone(generation) and self._log.reaches(records[-1])
            if not as_checkpoint and enough and self._flushing is None:
                carry_on(self._flush_held(generation, records[-1]))
                return
        spec = generation.spec
        if not spec.full:
            # The node with the parameters may stand one record before or behind: save what it may need of us.
            for each in reversed(records):
                carry_on(self._save_standing(Run(self._url), generation, each))
            return
        # Where others hold other shards, they may stand one record before; a replica goes forward only.
        sharded = len(spec.serves) < spec.world_size
        newest = records[-1 - (sharded and record is None) :]
        self._held_waiting.extend((generation, each, as_checkpoint) for each in newest)
        carry_on(self._save_waiting())

    async def _save_waiting(self) -> None:
        """Save what waits, one after the other: a replica goes forward only, and is read until its job is done."""
        if self._saving_held:
            return
        self._saving_held = True
        while self._held_waiting:
            generation, record, last = self._held_waiting.popleft()
            await self._save_standing(Run(self._url), generation, record, last)
        self._saving_held = False

    async def _flush_held(self, generation: Generation, record: int) -> None:
        """Save what stands still as records of the log; as a checkpoint if that fails."""
        flushed: Answer[None] = Answer()
        self._flushing = generation, flushed
        self._log.flush()
        self._look_at_flush()  # there is nothing to wait for where the process cannot even be started
        await flushed
        if not self._log.covers(record):
            self.save_held(generation, as_checkpoint=True)
        self._flushing = None

    def _look_at_flush(self) -> None:
        if self._flushing is not None and not self._log.busy:
            self._flushing[1].give(None)

    def save_record(self, generation: Generation, record: int, url: str, done: Done) -> None:
        """Write one record that stands still in memory, wherever; `done` is told."""
        if url == self._url and self._last is not None and self._saved_record == (self._timeline, record):
            done(self._last)
        else:
            carry_on(self._save_standing(Export(url, done), generation, record))

    def save_to(self, url: str, done: Done, generation: Generation, training: bool, record: int | None = None) -> None:
        """Write the newest record to a place that somebody has named; training goes on beside it.

        Args:
            url: of an empty store.
            done: called once, with what has become of it.
            generation: which holds it.
            training: whether a trainer runs.
            record: which one, if that is not free.
        """
        if self._asked:
            done(SaveFailed(0, "somebody else is waiting for the same; try again"))
        else:
            self._asked.append(Export(url, done, record))  # from the next commit on
            if not training:
                self.save_asked(generation)

    def save_asked(self, generation: Generation, record: int | None = None) -> None:
        """No trainer runs: whoever has asked for the state gets what stands still.

        Args:
            generation: which holds it.
            record: the one that all ranks of the job have, where that is known.
        """
        if isinstance(self._snapshots.asker, (Export, Peers)):
            self._snapshots.drop(again=True)  # its order has died with the trainers
        while self._asked:
            export = self._asked.popleft()
            if records := standing_still(generation):
                carry_on(self._save_standing(export, generation, records[-1] if record is None else record))
            else:
                export.done(SaveFailed(0, "no step can be produced from memory"))

    def retry_later(self) -> None:
        """What is held could not be saved: let :meth:`patience` end once more, after a while."""
        self._retry_at = time.monotonic() + _RETRY_SECONDS

    def patience(self, idle_since: float) -> float:
        """How long to wait for trainers to come back before their state goes to storage."""
        due = idle_since + (0.0 if self._schedule.preempted else _RETURN_SECONDS)
        return max(due, self._retry_at) - time.monotonic()

    # The processes that write

    def _checkpoints_said(self, message: Message) -> None:
        match message:
            case Saved() | SaveFailed():
                self._jobs.finished(message)
            case Announced():
                self._jobs.looked()
                if message.timeline == self._timeline:
                    self._schedule.announced(message.record)
            case Room():
                self._jobs.looked()
                self._found_room(message)
            case _:
                raise AgentError(f"it sent an unexpected {type(message).__name__}")

    def _checkpoints_ended(self, reason: str) -> None:
        """The writer process is gone."""
        self._jobs.ended(reason)

    def _records_said(self, message: Message) -> None:
        if not isinstance(message, Appended):
            raise AgentError(f"it sent an unexpected {type(message).__name__}")
        before = self._log.written
        self._log.appended(message)
        written = self._log.written
        if written is not None and written != before and self._log.based:
            self._tell_trainers(Logged(written[1], written[0]))
        self._look_at_flush()

    def _log_broken(self) -> None:
        """The log has a hole. In a grace period it was to be flushed: then a checkpoint takes its place."""
        self._schedule.at_once = self._schedule.at_once or self._schedule.preempted

    def _records_ended(self, reason: str) -> None:
        """That process is gone."""
        _log.error("records are not logged: %s", reason)
        self._log.writer_ended(reason)
        self._look_at_flush()

    def deadline(self) -> float | None:
        """Until when the writing may take (monotonic clock); None while nothing is written."""
        limits = (self._jobs.deadline, self._log.deadline(self._schedule.preempted_until))
        return min((limit for limit in limits if limit is not None), default=None)

    def look_at_clock(self) -> None:
        """Give up what has taken too long."""
        now = time.monotonic()
        checkpoint, log = self._jobs.deadline, self._log.deadline(self._schedule.preempted_until)
        if checkpoint is not None and now >= checkpoint:
            self._checkpoints_ended("the storage took too long")
        if log is not None and now >= log:
            self._records_ended("the storage took too long")

    def abort(self) -> None:
        """What is held is about to change: nothing is written from it any more."""
        self._flushing = None
        self._held_waiting.clear()
        self._snapshots.drop(again=True)  # the new trainers have not got the order
        self._jobs.give_up_held()

    def close(self) -> None:
        self._snapshots.drop(again=False)
        self._log.close()
        self._jobs.close()

    def status(self, newest_step: int | None) -> StorageStatus | None:
        """What the command line shows; `newest_step` is the newest that memory holds."""
        if self._config is None:
            return None
        config, last = self._config, self._last
        steps = [last.step] if last is not None else []
        if self._log.based and self._log.written is not None:
            steps.append(self._log.written[1])
        stored = max(steps, default=None)
        if self._mode == "log" and self._log.based:
            at_most = self._log.unwritten_at_most
        else:
            at_most = self._schedule.loses_at_most(last, self._snapshots.lead)
        if at_most is not None and stored is not None and newest_step is not None:
            at_most = max(at_most, newest_step - stored)
        return StorageStatus(
            url=self._url,
            step=stored,
            interval_seconds=None if config.every_steps is not None else self._schedule.interval_seconds(),
            every_steps=config.every_steps,
            bytes_per_second=last.nbytes / max(last.seconds, 1e-9) if last is not None else None,
            saving=self.saving,
            alarm=self.alarm or self._log.alarm,
            mode=self._mode,
            reason=self._mode_reason,
            batch_steps=self._log.batch_steps if self._mode == "log" else None,
            logged=self._log.taken,
            loses_at_most=at_most,
            untidy=last.untidy if last is not None else "",
        )
