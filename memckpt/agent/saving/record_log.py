"""Records that go to storage between checkpoints; another process copies and writes them.

Records whose slots are filled anew before that are a hole: a checkpoint is due, and the log goes on behind it.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from memckpt.errors import AgentError
from memckpt.memory.generation import Generation
from memckpt.processes.helper_process import WriterProcess
from memckpt.protocol.storing import Append, Appended, LogRecord, OpenLog
from memckpt.state.layout import Layout
from memckpt.state.records import Timeline

_log = logging.getLogger("memckpt.agent")
BATCH_BYTES = 64 << 20
_BATCH_STEPS, _BATCH_SECONDS = 64, 10.0
#: Size of the log at which a checkpoint ends it: in checkpoints, and at least in bytes.
_CHECKPOINTS, _LEAST_BYTES = 10, 1 << 30
#: Seconds before a process that failed is started again.
_RETRY_SECONDS = 5.0


def batch_steps_for(layout: Layout, asked: int | None) -> int:
    return asked or max(1, min(_BATCH_STEPS, BATCH_BYTES // max(layout.logged_bytes, 1)))


def room_to_log(layout: Layout, asked: int | None) -> int:
    """Bytes that a log takes at least: two batches of as many records as asked for, and a checkpoint."""
    return layout.checkpoint_bytes + 2 * batch_steps_for(layout, asked) * layout.logged_bytes


@dataclass(frozen=True)
class _Stretch:
    """Records `first` to `last` without a hole. `checkpoint`: the newest of ``first - 1`` to `last`, if any."""

    first: int
    last: int
    checkpoint: tuple[int, Timeline] | None


@dataclass(frozen=True)
class _Waiting:
    """A record on its way to the process. `follows`: the timeline of the record before it."""

    url: str
    timeline: Timeline
    follows: Timeline
    record: LogRecord


class RecordLog:
    """The log of one run on one node, which never waits. `broken`: called for a hole behind records of use."""

    def __init__(self, node: str, open_writer: Callable[[], WriterProcess], broken: Callable[[], None]) -> None:
        self._node, self._open_writer, self._broken = node, open_writer, broken
        self._writer: WriterProcess | None = None
        self._url = self._run = self._witness = ""
        self._asked_steps: int | None = None
        self._timeout_seconds = 0.0
        self._timeline: Timeline | None = None
        #: The record behind which the timeline branched off, and that record's timeline.
        self._branched: tuple[int, Timeline] | None = None
        self._generation: Generation | None = None
        #: What was last opened in the process (timeline, generation, ...), and the newest record given to it.
        self._opened: tuple[Timeline, int, bool, str] | None = None
        self._given = 0
        self._pending: deque[_Waiting] = deque()
        self._busy_since: float | None = None
        self._flush = False
        self._stretch: _Stretch | None = None
        self._stretch_before: _Stretch | None = None
        self._not_before = float("-inf")
        #: The newest record copied out of its slot; the newest one of this attempt in storage, and its step.
        self.taken: int | None = None
        self.written: tuple[int, int] | None = None
        #: Reason of a hole; empty once records are being written again.
        self.alarm = ""
        #: Why records wait for room in the storage; empty: they do not.
        self.short = ""
        #: Whether the process has answered.
        self._heard = False
        #: Records in a batch, as the process chooses; 0 until it has said so.
        self._chosen_steps = 0
        #: Bytes written since the last checkpoint, about.
        self._nbytes = 0

    def rename(self, name: str) -> None:
        """Take a name for the batches of the next attempt; one that is open keeps its own."""
        self._node = name

    def configure(
        self,
        url: str,
        batch_steps: int | None,
        timeout_seconds: float,
        timeline: Timeline,
        run: str = "",
        witness: str = "",
    ) -> None:
        """Log to a store, for an attempt of a run; `witness`: the file without which the store is away."""
        self._run, self._witness = run, witness
        if timeline != self._timeline:
            self._timeline, self._branched = timeline, None
            self._stretch_before, self._stretch = (self._stretch if url == self._url else None), None
            self.taken = self.written = None
        self._url, self._asked_steps, self._timeout_seconds = url, batch_steps, timeout_seconds

    def branch(self, record: int, follows: Timeline) -> None:
        """Go on behind a record that memory held, of the timeline `follows`."""
        # What lies beyond has its slots filled anew under the same numbers.
        self._pending = deque(one for one in self._pending if one.record.record <= record)
        if self._busy_since is not None and self._given > record:
            self.writer_ended("training has gone back to a step before those that are being logged")
        before, self._stretch_before = self._stretch_before, None
        self._branched = record, follows
        if before is not None and before.first - 1 <= record <= before.last:
            known = before.checkpoint
            # An attempt may have stored the very record that it began behind under its own name, where another one
            # that goes back to this record does not look.
            reached = known is not None and (known[0] < record or known == (record, follows))
            self._stretch = _Stretch(before.first, record, known if reached else None)

    def begin_anew(self) -> None:
        """Go on behind nothing that memory held."""
        self._pending.clear()
        self._branched = None

    # What is collected

    @property
    def based(self) -> bool:
        """Whether storage can produce what is logged: it has a checkpoint to redo the records on."""
        return self._stretch is not None and self._stretch.checkpoint is not None

    def reaches(self, record: int) -> bool:
        """Whether storage can produce a record once all that has been collected is written."""
        return self.based and self._stretch is not None and self._stretch.last >= record

    def covers(self, record: int) -> bool:
        """Whether storage can produce a record now."""
        return self.reaches(record) and self.written is not None and self.written[0] >= record

    def checkpoint_saved(self, record: int) -> None:
        stretch = self._stretch
        if stretch is not None and self._timeline is not None and stretch.first - 1 <= record <= stretch.last:
            self._stretch = _Stretch(stretch.first, stretch.last, (record, self._timeline))
            self._nbytes = 0

    def too_large(self, checkpoint_bytes: int) -> bool:
        """Whether a checkpoint should end the log, which else grows without bounds."""
        return self._nbytes > max(_LEAST_BYTES, _CHECKPOINTS * checkpoint_bytes)

    def collect(self, generation: Generation) -> None:
        """Note the records that all local ranks have committed since the last call, and hand them on."""
        if not generation.complete or self._timeline is None:
            return
        if time.monotonic() < self._not_before:
            self._break("the process that writes records has failed")
            return
        self._generation = generation
        newest = generation.common
        last = self._stretch.last if self._stretch is not None else newest - 1
        for number in range(last + 1, newest + 1):
            record = generation.log_record(number)
            if record is None:
                self._break(f"record {number} is not in the log of generation {generation.number}")
                continue
            stretch = self._stretch or _Stretch(number, number, None)
            self._stretch = _Stretch(stretch.first, number, stretch.checkpoint)
            branched = self._branched
            follows = branched[1] if branched is not None and branched[0] == number - 1 else self._timeline
            self._pending.append(_Waiting(self._url, self._timeline, follows, record))
        if len(self._pending) > generation.layout.ring:
            self._pending.clear()
            self._break("the storage does not keep up with the records")
        self._pump()

    def drop_generation(self, generation: Generation) -> None:
        """Let go of a generation that is about to be closed: what has not been handed on of it is lost."""
        if self._generation is generation:
            self._generation = None
            self._pending.clear()

    def pause(self) -> None:
        """Let what comes next not go on from what there is."""
        self.close()
        self._pending.clear()
        self._stretch = self._stretch_before = None

    @property
    def batch_steps(self) -> int | None:
        """Records in a batch; None while it is not known."""
        if self._generation is None:
            return None
        most = batch_steps_for(self._generation.layout, self._asked_steps)
        return min(self._chosen_steps or most, most)

    @property
    def unwritten_at_most(self) -> int | None:
        """Records not in storage yet, at most: a batch that is not full, and what waits for the process."""
        steps = self.batch_steps
        return steps + self._generation.layout.ring if steps is not None and self._generation is not None else None

    def flush(self) -> None:
        """Have all that has been collected written as soon as possible."""
        self._flush = True
        self._pump()

    def _break(self, reason: str, again: bool = False) -> None:
        if self._stretch is not None:
            level = logging.DEBUG if again else logging.WARNING
            _log.log(level, "the log has a hole behind record %d: %s", self._stretch.last, reason)
        self._nbytes = 0
        based = self.based
        self._stretch = self._stretch_before = None
        if based:
            self._broken()

    # The process

    def _pump(self) -> None:
        """Hand on what has been collected, if the process is idle."""
        generation = self._generation
        if self._busy_since is not None or generation is None or not (self._pending or self._flush):
            return
        waiting: list[_Waiting] = []
        while self._pending and (not waiting or self._pending[0].timeline == waiting[0].timeline):
            waiting.append(self._pending.popleft())
        try:
            self._hand_on(generation, waiting)
        except (AgentError, OSError) as error:
            self.writer_ended(f"the process that writes records cannot be used: {error}")

    def _hand_on(self, generation: Generation, waiting: list[_Waiting]) -> None:
        flush = self._flush and not self._pending
        self._flush = self._flush and not flush
        if waiting:
            self._open(generation, waiting[0])
            self._given = waiting[-1].record.record
        if self._writer is None:
            return  # there is nothing that could be flushed
        self._writer.send(Append(tuple(one.record for one in waiting), flush), [])
        self._busy_since = time.monotonic()

    def _open(self, generation: Generation, first: _Waiting) -> None:
        """Start the process if there is none, and tell it what the records from `first` on belong to."""
        if self._writer is None:
            self._opened, self._heard = None, False
            self._writer = self._open_writer()
        inexact = str(generation.drift) if generation.drift is not None else ""
        opened_for = first.timeline, generation.number, self.based, inexact
        if self._opened == opened_for:
            return
        opened = OpenLog(
            url=first.url,
            node=self._node,
            spec=generation.spec,
            generation=generation.number,
            timeline=first.timeline,
            follows=first.follows,
            batch_steps=batch_steps_for(generation.layout, self._asked_steps),
            batch_bytes=BATCH_BYTES,
            batch_seconds=_BATCH_SECONDS,
            run=self._run,
            # For the checkpoint that ends the log, and for the one on which it is redone, if that is yet to be written.
            reserve=generation.layout.checkpoint_bytes * (1 if self.based else 2),
            witness=self._witness,
            fixed_steps=self._asked_steps is not None,
            inexact=inexact,
        )
        self._writer.send(opened, [generation.regions.slots.fd])
        self._opened = opened_for

    @property
    def busy(self) -> bool:
        """Whether something is being written, or is to be."""
        return self._busy_since is not None or (self._flush and self._generation is not None)

    def deadline(self, preempted_until: float) -> float | None:
        """Time by which the process has to be done, a running grace period's end at the latest; None: it is idle."""
        if self._busy_since is None:
            return None
        limit = self._busy_since + self._timeout_seconds
        return min(limit, preempted_until) if preempted_until > self._busy_since else limit

    def appended(self, message: Appended) -> None:
        """Take the process's answer."""
        first, self._heard = not self._heard, True
        self._busy_since = None
        self.taken, self._chosen_steps = message.taken, message.batch_steps
        if message.written is not None and self._opened is not None and self._opened[0] == self._timeline:
            self.written = message.written, message.step
        self._nbytes += message.nbytes
        if message.hole:
            # A full disk makes a hole whenever the memory for what waits is full.
            self._break(message.hole, again=bool(self.short) and bool(message.short) and bool(self.alarm))
            # A process that has just been started was busy with its imports meanwhile; a checkpoint follows.
            self.alarm = "" if message.late and first else message.hole
        elif message.nbytes:
            self.alarm = ""
        if message.short and not self.short:
            _log.warning("records wait in memory: %s", message.short)
        self.short = message.short
        self._pump()

    def writer_ended(self, reason: str) -> None:
        """Note the end of the process: what it had not written is lost."""
        self.close()
        self._pending.clear()
        self.alarm = reason
        self._not_before = time.monotonic() + _RETRY_SECONDS
        self._break(reason)

    def close(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()
        self._busy_since, self._opened, self._flush = None, None, False
        self.short = ""
