"""Stripes to fragments and back, with every choice of k fragments."""

from __future__ import annotations

import contextlib
import itertools
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyeclib import ec_iface

from memckpt.errors import ConfigurationError
from memckpt.replication.coding.code import STRIPE_BYTES, Code

CODES = [(1, 1), (3, 1), (2, 2), (4, 2), (3, 3), (1, 3), (2, 5)]
STRIPE = (bytes(range(251)) * (STRIPE_BYTES // 251 + 1))[:STRIPE_BYTES]
BACKENDS = ["isa_l_rs_cauchy", "isa_l_rs_vand", "isa_l_rs_vand_inv", "liberasurecode_rs_vand"]


@pytest.fixture(scope="module", params=[(*each, BACKENDS[0]) for each in CODES] + [(4, 3, one) for one in BACKENDS[1:]])
def code(request: pytest.FixtureRequest) -> Iterator[Code]:
    data, tolerate, backend = request.param
    with closing(Code(data, tolerate, backend)) as code:
        yield code


@given(st.binary(min_size=1, max_size=300) | st.sampled_from([STRIPE[:-1], STRIPE]))
@settings(max_examples=40, deadline=None)
def test_any_k_fragments_give_the_stripe_back(code: Code, stripe: bytes) -> None:
    fragments = code.encode(stripe)
    assert len(fragments) == code.fragments == code.data + code.tolerate - 1
    assert {len(fragment) for fragment in fragments} == {code.fragment_bytes(len(stripe))}
    # k fragments of ceil(length / k), and what a backend rounds up to.
    assert -(-len(stripe) // code.data) <= len(fragments[0]) <= -(-len(stripe) // code.data) + 2
    assert b"".join(fragments[: code.data])[: len(stripe)] == stripe
    for choice in itertools.combinations(range(code.fragments), code.data):
        # The order in which they are found must not matter.
        assert code.decode({number: fragments[number] for number in reversed(choice)}, len(stripe)) == stripe


def test_lengths_that_come_and_go_are_decoded() -> None:
    with closing(Code(2, 2)) as code:
        for length in [*range(1, 200), *range(1, 200)]:
            stripe = bytes(length - 1) + b"x"
            fragments = code.encode(stripe)
            assert code.decode({1: fragments[1], 2: fragments[2]}, length) == stripe
            assert len(code._headers) <= 64


def test_a_backend_that_takes_nothing_but_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    encode = ec_iface.ECDriver.encode
    taken = set()

    def picky(self: ec_iface.ECDriver, stripe: bytes) -> list[bytes]:
        taken.add(type(stripe))
        if type(stripe) is not bytes:
            raise ec_iface.ECInvalidParameter("only bytes")
        return encode(self, stripe)

    monkeypatch.setattr(ec_iface.ECDriver, "encode", picky)
    with closing(Code(3, 2)) as code:
        fragments = code.encode(memoryview(b"a stripe"))
        assert code.decode(dict(enumerate(fragments[1:], 1)), 8) == b"a stripe"
    assert len(taken) == 2


def test_too_few_or_odd_fragments_are_refused(code: Code) -> None:
    stripe = bytes(range(100))
    fragments = dict(enumerate(code.encode(stripe)))
    few = {number: fragments[number] for number in range(code.data - 1)}
    for wrong in (
        few,
        fragments | {0: fragments[0][:-1]},
        fragments | {0: b""},
        fragments | {code.fragments: fragments[0]},
    ):
        with pytest.raises(
            ValueError, match=rf"expected {code.data} of {code.fragments} fragments of \d+ bytes, found"
        ):
            code.decode(wrong, len(stripe))


@pytest.mark.parametrize(
    ("data", "tolerate", "backend", "message"),
    [
        (2, 2, "zebra", "expected one that this machine has, .*isa_l_rs_cauchy.*, found 'zebra'"),
        (4, 3, "isa_l_rs_lrc", "takes 4 fragments of data and 2 of parity, .*; there are .*isa_l_rs_cauchy"),
        (10, 6, "flat_xor_hd_3", "any 10 of 15 fragments to give a record back, found that those numbered .* do not"),
        (20, 14, "isa_l_rs_vand", "found 573166440 choices, too many to try; choose one of isa_l_rs_cauchy"),
        (0, 1, "isa_l_rs_cauchy", "k and m of 1 or more, found k=0, m=1"),
    ],
)
def test_a_backend_that_does_not_do_is_refused(data: int, tolerate: int, backend: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Code(data, tolerate, backend)


@pytest.mark.parametrize("backend", ec_iface.ALL_EC_TYPES)
def test_every_backend_is_taken_or_refused_in_words(backend: str) -> None:
    for data, tolerate in [(2, 2), (5, 3), (8, 4), (10, 6)]:
        with contextlib.suppress(ConfigurationError), closing(Code(data, tolerate, backend)) as code:
            fragments = code.encode(b"a stripe")
            assert code.decode(dict(enumerate(fragments[-data:], code.fragments - data)), 8) == b"a stripe"


@pytest.mark.parametrize(("data", "tolerate"), [(32, 2), (2, 32), (32, 32), (20, 14)])
def test_the_most_fragments_that_are_configurable(data: int, tolerate: int) -> None:
    with closing(Code(data, tolerate)) as code:
        stripe = bytes(range(200)) * 7
        fragments = code.encode(stripe)
        last = {number: fragments[number] for number in range(code.fragments - code.data, code.fragments)}
        assert code.decode(last, len(stripe)) == stripe


def test_the_backend_is_imported_only_where_there_is_parity() -> None:
    program = (
        "import sys; from memckpt.replication.coding.code import Code; "
        "Code(3, 1); Code(1, 3); assert 'pyeclib' not in sys.modules; "
        "Code(2, 2); assert 'pyeclib' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
