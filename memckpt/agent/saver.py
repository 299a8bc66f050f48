"""What goes to storage and when: checkpoints, and the log between them. The writing itself is done by other processes.

While training runs, a checkpoint begins with a snapshot (:mod:`memckpt.agent.snapshots`), which costs trainers one copy
of the state at most. When no trainer runs, nothing is copied: the replica, or the ring, stands still. In log mode the
records between checkpoints are written, too (:mod:`memckpt.agent.record_log`).
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from memckpt.agent.attempt import Attempt
from memckpt.agent.generation import Generation
from memckpt.agent.messages import (
    Announced,
    Appended,
    Logged,
    Message,
    ReplicaCopied,
    Save,
    Saved,
    SaveFailed,
    SnapshotTaken,
    StorageStatus,
)
from memckpt.agent.record_log import RecordLog, record_bytes
from memckpt.agent.snapshots import Snapshot, Snapshots
from memckpt.agent.storage_mode import Measured, Pace, choose_mode
from memckpt.agent.writer_jobs import Done, Job, WriterJobs
from memckpt.config import StorageConfig, StorageMode
from memckpt.errors import AgentError, MemckptError
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
#: How many records before a snapshot its memory is taken and its order given, where steps decide.
_ORDER_RECORDS = 16
#: With several nodes: how far ahead the first rank's announces a checkpoint, and how often the others look.
_ANNOUNCE_SECONDS, _LOOK_SECONDS = 8.0, 2.0


class Saver:
    """Belongs to the agent's event loop. Nothing here waits for storage; a replica that is busy with a record is
    waited for where it must stand still.

    Args:
        node: this node's name.
        order: sends a message, with a descriptor, to all trainers of the attempt.
        tell: sends them one without.
        open_writer: starts the process that writes checkpoints.
        open_record_writer: starts the one that writes records.
        failed: called when a checkpoint could not be written.
    """

    def __init__(
        self,
        node: str,
        order: Callable[[Message, int], None],
        tell: Callable[[Message], None],
        open_writer: Callable[[], WriterProcess],
        open_record_writer: Callable[[], WriterProcess],
        failed: Callable[[], None],
    ) -> None:
        self._node = node
        self._failed = failed
        self._tell = tell
        self._jobs = WriterJobs(open_writer)
        self._snapshots = Snapshots(order, self._save_snapshot, self._again)
        self._log = RecordLog(node, open_record_writer)
        self._config: StorageConfig | None = None
        self._url = ""
        self._threads = 1
        self._timeline: Timeline | None = None
        self._mode: StorageMode = "replica"
        self._mode_reason = ""
        #: The generation that the mode was chosen for.
        self._mode_of: int | None = None
        self._pace = Pace()
        self._last_began = time.monotonic()
        self._copy_seconds = self._cost_seconds = 0.0
        self._last: Saved | None = None
        self._saved_record: tuple[Timeline, int] | None = None
        self._alarm = ""
        self._preempted_until = float("-inf")
        self._retry_at = float("-inf")
        self._at_once = False
        #: Where, and for whom, somebody wants a checkpoint of their own.
        self._asked: tuple[str, Done] | None = None
        #: What was left in memory, up to this record, goes to storage as records; as a checkpoint if that fails.
        self._flushing: tuple[Generation, int] | None = None
        #: With several nodes: the record that the first rank's has announced, and when it was asked for last.
        self._announced: int | None = None
        self._looked_at = float("-inf")

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
            self._announced = None
            self._mode_of = None
        if config is None:
            self._log.pause()
        else:
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
        return self._jobs.busy or self._flushing is not None

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
        """A record was committed: log it, and begin with a checkpoint if one is due."""
        if not generation.complete:
            return
        if self._config is not None:
            self._log_records(generation)
        if self._snapshots.busy or self._jobs.busy:
            return
        ahead = max(member.next_record for member in attempt.members.values()) - 1 + self._snapshots.lead
        if self._asked is not None:
            (url, done), self._asked = self._asked, None
            self._begin_snapshot(generation, ahead, url, done)
        elif self._config is not None and (record := self._due_record(generation, ahead, self._config)) is not None:
            self._at_once = False
            self._choose_mode(generation, self._config)
            self._last_began = time.monotonic()
            self._begin_snapshot(generation, record, self._url, self._checkpoint_done)

    def _log_records(self, generation: Generation) -> None:
        assert self._config is not None
        self._pace.note(min(generation.committed.values()), time.monotonic())
        if self._mode_of != generation.number:
            self._choose_mode(generation, self._config)
        if self._mode == "log":
            self._log.collect(generation)
            if self._at_once and self._log.based and _alone(generation):
                self._at_once = False
                self._log.flush()

    def _due_record(self, generation: Generation, ahead: int, config: StorageConfig) -> int | None:
        """After which record to take a snapshot, `ahead` or later, so that every rank learns of it in time; or None."""
        alone = _alone(generation)
        # Without a checkpoint to redo it on, the log is of no use yet.
        unbased = self._mode == "log" and not self._log.based
        if config.every_steps is not None and not (alone and (self._at_once or unbased)):
            # A record's number may differ from the framework's step; the difference stays while training runs.
            newest = max(generation.committed.values())
            step = generation.step_of(newest)
            offset = step - newest if step is not None else 0
            record = ahead + (-(ahead + offset)) % config.every_steps
            # Not long before: memory for the copy is taken when it is ordered, and somebody else may want one.
            return record if record - ahead <= _ORDER_RECORDS + self._snapshots.lead else None
        if not alone and 0 not in generation.spec.local_ranks:
            return self._announced_record(ahead)
        now = time.monotonic()
        wait = self._cost_seconds / config.overhead if unbased else self.interval_seconds()
        if not self._at_once and now - self._last_began < wait:
            return None
        return ahead if alone else self._announce(ahead)

    # Several nodes: the first rank's agent says which record, long before

    def _announce(self, ahead: int) -> int | None:
        assert self._timeline is not None
        seconds = self._pace.seconds
        if seconds is None:
            return None
        record = ahead + math.ceil(_ANNOUNCE_SECONDS / max(seconds, 1e-6))
        self._jobs.announce(self._url, self._timeline, record)
        return record

    def _announced_record(self, ahead: int) -> int | None:
        """What has been announced, if it can still be done; looks for news now and then."""
        assert self._timeline is not None
        record, self._announced = self._announced, None
        now = time.monotonic()
        if record is not None and record >= ahead:
            return record
        if now - self._looked_at >= _LOOK_SECONDS:
            self._looked_at = now
            self._jobs.look(self._url, self._timeline)
        return None

    def announced(self, message: Announced) -> None:
        """The writer process has looked."""
        self._jobs.looked()
        if message.timeline == self._timeline:
            self._announced = message.record

    # Snapshots

    def _choose_mode(self, generation: Generation, config: StorageConfig) -> None:
        layout, last, step_seconds = generation.layout, self._last, self._pace.seconds
        steps: float | None = config.every_steps
        if steps is None and step_seconds is not None:
            steps = self.interval_seconds() / max(step_seconds, 1e-9)
        measured = Measured(
            record_bytes=record_bytes(layout),
            checkpoint_bytes=layout.snapshot_bytes + layout.static_bytes,
            step_seconds=step_seconds,
            bytes_per_second=last.nbytes / max(last.seconds, 1e-9) if last is not None else None,
            interval_steps=steps,
        )
        impossible = not_loggable(generation.spec)
        if config.mode == "auto" and not _alone(generation):
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

    def _begin_snapshot(self, generation: Generation, record: int, url: str, done: Done) -> None:
        try:
            if not self._snapshots.begin(generation, record, url, done):
                self._want_again(url, done)
        except (MemckptError, OSError, RuntimeError) as error:
            done(SaveFailed(generation.newest_step() or 0, f"no snapshot can be taken: {error}"))

    def _again(self, snapshot: Snapshot) -> None:
        self._want_again(snapshot.url, snapshot.done)

    def _want_again(self, url: str, done: Done) -> None:
        if done == self._checkpoint_done:
            self._last_began = float("-inf")
        else:
            self._asked = url, done

    def snapshot_taken(self, rank: int, message: SnapshotTaken) -> None:
        """A trainer has copied its part of a snapshot, or could not."""
        self._snapshots.taken(rank, message)

    def replica_copied(self, message: ReplicaCopied) -> None:
        """The redo thread has copied the replica, or could not."""
        self._snapshots.copied(message)

    def _save_snapshot(self, snapshot: Snapshot) -> None:
        generation = snapshot.generation
        if not generation.knows(snapshot.record):
            # So late that its rank states have been let go of.
            snapshot.region.close()
            self._snapshots.hurry()
            self._again(snapshot)
            return
        save = self._describe(
            generation,
            snapshot.record,
            "snapshot",
            snapshot.url,
            by_value_base=generation.layout.state_bytes,
            missing=snapshot.missing,
            plain=snapshot.plain,
        )
        if snapshot.done == self._checkpoint_done:
            self._copy_seconds = snapshot.seconds
        regions = _with_static(generation, [snapshot.region, snapshot.region])
        waited = snapshot.done != self._checkpoint_done
        self._jobs.submit(Job(save, regions, snapshot.region, self._limit_seconds, snapshot.done, waited))

    def forget(self, generation: Generation) -> None:
        """A generation is about to be closed: nothing of it may be used any more."""
        self._snapshots.drop_of(generation)
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
        if self._config is None or self._timeline is None or self._jobs.reads_held(self._checkpoint_done):
            return None
        self._snapshots.drop(again=True)
        records = _standing_still(generation)
        if not records:
            return None
        if self._saved_record == (self._timeline, records[-1]):
            return self._last
        if self._mode == "log":
            self._log.collect(generation)
            # Of several nodes each knows of its own part only: a checkpoint is the surer way.
            enough = _alone(generation) and self._log.reaches(records[-1])
            if not as_checkpoint and enough and self._flushing is None:
                self._flushing = generation, records[-1]
                self._log.flush()
                self._end_flushing()  # where the process cannot even be started
                return None
        if 0 in generation.spec.local_ranks:
            self._save_still(generation, records[-1], self._url, self._checkpoint_done)
            return None
        # The node with the parameters may stand one record before or behind: save what it may need of us.
        for record in reversed(records):
            save = self._describe(generation, record, "ring", self._url)
            regions = _with_static(generation, [generation.slots])
            self._jobs.submit(Job(save, regions, None, self._limit_seconds, self._checkpoint_done))
        return None

    def _save_still(self, generation: Generation, record: int, url: str, done: Done) -> None:
        """Save from the replica, or the ring, while no trainer changes it."""
        if generation.replica is None:
            save = self._describe(generation, record, "ring", url, metas=generation.metas_for(record))
            regions = _with_static(generation, [generation.slots])
            waited = done != self._checkpoint_done
            self._jobs.submit(Job(save, regions, None, self._limit_seconds, done, waited))
            return
        try:
            generation.replica.advance_to(record)
        except AgentError as error:
            done(SaveFailed(generation.newest_step() or 0, str(error)))
            return
        generation.replica.freeze()
        missing, plain = generation.replica.describe_state()
        assert generation.replica_region is not None
        layout = generation.layout
        base = layout.slot_offset(record) + layout.by_value_base(generation.spec.local_ranks[0])
        save = self._describe(generation, record, "snapshot", url, by_value_base=base, missing=missing, plain=plain)
        regions = _with_static(generation, [generation.replica_region, generation.slots])
        self._jobs.submit(Job(save, regions, None, self._limit_seconds, done, done != self._checkpoint_done))

    def save_to(self, url: str, done: Done, generation: Generation, training: bool) -> None:
        """Write the newest record to a place that somebody has named; training goes on beside it.

        Args:
            url: of an empty store.
            done: called once, with what has become of it.
            generation: which holds it.
            training: whether a trainer runs.
        """
        if 0 not in generation.spec.local_ranks:
            done(SaveFailed(0, "this node does not hold the parameters; ask the node of rank 0"))
        elif self._asked is not None:
            done(SaveFailed(0, "somebody else is waiting for the same; try again"))
        elif training:
            self._asked = url, done  # from the next commit on
        elif records := _standing_still(generation):
            self._save_still(generation, records[-1], url, done)
        else:
            done(SaveFailed(0, "no step can be produced from memory"))

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

    def patience(self, lonely_since: float) -> float:
        """How long to wait for trainers to come back before their state goes to storage."""
        now = time.monotonic()
        due = lonely_since + (_RETURN_SECONDS if now > self._preempted_until else 0.0)
        return max(due, self._retry_at) - now

    # The processes that write

    def _describe(
        self,
        generation: Generation,
        record: int,
        source: Literal["snapshot", "ring"],
        url: str,
        *,
        by_value_base: int = 0,
        missing: tuple[tuple[int, int, str], ...] = (),
        plain: bytes = b"",
        metas: tuple[bytes, ...] = (),
    ) -> Save:
        config, spec = self._config or StorageConfig(), generation.spec
        assert self._timeline is not None
        step = generation.step_of(record)
        part = Part(
            format=FORMAT_VERSION,
            timeline=self._timeline,
            record=record,
            step=step if step is not None else record,
            world_size=spec.world_size,
            ranks=spec.local_ranks,
            node=self._node,
            full=0 in spec.local_ranks,
            created=time.time(),
            content=spec.content(),
        )
        return Save(
            url=url,
            part=part,
            spec=spec,
            source=source,
            generation=generation.number,
            rank_states=generation.rank_states(record),
            keep_last=config.keep_last,
            keep_every_steps=config.keep_every_steps,
            by_value_base=by_value_base,
            missing=missing,
            plain=plain,
            metas=metas,
            threads=self._threads,
        )

    def _limit_seconds(self) -> float:
        config = self._config or StorageConfig()
        return config.timeout_seconds if time.monotonic() > self._preempted_until else config.grace_seconds

    def writer_done(self, message: Saved | SaveFailed) -> None:
        """The writer process has done what it was given, or could not."""
        self._jobs.finished(message)

    def writer_ended(self, reason: str) -> None:
        """The writer process is gone."""
        self._jobs.ended(reason)

    def _checkpoint_done(self, message: Saved | SaveFailed) -> None:
        """A checkpoint of this run's own tier is there, or not."""
        if isinstance(message, SaveFailed):
            _log.error("step %d is not in storage: %s", message.step, message.reason)
            self._alarm = message.reason
            self._tell(message)
            self._failed()
            return
        self._last, self._alarm = message, ""
        if message.timeline is not None and message.timeline == self._timeline:
            self._saved_record = message.timeline, message.record
            self._log.checkpoint_saved(message.record)
        self._cost_seconds = self._copy_seconds + message.cpu_seconds / len(os.sched_getaffinity(0))
        _log.info("step %d is in storage: %d MiB, %.2f s", message.step, message.nbytes >> 20, message.seconds)
        self._tell(message)

    def appended(self, message: Appended) -> None:
        """The process that writes records has done what it was given."""
        before = self._log.written
        self._log.appended(message)
        if message.hole and time.monotonic() < self._preempted_until:
            self._at_once = True  # what was to be flushed is not there
        written = self._log.written
        if written is not None and written != before and self._log.based:
            self._tell(Logged(written[1], written[0]))
        self._end_flushing()

    def record_writer_ended(self, reason: str) -> None:
        """That process is gone."""
        _log.error("records are not logged: %s", reason)
        self._log.writer_ended(reason)
        self._end_flushing()

    def deadline(self) -> float | None:
        """Until when the writing may take (monotonic clock); None while nothing is written."""
        limits = (self._jobs.deadline, self._log.deadline(self._preempted_until))
        return min((limit for limit in limits if limit is not None), default=None)

    def look_at_clock(self) -> None:
        """Give up what has taken too long."""
        now = time.monotonic()
        checkpoint, log = self._jobs.deadline, self._log.deadline(self._preempted_until)
        if checkpoint is not None and now >= checkpoint:
            self.writer_ended("the storage took too long")
        if log is not None and now >= log:
            self.record_writer_ended("the storage took too long")

    def abort(self) -> None:
        """What is held is about to change: nothing is written from it any more."""
        self._flushing = None
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
        at_most = self._loses_at_most(config)
        if at_most is not None and stored is not None and newest_step is not None:
            at_most = max(at_most, newest_step - stored)
        return StorageStatus(
            url=self._url,
            step=stored,
            interval_seconds=None if config.every_steps is not None else self.interval_seconds(),
            every_steps=config.every_steps,
            bytes_per_second=last.nbytes / max(last.seconds, 1e-9) if last is not None else None,
            saving=self.saving,
            alarm=self._alarm or self._log.alarm,
            mode=self._mode,
            reason=self._mode_reason,
            batch_steps=self._log.batch_steps if self._mode == "log" else None,
            logged=self._log.taken,
            loses_at_most=at_most,
        )

    def _loses_at_most(self, config: StorageConfig) -> int | None:
        """Steps that are gone with this node's memory, at most: an interval, and what passes until one is written."""
        if self._mode == "log" and self._log.based:
            return self._log.unwritten_at_most
        last, seconds = self._last, self._pace.seconds
        if last is None or seconds is None:
            return None
        # Twice the last time: storage is not always as fast.
        writing = math.ceil((self._copy_seconds + 2 * last.seconds) / max(seconds, 1e-6)) + self._snapshots.lead
        interval = config.every_steps or math.ceil(self.interval_seconds() / max(seconds, 1e-6))
        return interval + writing


def _with_static(generation: Generation, regions: list[Region]) -> list[Region]:
    return [*regions, generation.static] if generation.static is not None else regions


def _alone(generation: Generation) -> bool:
    """Whether all ranks run on this node."""
    return generation.spec.world_size == len(generation.spec.local_ranks)


def _standing_still(generation: Generation) -> list[int]:
    """The records that can be produced while no trainer runs."""
    if generation.replica is not None:
        generation.replica.freeze()
    return generation.reachable()
