"""Records at the holders of their fragments, and all kinds of wrong answers from these."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Sequence

import msgspec
import xxhash

from memckpt.memory.region import Region
from memckpt.protocol.replication import Filled, FromFragments, WantedState
from memckpt.replication.coding.blob import STATIC
from memckpt.replication.coding.code import STRIPE_BYTES, Code, _checksum
from memckpt.replication.transport.messages import AskManifest, Get, Got, GotNone, Manifest, WireMessage
from tests.support.cluster.peers_records import RANKS, Answers, Bend, Bytes, Network, Node, Records, layout_spec, spread

CODES = [(1, 1), (1, 3), (3, 1), (2, 2), (4, 2), (2, 3)]
NEWEST = 5


class Job:
    """A unit's records at the holders of their fragments. The unit's own node is gone."""

    def __init__(self, data: int, tolerate: int) -> None:
        self.code = Code(data, tolerate)
        self.records = Records(layout_spec())
        self.nodes = [Node(f"n{index}") for index in range(self.code.fragments)]
        spread(self.records, self.code, self.nodes)

    @property
    def names(self) -> list[str]:
        return [node.name for node in self.nodes]

    def wanted(self, record: int = NEWEST, nodes: Sequence[Node] | None = None) -> WantedState:
        fragments = tuple((node.name, index) for index, node in enumerate(self.nodes) if nodes is None or node in nodes)
        return WantedState(RANKS, record, FromFragments("g", fragments, self.code.data, 2))

    def read(self, bend: Bend, order: random.Random | None = None) -> Filled:
        """Read the state, and return the result; one that claims success is checked."""
        result, regions = Network(self.nodes, bend, order).read(self.wanted(), self.records.spec, self.code)
        with closing_all(regions):
            if not result.problem:
                check_right(self.records, result, regions)
        return result

    def close(self) -> None:
        self.records.close()
        for node in self.nodes:
            node.close()
        self.code.close()


@contextlib.contextmanager
def closing_all(regions: Sequence[Region]) -> Iterator[None]:
    try:
        yield
    finally:
        for region in regions:
            region.close()


def check_right(
    records: Records, result: Filled, regions: Sequence[Region], record: int = NEWEST, before: bool = False
) -> None:
    oldest = record - before
    window = range(oldest - records.spec.period + 1, record + 1)
    for number in window:
        assert records.shared_bytes(number, regions) == records.shared_bytes(number, records.regions)
    for number in range(oldest, record + 1):
        assert records.own_bytes(number, regions) == records.own_bytes(number, records.regions)
    step, _, states = records.held[record - 1]
    assert result.before == ((step, states) if before else None)
    assert regions[1].map[:] == records.regions[1].map[:]
    assert result.metas == {number: records.held[number][1] for number in window}
    assert (result.step, result.rank_states) == (records.held[record][0], records.held[record][2])


def flip(payload: Bytes, at: int = 0) -> bytes:
    changed = bytearray(payload)
    changed[at] ^= 1
    return bytes(changed)


def lie(got: Got, payload: Bytes, **other: object) -> Got:
    """The answer with another payload or fields, and a valid checksum."""
    assert got.fragment is not None
    bare = msgspec.structs.replace(got.fragment, **other)
    return msgspec.structs.replace(got, fragment=msgspec.structs.replace(bare, checksum=_checksum(bare, payload)))


def claim(got: Got, **other: object) -> Got:
    """The answer with other fields, which its checksum does not match."""
    assert got.fragment is not None
    return msgspec.structs.replace(got, fragment=msgspec.structs.replace(got.fragment, **other))


def instead(node: Node, got: Got, payload: Bytes, **other: object) -> tuple[WireMessage, Bytes]:
    """The node's fragment of another record or stripe, claimed to be the one asked for."""
    question = msgspec.structs.replace(Get(got.request, RANKS, "g", got.record, None, got.stripe), **other)
    found, bytes_found = node.answer(question)
    if not isinstance(found, Got):
        return got, b""
    return msgspec.structs.replace(found, record=got.record, stripe=got.stripe), bytes_found


def false_stripe(node: Node, got: Got, payload: Bytes) -> tuple[WireMessage, Bytes]:
    data = flip(payload)
    return lie(got, data, digest=xxhash.xxh3_128_digest(data)), data


#: Damage of a fragment in transit.
Damage = Callable[[Node, Got, Bytes], tuple[WireMessage, Bytes]]
FRAGMENT_DAMAGES: dict[str, Damage] = {
    "a bit of the payload": lambda _, got, payload: (got, flip(payload, len(payload) // 2)),
    "truncated": lambda _, got, payload: (got, bytes(payload)[:-1]),
    "longer": lambda _, got, payload: (got, bytes(payload) + b"\0"),
    "empty": lambda _, got, payload: (got, b""),
    "no fragment": lambda _, got, payload: (msgspec.structs.replace(got, fragment=None), payload),
    "a whole stripe": lambda _, got, payload: (
        msgspec.structs.replace(got, fragment=None, digest=xxhash.xxh3_128_digest(payload)),
        payload,
    ),
    "another stripe": lambda node, got, payload: instead(node, got, payload, stripe=0 if got.stripe else 1),
    "another record": lambda node, got, payload: instead(node, got, payload, record=3),
    "what is sent once": lambda node, got, payload: instead(node, got, payload, record=STATIC if got.record > 0 else 4),
    "a header of another record": lambda _, got, payload: (claim(got, record=got.record + 1), payload),
    "a header of another length": lambda _, got, payload: (claim(got, length=1), payload),
    "a header of another digest": lambda _, got, payload: (claim(got, digest=bytes(16)), payload),
    "a checksum of nothing": lambda _, got, payload: (claim(got, checksum=b""), payload),
    "another payload, with a checksum": lambda _, got, payload: (lie(got, flip(payload)), flip(payload)),
    "another digest, with a checksum": lambda _, got, payload: (lie(got, payload, digest=bytes(16)), payload),
    "a false stripe": false_stripe,
    "another fragment, with a checksum": lambda _, got, payload: (
        lie(got, payload, index=(got.fragment.index if got.fragment else 0) + 1),
        payload,
    ),
    "more stripes, with a checksum": lambda _, got, payload: (lie(got, payload, stripes=1 << 60), payload),
    "got none": lambda _, got, payload: (GotNone(got.request, "it is gone"), b""),
}


def manifest_of(change: Callable[[Manifest], Manifest]) -> Bend:
    def bend(node: Node, question: WireMessage, answer: WireMessage, payload: Bytes) -> Answers:
        return [(node.name, change(answer) if isinstance(answer, Manifest) else answer, payload)]

    return bend


def fragments(damage: Damage) -> Bend:
    def bend(node: Node, question: WireMessage, answer: WireMessage, payload: Bytes) -> Answers:
        return (
            [(node.name, *damage(node, answer, payload))] if isinstance(answer, Got) else [(node.name, answer, payload)]
        )

    return bend


def silent(node: Node, question: WireMessage, answer: WireMessage, payload: Bytes) -> Answers:
    return []


def lost_in_the_middle(node: Node, question: WireMessage, answer: WireMessage, payload: Bytes) -> Answers:
    gone = isinstance(question, Get) and (question.record, question.stripe) >= (4, 1)
    return [] if gone else [(node.name, answer, payload)]


def without_a_record(node: Node, question: WireMessage, answer: WireMessage, payload: Bytes) -> Answers:
    if isinstance(question, AskManifest | Get) and question.record == 5:
        return [(node.name, GotNone(question.request, "it is not complete here"), b"")]
    return [(node.name, answer, payload)]


def chatters_on(node: Node, question: WireMessage, answer: WireMessage, payload: Bytes) -> Answers:
    """Repeat a record's manifest over and over, without ever sending any of it."""
    said = node.answer(AskManifest(getattr(question, "request", 0), RANKS, "g", 5))
    return [(node.name, *said)] if isinstance(question, Get) else [(node.name, answer, payload)]


DAMAGES: dict[str, Bend] = {name: fragments(damage) for name, damage in FRAGMENT_DAMAGES.items()} | {
    "silent": silent,
    "lost in the middle": lost_in_the_middle,
    "without a record": without_a_record,
    "chatters on": chatters_on,
    "another size": manifest_of(lambda one: msgspec.structs.replace(one, nbytes=one.nbytes - 1)),
    "an absurd size": manifest_of(lambda one: msgspec.structs.replace(one, nbytes=1 << 62)),
    "a size below nothing": manifest_of(lambda one: msgspec.structs.replace(one, nbytes=-STRIPE_BYTES)),
    "no size": manifest_of(lambda one: msgspec.structs.replace(one, nbytes=0, digests=b"")),
    "more digests": manifest_of(lambda one: msgspec.structs.replace(one, digests=one.digests + bytes(16))),
    "no digests": manifest_of(lambda one: msgspec.structs.replace(one, digests=b"")),
    "other digests": manifest_of(lambda one: msgspec.structs.replace(one, digests=flip(one.digests))),
}
#: Cases in which a lone liar cannot be told from a correct node, or several are in league.
LIES = {"another size", "other digests"}


def at(nodes: Sequence[str], bend: Bend) -> Bend:
    """Wrong behaviour of some nodes only."""

    def some(node: Node, question: WireMessage, answer: WireMessage, payload: Bytes) -> Answers:
        if node.name in nodes:
            return bend(node, question, answer, payload)
        return [(node.name, answer, payload)]

    return some


def named(result: Filled) -> set[str]:
    assert {(one.ranks, one.generation) for one in result.bad} <= {(RANKS, "g")}
    return {one.node for one in result.bad}
