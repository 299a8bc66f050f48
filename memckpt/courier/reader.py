"""Reads a state out of peers' memory: pieces of its records from all who keep them at once, or a living node's own."""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence

import xxhash

from memckpt.agent.peer_messages import BadSourceSeen, Filled, UnitSource
from memckpt.errors import DamagedPiecesError, DamagedStateError
from memckpt.memory.region import Region
from memckpt.peers.blob import STATIC, BlobReader, RecordTail
from memckpt.peers.code import STRIPE_BYTES, Code
from memckpt.peers.fragments import Fragment, decode_stripe
from memckpt.peers.wire import AskManifest, Get, Got, GotNone, Manifest, WireMessage
from memckpt.state.layout import Layout, StateSpec

_log = logging.getLogger("memckpt.courier")
#: Stripes that are asked for ahead of the one that is needed next.
_AHEAD = 64
#: A source that says nothing for so long is taken for lost.
PATIENCE_SECONDS = 10.0
#: In place of a generation's name: what a living node hands out itself, all of it or what every replica has.
LIVE_ALL, LIVE_SHARED = "live", "live shared"


class _Part:
    """A record that is to be read, and from whom.

    Args:
        owner, generation, record: which.
        sources: node and piece of each; a piece of None: whole stripes of the node's own.
        needed: how many of them make a stripe whole.
    """

    def __init__(
        self,
        owner: tuple[int, ...],
        generation: str,
        record: int,
        sources: Sequence[tuple[str, int | None]],
        needed: int,
    ) -> None:
        self.owner, self.generation, self.record = owner, generation, record
        self.sources = list(sources)
        self.needed = needed
        self.request = 0
        self.live = self.sources[0][1] is None
        self.manifests: dict[str, Manifest] = {}
        self.manifest: Manifest | None = None
        self.asked: dict[int, list[tuple[str, int | None]]] = defaultdict(list)
        self.here: dict[int, dict[str, tuple[Fragment | None, bytes]]] = defaultdict(dict)
        self.next_asked = 0
        self.next_taken = 0

    @property
    def stripes(self) -> int:
        assert self.manifest is not None
        return -(-self.manifest.nbytes // STRIPE_BYTES)

    def length(self, stripe: int) -> int:
        """Bytes of a stripe."""
        assert self.manifest is not None
        return min(STRIPE_BYTES, self.manifest.nbytes - stripe * STRIPE_BYTES)

    def digest(self, stripe: int) -> bytes:
        """Of a stripe, as most holders say; empty where the owner says it with the stripe."""
        assert self.manifest is not None
        return self.manifest.digests[16 * stripe : 16 * (stripe + 1)]


class Reader:
    """One state on its way into regions; closes them.

    Args:
        source: as the plan says.
        spec: of the generation that is filled.
        regions: its slots, then static where present.
        code: of the pieces.
        send: gives a message to a node.
        number: makes a number that no other question has.
        progress: told how many bytes more are here, record by record.
    """

    def __init__(
        self,
        source: UnitSource,
        spec: StateSpec,
        regions: list[Region],
        code: Code,
        send: Callable[[str, WireMessage], None],
        number: Callable[[], int],
        progress: Callable[[int], None],
        now: float,
    ) -> None:
        self.source = source
        self._layout = Layout(spec)
        self._regions = regions
        self._slots, self._static = regions[0], regions[1] if len(regions) > 1 else None
        self._code = code
        self._send = send
        self._progress = progress
        self._parts = self._plan_parts(self._static is not None)
        self._lost: set[str] = set()
        self._bad: dict[BadSourceSeen, None] = {}
        self._metas: dict[int, bytes] = {}
        self._rank_states: dict[int, bytes] = {}
        self._step = 0
        self._nbytes = 0
        self._heard: dict[str, float] = {}
        self._into: BlobReader | None = None
        self.result: Filled | None = None
        for part in self._parts:
            part.request = number()
            for node, _ in part.sources:
                self._heard[node] = now
                self._send(node, AskManifest(part.request, part.owner, part.generation, part.record))
        self._go_on(now)

    def _plan_parts(self, static: bool) -> list[_Part]:
        source = self.source
        window = range(source.record - source.period + 1, source.record + 1)
        if source.live is not None:
            period = self._layout.spec.period
            window = range(source.record - period + 1, source.record + 1)
            return self._live_parts(source.live, source.ranks, LIVE_ALL, window, static)
        pieces: list[tuple[str, int | None]] = [*source.pieces]
        if source.private:
            assert source.replica is not None
            node, ranks = source.replica
            period = self._layout.spec.period
            window = range(source.record - period + 1, source.record + 1)
            shared = self._live_parts(node, ranks, LIVE_SHARED, window, static)
            return [*shared, _Part(source.ranks, source.generation, source.record, pieces, source.data)]
        numbers = [STATIC] * static + list(window)
        return [_Part(source.ranks, source.generation, record, pieces, source.data) for record in numbers]

    @staticmethod
    def _live_parts(
        node: str, ranks: tuple[int, ...], generation: str, window: Sequence[int], static: bool
    ) -> list[_Part]:
        return [_Part(ranks, generation, record, [(node, None)], 1) for record in [STATIC] * static + list(window)]

    def close(self) -> Filled:
        """Let go of the regions; what has become of it."""
        self._into = None
        for region in self._regions:
            region.close()
        assert self.result is not None
        return self.result

    @property
    def requests(self) -> set[int]:
        """Numbers of the questions that are open."""
        return {part.request for part in self._parts} if self.result is None else set()

    # What peers answer

    def got_manifest(self, peer: str, message: Manifest, now: float) -> None:
        """What a record consists of, as a source says."""
        self._heard[peer] = now
        for part in self._parts:
            if part.request == message.request and peer in {node for node, _ in part.sources}:
                part.manifests[peer] = message
        self._go_on(now)

    def got(self, peer: str, message: Got, payload: bytes, now: float) -> None:
        """A fragment, or a stripe."""
        self._heard[peer] = now
        part = self._parts[0] if self._parts else None
        if self.result is not None or part is None or message.request != part.request:
            return
        if peer not in {node for node, _ in part.asked.get(message.stripe, ())}:
            return
        self._nbytes += len(payload)
        expected = part.digest(message.stripe) if not part.live else message.digest
        found = message.fragment.digest if message.fragment is not None else xxhash.xxh3_128_digest(payload)
        if (message.fragment is None) != part.live or found != expected:
            self._lose(peer, "it says other things than the others", now)
            return
        part.here[message.stripe][peer] = (message.fragment, payload)
        self._go_on(now)

    def got_none(self, peer: str, message: GotNone, now: float) -> None:
        """A source does not have what it should."""
        self._lose(peer, message.reason, now)

    def tend(self, now: float) -> None:
        """Give up sources that say nothing. To be called every second or so."""
        for peer in self._waiting_for():
            if now - self._heard.setdefault(peer, now) > PATIENCE_SECONDS:
                self._lose(peer, f"it has not answered for {PATIENCE_SECONDS:.0f} s", now)

    def _waiting_for(self) -> set[str]:
        if not self._parts or self.result is not None:
            return set()
        part = self._parts[0]
        if part.manifest is None:
            return {node for node, _ in part.sources} - set(part.manifests) - self._lost
        waiting = {
            peer for stripe, asked in part.asked.items() for peer, _ in asked if peer not in part.here.get(stripe, ())
        }
        return waiting - self._lost

    def _lose(self, peer: str, reason: str, now: float) -> None:
        """Read from the others instead."""
        if peer not in self._lost and self.result is None:
            self._drop(peer, reason)
            self._go_on(now)

    def _drop(self, peer: str, reason: str) -> None:
        part = self._parts[0]
        _log.warning("record %d of ranks %s is not read from %s: %s", part.record, list(part.owner), peer, reason)
        self._lost.add(peer)
        self._bad[BadSourceSeen(peer, part.owner, "" if part.live else part.generation)] = None
        for stripe in sorted(part.asked):
            part.here[stripe].pop(peer, None)
            if not self._ask_more(part, stripe):
                self._fail(f"record {part.record} of ranks {list(part.owner)} cannot be read: {peer}: {reason}")
                return

    # Reading on

    def _go_on(self, now: float) -> None:
        while self.result is None:
            if not self._parts:
                self._finish()
                return
            part = self._parts[0]
            if part.manifest is None and not self._vote(part):
                return
            if self._into is None:
                self._into = BlobReader(self._room(part.record))
            self._ask_ahead(part, now)
            if self.result is not None or not self._take(part, now):
                return

    def _vote(self, part: _Part) -> bool:
        """Once all sources have said what the record consists of, take what most say."""
        alive = {node for node, _ in part.sources} - self._lost
        said = {peer: (one.nbytes, one.digests) for peer, one in part.manifests.items() if peer in alive}
        if len(said) < len(alive):
            return False
        votes = Counter(said.values()).most_common(2)
        if len(alive) < part.needed or (len(votes) > 1 and votes[0][1] == votes[1][1]):
            self._fail(
                f"record {part.record} of ranks {list(part.owner)}: {len(alive)} sources are left of {part.needed} "
                f"needed, and they say {len(votes)} different things of it"
            )
            return False
        (nbytes, digests), _ = votes[0]
        stripes = -(-nbytes // STRIPE_BYTES)
        if nbytes < 1 or (not part.live and len(digests) != 16 * stripes):
            self._fail(f"record {part.record} of ranks {list(part.owner)}: what is said of it makes no sense")
            return False
        part.manifest = Manifest(part.request, part.record, nbytes, digests)
        for peer, what in said.items():
            if what != votes[0][0]:
                self._drop(peer, "it says other things of the record than most")
        return self.result is None

    def _room(self, record: int) -> memoryview:
        if record == STATIC:
            assert self._static is not None
            return memoryview(self._static.map)
        start = self._layout.slot_offset(record)
        return memoryview(self._slots.map)[start : start + self._layout.slot_bytes]

    def _ask_ahead(self, part: _Part, now: float) -> None:
        limit = min(part.next_taken + _AHEAD, part.stripes)
        while part.next_asked < limit:
            stripe, part.next_asked = part.next_asked, part.next_asked + 1
            usable = [one for one in part.sources if one[0] not in self._lost]
            if len({piece for _, piece in usable}) < part.needed:
                self._fail(
                    f"record {part.record} of ranks {list(part.owner)}: {len(usable)} of {part.needed} pieces needed "
                    "can be read"
                )
                return
            # In turns, so that all survivors' links carry their share.
            first = stripe % len(usable)
            for node, piece in (usable[first:] + usable[:first])[: part.needed]:
                self._heard[node] = max(self._heard.get(node, now), now)
                self._ask(part, stripe, node, piece)

    def _ask(self, part: _Part, stripe: int, node: str, piece: int | None) -> None:
        part.asked[stripe].append((node, piece))
        self._send(node, Get(part.request, part.owner, part.generation, part.record, piece, stripe))

    def _ask_more(self, part: _Part, stripe: int, besides: int = 0) -> bool:
        """Ask for pieces of a stripe from sources that were not asked yet, as many as are missing."""
        alive = [one for one in part.asked[stripe] if one[0] not in self._lost]
        others = [one for one in part.sources if one not in part.asked[stripe] and one[0] not in self._lost]
        missing = max(part.needed + besides - len(alive), 0)
        for node, piece in others[:missing]:
            self._ask(part, stripe, node, piece)
        return len(others) >= missing

    def _take(self, part: _Part, now: float) -> bool:
        """Take the next stripes if they are here; True when that was the last of the record."""
        assert self._into is not None
        try:
            while part.next_taken < part.stripes:
                stripe = part.next_taken
                if len(part.here[stripe]) < part.needed:
                    return False
                data = self._decode(part, stripe)
                if data is None:
                    return False
                self._into.take(data)
                part.next_taken += 1
                del part.here[stripe], part.asked[stripe]
                self._ask_ahead(part, now)
                if self.result is not None:
                    return False
            self._note(part, self._into.finish())
        except DamagedStateError as error:
            self._fail(str(error))
            return False
        self._into = None
        self._parts.pop(0)
        assert part.manifest is not None
        self._progress(part.manifest.nbytes)
        return True

    def _decode(self, part: _Part, stripe: int) -> bytes | None:
        """The bytes of a stripe; None if more pieces of it have to come first."""
        here = part.here[stripe]
        if part.live:
            return next(iter(here.values()))[1]
        candidates = [(peer, fragment, payload) for peer, (fragment, payload) in here.items() if fragment is not None]
        try:
            data, bad = decode_stripe(
                self._code,
                candidates,
                generation=part.generation,
                owner=part.owner,
                record=part.record,
                stripe=stripe,
                stripes=part.stripes,
                length=part.length(stripe),
            )
        except DamagedPiecesError:
            if len(part.asked[stripe]) > len(here):
                return None  # some are on their way
            if not self._ask_more(part, stripe, besides=len(here) - part.needed + 1):
                raise
            return None
        for peer in bad:
            _log.warning("%s has a damaged piece of record %d of ranks %s", peer, part.record, list(part.owner))
            self._bad[BadSourceSeen(peer, part.owner, part.generation)] = None
        return data

    def _note(self, part: _Part, tail: RecordTail) -> None:
        if part.record == STATIC:
            return
        if tail.meta:
            self._metas[part.record] = tail.meta
        if part.record == self.source.record:
            self._step = tail.step
            self._rank_states |= tail.rank_states

    def _finish(self) -> None:
        self.result = Filled(
            ranks=self.source.ranks,
            metas=self._metas,
            step=self._step,
            rank_states=self._rank_states,
            nbytes=self._nbytes,
            bad=tuple(self._bad),
        )

    def _fail(self, problem: str) -> None:
        self.result = Filled(ranks=self.source.ranks, nbytes=self._nbytes, problem=problem, bad=tuple(self._bad))
