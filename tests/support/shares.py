"""Shares and draws of the tests, for machines without time for all of them at once."""

from __future__ import annotations

import re
import zlib
from collections import Counter
from collections.abc import Sequence


def parse(text: str) -> tuple[int, int]:
    """Share and number of shares, from "K/N". Raises ValueError."""
    match = re.fullmatch(r"([1-9]\d*)/([1-9]\d*)", text)
    if match is None or int(match[1]) > int(match[2]):
        raise ValueError(f"expected K/N with K from 1 to N, found {text!r}")
    return int(match[1]), int(match[2])


def taken(tests: Sequence[str], share: int, shares: int) -> list[bool]:
    """Membership of each test in a share, from 1 to `shares`: every N-th case of each test function.

    `tests`, here and below: ids of the tests, cases of a function in order.
    """
    cases: dict[str, int] = {}
    found: list[bool] = []
    for test in tests:
        function = test.partition("[")[0]
        # The share of a function's first case is a hash of its name, to spread functions with one case.
        case = cases[function] = cases.get(function, zlib.crc32(function.encode())) + 1
        found.append(case % shares == share - 1)
    return found


def drawn(tests: Sequence[str], cases: int, draw: int) -> list[bool]:
    """Membership of each test in a draw of at most so many cases of each test function.

    They are spread over the function's cases. The next draw takes others, until all had their turn.
    """
    counts = Counter(test.partition("[")[0] for test in tests)
    seen: Counter[str] = Counter()
    found: list[bool] = []
    for test in tests:
        function = test.partition("[")[0]
        stride = -(-counts[function] // cases)
        found.append(seen[function] % stride == (draw + zlib.crc32(function.encode())) % stride)
        seen[function] += 1
    return found


def thinned(tests: Sequence[tuple[str, int]]) -> list[bool]:
    """Whether each test (id and N) is slow only because every N-th case of its function runs by default."""
    seen: Counter[str] = Counter()
    found: list[bool] = []
    for test, every in tests:
        function = test.partition("[")[0]
        found.append(seen[function] % every != 0)
        seen[function] += 1
    return found
