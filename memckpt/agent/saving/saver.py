"""The agent's decisions about storage: what goes there, and when. Other processes write."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from memckpt.agent.saving.checkpoints import Checkpoints
from memckpt.agent.saving.record_log import RecordLog
from memckpt.agent.saving.schedule import alone
from memckpt.agent.saving.state_copies import Answer, Done, Export, Peers, Run, StateCopy, carry_on
from memckpt.agent.unit_host import Host, Siblings
from memckpt.errors import AgentError
from memckpt.memory.generation import Generation
from memckpt.processes.attempt import Attempt
from memckpt.processes.backoff import Backoff
from memckpt.protocol.status import StorageStatus
from memckpt.protocol.storing import Appended, Logged, SaveFailed, WriterToAgent
from memckpt.protocol.trainer import Configure
from memckpt.state.records import RankGroup
from memckpt.storage.batch import not_loggable

_log = logging.getLogger("memckpt.agent")
#: Seconds in which a trainer that died may be back: then memory serves, and nothing need be written.
_RETURN_SECONDS = 3.0
#: Seconds before what is held with no trainer, and could not be saved, is tried again: a disk may have room.
_RETRY_SECONDS = 60.0
#: Seconds, at most, before it is tried again in a grace period.
_HURRIED_SECONDS = 4.0


class Saver:
    """Decides what of a unit goes to storage, in the agent's event loop; waits only for a replica to stand still."""

    def __init__(self, name: str, ranks: RankGroup, host: Host, siblings: Siblings) -> None:
        self._ranks, self._host = ranks, host
        open_writer = partial(host.start_writer, "record", self._records_said, self._records_ended)
        self.log = RecordLog(name, open_writer, self._log_broken)
        self._checkpoints = Checkpoints(name, ranks, host, siblings, self.log)
        self.schedule = self._checkpoints.schedule
        self.state_copies, self._jobs = self._checkpoints.state_copies, self._checkpoints.jobs
        #: Why records are not logged though that is configured, in words.
        self._not_logged = ""
        self._retry_at = float("-inf")
        #: Pauses before what could not be saved is tried again in a grace period.
        self._hurried = Backoff(at_once=0, longest=_HURRIED_SECONDS, steady=math.inf)
        #: The generation whose records are being flushed to the log because it stands still; the answer: they are.
        self._flushing: tuple[Generation, Answer[None]] | None = None

    def configure(self, message: Configure, run_dir: Path, name: str) -> None:
        """Take a new attempt's configuration, with its timeline; its parts get this name."""
        timeline, config = message.timeline, message.storage
        assert timeline is not None
        if timeline != self._checkpoints.timeline:
            self._retry_at = float("-inf")
            self._flushing = None
        self._checkpoints.configure(message, run_dir, name)
        self.log.rename(name)
        if config is None:
            self.log.pause()
        else:
            url, witness = self._checkpoints.url, self._checkpoints.witness
            self.log.configure(url, config.batch_steps, config.timeout_seconds, timeline, config.owner or "", witness)

    @property
    def attempt_number(self) -> int:
        """Number of the attempt whose parts are written; 0: none is known."""
        timeline = self._checkpoints.maker.settings.timeline
        return timeline.number if timeline is not None else 0

    def configure_like(self, other: Saver, name: str) -> None:
        """Write for the attempt that another saver knows, under this name; for ranks that are not here."""
        self._checkpoints.configure_like(other._checkpoints, name)

    @property
    def enabled(self) -> bool:
        return self._checkpoints.config is not None

    @property
    def saving(self) -> bool:
        return self._jobs.busy or self._flushing is not None or bool(self._checkpoints.held)

    @property
    def alarm(self) -> str:
        return self._checkpoints.alarm

    def preempt(self, ending: bool = False) -> bool:
        """Save within the grace period: a trainer or (`ending`) the agent got SIGTERM. False: nothing is written."""
        config = self._checkpoints.config
        if config is None:
            return False
        self.schedule.preempt(config.grace_seconds, ending)
        self._hurried.reset()
        return True

    @property
    def preempted_until(self) -> float | None:
        return self.schedule.preempted_until if self.schedule.preempted else None

    # While training runs

    def after_commit(self, generation: Generation, attempt: Attempt) -> None:
        """Log a record that was committed, and begin with a checkpoint if one is due."""
        if not generation.complete:
            return
        checkpoints = self._checkpoints
        if checkpoints.config is not None:
            self._log_records(generation)
        if checkpoints.busy:
            return
        lead = self.state_copies.lead
        if checkpoints.asked:
            export = checkpoints.asked.popleft()
            carry_on(checkpoints.save_ahead(export, generation, export.record or attempt.newest_record + lead))
            return
        checkpoints.look_for_room()
        # Without a checkpoint to redo it on, the log is of no use yet; one may also make room for it.
        unbased = self.schedule.logged and (not self.log.based or bool(self.log.short))
        if self.schedule.logged and self.log.too_large(generation.layout.checkpoint_bytes):
            self.schedule.at_once = True
        due = self.schedule.due_record(generation, attempt, lead, unbased)
        if due is not None:
            self.schedule.began()
            carry_on(checkpoints.save_ahead(Run(checkpoints.url), generation, due))

    def _log_records(self, generation: Generation) -> None:
        """Log what has been committed, where that is configured and the generation's tensors permit it."""
        assert self._checkpoints.config is not None
        schedule, configured = self.schedule, self._checkpoints.config.mode == "log"
        schedule.pace.add_record(generation.common, time.monotonic())
        problem = not_loggable(generation.spec) if configured else ""
        if problem and problem != self._not_logged:
            _log.info("records are not logged, only checkpoints are written: %s", problem)
        logged = configured and not problem
        if logged != schedule.logged:
            self.log.pause()
        schedule.logged, self._not_logged = logged, problem
        if logged:
            self.log.collect(generation)
            if schedule.at_once and self.log.based and alone(generation):
                schedule.at_once = False
                self.log.flush()

    def _log_broken(self) -> None:
        """Have a checkpoint in the log's place where it was to be flushed in a grace period, and has a hole."""
        self.schedule.at_once = self.schedule.at_once or self.schedule.preempted

    def hurry(self, lead: int) -> None:
        """Give orders so many records ahead, if not earlier: parts of one checkpoint are chosen alike."""
        self.state_copies.lead = max(self.state_copies.lead, lead)

    def copy_for_peers(self, generation: Generation, record: int, taken: Callable[[StateCopy | None], None]) -> None:
        """Have the state after a record that lies ahead copied; `taken` gets the copy, which it then owns, or None."""
        carry_on(self._checkpoints.copy_for_peers(generation, record, taken))

    # When no trainer runs

    def save_held(self, generation: Generation, as_checkpoint: bool, record: int | None = None) -> None:
        """Write the newest record that stands still, unless storage has it or is getting it.

        `as_checkpoint`: as a whole, though the log could do with a few records. `record`: that all ranks of the job
        have.
        """
        checkpoints, spec = self._checkpoints, generation.spec
        if checkpoints.config is None or checkpoints.timeline is None:
            return
        self.state_copies.drop(again=True)
        records = [one for one in generation.producible_at_rest() if record is None or one <= record]
        committed = generation.common
        if generation.ring.disagreed(committed):
            _log.warning("record %d does not go to storage: its ranks do not agree on what is held once", committed)
        # A commit may have come since: an agent that is told to end takes it while it writes the one before.
        coming = checkpoints.newest_held or 0
        records = [one for one in records if one > coming]
        if not records or checkpoints.find(records[-1]) is not None:
            return
        if self.schedule.logged:
            self.log.collect(generation)
            # One of several nodes knows its own part only: a checkpoint is the surer way.
            enough = alone(generation) and self.log.reaches(records[-1])
            if not as_checkpoint and enough and self._flushing is None:
                carry_on(self._flush_held(generation, records[-1]))
                return
        if not spec.full:
            # The node with the parameters may stand one record before or behind: save what it may need of us.
            for each in reversed(records):
                carry_on(checkpoints.save_standing(Run(checkpoints.url), generation, each))
            return
        # Where others hold other shards, they may stand one record before; a replica goes forward only.
        sharded = len(spec.serves) < spec.world_size
        newest = records[-1 - (sharded and record is None) :]
        checkpoints.held.extend((generation, each, as_checkpoint) for each in newest)
        carry_on(checkpoints.save_all_held())

    async def _flush_held(self, generation: Generation, record: int) -> None:
        """Save what stands still as records of the log; as a checkpoint if that fails."""
        flushed: Answer[None] = Answer()
        self._flushing = generation, flushed
        self.log.flush()
        self._look_at_flush()  # there is nothing to wait for where the process cannot even be started
        await flushed
        self._flushing = None
        if not self.log.covers(record):
            self.save_held(generation, as_checkpoint=True)

    def _look_at_flush(self) -> None:
        if self._flushing is not None and not self.log.busy:
            self._flushing[1].give(None)

    def save_record(self, generation: Generation, record: int, url: str, done: Done) -> None:
        """Write one record that stands still in memory to any store; `done` gets the result."""
        checkpoints = self._checkpoints
        if url == checkpoints.url and (saved := checkpoints.find(record)) is not None:
            done(saved)
        else:
            carry_on(checkpoints.save_standing(Export(url, done), generation, record))

    def save_to(self, url: str, done: Done, generation: Generation, training: bool, record: int | None = None) -> None:
        """Export the newest record, or the one that other units write, to an empty store; `done` gets the result."""
        if self._checkpoints.asked:
            done(SaveFailed(0, "another export of this state is still being written; try again when it is there"))
        else:
            self._checkpoints.asked.append(Export(url, done, record))  # from the next commit on
            if not training:
                self.save_asked(generation)

    def save_asked(self, generation: Generation, record: int | None = None) -> None:
        """Write exports of what stands still, as no trainer runs; `record`: the one that all ranks of the job have."""
        if isinstance(self.state_copies.asker, (Export, Peers)):
            self.state_copies.drop(again=True)  # its order has died with the trainers
        while self._checkpoints.asked:
            export = self._checkpoints.asked.popleft()
            if records := generation.producible_at_rest():
                newest = records[-1] if record is None else record
                carry_on(self._checkpoints.save_standing(export, generation, newest))
            else:
                export.done(SaveFailed(0, "no step can be produced from memory"))

    def retry_later(self) -> None:
        """Have what is held saved once more after a while, in a grace period soon: it could not be."""
        pause = self._hurried.died() if self.schedule.preempted else _RETRY_SECONDS
        self._retry_at = time.monotonic() + pause

    def may_save_from(self, idle_since: float) -> float:
        """Until when trainers may come back before their state goes to storage (monotonic clock)."""
        return max(idle_since + (0.0 if self.schedule.preempted else _RETURN_SECONDS), self._retry_at)

    # The processes that write

    def _records_said(self, message: WriterToAgent) -> None:
        if not isinstance(message, Appended):
            raise AgentError(f"it sent an unexpected {type(message).__name__}")
        before = self.log.written
        self.log.appended(message)
        written = self.log.written
        if written is not None and written != before and self.log.based:
            self._host.tell_ranks(self._ranks, Logged(written[1], written[0]))
        self._look_at_flush()

    def _records_ended(self, reason: str) -> None:
        _log.error("records are not logged: %s", reason)
        self.log.writer_ended(reason)
        self._look_at_flush()

    def _deadlines(self) -> list[tuple[float, Callable[[str], None]]]:
        """Times by which processes have to be done (monotonic clock), and what ends them."""
        log, writing = self.log.deadline(self.schedule.preempted_until), self._jobs.deadline
        if writing is not None:  # it may have begun before the end was ordered
            writing = min(writing, self.schedule.ends_at)
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
        self.log.drop_generation(generation)
        if self._flushing is not None and self._flushing[0] is generation:
            self._flushing = None

    def abort(self) -> None:
        """Write nothing more from what is held: it is about to change."""
        self._flushing = None
        self._checkpoints.abort()

    def close(self) -> None:
        self._checkpoints.close()
        self.log.close()

    def status(self, newest_step: int | None) -> StorageStatus | None:
        """What the command line shows; `newest_step` is the newest that memory holds."""
        config, last, log, schedule = self._checkpoints.config, self._checkpoints.last, self.log, self.schedule
        if config is None:
            return None
        steps = [last.step] if last is not None else []
        if log.based and log.written is not None:
            steps.append(log.written[1])
        stored = max(steps, default=None)
        if schedule.logged and log.based:
            at_most = log.unwritten_at_most
        else:
            at_most = schedule.loses_at_most(last, self.state_copies.lead)
        if at_most is not None and stored is not None and newest_step is not None:
            at_most = max(at_most, newest_step - stored)
        return StorageStatus(
            url=self._checkpoints.url,
            step=stored,
            interval_seconds=None if config.every_steps is not None else schedule.interval_seconds(),
            every_steps=config.every_steps,
            bytes_per_second=last.nbytes / max(last.seconds, 1e-9) if last is not None else None,
            saving=self.saving,
            alarm=self.alarm or log.alarm,
            mode="log" if schedule.logged else "replica",
            reason=self._not_logged,
            batch_steps=log.batch_steps if schedule.logged else None,
            logged=log.taken,
            loses_at_most=at_most,
            untidy=last.untidy if last is not None else "",
        )
