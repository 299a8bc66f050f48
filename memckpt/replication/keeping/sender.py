"""A node's own records on their way to the holders of their pieces.

Each holder is served by a stream of its own, in order: a generation is opened, what is static follows, then record
after record. Streams that keep step share what has been encoded; one that lags behind, or begins anew because its
holder came back empty, is served from what still lies in the slots.
"""

from __future__ import annotations

import logging
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Sequence
from typing import Protocol

import msgspec

from memckpt.replication.coding.blob import STATIC
from memckpt.replication.coding.code import STRIPE_BYTES, Code, Piece
from memckpt.replication.coding.fragments import Fragment, seal_stripe
from memckpt.replication.transport.wire import Abandon, NotStored, Open, Put, Stored, Window, WireMessage

_log = logging.getLogger("memckpt.replicator")
#: Encoded stripes that are kept for streams that are a little behind the first.
_CACHED_STRIPES = 32
#: Records that wait for a holder, in windows.
_MOST_WINDOWS_QUEUED = 3
#: Characters of a reason from a peer that are kept.
_MOST_WORDS = 500
_FIRST_RETRY_SECONDS, _LAST_RETRY_SECONDS = 0.1, 5.0
#: Records over which a link's rate is averaged.
_RATE_RECORDS = 16
#: So often records were overtaken, each time within so many windows of the last time: no accident, but a slow link.
_MOST_LOSSES, _LOSS_WINDOWS = 3, 4


class Stripes(Protocol):
    """The bytes of a record, as :class:`Blob` has them."""

    nbytes: int
    stripes: int

    def stripe(self, index: int) -> bytes | memoryview: ...

    def release(self) -> None: ...


class Source(Protocol):
    """Where the bytes of one generation's records lie."""

    def open(self, record: int) -> Stripes | None:
        """The bytes of a record; None if they are not there any more."""
        ...

    def intact(self, record: int) -> bool:
        """Whether what has been read of a record until now was the record's."""
        ...

    def step(self, record: int) -> int:
        """The framework's step of a record."""
        ...

    def close(self) -> None: ...


class Outgoing:
    """One generation that is sent.

    Args:
        window: as holders are told, for piece 0.
        source: of its records; closed with it.
        records: those that are there when it begins: virtual ones up to its base.
        slots: of the ring in which records lie; None: as many as a holder keeps.
    """

    def __init__(self, window: Window, source: Source, records: Sequence[int], slots: int | None = None) -> None:
        self.window = window
        self.source = source
        self.records = deque(records)
        self._slots = window.kept if slots is None else slots
        self._blobs: dict[int, Stripes] = {}

    @property
    def generation(self) -> str:
        return self.window.generation

    def add(self, record: int) -> None:
        """A record more; of what lies further back than a window reaches nothing is needed again."""
        self.records.append(record)
        while len(self.records) > self.window.kept:
            self.forget(self.records.popleft())

    def left(self, record: int) -> int:
        """Records that training may still commit before it fills the slot of this one anew."""
        newest = self.records[-1] if self.records else record
        return record // self.window.every + self._slots - 1 - newest // self.window.every

    def blob(self, record: int) -> Stripes | None:
        """The bytes of a record; None if they are not there any more."""
        found = self._blobs.get(record)
        if found is None:
            found = self.source.open(record)
            if found is not None:
                self._blobs[record] = found
        return found

    def forget(self, record: int) -> None:
        """Nobody reads this record just now."""
        blob = self._blobs.pop(record, None)
        if blob is not None:
            blob.release()

    def close(self) -> None:
        for record in list(self._blobs):
            self.forget(record)
        self.source.close()


#: In a stream's queue: tell the holder that a generation begins.
_OPEN = None


class _Stream:
    """What one holder gets, and what it has."""

    def __init__(self, holder: str, piece: int, start: int) -> None:
        self.holder, self.piece = holder, piece
        self.queue: deque[tuple[Outgoing, int | None]] = deque()
        #: The next one of the record at the head of the queue.
        self.stripe = 0
        self.acknowledged = start
        #: The holder has all records from this one to that.
        self.since = start
        self.met = False
        #: Why it did not take something, until it takes what follows; and whether it is not tried just now.
        self.problem = ""
        self.waits = False
        self.retry_at = 0.0
        self._backoff = _FIRST_RETRY_SECONDS
        #: How often it has said that it has a record.
        self._heard = 0
        #: What is on its way or yet to be sent, in order; and what the holder has said that it has.
        self._pending: deque[tuple[Outgoing, int]] = deque()
        self._stored: set[tuple[str, int]] = set()
        #: Records committed since something has been waiting all the time, and bytes sent meanwhile; both decay.
        self._busy_records = self._busy_bytes = 0.0
        #: Records committed since the last byte went.
        self._idle_records = 0

    def note_record(self) -> None:
        """A record is about to be queued."""
        if not self.queue:
            self._busy_records = self._busy_bytes = 0.0
            return
        self._idle_records += 1
        self._busy_records += 1
        if self._busy_records > _RATE_RECORDS:
            self._busy_records, self._busy_bytes = self._busy_records / 2, self._busy_bytes / 2

    def note_sent(self, nbytes: int) -> None:
        """So many bytes went."""
        if self._idle_records >= _RATE_RECORDS:  # the link was away: how fast it was tells nothing
            self._busy_records = self._busy_bytes = 0.0
        self._idle_records = 0
        self._busy_bytes += nbytes

    @property
    def bytes_per_record(self) -> float | None:
        """What the link carries while training commits a record; None: all that there was, or it is not known."""
        return self._busy_bytes / self._busy_records if self._busy_records and self._busy_bytes else None

    @property
    def progress(self) -> int | None:
        """How many records it has said that it has, where it is to say more; None where nothing is asked of it."""
        return self._heard if self._pending or self.problem or not self.met else None

    def restart(self, outgoing: Outgoing | None) -> None:
        """Send what there is of a generation, from its beginning; None: nothing."""
        self.queue.clear()
        self._pending.clear()
        self.stripe = 0
        if outgoing is not None:
            self.since = max(self.since, outgoing.window.base)
            self.begin(outgoing)

    def go_on(self, outgoing: Outgoing) -> None:
        """Send what follows of a generation, and none of the records that there are."""
        self.queue.append((outgoing, _OPEN))
        if outgoing.window.static and (outgoing.generation, STATIC) not in self._stored:
            self.add(outgoing, STATIC)

    def empty(self) -> None:
        """The holder has nothing any more."""
        self.met, self.waits, self.problem, self._backoff = True, False, "", _FIRST_RETRY_SECONDS
        self._stored.clear()

    def begin(self, outgoing: Outgoing) -> None:
        """Send a generation after what is still to be sent."""
        self.queue.append((outgoing, _OPEN))
        for record in ([STATIC] if outgoing.window.static else []) + list(outgoing.records):
            self.add(outgoing, record)

    def add(self, outgoing: Outgoing, record: int) -> None:
        self.queue.append((outgoing, record))
        self._pending.append((outgoing, record))

    def skip(self, outgoing: Outgoing, record: int) -> bool:
        """The holder gets nothing more of the record at the head of the queue; whether it does not have it already."""
        lacks = (outgoing, record) in self._pending
        if lacks:
            self._pending.remove((outgoing, record))
        self._advance()
        return lacks

    def behind_of(self, outgoing: Outgoing) -> list[int]:
        """Records that are queued and would not be any more if it began anew with a generation."""
        return [
            record
            for one, record in self.queue
            if record is not _OPEN and record >= one.window.base and (one is not outgoing or record not in one.records)
        ]

    def leave_out(self, outgoing: Outgoing, upto: int) -> tuple[list[int], bool]:
        """Send none of a generation's records up to one; which these are, and whether part of the first was sent."""
        out = [one for one in self.queue if one[0] is outgoing and one[1] not in (_OPEN, STATIC) and one[1] <= upto]
        begun = bool(out) and self.queue[0] == out[0] and self.stripe > 0
        if out and self.queue[0] == out[0]:
            self.stripe = 0
        self.queue = deque(one for one in self.queue if one not in out)
        self._pending = deque(one for one in self._pending if one not in out)
        self._advance()
        return [record for _, record in out if record is not _OPEN], begun

    def drop(self, outgoing: Outgoing) -> None:
        """Nobody needs this generation any more."""
        if self.queue and self.queue[0][0] is outgoing:
            self.stripe = 0
        self.queue = deque(one for one in self.queue if one[0] is not outgoing)
        self._pending = deque(one for one in self._pending if one[0] is not outgoing)
        self._stored = {one for one in self._stored if one[0] != outgoing.generation}
        self._advance()

    def stored(self, message: Stored) -> None:
        """The holder has a record. It counts if all of it was sent, and was not known to be there."""
        found = [one for one in self._pending if (one[0].generation, one[1]) == (message.generation, message.record)]
        if found and found[0] not in self.queue:
            self._heard += 1
            self._stored.add((message.generation, message.record))
            self._advance()

    def _advance(self) -> None:
        while self._pending and (self._pending[0][0].generation, self._pending[0][1]) in self._stored:
            outgoing, record = self._pending.popleft()
            if record >= outgoing.window.base:
                if record > self.acknowledged + outgoing.window.every:
                    self.since = record
                self.acknowledged = max(self.acknowledged, record)
                self.problem, self._backoff = "", _FIRST_RETRY_SECONDS
                oldest = record - outgoing.window.kept * outgoing.window.every
                self._stored = {
                    one for one in self._stored if one[0] != outgoing.generation or one[1] == STATIC or one[1] > oldest
                }

    def not_stored(self, message: NotStored, now: float) -> None:
        """The holder does not take it: try again, later each time."""
        self._stored.discard((message.generation, message.record))
        if message.nothing:
            self._stored = {one for one in self._stored if one[0] != message.generation}
        self.queue.clear()
        self._pending.clear()
        self.problem, self.waits = message.reason[:_MOST_WORDS], True
        self.retry_at = now + self._backoff
        self._backoff = min(2 * self._backoff, _LAST_RETRY_SECONDS)

    def whole(self, window: Window) -> bool:
        """Whether the holder has all that the state after its newest record needs."""
        return self.holds(window, self.acknowledged)

    def holds(self, window: Window, record: int) -> bool:
        """Whether the holder has all that the state after a record needs."""
        needed = {record - index * window.every for index in range(window.period)}
        if window.static:
            needed.add(STATIC)
        return all((window.generation, one) in self._stored for one in needed)


class Sender:
    """One set of shards and where its records go.

    Args:
        ranks: that share them on this node.
        code: of the pieces.
        holders: a node for each piece.
        send: gives a message, with bytes beside it, to a node.
        room: how many bytes a node takes just now; 0 or less: none.
        record: that every node can produce at the start.
        proceeds: training does not wait for holders, and goes on to fill slots whose records were not sent.
    """

    def __init__(
        self,
        ranks: tuple[int, ...],
        code: Code,
        holders: Sequence[str],
        send: Callable[[str, WireMessage, memoryview | bytes], None],
        room: Callable[[str], int],
        record: int,
        proceeds: bool = False,
    ) -> None:
        self.ranks = ranks
        #: Whether training goes on to fill slots whose records were not sent.
        self.proceeds = proceeds
        #: Whether states are sent instead (by somebody else) where links do not carry every record.
        self.spaces = False
        #: They do not.
        self.too_slow = False
        #: The record that was overtaken last, and how often some were, one time soon after the other.
        self._lost_at, self._losses = record, 0
        #: Nothing is sent until :meth:`go_on`.
        self.paused = False
        self._code = code
        self._send = send
        self._room = room
        self._streams = [_Stream(holder, piece, record) for piece, holder in enumerate(holders)]
        self._generations: list[Outgoing] = []
        self._encoded: OrderedDict[tuple[str, int, int], list[tuple[Fragment, Piece]]] = OrderedDict()
        self._start = record
        self.watermark = record
        self.bytes_sent = 0
        #: What the last record took that all holders were sent.
        self.last_record_bytes: int | None = None
        #: The records, from the first to the last, of the last stretch that not every holder got.
        self.gap: tuple[int, int] | None = None
        self._sent_of: dict[tuple[str, int], int] = {}

    @property
    def holders(self) -> tuple[str, ...]:
        return tuple(stream.holder for stream in self._streams)

    @property
    def problems(self) -> dict[str, str]:
        """Why holders do not take anything, in words."""
        return {stream.holder: stream.problem for stream in self._streams if stream.problem}

    def close(self) -> None:
        for outgoing in self._generations:
            outgoing.close()
        self._generations.clear()

    # What the node's own ranks do

    def begin(self, outgoing: Outgoing) -> None:
        """A generation is complete on this node: send it."""
        self._generations.append(outgoing)
        for stream in self._streams:
            if stream.met and not self.paused:
                stream.begin(outgoing)

    def committed(self, record: int) -> None:
        """A record of the newest generation is whole on this node."""
        outgoing = self._generations[-1]
        outgoing.add(record)
        for stream in self._streams:
            if stream.met and not stream.waits and not self.paused:
                stream.note_record()
                stream.add(outgoing, record)
                if len(stream.queue) > _MOST_WINDOWS_QUEUED * outgoing.window.kept:
                    # It takes nothing, and training goes on without it: what is gone from the slots is not remembered.
                    if missed := stream.behind_of(outgoing):
                        self._note_gap(outgoing, min(missed), max(missed))
                    stream.restart(outgoing)

    def pause(self) -> None:
        """Send nothing more of these records; what was sent of one in part is withdrawn."""
        self.paused = True
        for stream in self._streams:
            if stream.queue and stream.stripe:
                outgoing, record = stream.queue[0]
                if record is not _OPEN and record != STATIC:
                    self._send(stream.holder, Abandon(self.ranks, outgoing.generation, record), b"")
            stream.restart(None)
        for outgoing in self._generations:
            for record in outgoing.records:
                self._forget(outgoing, record)
            outgoing.forget(STATIC)

    def go_on(self, awaited: bool = False) -> None:
        """Send what is committed from now on.

        Args:
            awaited: training waits for what is there, so that it is sent, too.
        """
        if not self.paused:
            return
        self.paused = self.too_slow = False
        for stream in self._streams:
            if stream.met and not stream.waits and self._newest is not None:
                if awaited:
                    stream.restart(self._newest)
                else:
                    stream.go_on(self._newest)

    def supersede(self) -> None:
        """What is newer than the watermark is not sent any more: something else is to be sent instead."""
        for outgoing in [one for one in self._generations if one.window.base > self.watermark]:
            self._generations.remove(outgoing)
            for stream in self._streams:
                for record in outgoing.records:
                    self._send(stream.holder, Abandon(self.ranks, outgoing.generation, record), b"")
                stream.drop(outgoing)
            outgoing.close()

    def holds(self, base: int) -> bool:
        """Whether all holders have the state that a generation begins with."""
        windows = [one.window for one in self._generations if one.window.base == base]
        return any(all(stream.holds(window, base) for stream in self._streams) for window in windows)

    def give_up(self, generation: str) -> None:
        """What a generation begins with cannot be sent any more: the replica, where it lies, goes on."""
        for outgoing in self._generations:
            if outgoing.generation != generation:
                continue
            while outgoing.records and outgoing.records[0] <= outgoing.window.base:
                outgoing.forget(outgoing.records.popleft())
            for stream in self._streams:
                left_out, begun = stream.leave_out(outgoing, outgoing.window.base)
                if begun:
                    self._send(stream.holder, Abandon(self.ranks, generation, left_out[0]), b"")
                for record in left_out:
                    self._forget(outgoing, record)

    def watermark_advanced(self, watermark: int) -> None:
        """The watermark has got so far: older generations are not needed any more."""
        self.watermark = max(self.watermark, watermark)
        while len(self._generations) > 1 and self._generations[1].window.base <= self.watermark:
            old = self._generations.pop(0)
            for stream in self._streams:
                stream.drop(old)
            self._sent_of = {key: sent for key, sent in self._sent_of.items() if key[0] != old.generation}
            old.close()

    # What holders say

    def met(self, holder: str) -> None:
        """A holder is there, with nothing of ours on its way: it gets all that there is."""
        for stream in self._streams:
            if stream.holder == holder:
                stream.empty()
                stream.restart(None if self.paused else self._newest)

    def stored(self, holder: str, message: Stored) -> None:
        for stream in self._streams:
            if stream.holder == holder:
                stream.stored(message)

    def not_stored(self, holder: str, message: NotStored, now: float) -> None:
        for stream in self._streams:
            known = any(one.generation == message.generation for one in self._generations)
            if stream.holder == holder and stream.met and known and not stream.waits:
                _log.warning(
                    "%s does not keep record %d of ranks %s: %s",
                    holder,
                    message.record,
                    list(self.ranks),
                    message.reason[:_MOST_WORDS],
                )
                stream.not_stored(message, now)

    def owing(self, progress: Callable[[str], tuple[int, Hashable]]) -> dict[str, Hashable]:
        """Holders that have something to acknowledge, each with what changes as it does.

        Args:
            progress: bytes that a node has not acknowledged, and what changes whenever it acknowledges something.
        """
        found: dict[str, Hashable] = {}
        if self._newest is None:
            return found
        for stream in self._streams:
            told = stream.progress
            if told is None:
                continue
            nbytes, acknowledged = progress(stream.holder)
            if stream.problem or not stream.met:
                found[stream.holder] = told  # that it refuses counts for nothing
            elif nbytes or not stream.queue or self._room(stream.holder) <= 0:
                found[stream.holder] = told, acknowledged
        return found

    @property
    def acknowledged(self) -> int:
        """The newest record that all holders have."""
        return min((stream.acknowledged for stream in self._streams), default=self._start)

    @property
    def since(self) -> int:
        """All holders have all records from this one on, up to :attr:`acknowledged`."""
        return max((stream.since for stream in self._streams), default=self._start)

    @property
    def whole(self) -> bool:
        """Whether all holders have all that the state after :attr:`acknowledged` needs."""
        if not self._generations:
            return False
        return all(stream.whole(self._generations[-1].window) for stream in self._streams)

    @property
    def reaches_from(self) -> int:
        """The first record whose state all holders can produce, of those from :attr:`since` on."""
        base = self._generations[-1].window.base if self._generations else self._start
        period = self._generations[-1].window.period if self._generations else 1
        return base if self.since <= base else self.since + period - 1

    @property
    def _newest(self) -> Outgoing | None:
        return self._generations[-1] if self._generations else None

    @property
    def behind(self) -> dict[str, int]:
        """Records that each holder has still to get."""
        return {stream.holder: sum(record is not _OPEN for _, record in stream.queue) for stream in self._streams}

    @property
    def window(self) -> Window | None:
        """Window of the newest generation; None before the first."""
        newest = self._newest
        return None if newest is None else newest.window

    @property
    def newest(self) -> int | None:
        """The newest record that there is to send; None before the first."""
        newest = self._newest
        return newest.records[-1] if newest is not None and newest.records else None

    @property
    def record_bytes(self) -> int:
        """What a record of the newest generation is, in pieces for all holders."""
        newest = self._newest
        return 0 if newest is None else newest.window.record_bytes * len(self._streams) // self._code.data

    @property
    def bytes_per_step(self) -> float:
        """That records of the newest generation are, in pieces for all holders, on average."""
        newest = self._newest
        return 0.0 if newest is None else self.record_bytes / newest.window.every

    @property
    def waiting_bytes(self) -> int:
        """About what is yet to be sent, to all holders that take something."""
        newest = self._newest
        each = 0 if newest is None else newest.window.record_bytes // self._code.data
        behind = self.behind
        return each * sum(behind[holder] for holder in self.holders if self._room(holder) > 0)

    @property
    def every(self) -> int:
        """Records of the newest generation have numbers that are multiples of it."""
        newest = self._newest
        return 1 if newest is None else newest.window.every

    @property
    def kept(self) -> int:
        """How many records a holder keeps."""
        newest = self._newest
        return 0 if newest is None else newest.window.kept

    # Sending

    @property
    def wants(self) -> bool:
        """Whether there is anything to send to a holder that would take it."""
        return any(stream.queue and self._room(stream.holder) > 0 for stream in self._streams)

    def retry_at(self) -> float | None:
        """When to :meth:`retry`; None: there is nothing to."""
        return min((stream.retry_at for stream in self._streams if stream.waits), default=None)

    def retry(self, now: float) -> None:
        """Begin anew with holders that did not take something a while ago."""
        for stream in self._streams:
            if stream.waits and stream.retry_at <= now:
                stream.waits = False
                stream.restart(None if self.paused else self._newest)

    def pump(self, limit: int) -> int:
        """Send up to about `limit` bytes, in turns to all holders that take some; returns how many."""
        sent = 0
        progress = True
        while progress and sent < limit:
            progress = False
            for stream in self._streams:
                if stream.queue and self._room(stream.holder) > 0:
                    nbytes = self._send_next(stream)
                    stream.note_sent(nbytes)
                    sent += nbytes
                    progress = True
        self.bytes_sent += sent
        return sent

    def _send_next(self, stream: _Stream) -> int:
        outgoing, record = stream.queue[0]
        if record is _OPEN:
            stream.queue.popleft()
            self._send(stream.holder, Open(msgspec.structs.replace(outgoing.window, piece=stream.piece)), b"")
            return 0
        if self._comes_too_late(stream, outgoing, record):
            if self.spaces and record > outgoing.window.base:
                self.too_slow = True
                self.pause()
            else:
                self._go_to_newest(stream, outgoing)
            return 0
        blob = outgoing.blob(record)
        if blob is None:
            self._skip(stream, outgoing, record)
            return 0
        last = stream.stripe == blob.stripes - 1
        fragments = self._encode(outgoing, record, stream.stripe, blob)
        if last and not outgoing.source.intact(record):
            self._skip(stream, outgoing, record)
            return 0
        fragment, payload = fragments[stream.piece]
        self._send(stream.holder, Put(fragment, outgoing.source.step(record)), payload)
        stream.stripe += 1
        key = outgoing.generation, record
        self._sent_of[key] = self._sent_of.get(key, 0) + len(payload)
        if last:
            self._next(stream)
            if not any((outgoing, record) in one.queue for one in self._streams):
                outgoing.forget(record)
                sent = self._sent_of.pop(key)
                self.last_record_bytes = sent if record > outgoing.window.base else self.last_record_bytes
        return len(payload)

    def _next(self, stream: _Stream) -> None:
        stream.queue.popleft()
        stream.stripe = 0

    def _comes_too_late(self, stream: _Stream, outgoing: Outgoing, record: int) -> bool:
        """Whether training will fill a record's slot anew before all of it can be sent, as the link has been lately.

        Of the newest it is not: sending shows how fast the link is by now.
        """
        rate = stream.bytes_per_record
        if not self.proceeds or rate is None or record == STATIC or record == outgoing.records[-1]:
            return False
        nbytes = outgoing.window.record_bytes // self._code.data
        if stream.stripe:
            nbytes -= stream.stripe * STRIPE_BYTES // self._code.data
        return nbytes > outgoing.left(record) * rate

    def _go_to_newest(self, stream: _Stream, outgoing: Outgoing) -> None:
        """Leave out all that waits before a generation's newest record: the run behind it is the longest there can be.

        To send what still lies in its slot, but does not for long, would be to leave out something time and again.
        """
        left_out, begun = stream.leave_out(outgoing, outgoing.records[-1] - 1)
        if begun:
            self._send(stream.holder, Abandon(self.ranks, outgoing.generation, left_out[0]), b"")
        self._note_gap(outgoing, left_out[0], left_out[-1])
        for record in left_out:
            if not any((outgoing, record) in one.queue for one in self._streams):
                self._forget(outgoing, record)

    def _skip(self, stream: _Stream, outgoing: Outgoing, record: int) -> None:
        """A record is gone from its slot before it was sent: training has gone on without waiting."""
        if stream.stripe:
            self._send(stream.holder, Abandon(self.ranks, outgoing.generation, record), b"")
        self._next(stream)
        if stream.skip(outgoing, record) and record != STATIC:
            self._note_gap(outgoing, record, record)
            self._note_loss(outgoing, record)
        self._forget(outgoing, record)

    def _note_loss(self, outgoing: Outgoing, record: int) -> None:
        window = outgoing.window
        if not self.spaces or not self.proceeds or record <= window.base:
            return
        since, self._lost_at = record - self._lost_at, max(record, self._lost_at)
        if since > window.kept:  # else it is one loss with the last one
            self._losses = self._losses + 1 if since <= _LOSS_WINDOWS * window.kept else 1
        if self._losses >= _MOST_LOSSES:
            self._losses = 0
            self.too_slow = True
            self.pause()

    def _forget(self, outgoing: Outgoing, record: int) -> None:
        """Nothing more of a record can be read."""
        self._sent_of.pop((outgoing.generation, record), None)
        outgoing.forget(record)
        for key in [key for key in self._encoded if key[:2] == (outgoing.generation, record)]:
            del self._encoded[key]

    def _note_gap(self, outgoing: Outgoing, first: int, last: int) -> None:
        """Not every holder gets these records. Stretches that touch are one."""
        if self.gap is not None and first <= self.gap[1] + outgoing.window.every and last >= self.gap[0]:
            first, last = min(first, self.gap[0]), max(last, self.gap[1])
        self.gap = first, last

    def _encode(self, outgoing: Outgoing, record: int, stripe: int, blob: Stripes) -> list[tuple[Fragment, Piece]]:
        key = outgoing.generation, record, stripe
        found = self._encoded.get(key)
        if found is None:
            found = seal_stripe(
                self._code,
                blob.stripe(stripe),
                generation=outgoing.generation,
                owner=self.ranks,
                record=record,
                stripe=stripe,
                stripes=blob.stripes,
            )
            self._encoded[key] = found
            while len(self._encoded) > _CACHED_STRIPES:
                self._encoded.popitem(last=False)
        return found
