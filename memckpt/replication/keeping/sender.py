"""A node's own records on their way to the holders of their fragments.

Each holder is served by its stream, in order: a generation, what is static, then the records. Streams share what is
encoded; one that lags behind or begins anew is served from the slots.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence

import msgspec

from memckpt.replication.coding.blob import STATIC
from memckpt.replication.coding.code import STRIPE_BYTES, Code, Fragment, Payload, seal_stripe
from memckpt.replication.keeping.outgoing import Outgoing, Stripes
from memckpt.replication.keeping.stream import MAX_REASON_CHARS, OPEN, Stream
from memckpt.replication.transport.links import Pieces
from memckpt.replication.transport.messages import Abandon, Kept, NotStored, Open, Put, Stored, WireMessage
from memckpt.state.records import RankGroup

#: Encoded stripes that are kept for streams that are a little behind the first.
_CACHED_STRIPES = 32
#: Stripes of which a holder is sent its fragments at once, and their bytes, at most: each message costs its own.
_MOST_STRIPES, _PUT_BYTES = 16, 1 << 20


class StripeWriter:
    """Encodes the records of one set of shards, each stripe once, and sends their fragments to the holders."""

    def __init__(self, ranks: RankGroup, code: Code, send: Callable[[str, WireMessage, Pieces], None]) -> None:
        self._ranks, self._code, self._send = ranks, code, send
        self._encoded: OrderedDict[tuple[str, int, int], list[tuple[Fragment, Payload]]] = OrderedDict()
        #: Bytes sent of records that some holder still lacks, by generation and record.
        self._sent_of: dict[tuple[str, int], int] = {}
        self.last_record_bytes: int | None = None

    def open(self, holder: str, index: int, outgoing: Outgoing) -> None:
        """Tell a holder that a generation begins."""
        self._send(holder, Open(msgspec.structs.replace(outgoing.window, index=index)), ())

    def abandon(self, holder: str, outgoing: Outgoing, record: int) -> None:
        self._send(holder, Abandon(self._ranks, outgoing.generation, record), ())

    def put(self, stream: Stream, outgoing: Outgoing, record: int, limit: int) -> tuple[int, bool] | None:
        """Send a holder its fragments of the next stripes: one, or up to `limit` bytes.

        Returns the bytes, and whether it was sent all; None: the record is gone.
        """
        blob = outgoing.blob(record)
        if blob is None:
            return None
        first, nbytes = stream.stripe, 0
        found: list[tuple[Fragment, Payload]] = []
        while stream.stripe < min(blob.stripes, first + _MOST_STRIPES):
            one = self._encode(outgoing, record, stream.stripe, blob)[stream.index]
            if found and nbytes + len(one[1]) > limit:
                break
            found.append(one)
            nbytes += len(one[1])
            stream.stripe += 1
        last = stream.stripe == blob.stripes
        if last and not outgoing.source.intact(record):
            stream.stripe = first
            return None
        fragments, payload = zip(*found, strict=True)
        self._send(stream.holder, Put(fragments, outgoing.source.step(record)), payload)
        key = outgoing.generation, record
        self._sent_of[key] = self._sent_of.get(key, 0) + nbytes
        return nbytes, last

    def _encode(self, outgoing: Outgoing, record: int, stripe: int, blob: Stripes) -> list[tuple[Fragment, Payload]]:
        key = outgoing.generation, record, stripe
        found = self._encoded.get(key)
        if found is None:
            found = seal_stripe(
                self._code,
                blob.stripe(stripe),
                generation=outgoing.generation,
                owner=self._ranks,
                record=record,
                stripe=stripe,
                stripes=blob.stripes,
            )
            self._encoded[key] = found
            while len(self._encoded) > _CACHED_STRIPES:
                self._encoded.popitem(last=False)
        return found

    def finish(self, outgoing: Outgoing, record: int) -> None:
        """Note that every holder was sent all of a record. Its encoded stripes stay: a stream may begin anew."""
        outgoing.release_record(record)
        sent = self._sent_of.pop((outgoing.generation, record))
        if record > outgoing.window.base:
            self.last_record_bytes = sent

    def release_record(self, outgoing: Outgoing, record: int) -> None:
        """Drop what is known of a record that is not sent any more."""
        self._sent_of.pop((outgoing.generation, record), None)
        outgoing.release_record(record)
        for key in [key for key in self._encoded if key[:2] == (outgoing.generation, record)]:
            del self._encoded[key]

    def close(self, outgoing: Outgoing) -> None:
        """Drop a generation that no stream reads any more."""
        self._sent_of = {key: sent for key, sent in self._sent_of.items() if key[0] != outgoing.generation}
        outgoing.close()


_log = logging.getLogger("memckpt.replicator")
#: Records that wait for a holder, in windows.
_MOST_WINDOWS_QUEUED = 3


class Sender:
    """Sends the records of one set of shards to the holders of their fragments, one for each.

    `room`: bytes that a node takes now. `record`: what every node can produce at the start. `proceeds`: training does
    not wait, and overwrites slots unsent. `gap`: first and last record of the newest stretch that not every holder got.
    """

    def __init__(
        self,
        ranks: RankGroup,
        code: Code,
        holders: Sequence[str],
        send: Callable[[str, WireMessage, Pieces], None],
        room: Callable[[str], int],
        record: int,
        proceeds: bool = False,
    ) -> None:
        self.ranks, self.proceeds = ranks, proceeds
        self.paused = False
        self.gap: tuple[int, int] | None = None
        self.left_out = 0
        self.watermark = record
        self._code = code
        self._writer = StripeWriter(ranks, code, send)
        self._room = room
        self._streams = [Stream(holder, index, record) for index, holder in enumerate(holders)]
        self._generations: list[Outgoing] = []
        self._start = record

    @property
    def problems(self) -> dict[str, str]:
        """Why holders refuse records, in words, by their names."""
        return {stream.holder: stream.problem for stream in self._streams if stream.problem}

    @property
    def carried(self) -> int:
        """Number of records that each holder has acknowledged, at least."""
        return min((stream.heard for stream in self._streams), default=0)

    @property
    def last_record_bytes(self) -> int | None:
        """Bytes that went to all holders for the last record; None before the first."""
        return self._writer.last_record_bytes

    def close(self) -> None:
        for outgoing in self._generations:
            self._writer.close(outgoing)
        self._generations.clear()

    # What the node's own ranks do

    def begin_generation(self, outgoing: Outgoing) -> None:
        """Send a generation, which is complete on this node."""
        self._generations.append(outgoing)
        for stream in self._streams:
            if stream.met and not self.paused:
                stream.queue_generation(outgoing)

    def committed(self, record: int) -> None:
        """Send a record of the newest generation, which is whole on this node."""
        outgoing = self._generations[-1]
        outgoing.add(record)
        for stream in self._streams:
            if stream.met and not stream.waits and not self.paused:
                stream.rate.note_record(waiting=bool(stream.queue))
                stream.add(outgoing, record)
                if len(stream.queue) > _MOST_WINDOWS_QUEUED * outgoing.sizes.kept:
                    # It takes nothing, and training goes on without it: what is gone from the slots is not remembered.
                    if missed := stream.lost_by_restart(outgoing):
                        self._note_gap(min(missed), max(missed), len(missed), outgoing.sizes.every)
                    stream.restart(outgoing)

    def pause(self) -> None:
        """Send no more of these records; a record that was sent in part is withdrawn."""
        if self.paused:
            return
        self.paused = True
        for stream in self._streams:
            if stream.queue and stream.stripe:
                outgoing, record = stream.queue[0]
                if record is not OPEN and record != STATIC:
                    self._writer.abandon(stream.holder, outgoing, record)
            stream.restart(None)
        for outgoing in self._generations:
            for record in outgoing.records:
                self._writer.release_record(outgoing, record)
            outgoing.release_record(STATIC)

    def resume(self) -> None:
        """Send records again, the newest generation from its beginning as far as that is there."""
        if not self.paused:
            return
        self.paused = False
        for stream in self._streams:
            if stream.met and not stream.waits and self.generation is not None:
                stream.restart(self.generation)

    def withdraw_newer(self) -> None:
        """Drop generations newer than the watermark: something else is to be sent instead."""
        for outgoing in [one for one in self._generations if one.window.base > self.watermark]:
            self._generations.remove(outgoing)
            for stream in self._streams:
                for record in outgoing.records:
                    self._writer.abandon(stream.holder, outgoing, record)
                stream.drop(outgoing)
            self._writer.close(outgoing)

    def holds(self, base: int) -> bool:
        """Whether all holders have the state that a generation begins with."""
        begun = [one for one in self._generations if one.window.base == base]
        return any(all(stream.holds(one, base) for stream in self._streams) for one in begun)

    def give_up(self, generation: str) -> None:
        """Send no more of the state that a generation begins with: the replica in which it lies goes on."""
        for outgoing in self._generations:
            if outgoing.generation != generation:
                continue
            while outgoing.records and outgoing.records[0] <= outgoing.window.base:
                outgoing.release_record(outgoing.records.popleft())
            for stream in self._streams:
                for record in self._leave_out(stream, outgoing, outgoing.window.base):
                    self._writer.release_record(outgoing, record)

    def _leave_out(self, stream: Stream, outgoing: Outgoing, upto: int) -> list[int]:
        """Send a holder no more of a generation's records up to one; returns the records that it did not get."""
        left_out, begun = stream.leave_out(outgoing, upto)
        if begun:
            self._writer.abandon(stream.holder, outgoing, left_out[0])
        return left_out

    def watermark_advanced(self, watermark: int) -> None:
        """Note the watermark, and drop generations that are not needed any more."""
        self.watermark = max(self.watermark, watermark)
        while len(self._generations) > 1 and self._generations[1].window.base <= self.watermark:
            old = self._generations.pop(0)
            for stream in self._streams:
                stream.drop(old)
            self._writer.close(old)

    # What holders say

    def met(self, holder: str) -> None:
        """Send a holder all that it lacks: it is there, with nothing of ours on its way, and says what it has kept."""
        for stream in self._streams:
            if stream.holder == holder:
                stream.reset()
                stream.restart(None if self.paused else self.generation)

    def stored(self, holder: str, message: Stored) -> None:
        for stream in self._streams:
            if stream.holder == holder:
                stream.stored(message)

    def kept(self, holder: str, message: Kept) -> None:
        for stream in self._streams:
            for outgoing in self._generations if stream.holder == holder and stream.met and not self.paused else ():
                if outgoing.generation == message.generation and not stream.waits:
                    for record in stream.keep(outgoing, message.records):
                        if not self._is_queued(outgoing, record):
                            self._writer.release_record(outgoing, record)

    def not_stored(self, holder: str, message: NotStored, now: float) -> None:
        for stream in self._streams:
            known = any(one.generation == message.generation for one in self._generations)
            if stream.holder == holder and stream.met and known and not stream.waits:
                reason = message.reason[:MAX_REASON_CHARS]
                _log.warning("%s refused record %d of ranks %s: %s", holder, message.record, list(self.ranks), reason)
                stream.not_stored(message, now)

    def owing(self, progress: Callable[[str], tuple[int, Hashable]]) -> dict[str, Hashable]:
        """Holders that owe an acknowledgement, each with a value that changes with its progress, also of its link."""
        found: dict[str, Hashable] = {}
        if self.generation is None:
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
        return all(stream.holds(self._generations[-1], stream.acknowledged) for stream in self._streams)

    @property
    def reaches_from(self) -> int:
        """The first record whose state all holders can produce, of those from :attr:`since` on."""
        base = self._generations[-1].window.base if self._generations else self._start
        period = self._generations[-1].sizes.period if self._generations else 1
        return base if self.since <= base else self.since + period - 1

    @property
    def generation(self) -> Outgoing | None:
        """The newest generation; None before the first."""
        return self._generations[-1] if self._generations else None

    @property
    def newest(self) -> int | None:
        """The newest record that there is to send; None before the first."""
        newest = self.generation
        return newest.records[-1] if newest is not None and newest.records else None

    @property
    def record_bytes(self) -> int:
        """Bytes of a record of the newest generation, in fragments for all holders."""
        newest = self.generation
        return 0 if newest is None else newest.sizes.record_bytes * len(self._streams) // self._code.data

    @property
    def bytes_per_step(self) -> float:
        """Bytes that records of the newest generation add per step, in fragments for all holders, on average."""
        newest = self.generation
        return 0.0 if newest is None else self.record_bytes / newest.sizes.every

    @property
    def waiting_bytes(self) -> int:
        """Bytes that are yet to be sent, about, to all holders that have room."""
        newest = self.generation
        each = 0 if newest is None else newest.sizes.record_bytes // self._code.data
        queues = (stream.queue for stream in self._streams if self._room(stream.holder) > 0)
        return each * sum(record is not OPEN for queue in queues for _, record in queue)

    # Sending

    @property
    def wants(self) -> bool:
        """Whether there is anything to send to a holder that would take it."""
        return any(stream.queue and self._room(stream.holder) > 0 for stream in self._streams)

    def retry_at(self) -> float | None:
        """Time of the next :meth:`retry`; None: there is none."""
        return min((stream.retry_at for stream in self._streams if stream.waits), default=None)

    def retry(self, now: float) -> None:
        """Begin anew with holders that refused a record a while ago."""
        for stream in self._streams:
            if stream.waits and stream.retry_at <= now:
                stream.waits = False
                stream.restart(None if self.paused else self.generation)

    def pump(self, limit: int) -> int:
        """Send up to about `limit` bytes, in turns to all holders that take some; returns how many."""
        sent = 0
        progress = True
        while progress and sent < limit:
            progress = False
            for stream in self._streams:
                if stream.queue and self._room(stream.holder) > 0:
                    nbytes = self._send_next(stream, min(limit, _PUT_BYTES))
                    stream.rate.note_sent(nbytes)
                    sent += nbytes
                    progress = True
        return sent

    def _send_next(self, stream: Stream, limit: int) -> int:
        outgoing, record = stream.queue[0]
        if record is OPEN:
            stream.pop()
            self._writer.open(stream.holder, stream.index, outgoing)
            return 0
        if self._comes_too_late(stream, outgoing, record):
            self._go_to_newest(stream, outgoing)
            return 0
        sent = self._writer.put(stream, outgoing, record, limit)
        if sent is None:
            self._skip(stream, outgoing, record)
            return 0
        nbytes, last = sent
        if last:
            stream.pop()
            if not self._is_queued(outgoing, record):
                self._writer.finish(outgoing, record)
        return nbytes

    def _is_queued(self, outgoing: Outgoing, record: int) -> bool:
        return any((outgoing, record) in stream.queue for stream in self._streams)

    def _comes_too_late(self, stream: Stream, outgoing: Outgoing, record: int) -> bool:
        """Whether training will overwrite a record's slot before it is sent, at the link's recent rate.

        The newest record never comes too late: sending it shows how fast the link is by now.
        """
        rate = stream.rate.bytes_per_record
        if not self.proceeds or rate is None or record == STATIC or record == outgoing.records[-1]:
            return False
        nbytes = outgoing.sizes.record_bytes // self._code.data
        if stream.stripe:
            nbytes -= stream.stripe * STRIPE_BYTES // self._code.data
        return nbytes > outgoing.left(record) * rate

    def _go_to_newest(self, stream: Stream, outgoing: Outgoing) -> None:
        """Leave out what waits before a generation's newest record: the run behind it is as long as can be."""
        left_out = self._leave_out(stream, outgoing, outgoing.records[-1] - 1)
        self._note_gap(left_out[0], left_out[-1], len(left_out), outgoing.sizes.every)
        for record in left_out:
            if not self._is_queued(outgoing, record):
                self._writer.release_record(outgoing, record)

    def _skip(self, stream: Stream, outgoing: Outgoing, record: int) -> None:
        """Leave out the record at the head of a queue: training overwrote its slot before all of it was sent."""
        if stream.stripe:
            self._writer.abandon(stream.holder, outgoing, record)
        if stream.skip() and record != STATIC:
            self._note_gap(record, record, 1, outgoing.sizes.every)
        self._writer.release_record(outgoing, record)

    def _note_gap(self, first: int, last: int, count: int, every: int) -> None:
        """Note records that some holder does not get, `every` apart. Stretches that touch become one."""
        self.left_out += count
        if self.gap is not None and first <= self.gap[1] + every and last >= self.gap[0]:
            first, last = min(first, self.gap[0]), max(last, self.gap[1])
        self.gap = first, last
