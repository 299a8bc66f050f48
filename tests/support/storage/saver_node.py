"""A node whose saver writes checkpoints."""

from __future__ import annotations

from pathlib import Path
from queue import SimpleQueue
from typing import Any

from memckpt.agent.saving.saver import Saver
from memckpt.agent.unit_host import Host, Siblings
from memckpt.config import StorageConfig
from memckpt.memory.redo_news import RedoNews
from memckpt.protocol.channel import Message
from memckpt.protocol.storing import CopyRankPart, RankPartCopied, Save, Saved, SaveFailed
from memckpt.protocol.trainer import Configure
from memckpt.state.records import RankGroup, Timeline
from tests.support.cluster.storage_node import Clock, Filled, Process, RecordsProcess, Steps

T1 = Timeline(1, "a")


class Node(Host, Siblings):
    """An agent's saver, the trainers that it orders about, and its processes."""

    def __init__(self, directory: Path, clock: Clock, filled: Filled | None = None, **settings: Any) -> None:
        self._directory, self.clock, self.filled = directory, clock, filled or Filled()
        self.orders: list[CopyRankPart] = []  # for copies, as trainers got them
        self.told: list[Message] = []  # what else trainers were told
        self.checkpoints: list[Process] = []  # processes that were started, the newest last
        self.records: list[RecordsProcess] = []
        self.news: SimpleQueue[RedoNews] = SimpleQueue()  # of threads, for the event loop
        self.failures = 0  # how often the agent heard that what was last to be written could not be
        self.saver = Saver("n", (0,), self, self)
        self.attempt = Steps("n", self.held.spec.world_size, self.held.spec.local_ranks)
        self.config = StorageConfig(**settings)
        self.begin_attempt(T1)

    @property
    def held(self) -> Any:
        return self.filled.held

    def begin_attempt(self, timeline: Timeline) -> None:
        self.saver.configure(Configure(0.0, timeline, self.config), self._directory, "n")

    # What the agent does for it

    def tell_ranks(self, ranks: RankGroup, message: Any, *, besides: int | None = None, fd: int | None = None) -> None:
        if fd is None:
            self.told.append(message)
        else:
            assert isinstance(message, CopyRankPart)
            self.orders.append(message)

    def notify(self, ranks: RankGroup, message: RedoNews) -> None:
        self.news.put(message)

    def start_writer(self, kind: str, received: Any, ended: Any) -> Any:
        if kind == "record":
            self.records.append(RecordsProcess(received, ended))
            return self.records[-1]
        self.checkpoints.append(Process(received, ended))
        return self.checkpoints[-1]

    def checkpoint_failed(self) -> None:
        self.failures += 1

    # What trainers do

    def train(self, count: int = 1, seconds: float = 1.0, work: bool = True) -> None:
        for _ in range(count):
            self.clock.passes(seconds)
            self.attempt.at = self.filled.commit()
            self.saver.after_commit(self.held, self.attempt)
            if work:
                self.work()

    def train_until_ordered(self) -> int:
        """Until a copy that has not been made is due; its record."""
        count = len(self.orders)
        while len(self.orders) == count:
            self.train()
        return self.orders[-1].record

    def copy(self, record: int, seconds: float = 0.1) -> None:
        """All ranks have copied their part of the state."""
        for rank in self.held.spec.local_ranks:
            self.saver.state_copies.add_part(rank, RankPartCopied(record, self.order_of(record), seconds))

    def order_of(self, record: int) -> int:
        """Number of the newest order for a record."""
        return next(one.order for one in reversed(self.orders) if one.record == record)

    # What processes do

    def work(self) -> None:
        while self.records and self.records[-1].work():
            pass

    @property
    def saves(self) -> list[Save]:
        """The jobs of the newest process for checkpoints."""
        return list(self.checkpoints[-1].sent) if self.checkpoints else []

    def saved(self, nbytes: int = 1 << 30, cpu_seconds: float = 0.01, whole: bool = True) -> None:
        """The oldest job is done, in a second."""
        part = self.checkpoints[-1].sent.popleft().part
        done = Saved(part.step, part.record, nbytes, 1.0, cpu_seconds, part.timeline, whole=whole)
        self.checkpoints[-1].received(done)

    def checkpoint(self, cpu_seconds: float = 0.01) -> int:
        """Train through a whole checkpoint; its record."""
        record = self.train_until_ordered()
        self.train(max(0, record - self.attempt.at))
        self.copy(record)
        self.saved(cpu_seconds=cpu_seconds)
        return record

    def refused(self, reason: str = "no room") -> None:
        """The oldest job has failed."""
        part = self.checkpoints[-1].sent.popleft().part
        self.checkpoints[-1].received(SaveFailed(part.step, reason))

    @property
    def mode(self) -> str:
        return self.status.mode

    @property
    def status(self) -> Any:
        status = self.saver.status(None)
        assert status is not None
        return status

    def close(self) -> None:
        self.saver.close()
        self.filled.close()
