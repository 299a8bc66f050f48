"""Checkpoints on their way from memory to storage: copied, described, written, told.

While training runs, one begins with a copy of the state. When no trainer runs, replica or ring stand still instead.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import msgspec

from memckpt.agent.saving.jobs import Job, JobMaker, WriterJobs
from memckpt.agent.saving.record_log import RecordLog, room_to_log
from memckpt.agent.saving.schedule import Schedule
from memckpt.agent.saving.state_copies import Export, Peers, Run, StateCopies, StateCopy
from memckpt.agent.unit_host import Host, Siblings
from memckpt.config import StorageConfig
from memckpt.errors import AgentError, MemckptError
from memckpt.memory.generation import Generation
from memckpt.protocol import storing
from memckpt.protocol.trainer import Configure
from memckpt.state.layout import Layout
from memckpt.state.records import RankGroup, Timeline
from memckpt.storage.owner import CLAIM
from memckpt.user_messages import nbytes_text

_log = logging.getLogger("memckpt.agent")
#: Seconds between two looks whether a full storage has room again.
_ROOM_SECONDS = 2.0


class Checkpoints:
    """Belongs to the agent's event loop. Each checkpoint is one flow: :meth:`save_ahead` or :meth:`save_standing`."""

    def __init__(self, name: str, ranks: RankGroup, host: Host, siblings: Siblings, log: RecordLog) -> None:
        self._ranks, self._host, self._siblings, self._log = ranks, host, siblings, log
        #: Describes what is to be written; replaced with each attempt.
        self.maker = JobMaker(name)
        self.schedule = Schedule(self._announce, self._look_for_announced, host.note_event)
        self.state_copies = StateCopies(
            lambda message, fd: host.tell_ranks(ranks, message, fd=fd), partial(host.notify, ranks), siblings.hurry
        )
        self.jobs = WriterJobs(lambda: host.start_writer("checkpoint", self._writer_said, self.jobs.ended))
        #: Exports that wait for the next commit.
        self.asked: deque[Export] = deque()
        #: Generations that stand still, each with a record that is still to be written, and whether training has ended.
        self.held: deque[tuple[Generation, int, bool]] = deque()
        self._saving_held = False
        #: The attempt's settings (None: nothing is written), its store, and the file without which the store is away.
        self.config: StorageConfig | None = None
        self.url = self.witness = ""
        #: The timeline that the attempt trains on.
        self.timeline: Timeline | None = None
        #: The newest checkpoint; why the last one could not be written, or empty.
        self.last: storing.Saved | None = None
        self.alarm = ""
        #: The last few of this attempt.
        self._recent: deque[storing.Saved] = deque(maxlen=3)
        #: Bytes that have to be free before the next checkpoint is tried; None: as far as is known there are.
        self._missing: int | None = None
        self._looked_for_room = float("-inf")

    def configure(self, message: Configure, run_dir: Path, name: str) -> None:
        """Take a new attempt's configuration; its parts get this name."""
        assert message.timeline is not None
        config = self.config = message.storage
        self.maker = JobMaker(name, message)
        self.witness = CLAIM if message.claimed else ""
        self.schedule.configure(config)
        self.url = (config.url if config is not None else None) or str(run_dir / "storage")
        if message.timeline != self.timeline:
            self.timeline = message.timeline
            self.held.clear()
            self._recent.clear()
            self.schedule.restart()
            # The state that the last attempt has left could not be written; a copy by trainers may succeed.
            self.schedule.at_once = bool(self.alarm)
            self._missing = None
        if config is not None:
            self.jobs.warm()

    def configure_like(self, other: Checkpoints, name: str) -> None:
        """Write for the attempt that another one knows, under this name."""
        self._recent.clear()
        self.maker = replace(other.maker, node=name)

    @property
    def busy(self) -> bool:
        return self.state_copies.asker is not None or self.jobs.busy

    @property
    def newest_held(self) -> int | None:
        """The newest record that is being written from what stands still, or still to be; None: there is none."""
        waiting = [record for _, record, _ in self.held]
        current = self.jobs.held_record
        return max(waiting if current is None else [*waiting, current], default=None)

    def find(self, record: int) -> storing.Saved | None:
        """The checkpoint after a record of this attempt, if it is one of the last."""
        return next((one for one in self._recent if one.record == record), None)

    # While training runs

    async def save_ahead(self, asker: Run | Export, generation: Generation, record: int) -> None:
        """Save the state after a record that lies ahead."""
        match await self._copy_state(asker, generation, record):
            case StateCopy() as copy:
                if isinstance(asker, Run):
                    self.schedule.copied(copy.seconds)
                await self._write(asker, self.maker.of_copy(copy, asker.url))
            case storing.SaveFailed() as failed:
                self._report_outcome(asker, failed)
            case None if isinstance(asker, Run):
                self.schedule.again()
            case None:
                self.asked.appendleft(replace(asker, record=None))

    async def copy_for_peers(
        self, generation: Generation, record: int, taken: Callable[[StateCopy | None], None]
    ) -> None:
        """Have the state after a record copied, in place of an earlier one; not while storage has a copy made."""
        if isinstance(self.state_copies.asker, Peers):
            # Some node has missed that one. Were this order refused, that node would be busy with it at the next one.
            self.state_copies.drop(again=True)
        if self.state_copies.asker is not None:
            taken(None)
            return
        copy = await self._copy_state(Peers(), generation, record)
        if isinstance(copy, storing.SaveFailed):
            _log.warning("no state is copied for peers: %s", copy.reason)
        taken(copy if isinstance(copy, StateCopy) else None)

    async def _copy_state(
        self, asker: Run | Export | Peers, generation: Generation, record: int
    ) -> StateCopy | storing.SaveFailed | None:
        try:
            return await self.state_copies.copy_state(asker, generation, record)
        except (MemckptError, OSError, RuntimeError) as error:
            return storing.SaveFailed(generation.newest_step or 0, f"the state cannot be copied: {error}")

    def _announce(self, record: int, elsewhere: bool) -> None:
        assert self.timeline is not None
        self._siblings.announce(self._ranks, record)
        if elsewhere:
            self.jobs.announce(storing.Announce(self.url, self.timeline, record, self.witness))

    def _look_for_announced(self) -> None:
        assert self.timeline is not None
        self.jobs.look_into_store(storing.LookForAnnounced(self.url, self.timeline))

    def look_for_room(self) -> None:
        """Look if a full storage has room again, if it is time. That costs nothing, and a copy of the state does."""
        now = time.monotonic()
        if self._missing is not None and now >= self._looked_for_room + _ROOM_SECONDS:
            self._looked_for_room = now
            self.jobs.look_into_store(storing.LookForRoom(self.url, self.witness))

    def _writer_said(self, message: storing.WriterToAgent) -> None:
        match message:
            case storing.Saved() | storing.SaveFailed():
                self.jobs.finished(message)
            case storing.Announced():
                self.jobs.looked()
                if message.timeline == self.timeline:
                    self.schedule.announced(message.record)
            case storing.Room():
                self.jobs.looked()
                found = message.free if message.url == self.url else None
                if self._missing is not None and found is not None and found >= self._missing:
                    self._missing = None
                    self.schedule.now_it_may_work()
            case _:
                raise AgentError(f"it sent an unexpected {type(message).__name__}")

    # When no trainer runs

    async def save_standing(self, asker: Run | Export, generation: Generation, record: int, last: bool = False) -> None:
        """Save the state after a record that stands still in memory; `last`: training has ended."""
        try:
            job = self.maker.of_held(generation, record, asker.url, last=last)
        except MemckptError as error:
            self._report_outcome(asker, storing.SaveFailed(generation.newest_step or 0, str(error)))
        else:
            await self._write(asker, job)

    async def save_all_held(self) -> None:
        """Save what is :attr:`held` for the run, one after the other: a replica stands still until it is written."""
        if self._saving_held:
            return
        self._saving_held = True
        try:
            while self.held:
                generation, record, last = self.held.popleft()
                if self.find(record) is None:  # it was being written as the generation came to a stand
                    await self.save_standing(Run(self.url), generation, record, last)
        finally:
            self._saving_held = False

    # How each of them ends

    async def _write(self, asker: Run | Export, job: Job) -> None:
        outcome = await self.jobs.write(replace(job, save=self._add_terms(job)), asker, self.schedule.limit_seconds)
        if outcome is not None:
            self._report_outcome(asker, outcome)
        elif isinstance(asker, Export):  # a checkpoint of the run itself was not waited for: memory has its state
            asker.done(storing.SaveFailed(job.save.part.step, "training has resumed meanwhile; try again"))

    def _add_terms(self, job: Job) -> storing.Save:
        """Add a job's urgency, and this store's room for the log and witness."""
        save, ours = job.save, job.save.url == self.url
        steps = self.config.batch_steps if self.config is not None else None
        return msgspec.structs.replace(
            save,
            urgent=save.urgent or job.own is None or self.schedule.preempted,
            reserve=room_to_log(Layout(save.spec), steps) if ours and self.schedule.logged else 0,
            witness=self.witness if ours else "",
        )

    def _report_outcome(self, asker: Run | Export, outcome: storing.Saved | storing.SaveFailed) -> None:
        match asker, outcome:
            case Export(), _:
                asker.done(outcome)
            case Run(), storing.Saved():
                self._saved(outcome)
            case Run(), storing.SaveFailed():
                self._not_saved(outcome)
                if self.newest_held is None:  # else what is held is still to come
                    self._host.checkpoint_failed()

    def _saved(self, message: storing.Saved) -> None:
        if message.untidy and (self.last is None or not self.last.untidy):
            _log.warning("step %d is in storage, which could not be tidied up: %s", message.step, message.untidy)
        self.last, self.alarm, self._missing = message, "", None
        if message.timeline is not None and message.timeline == self.timeline:
            self._recent.append(message)
            self.last = max(self._recent, key=lambda one: one.record)  # the one before may be written for other nodes
            self._log.checkpoint_saved(message.record)
        self.schedule.wrote(message)
        what = "" if message.whole else "this node's part of "
        size = nbytes_text(message.nbytes)
        _log.info("%sstep %d is in storage: %s, %.2f s", what, message.step, size, message.seconds)
        self._host.tell_ranks(self._ranks, message)

    def _not_saved(self, message: storing.SaveFailed) -> None:
        """Note a checkpoint that could not be written, and tell trainers if that is news."""
        _log.error("step %d is not in storage: %s", message.step, message.reason)
        # Trainers are told once: of a full disk the message says each time how full.
        again = message.reason == self.alarm or (message.missing is not None and self._missing is not None)
        self.alarm = message.reason
        self._missing = message.missing
        self._looked_for_room = time.monotonic()
        self.schedule.failed()
        if not again:
            self._host.tell_ranks(self._ranks, message)

    # What takes their memory away

    def drop_generation(self, generation: Generation) -> None:
        """Use nothing more of a generation that is about to be closed."""
        self.state_copies.drop_of(generation)
        self.held = deque(one for one in self.held if one[0] is not generation)

    def abort(self) -> None:
        """Write nothing more from what is held: it is about to change."""
        self.held.clear()
        self.state_copies.drop(again=True)  # the new trainers have not got the order
        self.jobs.give_up_held()

    def close(self) -> None:
        self.state_copies.drop(again=False)
        self.jobs.close()
