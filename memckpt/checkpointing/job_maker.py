"""Jobs for the writer process: a snapshot, or a state that stands still in memory."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field, replace
from typing import Literal

import msgspec

from memckpt.checkpointing.snapshots import Snapshot
from memckpt.checkpointing.writer_jobs import Job
from memckpt.config import StorageConfig
from memckpt.errors import MemoryBudgetError
from memckpt.memory.budget import check_budget
from memckpt.memory.generation import Generation
from memckpt.memory.region import Region
from memckpt.protocol.writer import Save
from memckpt.state.records import Timeline
from memckpt.storage.format import FORMAT_VERSION, Part

_log = logging.getLogger("memckpt.agent")


@dataclass(frozen=True)
class JobMaker:
    """Describes what the writer process is to write in an attempt.

    Attributes:
        node: name of this node's parts; no other part of the checkpoint may have it.
        timeline: the one that the attempt trains on; None: no attempt is known.
        threads: of the process that redoes.
        search_path: where the trainers find modules.
    """

    node: str
    config: StorageConfig = field(default_factory=StorageConfig)
    timeline: Timeline | None = None
    threads: int = 1
    search_path: tuple[str, ...] = ()

    def of_snapshot(self, snapshot: Snapshot, url: str) -> Job:
        """A whole snapshot, whose region the job owns."""
        return self._of_copy(
            snapshot.generation, snapshot.record, url, snapshot.region, snapshot.missing, snapshot.plain
        )

    def of_held(self, generation: Generation, record: int, url: str, *, last: bool = False) -> Job:
        """The state after `record`, while no trainer changes the replica or the ring that hold it.

        A node without the parameters writes what is private to its ranks, from the ring. `last`: training has ended, so
        that no resume repeats the record's step from the state before it.

        Raises:
            MemckptError: redo has failed.
        """
        replica = generation.replica
        if replica is None or not generation.spec.full:
            metas = generation.metas_for(record) if generation.spec.full else ()
            save = self._describe(generation, record, "ring", url, metas=metas)
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
        save = self._describe(generation, record, "snapshot", url, by_value_base=base, missing=missing, plain=plain)
        return Job(save, _with_static(generation, [generation.regions.replica, generation.regions.slots]))

    def _of_copy_ahead(self, generation: Generation, record: int, url: str, region: Region) -> Job:
        """A copy of the replica that is taken on to `record`; the replica stays behind.

        A copy of all that is held blocks the agent while no trainer runs.
        """
        assert generation.replica is not None
        try:
            missing, plain = generation.replica.copy_ahead(record, region)
        except BaseException:  # raised again: nobody else knows of the region
            region.close()
            raise
        job = self._of_copy(generation, record, url, region, missing, plain)
        return replace(job, save=msgspec.structs.replace(job.save, urgent=True))

    def _of_copy(
        self,
        generation: Generation,
        record: int,
        url: str,
        region: Region,
        missing: tuple[tuple[int, int, str], ...],
        plain: bytes,
    ) -> Job:
        base = generation.layout.state_bytes
        save = self._describe(generation, record, "snapshot", url, by_value_base=base, missing=missing, plain=plain)
        return Job(save, _with_static(generation, [region, region]), region)

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
        config, spec = self.config, generation.spec
        assert self.timeline is not None
        step = generation.ledger.step_of(record)
        part = Part(
            format=FORMAT_VERSION,
            timeline=self.timeline,
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
            by_value_base=by_value_base,
            missing=missing,
            plain=plain,
            metas=metas,
            threads=self.threads,
            search_path=self.search_path,
        )


def _room_for_copy(generation: Generation, record: int) -> Region | None:
    """Room for a copy of the state, so that the replica stays where a resume can repeat a step from."""
    nbytes = generation.layout.snapshot_bytes
    try:
        check_budget(nbytes, 0, None, "a copy of the state on its way to storage")
        return Region.create("snapshot", nbytes)
    except (MemoryBudgetError, OSError) as error:
        _log.info("a resume will not repeat the step of record %d, whose state goes to storage: %s", record, error)
        return None


def _with_static(generation: Generation, regions: list[Region]) -> list[Region]:
    return [*regions, generation.regions.static] if generation.regions.static is not None else regions
