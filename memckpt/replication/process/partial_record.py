"""A record that is being read: which stripes were asked from whom, and what has come."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import xxhash

from memckpt.replication.coding.blob import STATIC
from memckpt.replication.coding.code import STRIPE_BYTES
from memckpt.replication.coding.fragments import Fragment
from memckpt.replication.transport.wire import Got, Manifest
from memckpt.state.records import RankGroup


class Stripe:
    """One stripe of a record that is being read.

    Attributes:
        asked: nodes that were asked for their fragment of it, and its index.
        here: what they have given, as far as it may be of use.
        useless: nodes that have given something else.
        wanted: number of fragments that it takes.
        suspects: nodes whose fragments do not make the stripe.
    """

    def __init__(self, wanted: int) -> None:
        self.asked: dict[str, int | None] = {}
        self.here: dict[str, tuple[Fragment | None, bytes]] = {}
        self.useless: set[str] = set()
        self.suspects: set[str] = set()
        self.wanted = wanted


class PartialRecord:
    """A record that is to be read, and from whom.

    Args:
        owner, generation, record: the record.
        sources: node and fragment index of each; an index of None: whole stripes of the node's own.
        needed: number of fragments that make a stripe whole.

    Attributes:
        manifests: description of the record, by source.
        manifest: the description that most sources give.
        lost: sources that are not asked any more, each with a reason.
        open: number of unanswered questions, by source.
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
        """Number of its stripes."""
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
        """Why an answer is not the fragment that was asked for, in words; empty if it may be.

        Digests of fragments' stripes are checked when they are decoded.

        Args:
            message: the answer.
            payload: the bytes beside it.
            index: index of the fragment that was asked for; None: the whole stripe.
        """
        fragment = message.fragment
        if self.live:
            if fragment is not None or len(payload) != self.length(message.stripe):
                return f"expected a stripe of {self.length(message.stripe)} bytes, found {len(payload)}"
            right = xxhash.xxh3_128_digest(payload) == message.digest
            return "" if right else "the stripe has not the digest that comes with it"
        if fragment is None or fragment.index != index:
            return f"expected fragment {index}, found {'none' if fragment is None else fragment.index}"
        return "" if fragment.digest == self.digest(message.stripe) else "it names another digest than most"
