"""What goes to storage and when: checkpoints, and the log between them. The writing itself is done by other processes.

While training runs, a checkpoint begins with a *snapshot*, a copy of the whole state in memory: the redo thread copies
the replica between two records (eager), or the trainers copy their own state at a commit (lazy), which costs them one
copy of the state and no more. When no trainer runs, nothing is copied: the replica, or the ring, stands still.

In log mode the records since are written, too (:mod:`memckpt.agent.record_log`).
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from memckpt.agent.attempt import Attempt
from memckpt.agent.generation import Generation
from memckpt.agent.messages import (
    Appended,
    Logged,
    Message,
    ReplicaCopied,
    Save,
    Saved,
    SaveFailed,
    SnapshotTaken,
    StorageStatus,
    TakeSnapshot,
)
from memckpt.agent.record_log import RecordLog, record_bytes
from memckpt.agent.storage_mode import Measured, Pace, choose_mode
from memckpt.config import StorageConfig, StorageMode
from memckpt.errors import AgentError, MemckptError
from memckpt.memory.budget import check_budget
from memckpt.memory.region import Region
from memckpt.state.records import Timeline
from memckpt.storage.batch import not_loggable
from memckpt.storage.format import FORMAT_VERSION, Part

if TYPE_CHECKING:
    from memckpt.agent.writer_process import WriterProcess

_log = logging.getLogger("memckpt.agent")
#: A trainer that died may be back at once; then memory serves, and nothing need be written.
_RETURN_SECONDS = 3.0
#: What is held with no trainer could not be saved: a disk may have room again after so long.
_RETRY_SECONDS = 60.0
_FIRST_LEAD, _LONGEST_LEAD = 2, 512


@dataclass
class _Snapshot:
    """One that is being taken: of which generation, after which record, and which ranks have copied their part."""

    generation: Generation
    record: int
    region: Region
    taken: dict[int, SnapshotTaken]


class Saver:
    """Belongs to the agent's event loop. Nothing here waits for storage; a replica that is busy with a record is
    waited for where it must stand still.

    Args:
        node: this node's name.
        order: sends a message, with a descriptor, to all trainers of the attempt.
        tell: sends them one without.
        open_writer: starts the process that writes checkpoints.
        open_record_writer: starts the one that writes records.
    """

    def __init__(
        self,
        node: str,
        order: Callable[[Message, int], None],
        tell: Callable[[Message], None],
        open_writer: Callable[[], WriterProcess],
        open_record_writer: Callable[[], WriterProcess],
    ) -> None:
        self._node = node
        self._order = order
        self._tell = tell
        self._open_writer = open_writer
        self._writer: WriterProcess | None = None
        self._config: StorageConfig | None = None
        self._url = ""
        self._threads = 1
        self._snapshot: _Snapshot | None = None
        self._saving: tuple[Save, float] | None = None
        self._held_for_writer: list[Region] = []
        self._waiting: list[Callable[[], None]] = []
        #: What killed writers may have left half-written.
        self._abandoned: list[Part] = []
        self._last_began = time.monotonic()
        self._lead = _FIRST_LEAD
        self._cost_seconds = 0.0
        self._copy_seconds = 0.0
        self._last: Saved | None = None
        self._saved_record: tuple[Timeline, int] | None = None
        self._alarm = ""
        self._timeline: Timeline | None = None
        self._preempted_until = float("-inf")
        self._retry_at = float("-inf")
        self._at_once = False
        self._log = RecordLog(node, open_record_writer)
        self._mode: StorageMode = "replica"
        self._mode_reason = ""
        self._pace = Pace()
        #: What was left in memory, up to this record, goes to storage as records; as a checkpoint if that fails.
        self._flushing: tuple[Generation, int] | None = None

    def configure(self, config: StorageConfig | None, run_dir: Path, timeline: Timeline, threads: int) -> None:
        """What a new attempt's configuration says (None: nothing is written), and the timeline it trains on."""
        self._config = config
        self._url = (config.url if config is not None else None) or str(run_dir / "storage")
        self._threads = threads
        if timeline != self._timeline:
            self._timeline = timeline
            self._preempted_until, self._at_once = float("-inf"), False
            self._last_began = time.monotonic()
            self._retry_at = float("-inf")
            self._pace.restart()
            self._flushing = None
        if config is not None:
            self._log.configure(self._url, config.batch_steps, config.timeout_seconds, timeline)

    def resumed(self, record: int, follows: Timeline | None) -> None:
        """The attempt goes on behind a record that memory holds, and that was made on the timeline `follows`."""
        if follows is not None:
            self._log.branch(record, follows)

    @property
    def enabled(self) -> bool:
        return self._config is not None

    @property
    def saving(self) -> bool:
        return self._saving is not None or bool(self._waiting) or self._flushing is not None

    @property
    def saving_held(self) -> bool:
        """Whether what is being written is read from held memory, or will be."""
        return bool(self._waiting) or (self._saving is not None and not self._held_for_writer)

    def preempt(self) -> None:
        """Somebody got SIGTERM: the machine may be about to go. Save at once, and take no longer than the grace period.

        It may also be an ordinary restart, so that is all.
        """
        if self._config is not None:
            self._preempted_until = time.monotonic() + self._config.grace_seconds
            self._at_once = True

    # While training runs

    def interval_seconds(self) -> float:
        """The least time from one checkpoint to the next: what one costs is then the configured share of it."""
        assert self._config is not None
        return max(self._config.min_seconds, self._cost_seconds / self._config.overhead)

    def after_commit(self, generation: Generation, attempt: Attempt) -> None:
        """A record was committed: log it, and order a snapshot if one is due."""
        if self._config is None or not generation.complete:
            return
        self._pace.note(min(generation.committed.values()), time.monotonic())
        if not self._mode_reason:
            self._choose_mode(generation)
        if self._mode == "log":
            self._log.collect(generation)
            if self._at_once and self._log.based:
                self._at_once = False
                self._log.flush()
        if self._snapshot is not None or self._saving is not None:
            return
        record = self._due_record(generation, attempt)
        if record is None:
            return
        self._at_once = False
        self._choose_mode(generation)
        try:
            self._begin_snapshot(generation, record)
        except MemckptError as error:
            self._fail(generation.newest_step() or 0, str(error))

    def _due_record(self, generation: Generation, attempt: Attempt) -> int | None:
        """After which record to take a snapshot, so far ahead that every rank learns of it in time; None: not yet."""
        config = self._config
        assert config is not None
        record = max(member.next_record for member in attempt.members.values()) - 1 + self._lead
        elapsed = time.monotonic() - self._last_began
        # Without a checkpoint to redo it on, the log is of no use yet.
        unbased = self._mode == "log" and not self._log.based and elapsed >= self._cost_seconds / config.overhead
        alone = generation.spec.world_size == len(generation.spec.local_ranks)
        if alone and (self._at_once or unbased):
            return record
        if config.every_steps is not None:
            # A record's number may differ from the framework's step; the difference stays while training runs.
            newest = max(generation.committed.values())
            step = generation.step_of(newest)
            offset = step - newest if step is not None else 0
            return record + (-(record + offset)) % config.every_steps
        # Several nodes would choose different records.
        return record if alone and elapsed >= self.interval_seconds() else None

    def _choose_mode(self, generation: Generation) -> None:
        config, layout = self._config, generation.layout
        assert config is not None
        step_seconds = self._pace.seconds
        steps: float | None = config.every_steps
        if steps is None and step_seconds is not None:
            steps = self.interval_seconds() / max(step_seconds, 1e-9)
        measured = Measured(
            record_bytes=record_bytes(layout),
            checkpoint_bytes=layout.snapshot_bytes + layout.static_bytes,
            step_seconds=step_seconds,
            bytes_per_second=self._last.nbytes / max(self._last.seconds, 1e-9) if self._last is not None else None,
            interval_steps=steps,
        )
        mode, reason = choose_mode(config.mode, not_loggable(generation.spec), measured)
        if mode != self._mode:
            _log.info("storage mode %s: %s", mode, reason)
            self._log.pause()
        self._mode, self._mode_reason = mode, reason

    def _begin_snapshot(self, generation: Generation, record: int) -> None:
        layout = generation.layout
        check_budget(layout.snapshot_bytes, 0, None, "a copy of the state on its way to storage")
        region = Region.create("snapshot", layout.snapshot_bytes)
        region.populate_in_background()
        self._last_began = time.monotonic()
        if generation.replica is None:
            self._snapshot = _Snapshot(generation, record, region, {})
            self._order(TakeSnapshot(record), region.fd)
        elif generation.replica.copy_at(record, region):
            self._snapshot = _Snapshot(generation, record, region, {})
        else:
            region.close()

    def snapshot_taken(self, rank: int, message: SnapshotTaken) -> None:
        """A trainer has copied its part, or the order came too late for it."""
        snapshot = self._snapshot
        if snapshot is None or message.record != snapshot.record:
            return
        snapshot.taken[rank] = message
        ranks = set(snapshot.generation.spec.local_ranks)
        if set(snapshot.taken) < ranks:
            return
        if any(part.missed for part in snapshot.taken.values()):
            self._lead = min(2 * self._lead, _LONGEST_LEAD)
            _log.info("the order for a snapshot after record %d came too late; once more", snapshot.record)
            self._drop_snapshot()
            self._last_began = float("-inf")
            return
        first = snapshot.taken[min(ranks)]
        self._copy_seconds = max(part.seconds for part in snapshot.taken.values())
        self._save_snapshot(first.missing, first.plain)

    def replica_copied(self, message: ReplicaCopied) -> None:
        """The redo thread has copied the replica, or could not."""
        if self._snapshot is None or self._snapshot.record != message.record:
            return
        if message.problem:
            step = self._snapshot.generation.newest_step() or 0
            self._drop_snapshot()
            self._fail(step, message.problem)
            return
        self._copy_seconds = 0.0  # hidden behind the slots
        self._save_snapshot(message.missing, message.plain)

    def _save_snapshot(self, missing: tuple[tuple[int, int, str], ...], plain: bytes) -> None:
        snapshot, self._snapshot = self._snapshot, None
        assert snapshot is not None
        generation = snapshot.generation
        self._held_for_writer = [snapshot.region]
        regions = [snapshot.region, snapshot.region]
        self._save(
            generation,
            snapshot.record,
            "snapshot",
            regions + ([generation.static] if generation.static is not None else []),
            by_value_base=generation.layout.state_bytes,
            missing=missing,
            plain=plain,
        )

    def _drop_snapshot(self) -> None:
        snapshot, self._snapshot = self._snapshot, None
        if snapshot is not None:
            if snapshot.generation.replica is not None:
                snapshot.generation.replica.forget_copy()
            snapshot.region.close()

    def forget(self, generation: Generation) -> None:
        """A generation is about to be closed: nothing of it may be used any more."""
        if self._snapshot is not None and self._snapshot.generation is generation:
            self._drop_snapshot()
            self._last_began = float("-inf")
        self._log.forget(generation)
        if self._flushing is not None and self._flushing[0] is generation:
            self._flushing = None

    # When no trainer runs

    def save_held(self, generation: Generation, as_checkpoint: bool) -> Saved | None:
        """Write the newest record that stands still in memory; what was saved, if it is there already.

        Args:
            generation: which holds it.
            as_checkpoint: write it as a whole, though the log could do with a few records.
        """
        if self._config is None or self._timeline is None or self.saving_held:
            return None
        self._drop_snapshot()
        if generation.replica is not None:
            generation.replica.freeze()
        records = generation.reachable()
        if not records:
            return None
        if self._saved_record == (self._timeline, records[-1]):
            return self._last
        if self._mode == "log":
            self._log.collect(generation)
            if not as_checkpoint and self._log.reaches(records[-1]) and self._flushing is None:
                self._flushing = generation, records[-1]
                self._log.flush()
                self._end_flushing()  # where the process cannot even be started
                return None
        static = [generation.static] if generation.static is not None else []
        if 0 not in generation.spec.local_ranks:
            # The node with the parameters may stand one record before or behind: save what it may need of us.
            for record in reversed(records):
                self._save_next(generation, record, "ring", [generation.slots, *static])
            return None
        record = records[-1]
        if generation.replica is None:
            metas = generation.metas_for(record)
            self._save_next(generation, record, "ring", [generation.slots, *static], metas=metas)
            return None
        try:
            generation.replica.advance_to(record)
        except AgentError as error:
            self._fail(generation.newest_step() or 0, str(error))
            return None
        generation.replica.freeze()
        missing, plain = generation.replica.describe_state()
        assert generation.replica_region is not None
        layout = generation.layout
        base = layout.slot_offset(record) + layout.by_value_base(generation.spec.local_ranks[0])
        regions = [generation.replica_region, generation.slots, *static]
        self._save_next(generation, record, "snapshot", regions, by_value_base=base, missing=missing, plain=plain)
        return None

    def retry_later(self) -> None:
        """What is held could not be saved: let :meth:`patience` end once more, after a while."""
        self._retry_at = time.monotonic() + _RETRY_SECONDS

    def _end_flushing(self) -> None:
        """See what has become of the records that were held."""
        if self._flushing is None or self._log.busy:
            return
        generation, record = self._flushing
        if not self._log.covers(record):
            self.save_held(generation, as_checkpoint=True)
        self._flushing = None

    def _save_next(
        self,
        generation: Generation,
        record: int,
        source: Literal["snapshot", "ring"],
        regions: list[Region],
        by_value_base: int = 0,
        missing: tuple[tuple[int, int, str], ...] = (),
        plain: bytes = b"",
        metas: tuple[bytes, ...] = (),
    ) -> None:
        """Save once the writer is done with what it has."""
        save = partial(self._save, generation, record, source, regions, by_value_base, missing, plain, metas)
        self._waiting.append(save)
        self._begin_waiting()

    def _begin_waiting(self) -> None:
        if self._waiting and self._saving is None:
            self._waiting.pop(0)()

    def patience(self, lonely_since: float) -> float:
        """How long to wait for trainers to come back before their state goes to storage."""
        now = time.monotonic()
        due = lonely_since + (_RETURN_SECONDS if now > self._preempted_until else 0.0)
        return max(due, self._retry_at) - now

    # The writer

    def _save(
        self,
        generation: Generation,
        record: int,
        source: Literal["snapshot", "ring"],
        regions: list[Region],
        by_value_base: int = 0,
        missing: tuple[tuple[int, int, str], ...] = (),
        plain: bytes = b"",
        metas: tuple[bytes, ...] = (),
    ) -> None:
        config, spec = self._config, generation.spec
        assert config is not None
        assert self._timeline is not None
        part = Part(
            format=FORMAT_VERSION,
            timeline=self._timeline,
            record=record,
            step=step if (step := generation.step_of(record)) is not None else record,
            world_size=spec.world_size,
            ranks=spec.local_ranks,
            node=self._node,
            full=0 in spec.local_ranks,
            created=time.time(),
            content=spec.content(),
        )
        job = Save(
            url=self._url,
            part=part,
            spec=spec,
            source=source,
            generation=generation.number,
            rank_states=generation.rank_states(record),
            keep_last=config.keep_last,
            keep_every_steps=config.keep_every_steps,
            threads=self._threads,
            by_value_base=by_value_base,
            missing=missing,
            plain=plain,
            metas=metas,
            abandoned=tuple(self._abandoned),
        )
        now = time.monotonic()
        limit = config.timeout_seconds if now > self._preempted_until else config.grace_seconds
        self._saving = job, now + limit
        try:
            if self._writer is None:
                self._writer = self._open_writer()
            self._writer.send(job, [region.fd for region in regions])
        except (AgentError, OSError) as error:
            self.writer_ended(f"the writer process cannot be used: {error}")

    def saved(self, message: Saved) -> None:
        """The writer is done."""
        if self._saving is None:
            return
        job, _ = self._saving
        self._end_saving()
        self._last, self._alarm = message, ""
        self._abandoned.clear()
        self._saved_record = job.part.timeline, job.part.record
        cores = len(os.sched_getaffinity(0))
        self._cost_seconds = self._copy_seconds + message.cpu_seconds / cores
        _log.info("step %d is in storage: %d MiB, %.2f s", message.step, message.nbytes >> 20, message.seconds)
        if job.part.timeline == self._timeline:
            self._log.checkpoint_saved(message.record)
        self._tell(message)
        self._begin_waiting()

    def appended(self, message: Appended) -> None:
        """The process that writes records has done what it was given."""
        before = self._log.written
        self._log.appended(message)
        written = self._log.written
        if written is not None and written != before and self._log.based:
            self._tell(Logged(written[1], written[0]))
        self._end_flushing()

    def record_writer_ended(self, reason: str) -> None:
        """That process is gone."""
        _log.error("records are not logged: %s", reason)
        self._log.writer_ended(reason)
        self._end_flushing()

    def failed(self, message: SaveFailed) -> None:
        """The writer could not do it."""
        if self._saving is not None:
            self._end_saving()
            self._fail(message.step, message.reason)
            self._begin_waiting()

    def writer_ended(self, reason: str) -> None:
        """The writer process is gone."""
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()
        if self._saving is not None:
            job, _ = self._saving
            self._waiting.clear()
            self._abandoned.append(job.part)
            self._end_saving()
            self._fail(job.part.step, reason)

    def _end_saving(self) -> None:
        self._saving = None
        for region in self._held_for_writer:
            region.close()
        self._held_for_writer = []

    def _fail(self, step: int, reason: str) -> None:
        _log.error("step %d is not in storage: %s", step, reason)
        self._alarm = reason
        self._tell(SaveFailed(step, reason))

    def deadline(self) -> float | None:
        """Until when the writing may take (monotonic clock); None while nothing is written."""
        known = [limit for limit in self._deadlines() if limit is not None]
        return min(known, default=None)

    def _deadlines(self) -> tuple[float | None, float | None]:
        checkpoint = self._saving[1] if self._saving is not None else None
        return checkpoint, self._log.deadline(self._preempted_until)

    def look_at_clock(self) -> None:
        """Give up what has taken too long."""
        now = time.monotonic()
        checkpoint, log = self._deadlines()
        if checkpoint is not None and now >= checkpoint:
            self.writer_ended("the storage took too long")
        if log is not None and now >= log:
            self.record_writer_ended("the storage took too long")

    def abort(self) -> None:
        """End the writer process if what it reads is about to change. What it had not committed does not count."""
        self._waiting.clear()
        if self._saving is not None and not self._held_for_writer:
            job, _ = self._saving
            _log.info("the checkpoint of step %d is not needed any more", job.part.step)
            self._abandoned.append(job.part)
            self._end_saving()
            if self._writer is not None:
                self._writer.close()
                self._writer = None

    def close(self) -> None:
        self._waiting.clear()
        self._drop_snapshot()
        self._end_saving()
        self._log.close()
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def status(self) -> StorageStatus | None:
        if self._config is None:
            return None
        config, last = self._config, self._last
        steps = [last.step] if last is not None else []
        if self._log.based and self._log.written is not None:
            steps.append(self._log.written[1])
        return StorageStatus(
            url=self._url,
            step=max(steps, default=None),
            interval_seconds=None if config.every_steps is not None else self.interval_seconds(),
            every_steps=config.every_steps,
            bytes_per_second=last.nbytes / max(last.seconds, 1e-9) if last is not None else None,
            saving=self.saving,
            alarm=self._alarm or self._log.alarm,
            mode=self._mode,
            reason=self._mode_reason,
            batch_steps=self._log.batch_steps if self._mode == "log" else None,
            logged=self._log.taken,
        )
