"""A state that is read from peers' memory: fragments from all holders at once, or the records of a living node."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Sequence

import xxhash

from memckpt.errors import DamagedFragmentsError, DamagedStateError
from memckpt.memory.generation_regions import GenerationRegions
from memckpt.memory.region import Region
from memckpt.protocol.recovery import BadSourceSeen, Filled, FromFragments, FromNode, WantedState
from memckpt.replication.coding.blob import MOST_TAIL_BYTES, STATIC, BlobReader, RecordTail, Room
from memckpt.replication.coding.code import STRIPE_BYTES, Code
from memckpt.replication.coding.fragments import decode_stripe
from memckpt.replication.process.assembly import Part, Stripe
from memckpt.replication.process.questions import Questions
from memckpt.replication.process.source import rooms_for
from memckpt.replication.transport.wire import AskManifest, Get, Got, GotNone, Manifest
from memckpt.state.layout import Layout
from memckpt.state.records import RankGroup
from memckpt.state.spec import StateSpec

_log = logging.getLogger("memckpt.replicator")
#: Number of stripes that are asked for ahead of the one that is needed next.
_AHEAD = 64
#: Seconds without an answer after which a source is taken for lost.
PATIENCE_SECONDS = 10.0
#: Bytes after which progress is reported; it is also at the end of each record.
PROGRESS_BYTES = 64 << 20
#: Names of what a living node hands out itself, in place of a generation: all of it, or what every replica has.
LIVE_ALL, LIVE_SHARED = "live", "live shared"


class Reader:
    """A state that is read from peers into regions; closes them.

    Args:
        wanted: which it is, and where, as the plan says.
        spec: layout of the generation that is filled.
        regions: its slots, then its static tensors where present.
        code: the code of the fragments.
        questions: how peers are asked.
        now: seconds of a clock that only goes forward.

    Attributes:
        taken_bytes: bytes of the state that are where they belong.
        expected_bytes: bytes of the whole state; a record of unknown size counts as its slot.
    """

    def __init__(
        self,
        wanted: WantedState,
        spec: StateSpec,
        regions: list[Region],
        code: Code,
        questions: Questions,
        now: float,
    ) -> None:
        self.wanted = wanted
        self._layout = Layout(spec)
        self._regions = GenerationRegions.of(self._layout, regions)
        self._code = code
        self._send = questions.send
        self._parts = self._plan_parts(self._regions.static is not None)
        self._bad: dict[BadSourceSeen, None] = {}
        self._metas: dict[int, bytes] = {}
        #: Steps of the record, and of the one before it where that is wanted.
        self._steps: dict[int, int] = {}
        self._rank_states: dict[int, dict[int, bytes]] = {
            number: {} for number in range(wanted.record - wanted.before, wanted.record + 1)
        }
        self._nbytes = 0
        #: Bytes that are here and were not reported, and whether they are to be.
        self._unreported, self._reports = 0, False
        #: When a source that is waited for last did what it was asked, or was asked.
        self._heard: dict[str, float] = {}
        #: Sources that were given up since they said nothing.
        self._silent: set[str] = set()
        self._into: BlobReader | None = None
        self.result: Filled | None = None
        self.taken_bytes = 0
        self.expected_bytes = sum(self._room_bytes(part.record) for part in self._parts)
        for part in self._parts:
            part.request = questions.number()
            for node in part.sources:
                self._heard[node] = now
                self._send(node, AskManifest(part.request, part.owner, part.generation, part.record))
        self._go_on(now)

    def _plan_parts(self, static: bool) -> list[Part]:
        wanted = self.wanted
        oldest = wanted.record - wanted.before
        window = range(oldest - self._layout.spec.period + 1, wanted.record + 1)
        match wanted.source:
            case FromNode(node):
                return self._live_parts(node, wanted.ranks, LIVE_ALL, window, static)
            case FromFragments(generation, found, data, period, replica):
                shared: list[Part] = []
                numbers = [STATIC] * static + list(range(oldest - period + 1, wanted.record + 1))
                if replica is not None:
                    shared = self._live_parts(*replica, LIVE_SHARED, window, static)
                    numbers = list(range(oldest, wanted.record + 1))
                fragments: list[tuple[str, int | None]] = [*found]
                return [*shared, *(Part(wanted.ranks, generation, one, fragments, data) for one in numbers)]

    @staticmethod
    def _live_parts(node: str, ranks: RankGroup, generation: str, window: Sequence[int], static: bool) -> list[Part]:
        return [Part(ranks, generation, record, [(node, None)], 1) for record in [STATIC] * static + list(window)]

    def close(self) -> None:
        """Close the regions, whether all is there or not."""
        self._into = None
        self._regions.close()

    @property
    def requests(self) -> set[int]:
        """Numbers of the questions that are open."""
        return {part.request for part in self._parts} if self.result is None else set()

    # What peers answer

    def _part_of(self, peer: str, request: int) -> Part | None:
        """The record that a source answers about; None: it was not asked, or does not count any more."""
        if self.result is not None:
            return None
        for part in self._parts:
            if part.request == request and peer in part.sources and peer not in part.lost:
                return part
        return None

    def got_manifest(self, peer: str, message: Manifest, now: float) -> None:
        """Take a source's description of a record."""
        part = self._part_of(peer, message.request)
        if part is None or part.manifest is not None or peer in part.manifests:
            return
        self._heard[peer] = now
        stripes = -(-message.nbytes // STRIPE_BYTES)
        most = self._room_bytes(part.record) + MOST_TAIL_BYTES
        if not 1 <= message.nbytes <= most or len(message.digests) != (0 if part.live else 16 * stripes):
            self._lose(part, peer, "its description of the record is invalid", now)
            return
        part.manifests[peer] = message
        self._go_on(now)

    def got(self, peer: str, message: Got, payload: bytes, now: float) -> None:
        """Take a fragment, or a whole stripe."""
        part = self._part_of(peer, message.request)
        stripe = part.stripes.get(message.stripe) if part is not None else None
        if part is None or stripe is None or peer not in part.waiting(stripe):
            return
        self._answered(part, peer, now)
        self._nbytes += len(payload)
        problem = self._check(part, stripe.asked[peer], message, payload)
        if problem:
            stripe.useless.add(peer)
            self._note_bad(part, peer, problem)
            self._want(part, message.stripe, now)
        else:
            stripe.here[peer] = (message.fragment, payload)
        self._go_on(now)

    def _check(self, part: Part, index: int | None, message: Got, payload: bytes) -> str:
        """Why an answer is not what was asked for, in words; empty if it may be. Digests are checked later."""
        fragment = message.fragment
        if part.live:
            if fragment is not None or len(payload) != part.length(message.stripe):
                return f"expected a stripe of {part.length(message.stripe)} bytes, found {len(payload)}"
            right = xxhash.xxh3_128_digest(payload) == message.digest
            return "" if right else "the stripe has not the digest that comes with it"
        if fragment is None or fragment.index != index:
            return f"expected fragment {index}, found {'none' if fragment is None else fragment.index}"
        return "" if fragment.digest == part.digest(message.stripe) else "it names another digest than most"

    def got_none(self, peer: str, message: GotNone, now: float) -> None:
        """Note that a source lacks what it should have."""
        part = self._part_of(peer, message.request)
        if part is None:
            return
        self._heard[peer] = now
        if part.manifest is None and not part.live:
            # It may have others: sources are named that have a part of what is needed.
            part.lost[peer] = message.reason
            self._go_on(now)
        else:
            self._lose(part, peer, message.reason, now)

    def tend(self, now: float) -> None:
        """Give up sources that do not answer. To be called every second or so."""
        for peer in self._waiting_for():
            if now - self._heard[peer] > PATIENCE_SECONDS:
                reason = f"it has not answered for {PATIENCE_SECONDS:.0f} s"
                self._silent.add(peer)
                parts = [part for part in self._parts if peer in part.sources]
                for part in parts:
                    self._note_bad(part, peer, reason)
                for part in parts:
                    self._lose(part, peer, reason, now)

    def _waiting_for(self) -> set[str]:
        if not self._parts or self.result is not None:
            return set()
        part = self._parts[0]
        if part.manifest is None:
            return {node for node, _ in part.usable()} - set(part.manifests)
        return {node for node, _ in part.usable() if part.open[node] > 0}

    def _answered(self, part: Part, peer: str, now: float) -> None:
        self._heard[peer] = now
        part.open[peer] -= 1

    def _lose(self, part: Part, peer: str, reason: str, now: float) -> None:
        """Read a record from the other sources instead."""
        if self.result is not None or peer in part.lost:
            return
        self._note_bad(part, peer, reason)
        part.lost[peer] = reason
        for number in sorted(part.stripes):
            self._want(part, number, now)
        self._go_on(now)

    def _note_bad(self, part: Part, peer: str, reason: str) -> None:
        seen = BadSourceSeen(peer, part.owner, "" if part.live else part.generation, peer in self._silent)
        if seen not in self._bad:
            _log.warning("%s cannot be read from %s: %s", part, peer, reason)
        self._bad[seen] = None

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
                self._into = BlobReader(self._rooms(part.record))
            self._ask_ahead(part, now)
            if self.result is not None or not self._take(part, now):
                return

    def _vote(self, part: Part) -> bool:
        """Take the description of the record that most sources give, once all have given one."""
        alive = [node for node, _ in part.usable()]
        said = {peer: (one.nbytes, one.digests) for peer, one in part.manifests.items() if peer in alive}
        if len(said) < len(alive):
            return False
        votes = Counter(said.values()).most_common(2)
        if len(alive) < part.needed:
            self._fail(part, f"{len(alive)} of {part.needed} fragments needed can be read", part.lost)
            return False
        if len(votes) > 1 and votes[0][1] == votes[1][1]:
            self._fail(part, f"{', '.join(sorted(said))} describe it differently", said)
            return False
        (nbytes, digests), _ = votes[0]
        part.manifest = Manifest(part.request, part.record, nbytes, digests)
        self.expected_bytes += nbytes - self._room_bytes(part.record)
        for peer, what in said.items():
            if what != votes[0][0]:
                part.lost[peer] = "it describes the record differently from most"
                self._note_bad(part, peer, part.lost[peer])
        return True

    def _rooms(self, record: int) -> list[Room]:
        if record == STATIC:
            assert self._regions.static is not None
            return [Room(0, memoryview(self._regions.static.map))]
        return rooms_for(self._layout, self._regions.slots.map, record)

    def _room_bytes(self, record: int) -> int:
        return sum(room.view.nbytes for room in self._rooms(record))

    def _ask_ahead(self, part: Part, now: float) -> None:
        limit = min(part.next_taken + _AHEAD, part.count)
        while part.next_asked < limit and self.result is None:
            number, part.next_asked = part.next_asked, part.next_asked + 1
            part.stripes[number] = Stripe(part.needed)
            self._want(part, number, now)

    def _want(self, part: Part, number: int, now: float) -> None:
        """Ask sources for a stripe that were not asked yet, as many as it needs fragments."""
        stripe = part.stripes[number]
        missing = stripe.wanted - len(stripe.here) - len(part.waiting(stripe))
        if missing <= 0 or self.result is not None:
            return
        others = [one for one in part.usable() if one[0] not in stripe.asked]
        if len(others) < missing:
            words = [f"{node}: {reason}" for node, reason in sorted(part.lost.items())]
            words += [f"{node}: its answer is not what was asked for" for node in sorted(stripe.useless)]
            words += [f"{', '.join(sorted(stripe.suspects))}: their fragments do not make the stripe"] * bool(
                stripe.suspects
            )
            problem = f"too few of the {part.needed} fragments needed of stripe {number} are left ({'; '.join(words)})"
            self._fail(part, problem, {**part.lost, **dict.fromkeys(stripe.useless | stripe.suspects)})
            return
        # In turns, so that all survivors' links carry their share.
        first = (part.record + number) % len(others)
        for node, index in (others[first:] + others[:first])[:missing]:
            if part.open[node] <= 0:
                self._heard[node] = now
            part.open[node] += 1
            stripe.asked[node] = index
            self._send(node, Get(part.request, part.owner, part.generation, part.record, index, number))

    def _take(self, part: Part, now: float) -> bool:
        """Take the next stripes if they are here; True when that was the last of the record."""
        assert self._into is not None
        try:
            while part.next_taken < part.count:
                stripe = part.stripes[part.next_taken]
                if len(stripe.here) < stripe.wanted:
                    return False
                data = self._decode(part, part.next_taken, now)
                if data is None:
                    return False
                self._into.take(data)
                self.taken_bytes += len(data)
                self._unreported += len(data)
                self._reports |= self._unreported >= PROGRESS_BYTES
                del part.stripes[part.next_taken]
                part.next_taken += 1
                self._ask_ahead(part, now)
                if self.result is not None:
                    return False
            self._note(part, self._into.finish())
        except DamagedStateError as error:
            # All that was read is what its owner has sent.
            self._fail(part, str(error), dict(part.usable()))
            return False
        self._into = None
        self._parts.pop(0)
        self._reports = True
        return True

    def take_progress(self) -> int:
        """Bytes that have come since they were reported last; 0: too few to report."""
        nbytes = self._unreported if self._reports else 0
        self._unreported, self._reports = self._unreported - nbytes, False
        return nbytes

    def _decode(self, part: Part, number: int, now: float) -> bytes | None:
        """The bytes of a stripe; None if more fragments of it have to come first."""
        stripe = part.stripes[number]
        if part.live:
            return next(iter(stripe.here.values()))[1]
        found = [(peer, fragment, payload) for peer, (fragment, payload) in stripe.here.items() if fragment is not None]
        try:
            data, bad = decode_stripe(
                self._code,
                found,
                generation=part.generation,
                owner=part.owner,
                record=part.record,
                stripe=number,
                stripes=part.count,
                length=part.length(number),
            )
        except DamagedFragmentsError as error:
            for peer in error.bad:
                self._note_bad(part, peer, "its fragment is damaged")
            stripe.suspects = set() if error.bad else set(stripe.here)
            stripe.wanted = len(stripe.here) + 1
            self._want(part, number, now)
            return None
        for peer in bad:
            self._note_bad(part, peer, "its fragment is damaged")
        return data

    def _note(self, part: Part, tail: RecordTail) -> None:
        if part.record == STATIC:
            return
        if tail.meta:
            self._metas[part.record] = tail.meta
        if part.record in self._rank_states:
            self._steps[part.record] = tail.step
            self._rank_states[part.record] |= tail.rank_states

    def _finish(self) -> None:
        record, states = self.wanted.record, self._rank_states
        self.result = Filled(
            ranks=self.wanted.ranks,
            metas=self._metas,
            step=self._steps[record],
            rank_states=states[record],
            nbytes=self._nbytes,
            bad=tuple(self._bad),
            before=(self._steps[record - 1], states[record - 1]) if self.wanted.before else None,
        )

    def _fail(self, part: Part, problem: str, bad: Iterable[str]) -> None:
        """Note that the state cannot be read from these sources."""
        for peer in bad:
            self._note_bad(part, peer, problem)
        problem = f"{part} cannot be had: {problem}"
        self.result = Filled(ranks=self.wanted.ranks, nbytes=self._nbytes, problem=problem, bad=tuple(self._bad))
