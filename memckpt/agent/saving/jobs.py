"""Jobs for the writer process: a copy of the state, or a state that stands still in memory."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import msgspec

from memckpt.agent.saving.state_copies import Answer, Export, Run, StateCopy
from memckpt.config import StorageConfig
from memckpt.errors import AgentError, MemoryBudgetError
from memckpt.memory.budget import check_budget
from memckpt.memory.generation import Generation
from memckpt.memory.region import Region
from memckpt.processes.helper_process import WriterProcess
from memckpt.protocol.storing import Announce, LookForAnnounced, LookForRoom, Save, Saved, SaveFailed
from memckpt.protocol.trainer import Configure
from memckpt.storage.format import Part

_log = logging.getLogger("memckpt.agent")


#: Settings where no attempt is known.
_UNKNOWN = Configure(linger_seconds=0.0)


@dataclass(frozen=True)
class JobMaker:
    """Describes what the writer is to write in an attempt. `node`: name that no other part of a checkpoint has."""

    node: str
    settings: Configure = _UNKNOWN

    def of_copy(self, copy: StateCopy, url: str) -> Job:
        """A copy of the whole state, whose region the job owns."""
        generation, region = copy.generation, copy.region
        save = self._describe(generation, copy.record, "copy", url)
        base = generation.layout.state_bytes
        save = msgspec.structs.replace(save, by_value_base=base, missing=copy.missing, plain=copy.plain)
        return Job(save, _with_static(generation, [region, region]), region)

    def of_held(self, generation: Generation, record: int, url: str, *, last: bool = False) -> Job:
        """The state after `record`, while no trainer changes what holds it. Raises MemckptError: redo has failed.

        A node without the parameters writes its ranks' own part, from the ring. `last`: no resume repeats the record's
        step.
        """
        replica = generation.replica
        if replica is None or not generation.spec.full:
            metas = generation.metas_for(record) if generation.spec.full else ()
            save = msgspec.structs.replace(self._describe(generation, record, "ring", url), metas=metas)
            return Job(save, _with_static(generation, [generation.regions.slots]))
        replica.freeze()
        if generation.spec.trails and not last and replica.applied < record:
            region = _room_for_copy(generation, record)
            if region is not None:
                return self._of_copy_ahead(generation, record, url, region)
        replica.advance_to(record)
        replica.freeze()
        missing, plain = replica.describe_state()
        assert generation.regions.replica is not None
        base = generation.layout.by_value_base(record)
        save = self._describe(generation, record, "copy", url)
        save = msgspec.structs.replace(save, by_value_base=base, missing=missing, plain=plain)
        return Job(save, _with_static(generation, [generation.regions.replica, generation.regions.slots]))

    def _of_copy_ahead(self, generation: Generation, record: int, url: str, region: Region) -> Job:
        """A copy of the replica, redone up to `record`. It blocks the agent, while no trainer runs."""
        assert generation.replica is not None
        try:
            missing, plain = generation.replica.copy_ahead(record, region)
        except BaseException:  # raised again; the region has no other owner yet
            region.close()
            raise
        job = self.of_copy(StateCopy(generation, record, region, missing, plain), url)
        return replace(job, save=msgspec.structs.replace(job.save, urgent=True))

    def _describe(self, generation: Generation, record: int, source: Literal["copy", "ring"], url: str) -> Save:
        settings, spec = self.settings, generation.spec
        config = settings.storage or StorageConfig()
        assert settings.timeline is not None
        step = generation.ledger.steps.get(record)
        redone = source == "ring" or generation.replica is not None  # else trainers have copied their own state
        part = Part(
            timeline=settings.timeline,
            record=record,
            step=step if step is not None else record,
            world_size=spec.world_size,
            ranks=spec.local_ranks,
            node=self.node,
            full=spec.full,
            created=time.time(),
            content=spec.content(),
            serves=spec.serves,
            run=config.owner or "",
            inexact=str(generation.drift) if redone and generation.drift is not None else "",
        )
        return Save(
            url=url,
            part=part,
            spec=spec,
            source=source,
            generation=generation.number,
            rank_states=generation.ledger.rank_states(record),
            keep_last=config.keep_last,
            keep_every_steps=config.keep_every_steps,
            threads=settings.compute_threads,
            search_path=settings.search_path,
        )


def _room_for_copy(generation: Generation, record: int) -> Region | None:
    """Room for a copy of the state, so that the replica stays where a resume can repeat a step from."""
    nbytes = generation.layout.copy_bytes
    try:
        check_budget(nbytes, 0, None, "a copy of the state on its way to storage")
        return Region.create("copy", nbytes)
    except (MemoryBudgetError, OSError) as error:
        _log.info("a resume will not repeat the step of record %d, whose state goes to storage: %s", record, error)
        return None


def _with_static(generation: Generation, regions: list[Region]) -> list[Region]:
    return [*regions, generation.regions.static] if generation.regions.static is not None else regions


#: Seconds that the writer may take to look for what another node has announced.
_LOOK_LIMIT_SECONDS = 120.0


@dataclass(frozen=True)
class Job:
    """One part of a checkpoint: a message to the writer, and memory. `own` is closed with it, if any."""

    save: Save
    regions: list[Region]
    own: Region | None = None

    def close(self) -> None:
        if self.own is not None:
            self.own.close()


@dataclass(frozen=True)
class _Queued:
    """A job on its way; `limit` gives the seconds that it may take, once it begins."""

    job: Job
    asker: Run | Export
    limit: Callable[[], float]
    answer: Answer[Saved | SaveFailed | None]


class WriterJobs:
    """Owns the writer process, which `open_writer` starts."""

    def __init__(self, open_writer: Callable[[], WriterProcess]) -> None:
        self._open_writer = open_writer
        self._writer: WriterProcess | None = None
        self._waiting: deque[_Queued] = deque()
        self._current: _Queued | None = None
        self._deadline = 0.0
        self._looking_since: float | None = None
        #: Parts that killed writers may have left half-written, by URL.
        self._abandoned: list[tuple[str, Part]] = []
        #: URLs that have got something whole: before, a dead agent may have left what is written first.
        self._reached: set[str] = set()

    @property
    def busy(self) -> bool:
        return self._current is not None or bool(self._waiting)

    @property
    def held_record(self) -> int | None:
        """The newest record that the run has a job for here that reads held memory; None: there is no such job."""
        held = (one for one in self._all if one.job.own is None and isinstance(one.asker, Run))
        return max((one.job.save.part.record for one in held), default=None)

    @property
    def _all(self) -> list[_Queued]:
        return [*filter(None, [self._current]), *self._waiting]

    @property
    def deadline(self) -> float | None:
        """Time by which the writer has to be done (monotonic clock); None while it is idle."""
        if self._current is not None:
            return self._deadline
        return None if self._looking_since is None else self._looking_since + _LOOK_LIMIT_SECONDS

    def warm(self) -> None:
        """Start the process now: its imports take seconds, and the end of a training waits for them."""
        try:
            if self._writer is None:
                self._writer = self._open_writer()
        except AgentError as error:
            _log.info("the writer process is started later: %s", error)

    async def write(self, job: Job, asker: Run | Export, limit: Callable[[], float]) -> Saved | SaveFailed | None:
        """Have a job written; returns the writer's answer, or None: its memory is about to change."""
        queued = _Queued(job, asker, limit, Answer())
        self._waiting.append(queued)
        self._begin_job()
        return await queued.answer

    def _begin_job(self) -> None:
        while self._waiting and self._current is None:
            self._current = self._waiting.popleft()
            job = self._current.job
            self._deadline = time.monotonic() + self._current.limit()
            abandoned = tuple(part for url, part in self._abandoned if url == job.save.url)
            if job.save.url not in self._reached:
                abandoned = (*abandoned, job.save.part)
            self._send_to_writer(msgspec.structs.replace(job.save, abandoned=abandoned), job.regions)

    # What else it does

    def announce(self, message: Announce) -> None:
        """Let the agents of other nodes know after which record a checkpoint will be taken."""
        self._send_to_writer(message)

    def look_into_store(self, message: LookForAnnounced | LookForRoom) -> None:
        """Have the writer look into a store, if it is idle; Announced or Room comes back."""
        if self._current is None and self._looking_since is None:
            self._looking_since = time.monotonic()
            self._send_to_writer(message)

    def looked(self) -> None:
        self._looking_since = None

    def _send_to_writer(
        self, message: Save | Announce | LookForAnnounced | LookForRoom, regions: Sequence[Region] = ()
    ) -> None:
        try:
            if self._writer is None:
                self._writer = self._open_writer()
            self._writer.send(message, [region.fd for region in regions])
        except (AgentError, OSError) as error:
            self.ended(f"the writer process cannot be used: {error}")

    # How a job ends

    def finished(self, message: Saved | SaveFailed) -> None:
        """Take the writer's answer to a job."""
        queued = self._current
        if queued is None:
            return
        if isinstance(message, Saved):
            self._reached.add(queued.job.save.url)
            self._abandoned = [one for one in self._abandoned if one[0] != queued.job.save.url]
        self._current = None
        queued.job.close()
        queued.answer.give(message)
        self._begin_job()

    def ended(self, reason: str) -> None:
        """End the writer process, which is gone or has to go: its jobs fail."""
        self._end_writer()
        failed = self._all
        self._abandon_current()
        self._waiting.clear()
        for one in failed:
            one.job.close()
            one.answer.give(SaveFailed(one.job.save.part.step, reason))

    def give_up_held(self) -> None:
        """Write nothing more from held memory: it is about to change. What was not committed does not count."""
        given_up = [one for one in self._waiting if one.job.own is None]
        self._waiting = deque(one for one in self._waiting if one.job.own is not None)
        if self._current is not None and self._current.job.own is None:
            _log.info("the checkpoint of step %d is not needed any more", self._current.job.save.part.step)
            given_up.append(self._current)
            self._abandon_current()
            self._end_writer()
        for one in given_up:
            one.answer.give(None)
        self._begin_job()

    def _abandon_current(self) -> None:
        queued, self._current = self._current, None
        if queued is not None:
            self._abandoned.append((queued.job.save.url, queued.job.save.part))

    def _end_writer(self) -> None:
        writer, self._writer = self._writer, None
        self._looking_since = None
        if writer is not None:
            writer.close()

    def close(self) -> None:
        for one in self._all:
            one.job.close()
        self._waiting.clear()
        self._current = None
        self._end_writer()
