"""Jobs for the writer process: a snapshot, or a state that stands still in memory."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Literal

import msgspec

from memckpt.checkpointing.snapshots import Snapshot
from memckpt.checkpointing.writer_jobs import Done
from memckpt.config import StorageConfig
from memckpt.errors import MemckptError, MemoryBudgetError
from memckpt.memory.budget import check_budget
from memckpt.memory.region import Region
from memckpt.node.generation import Generation
from memckpt.protocol.trainer import (
    SaveFailed,
)
from memckpt.protocol.writer import (
    Save,
)
from memckpt.state.records import Timeline
from memckpt.storage.format import FORMAT_VERSION, Part

_log = logging.getLogger("memckpt.agent")
#: Takes what the process is told, the regions that come along, the one among them that is only there for this, and who
#: is told what has become of it; as for a job.
Submit = Callable[[Save, list[Region], "Region | None", Done], None]


def standing_still(generation: Generation) -> list[int]:
    """The records that can be produced while no trainer runs."""
    if generation.replica is not None:
        generation.replica.freeze()
    return generation.reachable()


class JobMaker:
    """Belongs to the agent's event loop.

    Args:
        node: this node's name, or that of the ranks on it that hold the same shards: no other part may have it.
        submit: has it written.
    """

    def __init__(self, node: str, submit: Submit) -> None:
        self._node = node
        self._submit = submit
        self._config = StorageConfig()
        self._timeline: Timeline | None = None
        self._threads = 1
        self._search_path: tuple[str, ...] = ()

    def configure(
        self, config: StorageConfig, timeline: Timeline, threads: int, search_path: tuple[str, ...] = ()
    ) -> None:
        """Take the attempt's configuration, and the places where its trainers find modules."""
        self._config, self._timeline, self._threads = config, timeline, threads
        self._search_path = search_path

    @property
    def attempt_number(self) -> int:
        """Number of the current attempt; 0: none is known."""
        return self._timeline.number if self._timeline is not None else 0

    def configure_like(self, other: JobMaker) -> None:
        """Take what another one has been told of an attempt."""
        assert other._timeline is not None
        self.configure(other._config, other._timeline, other._threads, other._search_path)

    def rename(self, name: str) -> None:
        """What the parts are called from now on."""
        self._node = name

    def of_snapshot(self, snapshot: Snapshot) -> None:
        """A checkpoint of one that is whole; its region goes along."""
        generation = snapshot.generation
        save = self._describe(
            generation,
            snapshot.record,
            "snapshot",
            snapshot.url,
            by_value_base=generation.layout.state_bytes,
            missing=snapshot.missing,
            plain=snapshot.plain,
        )
        regions = [snapshot.region, snapshot.region]
        self._submit(save, _with_static(generation, regions), snapshot.region, snapshot.done)

    def of_ring(self, generation: Generation, record: int, url: str, done: Done, metas: tuple[bytes, ...] = ()) -> None:
        """A checkpoint of a record in the ring, which stands still; `metas`: what to redo, where parameters belong."""
        save = self._describe(generation, record, "ring", url, metas=metas)
        self._submit(save, _with_static(generation, [generation.slots]), None, done)

    def of_held(self, generation: Generation, record: int, url: str, done: Done, *, last: bool = False) -> None:
        """A checkpoint of the replica, or of the ring, while no trainer changes it.

        Args:
            generation: which holds it.
            record: after which.
            url: of the store.
            done: told what has become of it.
            last: whether training has ended, so that nobody repeats the record's step from the state before it.
        """
        if generation.replica is None:
            self.of_ring(generation, record, url, done, generation.metas_for(record))
            return
        generation.replica.freeze()
        try:
            if generation.spec.trails and not last and generation.replica.applied < record:
                region = _room_for_copy(generation, record)
                if region is not None:
                    self._of_copy(generation, record, url, done, region)
                    return
            generation.replica.advance_to(record)
        except MemckptError as error:
            done(SaveFailed(generation.newest_step() or 0, str(error)))
            return
        generation.replica.freeze()
        missing, plain = generation.replica.describe_state()
        assert generation.replica_region is not None
        base = generation.layout.by_value_base(record)
        save = self._describe(generation, record, "snapshot", url, by_value_base=base, missing=missing, plain=plain)
        regions = [generation.replica_region, generation.slots]
        self._submit(save, _with_static(generation, regions), None, done)

    def _of_copy(self, generation: Generation, record: int, url: str, done: Done, region: Region) -> None:
        """A checkpoint of a copy of the replica that is taken on to `record`; the replica stays behind.

        A copy of all that is held blocks the agent while no trainer runs.
        """
        assert generation.replica is not None
        try:
            missing, plain = generation.replica.copy_ahead(record, region)
        except BaseException:  # raised again: nobody else knows of the region
            region.close()
            raise
        base = generation.layout.state_bytes
        save = self._describe(generation, record, "snapshot", url, by_value_base=base, missing=missing, plain=plain)
        save = msgspec.structs.replace(save, urgent=True)
        self._submit(save, _with_static(generation, [region, region]), region, done)

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
        config, spec = self._config, generation.spec
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
            rank_states=generation.rank_states(record),
            keep_last=config.keep_last,
            keep_every_steps=config.keep_every_steps,
            by_value_base=by_value_base,
            missing=missing,
            plain=plain,
            metas=metas,
            threads=self._threads,
            search_path=self._search_path,
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
    return [*regions, generation.static] if generation.static is not None else regions
