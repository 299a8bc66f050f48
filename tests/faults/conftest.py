"""Counts of faults, which the summary of a test run shows (see tests/conftest.py)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

from tests.faults.kinds import Kind

Count = Callable[[Counter[Kind], Counter[Kind]], None]


@pytest.fixture
def count_faults(record_property: Callable[[str, object], None]) -> Count:
    """Give the summary the faults that a test has injected and survived."""

    def count(injected: Counter[Kind], survived: Counter[Kind]) -> None:
        record_property("faults", {kind.value: [number, survived[kind]] for kind, number in injected.items()})

    return count
