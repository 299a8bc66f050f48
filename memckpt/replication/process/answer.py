"""What this node answers its peers: from fragments that are kept here, or from records of its own."""

from __future__ import annotations

import logging
from collections import deque

import msgspec
import xxhash

from memckpt.memory.region import Region
from memckpt.protocol.replication import SendGeneration
from memckpt.replication.coding.blob import Blob
from memckpt.replication.keeping.fragment_store import FragmentStore
from memckpt.replication.keeping.outgoing import RegionSource
from memckpt.replication.process.reader import LIVE_ALL, LIVE_SHARED
from memckpt.replication.process.send import Mail
from memckpt.replication.transport.wire import (
    AskManifest,
    AskWindow,
    Get,
    Got,
    GotNone,
    Manifest,
    WindowIs,
    WireMessage,
)
from memckpt.state.records import RankGroup

Question = AskManifest | Get | AskWindow
_log = logging.getLogger("memckpt.replicator")


class Serving:
    """Generations that stand still on this node, to be read by peers. Closes their regions."""

    def __init__(self) -> None:
        self._sources: dict[RankGroup, RegionSource] = {}
        self._blobs: dict[tuple[RankGroup, str, int], Blob] = {}

    def add(self, message: SendGeneration, regions: list[Region]) -> None:
        """Hand out this state from now on, and no other one of these ranks."""
        former = self._sources.pop(message.ranks, None)
        for key in [key for key in self._blobs if key[0] == message.ranks]:
            self._blobs.pop(key).release()
        if former is not None:
            former.close()
        # Those whose states are wanted, with their by-value tensors.
        wanted = (record for record, (_, _, rank_states) in message.records.items() if rank_states)
        oldest = min(wanted, default=message.base)
        source = RegionSource(
            message.spec, message.number, message.base, regions, message.missing, message.plain, by_value_from=oldest
        )
        for record, (step, meta, rank_states) in message.records.items():
            source.note_record(record, step, meta, rank_states)
        self._sources[message.ranks] = source

    def close(self) -> None:
        for blob in self._blobs.values():
            blob.release()
        self._blobs.clear()
        for source in self._sources.values():
            source.close()
        self._sources.clear()

    def answer(self, question: Question) -> tuple[WireMessage | None, bytes | memoryview]:
        """The answer to a peer, and the bytes beside it; None where it asks for fragments."""
        if question.generation not in (LIVE_ALL, LIVE_SHARED):
            return None, b""
        source = self._sources.get(question.owner)
        if source is None:
            return GotNone(question.request, f"ranks {list(question.owner)} are not handed out here"), b""
        if isinstance(question, AskWindow):
            return WindowIs(question.request, question.owner, msgspec.msgpack.encode(source.spec)), b""
        key = question.owner, question.generation, question.record
        blob = self._blobs.get(key)
        if blob is None:
            blob = source.open(question.record, "all" if question.generation == LIVE_ALL else "shared")
            if blob is None:
                return GotNone(question.request, f"record {question.record} is not here any more"), b""
            self._blobs[key] = blob
        if isinstance(question, AskManifest):
            return Manifest(question.request, question.record, blob.nbytes, b""), b""
        if not 0 <= question.stripe < blob.stripes:
            return GotNone(question.request, f"record {question.record} has {blob.stripes} stripes"), b""
        stripe = blob.stripe(question.stripe)
        digest = xxhash.xxh3_128_digest(stripe)
        return Got(question.request, question.record, question.stripe, None, digest), stripe

    @staticmethod
    def answer_from(fragment_store: FragmentStore, question: Question) -> tuple[WireMessage, bytes | memoryview]:
        """The answer from the fragments that are kept, and the bytes beside it."""
        window = fragment_store.window(question.owner, question.generation)
        if window is None:
            return GotNone(question.request, f"nothing is kept of generation {question.generation}"), b""
        match question:
            case AskWindow():
                return WindowIs(question.request, question.owner, window.window.spec), b""
            case AskManifest():
                found = window.manifest(question.record)
                if found is None:
                    return GotNone(question.request, f"record {question.record} is not complete here"), b""
                return Manifest(question.request, question.record, *found), b""
            case Get():
                kept = window.fragment(question.record, question.stripe)
                if kept is None:
                    return GotNone(question.request, f"record {question.record} is not complete here"), b""
                fragment, payload = kept
                return Got(question.request, question.record, question.stripe, fragment), bytes(payload)


#: Limit on questions of one peer that wait until it has room for the answers.
MOST_QUESTIONS = 4096


class Answering:
    """Answers peers' questions as they have room: questions are small, and a peer that does not read gets no more.

    Attributes:
        serving: generations that are handed out here.
    """

    def __init__(self) -> None:
        self.serving = Serving()
        self._waiting: dict[str, deque[Question]] = {}

    def add(self, peer: str, question: Question) -> bool:
        """Queue a question; False: the peer has so many that it is not."""
        waiting = self._waiting.setdefault(peer, deque())
        if len(waiting) >= MOST_QUESTIONS:
            return False
        waiting.append(question)
        return True

    def answer(self, peer: str, mail: Mail, store: FragmentStore) -> None:
        """Answer questions of a peer, as far as it has room.

        Args:
            mail: to the peer.
            store: fragments that are kept here.
        """
        waiting = self._waiting[peer]
        while waiting and mail.room(peer) > 0:
            question = waiting.popleft()
            answer, payload = self.serving.answer(question)
            if answer is None:
                answer, payload = self.serving.answer_from(store, question)
            mail.send(peer, answer, payload)
        if not waiting:
            del self._waiting[peer]

    def work(self, mail: Mail, store: FragmentStore) -> None:
        """Answer what peers have room for by now."""
        for peer in list(self._waiting):
            self.answer(peer, mail, store)

    def drop_questions(self, peer: str) -> None:
        """Drop the questions of a peer that is gone."""
        self._waiting.pop(peer, None)

    def close(self) -> None:
        """Answer nothing more."""
        self._waiting.clear()
        self.serving.close()
