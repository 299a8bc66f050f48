"""Records on the wire, stripe by stripe."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from memckpt.replication.coding.code import Code, Payload
from memckpt.replication.coding.fragments import Fragment, seal_stripe
from memckpt.replication.keeping.outgoing import Outgoing, Stripes
from memckpt.replication.transport.wire import Abandon, Open, Put, WireMessage
from memckpt.state.records import RankGroup

#: Encoded stripes that are kept for streams that are a little behind the first.
_CACHED_STRIPES = 32


class Sent(NamedTuple):
    """A stripe went out. `nbytes`: bytes of the fragment; `last`: whether the record has no further stripe."""

    nbytes: int
    last: bool


class StripeWriter:
    """Encodes the records of one set of shards, each stripe once for all holders, and sends their fragments.

    Args:
        ranks: the ranks that share the shards on this node.
        code: the code of the fragments.
        send: gives a message, with bytes beside it, to a node.

    Attributes:
        last_record_bytes: bytes that went to all holders for the last record; None before the first.
    """

    def __init__(
        self, ranks: RankGroup, code: Code, send: Callable[[str, WireMessage, memoryview | bytes], None]
    ) -> None:
        self._ranks = ranks
        self._code = code
        self._send = send
        self._encoded: OrderedDict[tuple[str, int, int], list[tuple[Fragment, Payload]]] = OrderedDict()
        #: Bytes sent of records that some holder still lacks, by generation and record.
        self._sent_of: dict[tuple[str, int], int] = {}
        self.last_record_bytes: int | None = None

    def open(self, holder: str, index: int, outgoing: Outgoing) -> None:
        """Tell a holder that a generation begins."""
        self._send(holder, Open(msgspec.structs.replace(outgoing.window, index=index)), b"")

    def abandon(self, holder: str, outgoing: Outgoing, record: int) -> None:
        """Tell a holder that no more comes of a record."""
        self._send(holder, Abandon(self._ranks, outgoing.generation, record), b"")

    def put(self, holder: str, index: int, outgoing: Outgoing, record: int, stripe: int) -> Sent | None:
        """Send a holder its fragment of a stripe; None: the record is gone from its slot."""
        blob = outgoing.blob(record)
        if blob is None:
            return None
        last = stripe == blob.stripes - 1
        fragment, payload = self._encode(outgoing, record, stripe, blob)[index]
        if last and not outgoing.source.intact(record):
            return None
        self._send(holder, Put(fragment, outgoing.source.step(record)), payload)
        key = outgoing.generation, record
        self._sent_of[key] = self._sent_of.get(key, 0) + len(payload)
        return Sent(len(payload), last)

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
