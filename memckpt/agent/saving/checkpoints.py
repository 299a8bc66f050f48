"""Checkpoints on their way from memory to storage: copied, described, written, told.

While training runs, a checkpoint begins with a snapshot (:mod:`memckpt.agent.saving.snapshots`), which costs trainers
one copy of the state at most. When no trainer runs, nothing is copied: the replica, or the ring, stands still.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import replace

from memckpt.agent.saving.jobs import Job, JobMaker, WriterJobs
from memckpt.agent.saving.run_storage import RunStorage
from memckpt.agent.saving.snapshots import Export, Peers, Run, Snapshot, Snapshots
from memckpt.errors import MemckptError
from memckpt.memory.generation import Generation
from memckpt.processes.helper_process import WriterProcess
from memckpt.protocol.channel import AgentToTrainer
from memckpt.protocol.storing import Saved, SaveFailed

_log = logging.getLogger("memckpt.agent")


class Checkpoints:
    """Belongs to the agent's event loop. Each checkpoint is one flow: :meth:`save_ahead` or :meth:`save_standing`.

    Args:
        node: name of this node's parts.
        storage: the run's storage.
        order: sends a message, with a descriptor, to all trainers of the attempt.
        open_writer: starts the writer process.
        failed: called when one of the run's could not be written, and nothing that is held is still to be written.
        hurried: called with the records that an order has to be ahead when one was too late.

    Attributes:
        maker: describes what is to be written; replaced with each attempt.
        asked: exports that wait for the next commit.
        held: what is still to be written of a generation that stands still, oldest first: its record; whether
            training has ended.
    """

    def __init__(
        self,
        node: str,
        storage: RunStorage,
        order: Callable[[AgentToTrainer, int], None],
        open_writer: Callable[[], WriterProcess],
        failed: Callable[[], None],
        hurried: Callable[[int], None],
    ) -> None:
        self.maker = JobMaker(node)
        self._storage = storage
        self._failed = failed
        self.snapshots = Snapshots(order, hurried)
        self.jobs = WriterJobs(open_writer)
        self.asked: deque[Export] = deque()
        self.held: deque[tuple[Generation, int, bool]] = deque()
        self._saving_held = False

    @property
    def busy(self) -> bool:
        return self.snapshots.asker is not None or self.jobs.busy

    @property
    def newest_held(self) -> int | None:
        """The newest record that is being written from what stands still, or still to be; None: there is none."""
        waiting = [record for _, record, _ in self.held]
        current = self.jobs.held_record
        return max(waiting if current is None else [*waiting, current], default=None)

    # While training runs

    async def save_ahead(self, asker: Run | Export, generation: Generation, record: int) -> None:
        """Save the state after a record that lies ahead."""
        try:
            snapshot = await self.snapshots.take_snapshot(asker, generation, record)
        except (MemckptError, OSError, RuntimeError) as error:
            snapshot = SaveFailed(generation.newest_step or 0, f"no snapshot can be taken: {error}")
        match snapshot:
            case Snapshot():
                if isinstance(asker, Run):
                    self._storage.schedule.copied(snapshot.seconds)
                await self._write(asker, self.maker.of_snapshot(snapshot, asker.url))
            case SaveFailed():
                self._report_outcome(asker, snapshot)
            case None if isinstance(asker, Run):
                self._storage.schedule.again()
            case None:
                self.asked.appendleft(replace(asker, record=None))

    async def copy_for_peers(
        self, generation: Generation, record: int, taken: Callable[[Snapshot | None], None]
    ) -> None:
        """Have the state after a record copied, if nothing else is just being copied."""
        if self.snapshots.asker is not None:
            taken(None)
            return
        try:
            snapshot = await self.snapshots.take_snapshot(Peers(), generation, record)
        except (MemckptError, OSError, RuntimeError) as error:
            snapshot = SaveFailed(generation.newest_step or 0, str(error))
        if isinstance(snapshot, SaveFailed):
            _log.warning("no state is copied for peers: %s", snapshot.reason)
            snapshot = None
        taken(snapshot)

    # When no trainer runs

    async def save_standing(self, asker: Run | Export, generation: Generation, record: int, last: bool = False) -> None:
        """Save the state after a record that stands still in memory; `last`: training has ended."""
        try:
            job = self.maker.of_held(generation, record, asker.url, last=last)
        except MemckptError as error:
            self._report_outcome(asker, SaveFailed(generation.newest_step or 0, str(error)))
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
                await self.save_standing(Run(self._storage.url), generation, record, last)
        finally:
            self._saving_held = False

    # How each of them ends

    async def _write(self, asker: Run | Export, job: Job) -> None:
        """Have the writer process write and commit a checkpoint, and tell who asked for it."""
        storage = self._storage
        outcome = await self.jobs.write(
            replace(job, save=storage.add_terms(job)), asker, storage.schedule.limit_seconds
        )
        if outcome is not None:
            self._report_outcome(asker, outcome)
        elif isinstance(asker, Export):  # a checkpoint of the run itself was not waited for: memory has its state
            asker.done(SaveFailed(job.save.part.step, "training has resumed meanwhile; try again"))

    def _report_outcome(self, asker: Run | Export, outcome: Saved | SaveFailed) -> None:
        match asker, outcome:
            case Export(), _:
                asker.done(outcome)
            case Run(), Saved():
                self._storage.saved(outcome)
            case Run(), SaveFailed():
                self._storage.not_saved(outcome)
                if self.newest_held is None:  # else what is held is still to come
                    self._failed()

    # What takes their memory away

    def drop_generation(self, generation: Generation) -> None:
        """Use nothing more of a generation that is about to be closed."""
        self.snapshots.drop_of(generation)
        self.held = deque(one for one in self.held if one[0] is not generation)

    def abort(self) -> None:
        """Write nothing more from what is held: it is about to change."""
        self.held.clear()
        self.snapshots.drop(again=True)  # the new trainers have not got the order
        self.jobs.give_up_held()

    def close(self) -> None:
        self.snapshots.drop(again=False)
        self.jobs.close()
