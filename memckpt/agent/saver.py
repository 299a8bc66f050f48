"""When a checkpoint goes to storage, and what it is made of. The writing itself is the writer process's.

While training runs, a checkpoint begins with a *snapshot*, a copy of the whole state in memory: the redo thread copies
the replica between two records (eager), or the trainers copy their own state at a commit (lazy), which costs them one
copy of the state and no more. When no trainer runs, nothing is copied: the replica, or the ring, stands still.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from memckpt.agent.attempt import Attempt
from memckpt.agent.generation import Generation
from memckpt.agent.messages import (
    Message,
    ReplicaCopied,
    Save,
    Saved,
    SaveFailed,
    SnapshotTaken,
    StorageStatus,
    TakeSnapshot,
)
from memckpt.config import StorageConfig
from memckpt.errors import AgentError, MemckptError
from memckpt.memory.budget import check_budget
from memckpt.memory.region import Region
from memckpt.state.records import Timeline
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
    """Belongs to the agent's event loop; nothing here waits.

    Args:
        node: this node's name.
        order: sends a message, with a descriptor, to all trainers of the attempt.
        tell: sends them one without.
        open_writer: starts the writer process.
    """

    def __init__(
        self,
        node: str,
        order: Callable[[Message, int], None],
        tell: Callable[[Message], None],
        open_writer: Callable[[], WriterProcess],
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

    @property
    def enabled(self) -> bool:
        return self._config is not None

    @property
    def saving(self) -> bool:
        return self._saving is not None or bool(self._waiting)

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
        """A record was committed: order a snapshot if one is due."""
        config = self._config
        if config is None or self._snapshot is not None or self._saving is not None or not generation.complete:
            return
        now = time.monotonic()
        every_steps = None if self._at_once else config.every_steps
        due = self._at_once or now - self._last_began >= self.interval_seconds()
        if every_steps is None and not due:
            return
        if every_steps is None and generation.spec.world_size > len(generation.spec.local_ranks):
            return  # nodes would choose different records
        self._at_once = False
        record = self._next_record(generation, attempt, every_steps)
        try:
            self._begin_snapshot(generation, record)
        except MemckptError as error:
            self._fail(generation.newest_step() or 0, str(error))

    def _next_record(self, generation: Generation, attempt: Attempt, every_steps: int | None) -> int:
        """A record so far ahead that every rank learns of it in time."""
        record = max(member.next_record for member in attempt.members.values()) - 1 + self._lead
        if every_steps is None:
            return record
        # A record's number may differ from the framework's step; the difference stays as it is while training runs.
        newest = max(generation.committed.values())
        offset = (generation.step_of(newest) or newest) - newest
        step = record + offset
        return record + (-step) % every_steps

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
        """The redo thread has copied the replica."""
        if self._snapshot is not None and self._snapshot.record == message.record:
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

    # When no trainer runs

    def save_held(self, generation: Generation) -> Saved | None:
        """Write the newest record that stands still in memory; what was saved, if it is there already."""
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

    def _save_next(
        self, generation: Generation, record: int, source: str, regions: list[Region], **rest: object
    ) -> None:
        """Save once the writer is done with what it has."""
        self._waiting.append(partial(self._save, generation, record, source, regions, **rest))
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

    def _save(self, generation: Generation, record: int, source: str, regions: list[Region], **rest: object) -> None:
        config, spec = self._config, generation.spec
        assert config is not None
        assert self._timeline is not None
        part = Part(
            format=FORMAT_VERSION,
            timeline=self._timeline,
            record=record,
            step=generation.step_of(record) or record,
            world_size=spec.world_size,
            ranks=spec.local_ranks,
            node=self._node,
            full=0 in spec.local_ranks,
            created=time.time(),
        )
        job = Save(
            url=self._url,
            part=part,
            spec=spec,
            source=source,  # type: ignore[arg-type]
            generation=generation.number,
            rank_states=generation.rank_states(record),
            keep_last=config.keep_last,
            keep_every_steps=config.keep_every_steps,
            threads=self._threads,
            abandoned=tuple(self._abandoned),
            **rest,  # type: ignore[arg-type]
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
        self._tell(message)
        self._begin_waiting()

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
        """Until when the writer may take (monotonic clock); None while it does nothing."""
        return self._saving[1] if self._saving is not None else None

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
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def status(self) -> StorageStatus | None:
        if self._config is None:
            return None
        every, last = self._config.every_steps, self._last
        return StorageStatus(
            url=self._url,
            step=last.step if last is not None else None,
            interval_seconds=None if every is not None else self.interval_seconds(),
            every_steps=every,
            bytes_per_second=last.nbytes / max(last.seconds, 1e-9) if last is not None else None,
            saving=self.saving,
            alarm=self._alarm,
        )
