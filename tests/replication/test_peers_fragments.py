"""Fragments with every kind of damage: decoded around as far as the code bears, an error beyond, never wrong bytes."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memckpt.errors import DamagedFragmentsError, DamagedStateError
from memckpt.replication.coding.code import (
    STRIPE_BYTES,
    Candidate,
    Code,
    Fragment,
    _checksum,
    check,
    decode_stripe,
    seal_stripe,
)

CODES = [(1, 1), (3, 1), (2, 2), (4, 2), (3, 3), (1, 3)]
WHICH: dict[str, Any] = {"generation": "g1", "owner": (2, 3), "record": 7, "stripe": 1, "stripes": 4}
STRIPE = bytes(range(256)) * 3 + b"uneven"


@pytest.fixture(scope="module", params=CODES, ids=lambda code: f"k{code[0]}m{code[1]}")
def code(request: pytest.FixtureRequest) -> Iterator[Code]:
    with closing(Code(*request.param)) as code:
        yield code


def seal(code: Code, data: bytes = STRIPE, **other: Any) -> list[Candidate]:
    sealed = seal_stripe(code, data, **(WHICH | other))
    return [Candidate(f"node{index}", fragment, bytes(payload)) for index, (fragment, payload) in enumerate(sealed)]


def decode(code: Code, candidates: list[Candidate], length: int = len(STRIPE)) -> tuple[bytes, tuple[str, ...]]:
    return decode_stripe(code, candidates, **WHICH, length=length)


def flip(payload: bytes, at: int = 0, mask: int = 1) -> bytes:
    changed = bytearray(payload)
    changed[at] ^= mask
    return bytes(changed)


def lie(one: Candidate, payload: bytes, **other: Any) -> Candidate:
    """The same with another payload or fields, and a checksum that says it is well."""
    bare = msgspec.structs.replace(one.fragment, **other)
    return Candidate(one.source, msgspec.structs.replace(bare, checksum=_checksum(bare, payload)), payload)


def false_stripe(code: Code, one: Candidate) -> Candidate:
    """What liars in league say: all fragments of one other stripe."""
    other = seal(code, flip(STRIPE))[one.fragment.index]
    return Candidate(one.source, other.fragment, other.payload)


#: What may have happened to a fragment; a checksum finds it, or a field that is not as expected.
DAMAGES: dict[str, Callable[[Code, Candidate], Candidate]] = {
    "a bit of the payload": lambda _, one: one._replace(payload=flip(one.payload, len(one.payload) // 2)),
    "truncated": lambda _, one: one._replace(payload=one.payload[:-1]),
    "longer": lambda _, one: one._replace(payload=one.payload + b"\0"),
    "empty": lambda _, one: one._replace(payload=b""),
    "of another stripe": lambda code, one: seal(code, stripe=2)[one.fragment.index]._replace(source=one.source),
    "of another record": lambda code, one: seal(code, record=8)[one.fragment.index]._replace(source=one.source),
    "of another owner": lambda code, one: seal(code, owner=(2,))[one.fragment.index]._replace(source=one.source),
    "of another generation": lambda code, one: seal(code, generation="g")[one.fragment.index]._replace(
        source=one.source
    ),
    "of another length": lambda code, one: seal(code, STRIPE[:-1])[one.fragment.index]._replace(source=one.source),
    "a payload of another stripe": lambda code, one: one._replace(
        payload=seal(code, STRIPE[::-1])[one.fragment.index].payload
    ),
    "another k, with a checksum": lambda _, one: lie(one, one.payload, data=one.fragment.data + 1),
    "no such fragment, with a checksum": lambda code, one: lie(one, one.payload, index=code.fragments),
    "a negative fragment, with a checksum": lambda _, one: lie(one, one.payload, index=-1),
    "truncated, with a checksum": lambda _, one: lie(one, one.payload[:-1]),
    "empty, with a checksum": lambda _, one: lie(one, b""),
}
#: What takes a digest to find.
LIES: dict[str, Callable[[Code, Candidate], Candidate]] = {
    "another payload": lambda _, one: lie(one, flip(one.payload)),
    "another digest": lambda _, one: lie(one, one.payload, digest=bytes(16)),
    "a digest of no length": lambda _, one: lie(one, one.payload, digest=b""),
    "a false stripe": false_stripe,
}


@pytest.mark.promise(
    "damaged fragments, and peers that send wrong data, are named and left out, as far as the code tolerates"
)
@pytest.mark.parametrize("length", [1, 2, 5, 300, STRIPE_BYTES])
def test_any_k_fragments_make_the_stripe(code: Code, length: int) -> None:
    data = (STRIPE * (STRIPE_BYTES // len(STRIPE) + 1))[:length]
    sealed = seal(code, data)
    for choice in itertools.permutations(sealed, code.data):
        assert decode(code, list(choice), length) == (data, ())
    assert decode(code, sealed, length) == (data, ())
    views = [one._replace(payload=memoryview(one.payload)) for one in sealed]  # type: ignore[arg-type]
    assert decode(code, views[::-1], length) == (data, ())


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_known_by_itself(code: Code, damage: str) -> None:
    """m - 1 damaged fragments are one less than the code bears losses; one more is an error."""
    sealed = seal(code)
    for choice in itertools.combinations(range(code.fragments), code.tolerate - 1):
        found = [DAMAGES[damage](code, one) if at in choice else one for at, one in enumerate(sealed)]
        assert decode(code, found) == (STRIPE, tuple(f"node{at}" for at in choice))
    for choice in itertools.combinations(range(code.fragments), code.tolerate):
        found = [DAMAGES[damage](code, one) if at in choice else one for at, one in enumerate(sealed)]
        with pytest.raises(
            DamagedFragmentsError, match=r"stripe 1 of record 7 of ranks \[2, 3\]: expected .* intact"
        ) as info:
            decode(code, found)
        error = info.value
        assert (error.owner, error.record, error.stripe) == ((2, 3), 7, 1)
        assert error.bad == tuple(f"node{at}" for at in choice)
        assert (error.good, error.needed) == (code.data - 1, code.data)
        assert isinstance(error, DamagedStateError)


@pytest.mark.parametrize("kind", LIES)
def test_liars_that_are_too_many_are_never_believed_alone(code: Code, kind: str) -> None:
    """One liar among k: nothing can be said but that it does not fit. (With k = 1 nobody can contradict it.)"""
    for choice in itertools.combinations(seal(code), code.data):
        found = [LIES[kind](code, choice[0]), *choice[1:]]
        if code.data == 1 and kind == "a false stripe":
            continue
        with pytest.raises(DamagedFragmentsError) as info:
            decode(code, found)
        assert info.value.good < info.value.needed == code.data


def test_as_many_liars_as_others_are_an_error() -> None:
    """Two stripes that are each made by two fragments: nobody can tell which is the right one."""
    with closing(Code(2, 3)) as code:
        sealed = seal(code)
        found = [false_stripe(code, sealed[0]), false_stripe(code, sealed[2]), sealed[1], sealed[3]]
        with pytest.raises(DamagedFragmentsError, match="make one stripe as another, node0, node2 and node1, node3"):
            decode(code, found)
        # As many, but not in league: the others are known by their stripe.
        found = [lie(sealed[0], flip(sealed[0].payload), digest=bytes(16)), sealed[1], sealed[3]]
        found.insert(1, lie(sealed[2], sealed[2].payload, digest=bytes(16)))
        assert decode(code, found) == (STRIPE, ("node0", "node2"))


def test_a_fragment_that_is_there_twice(code: Code) -> None:
    sealed = seal(code)
    again = sealed[0]._replace(source="another")
    assert decode(code, [again, *sealed]) == (STRIPE, ())
    assert decode(code, [*sealed[: code.data], again]) == (STRIPE, ())
    for kind in ("another payload", "another digest"):
        assert decode(code, [LIES[kind](code, again), *sealed, sealed[0]._replace(source="third")]) == (
            STRIPE,
            ("another",),
        )
    if code.data > 1:  # one fragment many times is still one
        with pytest.raises(DamagedFragmentsError) as info:
            decode(code, [sealed[0]._replace(source=str(number)) for number in range(code.data + 2)])
        assert info.value.good == 1


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_any_changed_byte_of_header_or_payload_is_found(data: st.DataObject) -> None:
    """On the wire, as msgpack: it cannot be read, or it is not what it claims to be."""
    with closing(Code(2, 2)) as code:
        one = data.draw(st.sampled_from(seal(code)))
    packed = msgspec.msgpack.encode(one.fragment)
    at = data.draw(st.integers(0, len(packed) + len(one.payload) - 1))
    changed = flip(packed + one.payload, at, data.draw(st.integers(1, 255)))
    try:
        fragment = msgspec.msgpack.decode(changed[: len(packed)], type=Fragment)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return
    assert check(fragment, changed[len(packed) :])


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_whatever_is_found_the_bytes_are_right_or_refused(code: Code, data: st.DataObject) -> None:
    """Any damage to any of them, some missing, in any order: right where enough are left, never anything else."""
    sealed = seal(code)
    kinds = ["", "", "missing", *DAMAGES, *LIES]
    fates = [data.draw(st.sampled_from(kinds)) for _ in sealed]
    found = [
        DAMAGES.get(fate, LIES.get(fate, lambda _, one: one))(code, one)
        for fate, one in zip(fates, sealed, strict=True)
        if fate != "missing"
    ]
    honest = [one.source for fate, one in zip(fates, sealed, strict=True) if not fate]
    liars = [one.source for fate, one in zip(fates, sealed, strict=True) if fate in LIES]
    found = data.draw(st.permutations(found))
    bears = len(honest) >= code.data and len(honest) > len(liars)
    decoded, bad = None, ()
    with contextlib.nullcontext() if bears else contextlib.suppress(DamagedFragmentsError):
        decoded, bad = decode(code, found)
    if bears:
        assert set(bad) == {one.source for one in found} - set(honest)
    if decoded not in (None, STRIPE):  # only k or more in league make another stripe
        assert code.data <= fates.count("a false stripe") > len(honest)


def test_many_fragments_are_not_tried_for_ever() -> None:
    with closing(Code(16, 9)) as code:
        sealed = seal(code)
        found = [lie(one, flip(one.payload)) if at in (0, 5, 20) else one for at, one in enumerate(sealed)]
        assert decode(code, found) == (STRIPE, ("node0", "node5", "node20"))
        hopeless = [lie(one, flip(one.payload)) if at % 2 else one for at, one in enumerate(sealed)]
        with pytest.raises(DamagedFragmentsError, match="have does not make the stripe that they name"):
            decode(code, hopeless)


def test_a_header_without_sense_is_refused() -> None:
    with closing(Code(2, 2)) as code:
        one = seal(code)[1]
    for field, value in [("stripe", 4), ("stripe", -1), ("stripes", 0), ("tolerate", 0), ("length", 0)]:
        wrong = lie(one, one.payload, **{field: value})
        assert check(wrong.fragment, wrong.payload), field
    assert check(one.fragment, one.payload, index=1, record=7) == ""
    assert check(one.fragment, one.payload, index=2) == "expected index 2, found 1"
