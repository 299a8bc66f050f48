"""A node's storage tier in one process: generations filled by a test, and writer processes that work on request.

Events that the agent's loop would see from trainers and processes happen here in the order that a test chooses.
"""

from __future__ import annotations

import contextlib
import os
import struct
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from memckpt.agent.saving.writer.record_writer import RecordWriter
from memckpt.errors import AgentGoneError
from memckpt.memory.generation import make_generation
from memckpt.memory.region import Allowance, Region
from memckpt.memory.slots import SlotRing
from memckpt.processes.attempt import Attempt
from memckpt.protocol.channel import Message
from memckpt.protocol.storing import Append, OpenLog
from memckpt.protocol.trainer import Commit, GenerationCommit
from memckpt.state.records import RecordMeta, SubStep, encode_meta
from memckpt.state.spec import OptimizerSpec, OwnerSpec, ParamSpec, StateSpec, TensorSpec


class Clock(SimpleNamespace):
    """Stand-in for the module `time` in the code under test: it advances when a test says so."""

    def __init__(self) -> None:
        super().__init__(now=1000.0)

    def monotonic(self) -> float:
        return float(self.now)

    perf_counter = time = monotonic

    def passes(self, seconds: float) -> None:
        self.now += seconds


def spec_of(local_ranks: tuple[int, ...] = (0,), world_size: int | None = None, dtype: str = "float32") -> StateSpec:
    """One small parameter, redone lazily: a ring of 5 records."""
    return StateSpec(
        params=(ParamSpec(TensorSpec("w", (4,), dtype), (OwnerSpec(0, 0, ()),), False, 0),),
        optimizers=(OptimizerSpec("torch.optim", "SGD", b"", (1,), 1),),
        static=(),
        by_value=(),
        mode="lazy",
        period=2,
        slots=3,
        local_ranks=local_ranks,
        world_size=world_size or len(local_ranks),
    )


class Filled:
    """A generation as trainers fill it, after the record `base`. :meth:`close` it, unless the agent's parts have.

    `offset`: difference between the framework's steps and the records.
    """

    def __init__(self, number: int = 1, spec: StateSpec | None = None, base: int = 0, offset: int = 0) -> None:
        spec = spec or spec_of()
        self.offset = offset
        self.held = make_generation(number, spec, Allowance(), threads=1, notify=lambda message: None)
        self._ring = SlotRing(self.held.regions.slots, self.held.layout, number)
        for rank in spec.local_ranks:
            for virtual in range(base - spec.period + 1, base + 1):
                self._ring.seal(virtual, rank)
            self.held.start(rank, GenerationCommit(number, base, base + offset, b"state"))
        self.newest = base

    def open(self, record: int, value: float) -> None:
        """Begin to fill a record's slot."""
        for rank in self.held.spec.local_ranks:
            self._ring.open_for_writing(record, rank)
        layout = self.held.layout
        start = layout.slot_offset(record) + layout.gradient_offset(0, 0, 0)
        self.held.regions.slots.map[start : start + 16] = struct.pack("4f", *[value] * 4)

    def commit(self, record: int | None = None, value: float = 0.0, ranks: Sequence[int] | None = None) -> int:
        """Commit a record (None: the next one) for ranks (None: all of the node); returns its number."""
        record = self.newest + 1 if record is None else record
        self.open(record, value)
        spec, number = self.held.spec, self.held.number
        meta = encode_meta(RecordMeta(record, record - 1, False, (SubStep(0, 0, b""),), (), repr(value).encode()))
        for rank in spec.local_ranks if ranks is None else ranks:
            self._ring.seal(record, rank)
            leads = rank == spec.local_ranks[0]
            state = f"{rank} {value!r}".encode()
            self.held.commit(rank, Commit(number, record, record + self.offset, state, meta if leads else b""))
        self.newest = record
        return record

    def settle(self, record: int) -> None:
        """Let a new attempt continue after a record."""
        self.held.settle(record)
        self.newest = record

    def close(self) -> None:
        self.held.close()


@dataclass
class Steps(Attempt):
    """An attempt that only knows its newest record."""

    at: int = 0

    @property
    def newest_record(self) -> int:
        return self.at


@dataclass
class Process:
    """Stand-in for a writer process: keeps its messages."""

    received: Callable[[Any], None] = lambda message: None  # gets its answers
    ended: Callable[[str], None] = lambda reason: None  # gets the reason of its end
    sent: deque[Any] = field(default_factory=deque)
    closed: bool = False
    broken: bool = False  # nothing can be sent to it

    def send(self, message: Message, fds: Sequence[int]) -> None:
        if self.broken or self.closed:
            raise AgentGoneError("the connection is closed")
        self.sent.append(message)

    def close(self) -> None:
        self.closed = True


class RecordsProcess(Process):
    """Stand-in for the process that writes records: it works in :meth:`work`, as late as a test wants."""

    def __init__(self, received: Callable[[Any], None], ended: Callable[[str], None] = lambda reason: None) -> None:
        super().__init__(received, ended)
        self._writer: RecordWriter | None = None
        self._fds: deque[int] = deque()

    def send(self, message: Message, fds: Sequence[int]) -> None:
        super().send(message, fds)
        self._fds.extend(os.dup(fd) for fd in fds)

    def work(self) -> bool:
        """Handle the oldest message; without one, write what is due by the clock, and return False."""
        if not self.sent:
            if self._writer is not None:
                self._writer.write_if_due()
            return False
        message = self.sent.popleft()
        if isinstance(message, OpenLog):
            lost = self._writer.close() if self._writer is not None else ""
            self._writer = RecordWriter(message, Region.open(self._fds.popleft()), lost)
            return self.work()
        assert isinstance(message, Append)
        self.received(self._writer.append(message))
        return True

    def close(self) -> None:
        """Kill it: unwritten records are lost."""
        super().close()
        self.sent.clear()
        while self._fds:
            with contextlib.suppress(OSError):
                os.close(self._fds.popleft())
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close(write=False)
