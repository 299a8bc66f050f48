"""The writer of records: from an agent's slots into batches in a store. Needs no torch.

Training does not wait: stamps, checked before and after, say whether a copy is good. Else the log has a hole.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections import deque
from dataclasses import dataclass

from memckpt.errors import AgentError, DamagedStateError, MemckptError, StorageAwayError, StorageError, StorageFullError
from memckpt.memory.region import Region
from memckpt.memory.slots import SlotRing
from memckpt.processes.backoff import Backoff
from memckpt.processes.helper import AgentEnd
from memckpt.protocol.channel import WriterChannel
from memckpt.protocol.storing import Append, Appended, LogRecord, OpenLog
from memckpt.state.layout import Layout
from memckpt.state.records import Timeline, decode_meta
from memckpt.storage.batch import FileTensor, RecordCopy, write_batch
from memckpt.storage.format import Batch
from memckpt.storage.retention import no_room
from memckpt.storage.urls import open_store

_log = logging.getLogger("memckpt.writer")
#: The longest time between two looks for room, in seconds.
_ROOM_SECONDS = 10.0


class Complaints:
    """Log of the failures of one kind of work: one traceback for each new one."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._last: object = None

    def log_failure(self, what: str, error: BaseException) -> None:
        """Log an error that is being handled; `what` has failed, in words."""
        cause = error.__cause__
        kind = (type(error), type(cause), getattr(cause, "errno", None))
        self._log.error("%s: %s: %s", what, type(error).__name__, error, exc_info=kind != self._last)
        self._last = kind

    def reset(self) -> None:
        """Take the next failure for a new one: the work has succeeded."""
        self._last = None


_complaints = Complaints(_log)


def serve(channel: WriterChannel) -> None:
    """Take records from the agent until it is gone."""
    log: RecordWriter | None = None
    try:
        while True:
            received = channel.poll(log.seconds_left() if log is not None else None)
            if received is None:
                if log is not None:
                    log.write_if_due()
                continue
            message, fds = received
            if isinstance(message, OpenLog):
                unwritten = log.close() if log is not None else ""
                log = RecordWriter(message, Region.open(fds[0]), unwritten)
            elif isinstance(message, Append) and log is not None:
                channel.send(log.append(message))
            else:
                raise AgentError(f"expected OpenLog, then Append, from the agent, found {type(message).__name__}")
    finally:
        if log is not None:
            log.close(write=False)


@dataclass(frozen=True)
class _Taken:
    """A copied record that waits for its batch to be full."""

    copy: RecordCopy
    record: LogRecord
    at: float


class RecordWriter:
    """Writes the records of one generation on one timeline. Owns its slots. `hole`: an earlier loss, to report."""

    def __init__(self, opened: OpenLog, slots: Region, hole: str = "") -> None:
        self._opened, self._slots = opened, slots
        self._layout = Layout(opened.spec)
        self._ring = SlotRing(slots, self._layout, opened.generation)
        self._full = opened.spec.full
        self._taken: list[_Taken] = []
        self._follows: Timeline | None = opened.follows
        self._last: int | None = None
        self._written: LogRecord | None = None
        self._hole = hole
        self._late = False
        #: Why taken records wait for room, and until when; they may take as much memory as a batch.
        self._short = ""
        self._not_before = float("-inf")
        self._backoff = Backoff(lambda: time.monotonic(), at_once=0, longest=_ROOM_SECONDS)
        self._batch_size = BatchSize(opened.batch_steps, opened.fixed_steps)

    def append(self, message: Append) -> Appended:
        """Copy records; write batches that are full."""
        nbytes = 0
        try:
            for record in message.records:
                nbytes += self._copy_record(record)
            if self._taken and message.flush:
                self._not_before = float("-inf")
                nbytes += self._write_if_there_is_room()
        except (MemckptError, OSError, MemoryError) as error:
            self._lose_to(error)
        hole, late, self._hole, self._late = self._hole, self._late, "", False
        newest, step = (self._written.record, self._written.step) if self._written is not None else (None, 0)
        return Appended(self._last, newest, step, nbytes, hole, self._short, self._batch_size.records, late)

    def seconds_left(self) -> float | None:
        """Seconds until the oldest taken record has waited long enough; None while there is none."""
        if not self._taken:
            return None
        # A timeout of zero would not wait at all, and one that is over by now is as good as due.
        return max(0.001, max(self._taken[0].at + self._opened.batch_seconds, self._not_before) - time.monotonic())

    def write_if_due(self) -> None:
        """Write a batch whose records have waited long enough; the next answer says whether that failed."""
        if self._taken and time.monotonic() >= self._taken[0].at + self._opened.batch_seconds:
            try:
                self._write_if_there_is_room()
            except (MemckptError, OSError, MemoryError) as error:
                self._lose_to(error)

    def _write_if_there_is_room(self) -> int:
        """Write the taken records as one batch, or keep them; returns its bytes.

        Raises StorageError: the storage has no room, or is away, and there is no memory to wait in.
        """
        if time.monotonic() >= self._not_before:
            try:
                return self._write()
            except (StorageFullError, StorageAwayError) as error:
                if not self._short:
                    _complaints.log_failure("records wait", error)
                self._short = str(error)
                self._not_before = time.monotonic() + self._backoff.died()
        if sum(taken.copy.nbytes for taken in self._taken) > self._opened.batch_bytes:
            raise StorageError(self._short)
        return 0

    def _copy_record(self, record: LogRecord) -> int:
        """Copy one record, and write the batch if that makes it full; returns the bytes written."""
        nbytes = 0
        if self._last is not None and record.record != self._last + 1:
            nbytes += self._write() if self._taken else 0
            self._begin_anew()  # the agent knows: it has not sent what is missing
        try:
            self._check(record.record)
            copy = RecordCopy(self._layout, self._slots.map, record.record, self._full)
            self._check(record.record)
        except DamagedStateError as error:
            self._late = not self._hole
            nbytes += self._write() if self._taken else 0
            self._lose(f"it is not logged in time: {error}")
            return nbytes
        self._taken.append(_Taken(copy, record, time.monotonic()))
        self._last = record.record
        held = sum(taken.copy.nbytes for taken in self._taken)
        full = len(self._taken) >= self._batch_size.records or held >= self._opened.batch_bytes
        if full or time.monotonic() - self._taken[0].at >= self._opened.batch_seconds:
            nbytes += self._write_if_there_is_room()
        return nbytes

    def _check(self, record: int) -> None:
        self._ring.check(record, self._opened.spec.local_ranks)
        self._ring.check_by_value(record, self._opened.spec.local_ranks)

    def _lose_to(self, error: BaseException) -> None:
        """Lose the taken records to an error that is being handled."""
        if not self._short:
            _complaints.log_failure("a batch of records was not written", error)
        self._lose(f"{type(error).__name__}: {error}")

    def _lose(self, reason: str) -> None:
        self._hole = self._hole or reason
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._taken.clear()
        self._follows = self._opened.timeline  # what comes next does not begin where the timeline branched off
        self._last = None

    def _write(self) -> int:
        """Write the taken records as one batch; returns its bytes."""
        opened, taken, started = self._opened, self._taken, time.monotonic()
        last = taken[-1].record
        batch = Batch(
            timeline=opened.timeline,
            first=taken[0].record.record,
            last=last.record,
            steps=tuple(one.record.step for one in taken),
            follows=self._follows,
            world_size=opened.spec.world_size,
            ranks=opened.spec.local_ranks,
            node=opened.node,
            full=self._full,
            created=time.time(),
            content=opened.spec.content(),
            serves=opened.spec.serves,
            run=opened.run,
            inexact=opened.inexact,
        )
        store = open_store(opened.url, opened.witness)
        free = store.free()
        needed = opened.reserve + sum(one.copy.nbytes for one in taken)
        if free is not None and free < needed:
            raise no_room(f"records {batch.first} to {batch.last} and a checkpoint", store.url, needed, free)
        committed = write_batch(store, batch, [tensor for one in taken for tensor in self._parts(one)])
        now = time.monotonic()
        self._batch_size.wrote(len(taken), now - started, now)
        self._taken.clear()
        self._short, self._not_before = "", float("-inf")
        self._backoff.reset()
        _complaints.reset()
        self._follows = opened.timeline
        self._written = last
        _log.debug("records %d to %d are in storage (pid %d)", batch.first, batch.last, os.getpid())
        return sum(file.nbytes for file in committed.files)

    def _parts(self, taken: _Taken) -> list[FileTensor]:
        meta = taken.record.meta if self._full else b""
        sub_steps = decode_meta(meta).sub_steps if meta else ()
        return list(taken.copy.tensors(meta, sub_steps, taken.record.rank_states))

    def close(self, write: bool = True) -> str:
        """Let go of the region, with `write` after writing the taken records; returns the loss, in words."""
        try:
            if write and self._taken:
                self._write()
        except (MemckptError, OSError, MemoryError) as error:
            _complaints.log_failure("a batch of records was not written", error)
            return f"{type(error).__name__}: {error}"
        finally:
            self._taken.clear()
            self._slots.close()
        return ""


#: Share of the time that writing may take.
_BUSY = 0.05
#: Shortest time between two batches: each is two files, which a resume has to look at.
_LEAST_SECONDS = 1.0
_SAMPLES = 4
#: A quotient this little above a number counts as the number.
_ROUNDING = 1e-3


class BatchSize:
    """As few records as leave the writer idle for 95% of the time, and a second between batches, `most` at most.

    Batches of b records are written every b steps, in a time that depends little on b (LowDiff, section IV-B).
    """

    def __init__(self, most: int, fixed: bool) -> None:
        self._most, self._fixed = most, fixed
        # The longest write and the shortest step of the last few count: one of each may be unusual.
        self._writes: deque[float] = deque(maxlen=_SAMPLES)
        self._intervals: deque[float] = deque(maxlen=_SAMPLES)
        self._last: float | None = None

    def wrote(self, records: int, seconds: float, now: float) -> None:
        """Note a batch of records, whose writing took `seconds` until `now`."""
        self._writes.append(seconds)
        if self._last is not None:
            self._intervals.append((now - self._last) / records)
        self._last = now

    @property
    def records(self) -> int:
        if self._fixed or not self._intervals:
            return self._most
        step = min(self._intervals)
        seconds = max(_LEAST_SECONDS, max(self._writes) / _BUSY)
        return min(self._most, max(1, math.ceil(seconds / step - _ROUNDING))) if step > 0 else self._most


def main(end: AgentEnd) -> None:
    os.nice(5)  # no more: it has to keep up with training
    serve(end.channel)
