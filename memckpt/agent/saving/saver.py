"""The agent's decisions about storage: what goes there, and when. Other processes write.

A checkpoint's way to storage is in :mod:`memckpt.agent.saving.checkpoints`. In log mode the records between
checkpoints are written, too (:mod:`memckpt.agent.saving.record_log`).
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Literal

from memckpt.agent.saving.checkpoints import Checkpoints
from memckpt.agent.saving.jobs import JobMaker
from memckpt.agent.saving.run_storage import RunStorage
from memckpt.agent.saving.schedule import Schedule, alone
from memckpt.agent.saving.snapshots import Answer, Done, Export, Peers, Run, Snapshot, carry_on
from memckpt.config import StorageConfig
from memckpt.errors import AgentError
from memckpt.journal.events import Decision
from memckpt.memory.generation import Generation
from memckpt.processes.attempt import Attempt
from memckpt.processes.backoff import Backoff
from memckpt.processes.helper_process import WriterProcess
from memckpt.protocol.channel import AgentToTrainer
from memckpt.protocol.status import StorageStatus
from memckpt.protocol.storing import (
    Announce,
    Announced,
    Appended,
    LookForAnnounced,
    LookForRoom,
    Room,
    Saved,
    SaveFailed,
    WriterToAgent,
)
from memckpt.protocol.trainer import Observed
from memckpt.state.records import Timeline

_log = logging.getLogger("memckpt.agent")
#: Seconds in which a trainer that died may be back: then memory serves, and nothing need be written.
_RETURN_SECONDS = 3.0
#: Seconds before what is held with no trainer, and could not be saved, is tried again: a disk may have room.
_RETRY_SECONDS = 60.0
#: Seconds, at most, before it is tried again in a grace period.
_HURRIED_SECONDS = 4.0

#: Starts a process that writes; its messages go to the first function, the reason of its end to the second.
StartWriter = Callable[
    [Literal["checkpoints", "records"], Callable[[WriterToAgent], None], Callable[[str], None]], WriterProcess
]


class Saver:
    """Belongs to the agent's event loop. It waits for a replica that has to stand still, and for nothing else.

    Args:
        node: this node's name, or the name of its parts of a checkpoint where others of the same node have theirs.
        order: sends a message, with a descriptor, to all trainers of the attempt.
        tell: sends them one without.
        start_writer: starts a process that writes.
        failed: called when a checkpoint could not be written, and nothing that is held is still to be written.
        announce: tells the savers of other shards on this node that a checkpoint is taken after a record.
        decided: gets each change of the interval that measurements have made.
        hurried: tells them how many records ahead an order has to be.
    """

    def __init__(
        self,
        node: str,
        order: Callable[[AgentToTrainer, int], None],
        tell: Callable[[AgentToTrainer], None],
        start_writer: StartWriter,
        failed: Callable[[], None],
        announce: Callable[[int], None] = lambda record: None,
        hurried: Callable[[int], None] = lambda lead: None,
        decided: Callable[[Decision], None] = lambda decision: None,
    ) -> None:
        self._tell_siblings = announce
        self._schedule = Schedule(self._announce, self._look_for_announced, decided)
        self._storage = RunStorage(
            node, self._schedule, lambda: start_writer("records", self._records_said, self._records_ended), tell
        )
        self._log = self._storage.log
        self._checkpoints = Checkpoints(
            node,
            self._storage,
            order,
            lambda: start_writer("checkpoints", self._checkpoints_said, self._jobs.ended),
            failed,
            hurried,
        )
        self.snapshots, self._jobs = self._checkpoints.snapshots, self._checkpoints.jobs
        self._retry_at = float("-inf")
        #: Pauses before what could not be saved is tried again in a grace period.
        self._hurried = Backoff(at_once=0, longest=_HURRIED_SECONDS, steady=math.inf)
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
        """Take a new attempt's configuration (None: nothing is written), and the timeline it trains on.

        `claimed`: the run has claimed its store, so that one without a claim is not it.
        """
        if timeline != self._storage.timeline:
            self._retry_at = float("-inf")
            self._flushing = None
            self._checkpoints.held.clear()
        self._storage.configure(config, run_dir, timeline, claimed)
        node = self._checkpoints.maker.node
        self._checkpoints.maker = JobMaker(node, config or StorageConfig(), timeline, threads, search_path)
        if config is not None:
            self._jobs.warm()

    @property
    def attempt_number(self) -> int:
        """Number of the attempt whose parts are written; 0: none is known."""
        timeline = self._checkpoints.maker.timeline
        return timeline.number if timeline is not None else 0

    def configure_like(self, other: Saver, name: str) -> None:
        """Write for the attempt that another saver knows, under this name; for ranks that are not here."""
        self._storage.forget_saved()
        self._checkpoints.maker = replace(other._checkpoints.maker, node=name)

    def rename(self, name: str) -> None:
        """Take a name for the parts of the next attempt, which :meth:`configure` then tells of."""
        self._checkpoints.maker = replace(self._checkpoints.maker, node=name)
        self._log.rename(name)

    def resumed(self, record: int, follows: Timeline | None) -> None:
        """Note that the attempt goes on behind a record that memory holds, made on the timeline `follows`."""
        if follows is not None:
            self._log.branch(record, follows)

    def begin_anew(self) -> None:
        """Note that the attempt goes on behind nothing that memory holds."""
        self._log.begin_anew()

    @property
    def enabled(self) -> bool:
        return self._storage.config is not None

    @property
    def saving(self) -> bool:
        return self._jobs.busy or self._flushing is not None or bool(self._checkpoints.held)

    @property
    def alarm(self) -> str:
        """Why the last checkpoint could not be written; empty if it could."""
        return self._storage.alarm

    def observe(self, observed: Observed) -> None:
        """Follow what the job has measured: the interval of checkpoints depends on it."""
        self._schedule.observe(observed)

    def preempt(self, ending: bool = False) -> bool:
        """Save at once, within the grace period: a trainer got SIGTERM, or with `ending` the agent.

        Returns:
            False where nothing is to be written.
        """
        if self._storage.config is None:
            return False
        self._schedule.preempt(self._storage.config.grace_seconds, ending)
        self._hurried.reset()
        return True

    @property
    def preempted_until(self) -> float | None:
        """End of the grace period that runs (monotonic clock); None: none does."""
        return self._schedule.preempted_until if self._schedule.preempted else None

    # While training runs

    def after_commit(self, generation: Generation, attempt: Attempt) -> None:
        """Log a record that was committed, and begin with a checkpoint if one is due."""
        if not generation.complete:
            return
        self._storage.log_records(generation)
        if self._checkpoints.busy:
            return
        if self._checkpoints.asked:
            export = self._checkpoints.asked.popleft()
            record = export.record or attempt.newest_record + self.snapshots.lead
            carry_on(self._checkpoints.save_ahead(export, generation, record))
            return
        if self._storage.look_is_due():
            self._jobs.look_into_store(LookForRoom(self._storage.url, self._storage.witness))
        due = self._storage.due_record(generation, attempt, self.snapshots.lead)
        if due is not None:
            carry_on(self._checkpoints.save_ahead(Run(self._storage.url), generation, due))

    def _announce(self, record: int, elsewhere: bool) -> None:
        storage = self._storage
        assert storage.timeline is not None
        self._tell_siblings(record)
        if elsewhere:
            self._jobs.announce(Announce(storage.url, storage.timeline, record, storage.witness))

    def hurry(self, lead: int) -> None:
        """Give orders so many records ahead, if not earlier: parts of one checkpoint are chosen alike."""
        self.snapshots.lead = max(self.snapshots.lead, lead)

    def announced(self, record: int) -> None:
        """Note the record after which the saver of the first rank takes a checkpoint."""
        self._schedule.announced(record)

    def _look_for_announced(self) -> None:
        assert self._storage.timeline is not None
        self._jobs.look_into_store(LookForAnnounced(self._storage.url, self._storage.timeline))

    def copy_for_peers(self, generation: Generation, record: int, taken: Callable[[Snapshot | None], None]) -> None:
        """Have the state after a record that lies ahead copied; `taken` gets the copy, which it then owns, or None."""
        carry_on(self._checkpoints.copy_for_peers(generation, record, taken))

    # When no trainer runs

    def save_held(self, generation: Generation, as_checkpoint: bool, record: int | None = None) -> None:
        """Write the newest record that stands still in memory, unless it is there, or on its way, already.

        Args:
            generation: the one that is held.
            as_checkpoint: write it as a whole, though the log could do with a few records: training has ended.
            record: the one that all ranks of the job have, where that is known; a later one is not written.
        """
        storage, spec = self._storage, generation.spec
        if storage.config is None or storage.timeline is None:
            return
        self.snapshots.drop(again=True)
        records = [one for one in generation.standing_still() if record is None or one <= record]
        committed = generation.common
        if generation.ring.disagreed(committed):
            _log.warning("record %d does not go to storage: its ranks do not agree on what is held once", committed)
        # A commit may have come since: an agent that is told to end takes it while it writes the one before.
        coming = self._checkpoints.newest_held or 0
        records = [one for one in records if one > coming]
        if not records or storage.has(records[-1]):
            return
        if storage.mode == "log":
            self._log.collect(generation)
            # One of several nodes knows its own part only: a checkpoint is the surer way.
            enough = alone(generation) and self._log.reaches(records[-1])
            if not as_checkpoint and enough and self._flushing is None:
                carry_on(self._flush_held(generation, records[-1]))
                return
        if not spec.full:
            # The node with the parameters may stand one record before or behind: save what it may need of us.
            for each in reversed(records):
                carry_on(self._checkpoints.save_standing(Run(storage.url), generation, each))
            return
        # Where others hold other shards, they may stand one record before; a replica goes forward only.
        sharded = len(spec.serves) < spec.world_size
        newest = records[-1 - (sharded and record is None) :]
        self._checkpoints.held.extend((generation, each, as_checkpoint) for each in newest)
        carry_on(self._checkpoints.save_all_held())

    async def _flush_held(self, generation: Generation, record: int) -> None:
        """Save what stands still as records of the log; as a checkpoint if that fails."""
        flushed: Answer[None] = Answer()
        self._flushing = generation, flushed
        self._log.flush()
        self._look_at_flush()  # there is nothing to wait for where the process cannot even be started
        await flushed
        self._flushing = None
        if not self._log.covers(record):
            self.save_held(generation, as_checkpoint=True)

    def _look_at_flush(self) -> None:
        if self._flushing is not None and not self._log.busy:
            self._flushing[1].give(None)

    def save_record(self, generation: Generation, record: int, url: str, done: Done) -> None:
        """Write one record that stands still in memory to any store; `done` gets the result."""
        if url == self._storage.url and self._storage.last is not None and self._storage.has(record):
            done(self._storage.last)
        else:
            carry_on(self._checkpoints.save_standing(Export(url, done), generation, record))

    def save_to(self, url: str, done: Done, generation: Generation, training: bool, record: int | None = None) -> None:
        """Write the newest record to a place that a command or the script has named; training goes on beside it.

        Args:
            url: of an empty store.
            done: called once, with the result.
            generation: the one that is held.
            training: whether a trainer runs.
            record: the one to write, where other groups of ranks write the same; None: the newest.
        """
        if self._checkpoints.asked:
            done(SaveFailed(0, "another export of this state is still being written; try again when it is there"))
        else:
            self._checkpoints.asked.append(Export(url, done, record))  # from the next commit on
            if not training:
                self.save_asked(generation)

    def save_asked(self, generation: Generation, record: int | None = None) -> None:
        """Write what stands still to the places that were asked for; no trainer runs.

        Args:
            generation: the one that is held.
            record: the one that all ranks of the job have, where that is known.
        """
        if isinstance(self.snapshots.asker, (Export, Peers)):
            self.snapshots.drop(again=True)  # its order has died with the trainers
        while self._checkpoints.asked:
            export = self._checkpoints.asked.popleft()
            if records := generation.standing_still():
                newest = records[-1] if record is None else record
                carry_on(self._checkpoints.save_standing(export, generation, newest))
            else:
                export.done(SaveFailed(0, "no step can be produced from memory"))

    def retry_later(self) -> None:
        """Have what is held saved once more after a while, in a grace period soon: it could not be."""
        pause = self._hurried.died() if self._schedule.preempted else _RETRY_SECONDS
        self._retry_at = time.monotonic() + pause

    def save_at(self, idle_since: float) -> float:
        """Until when trainers may come back before their state goes to storage (monotonic clock)."""
        return max(idle_since + (0.0 if self._schedule.preempted else _RETURN_SECONDS), self._retry_at)

    # The processes that write

    def _checkpoints_said(self, message: WriterToAgent) -> None:
        match message:
            case Saved() | SaveFailed():
                self._jobs.finished(message)
            case Announced():
                self._jobs.looked()
                if message.timeline == self._storage.timeline:
                    self._schedule.announced(message.record)
            case Room():
                self._jobs.looked()
                self._storage.found_room(message)
            case _:
                raise AgentError(f"it sent an unexpected {type(message).__name__}")

    def _records_said(self, message: WriterToAgent) -> None:
        if not isinstance(message, Appended):
            raise AgentError(f"it sent an unexpected {type(message).__name__}")
        self._storage.appended(message)
        self._look_at_flush()

    def _records_ended(self, reason: str) -> None:
        _log.error("records are not logged: %s", reason)
        self._log.writer_ended(reason)
        self._look_at_flush()

    def _deadlines(self) -> list[tuple[float, Callable[[str], None]]]:
        """Times by which processes have to be done (monotonic clock), and what ends them."""
        log, writing = self._log.deadline(self._schedule.preempted_until), self._jobs.deadline
        if writing is not None:  # it may have begun before the end was ordered
            writing = min(writing, self._schedule.ends_at)
        both = [(writing, self._jobs.ended), (log, self._records_ended)]
        return [(limit, end) for limit, end in both if limit is not None]

    def deadline(self) -> float | None:
        """Time by which the writing has to be done (monotonic clock); None while nothing is written."""
        return min((limit for limit, _ in self._deadlines()), default=None)

    def look_at_clock(self) -> None:
        """End processes that have taken too long."""
        now = time.monotonic()
        for limit, end in self._deadlines():
            if now >= limit:
                end("the storage took too long")

    def drop_generation(self, generation: Generation) -> None:
        """Use nothing more of a generation that is about to be closed."""
        self._checkpoints.drop_generation(generation)
        self._log.drop_generation(generation)
        if self._flushing is not None and self._flushing[0] is generation:
            self._flushing = None

    def abort(self) -> None:
        """Write nothing more from what is held: it is about to change."""
        self._flushing = None
        self._checkpoints.abort()

    def close(self) -> None:
        self._checkpoints.close()
        self._log.close()

    def status(self, newest_step: int | None) -> StorageStatus | None:
        """What the command line shows; `newest_step` is the newest that memory holds."""
        return self._storage.status(newest_step, self.snapshots.lead, self.saving)
