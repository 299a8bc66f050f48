"""A state that is read from peers' memory: fragments from all holders at once, or the records of a living node."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import xxhash

from memckpt.errors import DamagedFragmentsError, DamagedStateError
from memckpt.memory.region import GenerationRegions, Region
from memckpt.protocol.replication import BadSourceSeen, Filled, FromFragments, FromNode, WantedState
from memckpt.replication.coding.blob import MOST_TAIL_BYTES, STATIC, BlobReader, RecordTail, Room
from memckpt.replication.coding.code import STRIPE_BYTES, Code, Fragment, decode_stripe
from memckpt.replication.keeping.outgoing import rooms_for
from memckpt.replication.transport.messages import AskManifest, Get, Got, GotNone, Manifest, WindowIs, WireMessage
from memckpt.state.layout import Layout
from memckpt.state.records import RankGroup
from memckpt.state.spec import StateSpec

Answer = Manifest | Got | WindowIs | GotNone


class Stripe:
    """One stripe of a record that is being read.

    `wanted`: fragments that it takes. `asked`: nodes, and their fragment's index. `here`: what they gave, except
    `useless` ones. `suspects`: nodes whose fragments do not make the stripe.
    """

    def __init__(self, wanted: int) -> None:
        self.asked: dict[str, int | None] = {}
        self.here: dict[str, tuple[Fragment | None, bytes]] = {}
        self.useless: set[str] = set()
        self.suspects: set[str] = set()
        self.wanted = wanted


class PartialRecord:
    """A record that is to be read, and from whom.

    `sources`: node and fragment index; None: whole stripes of the node's own. `needed`: fragments of a stripe.
    `manifest`: what most sources say. `lost`: sources not asked any more, and why. `open`: unanswered questions.
    """

    def __init__(
        self,
        owner: RankGroup,
        generation: str,
        record: int,
        sources: Sequence[tuple[str, int | None]],
        needed: int,
    ) -> None:
        self.owner, self.generation, self.record = owner, generation, record
        self.sources = dict(sources)
        self.needed = needed
        self.request = 0
        self.live = None in self.sources.values()
        self.manifests: dict[str, Manifest] = {}
        self.manifest: Manifest | None = None
        self.lost: dict[str, str] = {}
        self.stripes: dict[int, Stripe] = {}
        self.open: Counter[str] = Counter()
        self.next_asked = 0
        self.next_taken = 0

    def __str__(self) -> str:
        what = "what is sent once" if self.record == STATIC else f"record {self.record}"
        return f"{what} of ranks {list(self.owner)}"

    def usable(self) -> list[tuple[str, int | None]]:
        """Sources that are not lost, each with its fragment index."""
        return [(node, index) for node, index in self.sources.items() if node not in self.lost]

    @property
    def count(self) -> int:
        assert self.manifest is not None
        return -(-self.manifest.nbytes // STRIPE_BYTES)

    def length(self, stripe: int) -> int:
        """Bytes of a stripe."""
        assert self.manifest is not None
        return min(STRIPE_BYTES, self.manifest.nbytes - stripe * STRIPE_BYTES)

    def digest(self, stripe: int) -> bytes:
        """Digest of a stripe, as most holders say; empty where the owner sends it with the stripe."""
        assert self.manifest is not None
        return self.manifest.digests[16 * stripe : 16 * (stripe + 1)]

    def waiting(self, stripe: Stripe) -> list[str]:
        """Nodes that were asked for a stripe and have not answered."""
        return [
            node
            for node in stripe.asked
            if node not in stripe.here and node not in stripe.useless and node not in self.lost
        ]

    def problem_of(self, message: Got, payload: bytes, index: int | None) -> str:
        """Why an answer is not fragment `index`, or the whole stripe (None), in words; empty if it is."""
        fragment = message.fragment
        if self.live:
            if fragment is not None or len(payload) != self.length(message.stripe):
                return f"expected a stripe of {self.length(message.stripe)} bytes, found {len(payload)}"
            right = xxhash.xxh3_128_digest(payload) == message.digest
            return "" if right else "the stripe has not the digest that comes with it"
        if fragment is None or fragment.index != index:
            return f"expected fragment {index}, found {'none' if fragment is None else fragment.index}"
        return "" if fragment.digest == self.digest(message.stripe) else "it names another digest than most"


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
    """A state that is read from peers into regions, which it closes: slots, then static tensors where present."""

    def __init__(
        self,
        wanted: WantedState,
        spec: StateSpec,
        regions: list[Region],
        code: Code,
        send: Callable[[str, WireMessage], None],
        number: Callable[[], int],
        now: float,
    ) -> None:
        self.wanted = wanted
        self._layout = Layout(spec)
        self._regions = GenerationRegions.of(self._layout, regions)
        self._code, self._send = code, send
        self._partials = self._plan_partials(self._regions.static is not None)
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
        self.expected_bytes = sum(self._room_bytes(partial.record) for partial in self._partials)
        for partial in self._partials:
            partial.request = number()
            for node in partial.sources:
                self._heard[node] = now
                self._send(node, AskManifest(partial.request, partial.owner, partial.generation, partial.record))
        self._go_on(now)

    def _plan_partials(self, static: bool) -> list[PartialRecord]:
        wanted = self.wanted
        oldest = wanted.record - wanted.before
        window = range(oldest - self._layout.spec.period + 1, wanted.record + 1)
        match wanted.source:
            case FromNode(node):
                return self._live_partials(node, wanted.ranks, LIVE_ALL, window, static)
            case FromFragments(generation, found, data, period, replica):
                shared: list[PartialRecord] = []
                numbers = [STATIC] * static + list(range(oldest - period + 1, wanted.record + 1))
                if replica is not None:
                    shared = self._live_partials(*replica, LIVE_SHARED, window, static)
                    numbers = list(range(oldest, wanted.record + 1))
                fragments: list[tuple[str, int | None]] = [*found]
                return [*shared, *(PartialRecord(wanted.ranks, generation, one, fragments, data) for one in numbers)]

    @staticmethod
    def _live_partials(
        node: str, ranks: RankGroup, generation: str, window: Sequence[int], static: bool
    ) -> list[PartialRecord]:
        return [
            PartialRecord(ranks, generation, record, [(node, None)], 1) for record in [STATIC] * static + list(window)
        ]

    def close(self) -> None:
        self._into = None
        self._regions.close()

    # What peers answer

    def take_answer(self, peer: str, message: Answer, payload: bytes | memoryview, now: float) -> None:
        """Take a peer's answer, if it is one to this reader's questions."""
        if self.result is not None:
            return
        for partial in self._partials:
            if partial.request == message.request and peer in partial.sources and peer not in partial.lost:
                match message:
                    case Manifest():
                        self._got_manifest(partial, peer, message, now)
                    case Got():
                        self._got(partial, peer, message, bytes(payload), now)
                    case GotNone():
                        self._got_none(partial, peer, message, now)
                return

    def _got_manifest(self, partial: PartialRecord, peer: str, message: Manifest, now: float) -> None:
        if partial.manifest is not None or peer in partial.manifests:
            return
        self._heard[peer] = now
        stripes = -(-message.nbytes // STRIPE_BYTES)
        most = self._room_bytes(partial.record) + MOST_TAIL_BYTES
        if not 1 <= message.nbytes <= most or len(message.digests) != (0 if partial.live else 16 * stripes):
            self._lose(partial, peer, "its description of the record is invalid", now)
            return
        partial.manifests[peer] = message
        self._go_on(now)

    def _got(self, partial: PartialRecord, peer: str, message: Got, payload: bytes, now: float) -> None:
        stripe = partial.stripes.get(message.stripe)
        if stripe is None or peer not in partial.waiting(stripe):
            return
        self._heard[peer] = now
        partial.open[peer] -= 1
        self._nbytes += len(payload)
        problem = partial.problem_of(message, payload, stripe.asked[peer])
        if problem:
            stripe.useless.add(peer)
            self._note_bad(partial, peer, problem)
            self._ask_for(partial, message.stripe, now)
        else:
            stripe.here[peer] = (message.fragment, payload)
        self._go_on(now)

    def _got_none(self, partial: PartialRecord, peer: str, message: GotNone, now: float) -> None:
        self._heard[peer] = now
        if partial.manifest is None and not partial.live:
            # It may have others: sources are named that have a part of what is needed.
            partial.lost[peer] = message.reason
            self._go_on(now)
        else:
            self._lose(partial, peer, message.reason, now)

    def tend(self, now: float) -> None:
        """Give up sources that do not answer. To be called every second or so."""
        for peer in self._waiting_for():
            if now - self._heard[peer] > PATIENCE_SECONDS:
                reason = f"it has not answered for {PATIENCE_SECONDS:.0f} s"
                self._silent.add(peer)
                partials = [partial for partial in self._partials if peer in partial.sources]
                for partial in partials:
                    self._note_bad(partial, peer, reason)
                for partial in partials:
                    self._lose(partial, peer, reason, now)

    def _waiting_for(self) -> set[str]:
        if not self._partials or self.result is not None:
            return set()
        partial = self._partials[0]
        if partial.manifest is None:
            return {node for node, _ in partial.usable()} - set(partial.manifests)
        return {node for node, _ in partial.usable() if partial.open[node] > 0}

    def _lose(self, partial: PartialRecord, peer: str, reason: str, now: float) -> None:
        """Read a record from the other sources instead."""
        if self.result is not None or peer in partial.lost:
            return
        self._note_bad(partial, peer, reason)
        partial.lost[peer] = reason
        for number in sorted(partial.stripes):
            self._ask_for(partial, number, now)
        self._go_on(now)

    def _note_bad(self, partial: PartialRecord, peer: str, reason: str) -> None:
        seen = BadSourceSeen(peer, partial.owner, "" if partial.live else partial.generation, peer in self._silent)
        if seen not in self._bad:
            _log.warning("%s cannot be read from %s: %s", partial, peer, reason)
        self._bad[seen] = None

    # Reading on

    def _go_on(self, now: float) -> None:
        while self.result is None:
            if not self._partials:
                self._finish()
                return
            partial = self._partials[0]
            if partial.manifest is None and not self._vote(partial):
                return
            if self._into is None:
                self._into = BlobReader(self._rooms(partial.record))
            self._ask_ahead(partial, now)
            if self.result is not None or not self._take_stripes(partial, now):
                return

    def _vote(self, partial: PartialRecord) -> bool:
        """Take the description of the record that most sources give, once all have given one."""
        alive = [node for node, _ in partial.usable()]
        said = {peer: (one.nbytes, one.digests) for peer, one in partial.manifests.items() if peer in alive}
        if len(said) < len(alive):
            return False
        votes = Counter(said.values()).most_common(2)
        if len(alive) < partial.needed:
            self._fail(partial, f"{len(alive)} of {partial.needed} fragments needed can be read", partial.lost)
            return False
        if len(votes) > 1 and votes[0][1] == votes[1][1]:
            self._fail(partial, f"{', '.join(sorted(said))} describe it differently", said)
            return False
        (nbytes, digests), _ = votes[0]
        partial.manifest = Manifest(partial.request, partial.record, nbytes, digests)
        self.expected_bytes += nbytes - self._room_bytes(partial.record)
        for peer, what in said.items():
            if what != votes[0][0]:
                partial.lost[peer] = "it describes the record differently from most"
                self._note_bad(partial, peer, partial.lost[peer])
        return True

    def _rooms(self, record: int) -> list[Room]:
        if record == STATIC:
            assert self._regions.static is not None
            return [Room(0, memoryview(self._regions.static.map))]
        return rooms_for(self._layout, self._regions.slots.map, record)

    def _room_bytes(self, record: int) -> int:
        return sum(room.view.nbytes for room in self._rooms(record))

    def _ask_ahead(self, partial: PartialRecord, now: float) -> None:
        limit = min(partial.next_taken + _AHEAD, partial.count)
        while partial.next_asked < limit and self.result is None:
            number, partial.next_asked = partial.next_asked, partial.next_asked + 1
            partial.stripes[number] = Stripe(partial.needed)
            self._ask_for(partial, number, now)

    def _ask_for(self, partial: PartialRecord, number: int, now: float) -> None:
        """Ask sources for a stripe that were not asked yet, as many as it needs fragments."""
        stripe = partial.stripes[number]
        missing = stripe.wanted - len(stripe.here) - len(partial.waiting(stripe))
        if missing <= 0 or self.result is not None:
            return
        others = [one for one in partial.usable() if one[0] not in stripe.asked]
        if len(others) < missing:
            words = [f"{node}: {reason}" for node, reason in sorted(partial.lost.items())]
            words += [f"{node}: its answer is not what was asked for" for node in sorted(stripe.useless)]
            words += [f"{', '.join(sorted(stripe.suspects))}: their fragments do not make the stripe"] * bool(
                stripe.suspects
            )
            problem = (
                f"too few of the {partial.needed} fragments needed of stripe {number} are left ({'; '.join(words)})"
            )
            self._fail(partial, problem, {**partial.lost, **dict.fromkeys(stripe.useless | stripe.suspects)})
            return
        # In turns, so that all survivors' links carry their share.
        first = (partial.record + number) % len(others)
        for node, index in (others[first:] + others[:first])[:missing]:
            if partial.open[node] <= 0:
                self._heard[node] = now
            partial.open[node] += 1
            stripe.asked[node] = index
            self._send(node, Get(partial.request, partial.owner, partial.generation, partial.record, index, number))

    def _take_stripes(self, partial: PartialRecord, now: float) -> bool:
        """Take the next stripes if they are here; True when that was the last of the record."""
        assert self._into is not None
        try:
            while partial.next_taken < partial.count:
                stripe = partial.stripes[partial.next_taken]
                if len(stripe.here) < stripe.wanted:
                    return False
                data = self._decode(partial, partial.next_taken, now)
                if data is None:
                    return False
                self._into.take(data)
                self.taken_bytes += len(data)
                self._unreported += len(data)
                self._reports |= self._unreported >= PROGRESS_BYTES
                del partial.stripes[partial.next_taken]
                partial.next_taken += 1
                self._ask_ahead(partial, now)
                if self.result is not None:
                    return False
            self._note_tail(partial, self._into.finish())
        except DamagedStateError as error:
            # All that was read is what its owner has sent.
            self._fail(partial, str(error), dict(partial.usable()))
            return False
        self._into = None
        self._partials.pop(0)
        self._reports = True
        return True

    def take_progress(self) -> int:
        """Bytes that have come since they were reported last; 0: too few to report."""
        nbytes = self._unreported if self._reports else 0
        self._unreported, self._reports = self._unreported - nbytes, False
        return nbytes

    def _decode(self, partial: PartialRecord, number: int, now: float) -> bytes | None:
        """The bytes of a stripe; None if more fragments of it have to come first."""
        stripe = partial.stripes[number]
        if partial.live:
            return next(iter(stripe.here.values()))[1]
        found = [(peer, fragment, payload) for peer, (fragment, payload) in stripe.here.items() if fragment is not None]
        try:
            data, bad = decode_stripe(
                self._code,
                found,
                generation=partial.generation,
                owner=partial.owner,
                record=partial.record,
                stripe=number,
                stripes=partial.count,
                length=partial.length(number),
            )
        except DamagedFragmentsError as error:
            for peer in error.bad:
                self._note_bad(partial, peer, "its fragment is damaged")
            stripe.suspects = set() if error.bad else set(stripe.here)
            stripe.wanted = len(stripe.here) + 1
            self._ask_for(partial, number, now)
            return None
        for peer in bad:
            self._note_bad(partial, peer, "its fragment is damaged")
        return data

    def _note_tail(self, partial: PartialRecord, tail: RecordTail) -> None:
        if partial.record == STATIC:
            return
        if tail.meta:
            self._metas[partial.record] = tail.meta
        if partial.record in self._rank_states:
            self._steps[partial.record] = tail.step
            self._rank_states[partial.record] |= tail.rank_states

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

    def _fail(self, partial: PartialRecord, problem: str, bad: Iterable[str]) -> None:
        for peer in bad:
            self._note_bad(partial, peer, problem)
        problem = f"{partial} cannot be had: {problem}"
        self.result = Filled(ranks=self.wanted.ranks, nbytes=self._nbytes, problem=problem, bad=tuple(self._bad))
