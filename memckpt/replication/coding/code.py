"""The erasure code: a stripe of bytes to k + m - 1 fragments, any k of which give it back.

A payload is the bytes alone. What liberasurecode puts in front of each is a function of the stripe's length, and is
made anew to decode: it has lengths that the library trusts, and a fragment may come from a peer that lies.

What travels says what it is (:class:`Fragment`), with a checksum of all of it: damage and mix-ups show in the fragment
itself. A peer that lies can make a valid checksum. So each fragment also carries a digest of the whole stripe, and what
was decoded must have the digest that most fragments name.
"""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np
import xxhash

from memckpt.errors import ConfigurationError, DamagedFragmentsError
from memckpt.state.records import RankGroup

if TYPE_CHECKING:
    from pyeclib.ec_iface import ECDriver

#: Bytes of a fragment.
Payload = bytes | memoryview

#: Bytes of a stripe: encoding one works in a core's cache.
STRIPE_BYTES = 256 << 10

#: Any k fragments suffice by their construction. What else there is must show it, with each choice of k.
_PROVEN = frozenset({"isa_l_rs_cauchy", "isa_l_rs_vand_inv", "liberasurecode_rs_vand"})
_MOST_CHOICES = 5_000

_HEADER_BYTES = 80  # of liberasurecode, before each fragment
_MOST_HEADERS = 64  # lengths for which they are kept: whole stripes, and the last ones of some records


class Code:
    """A stripe's bytes to k + m - 1 fragments and back. Owns what its backend (of liberasurecode) holds.

    With m = 1 there is no parity, with k = 1 the fragments are copies: neither needs a backend. Raises
    ConfigurationError: it is not there, or not any k of so many fragments suffice.
    """

    def __init__(self, data: int, tolerate: int, backend: str = "isa_l_rs_cauchy") -> None:
        if data < 1 or tolerate < 1:
            raise ConfigurationError(f"peers: expected k and m of 1 or more, found k={data}, m={tolerate}")
        self.data = data
        self.tolerate = tolerate
        self.fragments = data + tolerate - 1
        self._driver: ECDriver | None = None
        self._readable: Callable[[Payload], Any] = _as_array
        self._headers: dict[int, list[bytes]] = {}
        if data > 1 and tolerate > 1:
            self._driver = _open_driver(data, tolerate - 1, backend)
            try:
                self._prove(backend)
            except BaseException:  # nobody else could close it
                self.close()
                raise

    def close(self) -> None:
        """Release what the backend holds. Idempotent."""
        if self._driver is not None:
            self._driver.close()

    def encode(self, stripe: bytes | memoryview) -> Sequence[Payload]:
        """The fragments of a stripe of one byte or more, all of one length; the first k are its bytes in order."""
        if self._driver is not None:
            return [memoryview(framed)[_HEADER_BYTES:] for framed in self._driver.encode(self._readable(stripe))]
        if self.data == 1:
            return [bytes(stripe)] * self.fragments
        size = self.fragment_bytes(len(stripe))
        return [bytes(stripe[at * size : (at + 1) * size]).ljust(size, b"\0") for at in range(self.data)]

    def decode(self, fragments: Mapping[int, Payload], length: int) -> bytes:
        """The stripe of `length` bytes, from any k of its fragments. Raises ValueError: too few, or misfits."""
        size = self.fragment_bytes(length)
        fit = all(0 <= number < self.fragments and len(fragment) == size for number, fragment in fragments.items())
        if not fit or len(fragments) < self.data:
            found = {number: len(fragment) for number, fragment in sorted(fragments.items())}
            raise ValueError(f"expected {self.data} of {self.fragments} fragments of {size} bytes, found {found}")
        if all(number in fragments for number in range(self.data)):
            return b"".join(fragments[number] for number in range(self.data))[:length]
        if self.data == 1:
            return bytes(next(iter(fragments.values())))
        assert self._driver is not None  # without parity all k are needed
        headers = self._headers_of(length)
        chosen = itertools.islice(fragments.items(), self.data)
        # Anything but bytes would end the process.
        return self._driver.decode([b"".join((headers[number], fragment)) for number, fragment in chosen])

    def fragment_bytes(self, length: int) -> int:
        """Length in bytes of each fragment of a stripe of `length` bytes."""
        if self._driver is None:
            return -(-length // self.data)
        framed: int = self._driver.get_segment_info(length, length)["fragment_size"]
        return framed - _HEADER_BYTES

    def _headers_of(self, length: int) -> list[bytes]:
        """Headers that the backend puts before the fragments of any stripe of `length` bytes."""
        if length not in self._headers:
            assert self._driver is not None
            if len(self._headers) >= _MOST_HEADERS:
                self._headers.clear()
            self._headers[length] = [framed[:_HEADER_BYTES] for framed in self._driver.encode(bytes(length))]
        return self._headers[length]

    def _prove(self, backend: str) -> None:
        """Take a short stripe to fragments and back, with every choice of k unless any k suffice by construction."""
        from pyeclib.ec_iface import ECDriverError, ECInvalidParameter

        unfit = (
            f"peers.backend={backend!r}: expected any {self.data} of {self.fragments} fragments to give a record back"
        )
        remedy = f"choose one of {', '.join(sorted(_PROVEN))}"
        stripe = random.Random(self.fragments).randbytes(16 * self.data + 1)
        try:
            fragments = self.encode(stripe)
        except ECInvalidParameter:
            self._readable = bytes  # a pyeclib that takes nothing else
            fragments = self.encode(stripe)
        if {len(fragment) for fragment in fragments} != {self.fragment_bytes(len(stripe))}:
            raise ConfigurationError(f"{unfit}, found fragments of unequal length; {remedy}")
        choices = itertools.combinations(range(self.fragments), self.data)
        if backend in _PROVEN:
            choices = itertools.combinations(range(self.fragments)[-self.data - 1 :], self.data)
        elif (count := math.comb(self.fragments, self.data)) > _MOST_CHOICES:
            raise ConfigurationError(f"{unfit}, found {count} choices, too many to try; {remedy}")
        for choice in choices:
            try:
                whole = self.decode({number: fragments[number] for number in choice}, len(stripe)) == stripe
            except ECDriverError:
                whole = False
            if not whole:
                raise ConfigurationError(f"{unfit}, found that those numbered {list(choice)} do not; {remedy}")


def _as_array(stripe: Payload) -> Any:
    """Spares pyeclib a copy: of what it does not have to copy it takes arrays, and no views."""
    return np.frombuffer(stripe, np.uint8)


def _open_driver(data: int, parity: int, backend: str) -> ECDriver:
    """The backend for `data` and `parity` fragments; a ConfigurationError names those that are there."""
    try:
        from pyeclib.ec_iface import VALID_EC_TYPES, ECDriver, ECDriverError
    except ImportError as error:
        raise ConfigurationError(
            f"peers: expected pyeclib, for k={data} and m={parity + 1}, found {error}; install it, or choose k=1 or m=1"
        ) from error
    if backend not in VALID_EC_TYPES:
        raise ConfigurationError(
            f"peers.backend: expected one that this machine has, {', '.join(sorted(VALID_EC_TYPES))}, found {backend!r}"
        )
    try:
        return ECDriver(ec_type=backend, k=data, m=parity)
    except ECDriverError as error:
        raise ConfigurationError(
            f"peers.backend={backend!r}: expected one that takes {data} fragments of data and {parity} of parity, "
            f"found that it does not ({error}); choose isa_l_rs_cauchy, or other k and m; there are "
            f"{', '.join(sorted(VALID_EC_TYPES))}"
        ) from error


#: How many choices of k candidates are tried to find those that do not lie.
_MOST_TRIED = 4_096


class Fragment(msgspec.Struct, frozen=True, array_like=True):
    """The header of one fragment. `checksum`: xxh3_64 of the rest and payload; `digest`: xxh3_128 of its stripe."""

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
    """Encode one stripe of 1 to STRIPE_BYTES bytes: its fragments in their order, each with its payload."""
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
    """The bytes of a stripe from the candidates that are what they claim, and the sources of those that are not.

    The first k are used, and others checked against the result. Where fewer lie than do not, and k do not, the bytes
    are right. Raises DamagedFragmentsError: too few are intact, or several stripes could follow.
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
    if math.comb(len(candidates), count) > _MOST_TRIED:
        numbers = random.Random(0)
        drawn = (tuple(numbers.sample(candidates, count)) for _ in range(_MOST_TRIED))
        choices = itertools.chain(itertools.islice(choices, 1), drawn)
    return (choice for choice in choices if len({one.fragment.index for one in choice}) == count)


def _name(candidates: Iterable[Candidate]) -> str:
    return ", ".join(one.source for one in candidates)
