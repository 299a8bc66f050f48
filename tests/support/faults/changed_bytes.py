"""Bytes that were changed on their way, and how often parsers get them."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

FUZZ = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
#: Lists in lists, counts of billions, text that is no UTF-8, in msgpack and in JSON; a memo's place in pickles.
NASTY = [
    b"\x91" * 5000,
    b"\x81\xa1x" * 2000,
    *(bytes([head]) + b"\xff\xff\xff\x7f" for head in (0xC6, 0xDB, 0xDD, 0xDF)),
    b"\xa2\xff\xfe",
    b"[" * 5000,
    b'{"event":' * 2000,
    b'{"format":' + b"9" * 5000 + b"}",
    b'"\xff"',
    b"\x80\x02Nr\xff\xff\xff\x3f.",
    b"\x80\x04\x8e" + b"\xff" * 7 + b"\x7f.",
    b"",
]


@st.composite
def changed(draw: st.DrawFn, valid: bytes) -> bytes:
    """Valid bytes with some overwritten, cut out, doubled, or replaced by something nasty."""
    data = bytearray(valid)
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(data)))
        end = min(len(data), at + draw(st.integers(0, 8)))
        new = draw(st.one_of(st.binary(max_size=8), st.just(bytes(data[at:end]) * 2), st.sampled_from(NASTY)))
        data[at:end] = new
    return bytes(data)
