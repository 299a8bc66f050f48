"""Fragments: what travels and is kept of a record, k + m - 1 of each stripe, and how damage is found.

Each fragment says what it is and carries a checksum of all of it, so that one that was damaged or mixed up is known by
itself. A peer that lies can make a valid checksum; so each also carries a digest of the whole stripe, and what was
decoded must have the digest that most fragments name.
"""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import msgspec
import xxhash

from memckpt.errors import DamagedFragmentsError
from memckpt.replication.coding.code import STRIPE_BYTES, Code, Payload
from memckpt.state.records import RankGroup

#: How many choices of k candidates are tried to find those that do not lie.
_MOST_CHOICES = 4_096


class Fragment(msgspec.Struct, frozen=True, array_like=True):
    """The header of one fragment; its payload goes beside it.

    Attributes:
        generation: the owner's generation to which the record belongs.
        owner: the ranks whose record it is.
        record: its number.
        stripe, stripes: index of the stripe in its record, and number of stripes.
        index: which of the k + m - 1 fragments of the stripe.
        data, tolerate: k and m.
        length: length of the stripe, in bytes.
        checksum: xxh3_64 of the other fields and of the payload.
        digest: xxh3_128 of the stripe.
    """

    generation: str
    owner: RankGroup
    record: int
    stripe: int
    stripes: int
    index: int
    data: int
    tolerate: int
    length: int
    checksum: bytes
    digest: bytes


class Candidate(NamedTuple):
    """A fragment, where it was found, and its payload."""

    source: str
    fragment: Fragment
    payload: Payload


_encoder = msgspec.msgpack.Encoder()


def _checksum(fragment: Fragment, payload: Payload) -> bytes:
    bare = msgspec.structs.replace(fragment, checksum=b"")
    state = xxhash.xxh3_64(_encoder.encode(bare))
    state.update(payload)
    return state.digest()


def seal_stripe(
    code: Code,
    data: bytes | memoryview,
    *,
    generation: str,
    owner: RankGroup,
    record: int,
    stripe: int,
    stripes: int,
) -> list[tuple[Fragment, Payload]]:
    """Encode one stripe of 1 to STRIPE_BYTES bytes: its fragments in their order, each with its payload.

    The stripe is not to change meanwhile; the payloads are the caller's.
    """
    digest = xxhash.xxh3_128_digest(data)
    sealed = []
    for index, payload in enumerate(code.encode(data)):
        bare = Fragment(
            generation, owner, record, stripe, stripes, index, code.data, code.tolerate, len(data), b"", digest
        )
        sealed.append((msgspec.structs.replace(bare, checksum=_checksum(bare, payload)), payload))
    return sealed


def check(fragment: Fragment, payload: Payload, **expected: object) -> str:
    """What is wrong with a fragment, in words; empty if it is whole, makes sense, and has the `expected` fields."""
    for name, value in expected.items():
        if (found := getattr(fragment, name)) != value:
            return f"expected {name} {value}, found {found}"
    one = fragment
    if one.data < 1 or one.tolerate < 1 or not 0 <= one.index < one.data + one.tolerate - 1:
        return f"expected one of k + m - 1 fragments, found fragment {one.index} with k={one.data}, m={one.tolerate}"
    if not 0 <= one.stripe < one.stripes or not 1 <= one.length <= STRIPE_BYTES:
        return f"found stripe {one.stripe} of {one.stripes} with {one.length} bytes, of record {one.record}"
    if fragment.checksum != _checksum(fragment, payload):
        return "its checksum is not that of its content"
    return ""


def decode_stripe(
    code: Code,
    candidates: Sequence[Candidate | tuple[str, Fragment, Payload]],
    *,
    generation: str,
    owner: RankGroup,
    record: int,
    stripe: int,
    stripes: int,
    length: int,
) -> tuple[bytes, tuple[str, ...]]:
    """The bytes of a stripe from those of the candidates that are what they claim to be.

    k of them are enough; earlier ones are used first, and any beside them are checked against the result. Where fewer
    candidates lie than do not, and k do not, the bytes are right, whatever the liars have made up.

    Args:
        code: the code with which it was encoded.
        candidates: fragments, and by name where they were found, each source once.
        generation, owner, record, stripe, stripes, length: what they should be of.

    Returns:
        The stripe, and the sources of what was found to be wrong.

    Raises:
        DamagedFragmentsError: too few are intact, or more than one stripe could follow from them.
    """
    found = [Candidate(*candidate) for candidate in candidates]
    size = code.fragment_bytes(length)
    problems: dict[str, str] = {}
    for source, fragment, payload in found:
        problem = check(
            fragment, payload, generation=generation, owner=owner, record=record, stripe=stripe, stripes=stripes,
            data=code.data, tolerate=code.tolerate, length=length,
        )  # fmt: skip
        if problem or len(payload) != size:
            problems[source] = problem or f"expected {size} bytes, found {len(payload)}"
    intact = [one for one in found if one.source not in problems]
    votes = Counter(one.fragment.digest for one in intact)
    named = [digest for digest, count in votes.items() if count == max(votes.values())]
    agreeing = {digest: [one for one in intact if one.fragment.digest == digest] for digest in named}
    results = {digest: result for digest in named if (result := _decode_to(digest, code, agreeing[digest], length))}
    if len(named) == 1 or len(results) == 1:
        [digest] = results or named
        problems |= {one.source: "names another digest" for one in intact if one.fragment.digest != digest}
    if len(results) == 1:
        data, used = results[digest]
        rest = [one for one in agreeing[digest] if one not in used]
        fragments = code.encode(data) if rest else []
        problems |= {one.source: "lies" for one in rest if bytes(one.payload) != bytes(fragments[one.fragment.index])}
        return data, tuple(problems)
    good = max((len({one.fragment.index for one in each}) for each in agreeing.values()), default=0)
    words = [f"{source}: {problem}" for source, problem in problems.items()]
    if len(results) > 1:
        words.append(f"as many fragments make one stripe as another, {' and '.join(map(_name, agreeing.values()))}")
    elif good >= code.data:
        words.append(f"what {_name(agreeing[named[0]])} have does not make the stripe that they name")
    good = min(good, code.data - 1)  # more would have made the stripe
    raise DamagedFragmentsError(owner, record, stripe, tuple(problems), good, code.data, "; ".join(words))


def _decode_to(
    digest: bytes, code: Code, candidates: Sequence[Candidate], length: int
) -> tuple[bytes, tuple[Candidate, ...]] | None:
    """The stripe that has `digest`, and the k candidates that make it; None if no choice of them does."""
    for choice in _choose(candidates, code.data):
        data = code.decode({one.fragment.index: one.payload for one in choice}, length)
        if xxhash.xxh3_128_digest(data) == digest:
            return data, choice
    return None


def _choose(candidates: Sequence[Candidate], count: int) -> Iterator[tuple[Candidate, ...]]:
    """Choices of `count` different fragments, the first ones first: all, or some at random if these are too many."""
    choices: Iterator[tuple[Candidate, ...]] = itertools.combinations(candidates, count)
    if math.comb(len(candidates), count) > _MOST_CHOICES:
        numbers = random.Random(0)
        drawn = (tuple(numbers.sample(candidates, count)) for _ in range(_MOST_CHOICES))
        choices = itertools.chain(itertools.islice(choices, 1), drawn)
    return (choice for choice in choices if len({one.fragment.index for one in choice}) == count)


def _name(candidates: Iterable[Candidate]) -> str:
    return ", ".join(one.source for one in candidates)
