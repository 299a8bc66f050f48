"""Checks of the numbers that formulas are given: an error names the field, the value and the range."""

from __future__ import annotations

import math
from typing import Any

from memckpt.errors import ConfigurationError


def require_number(name: str, value: Any, low: float, high: float, unit: str = "", *, above: bool = False) -> None:
    """Check that a value is a finite number in a range.

    Args:
        name: name of the field, as the user knows it.
        value: the value.
        low, high: smallest and largest value.
        unit: unit of both; empty for a ratio or a count.
        above: whether the value must be more than `low`.

    Raises:
        ConfigurationError: it is no number, or outside of the range.
    """
    fits = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not fits or not low <= value <= high or (above and value == low):
        begin = f"more than {low:g}, at most {high:g}" if above else f"{low:g} to {high:g}"
        raise ConfigurationError(f"{name}: expected {begin}{unit and ' ' + unit}, found {value!r}")


def require_count(name: str, value: Any, low: int, high: int, unit: str = "") -> None:
    """Check that a value is a whole number in a range.

    Raises:
        ConfigurationError: it is none, or outside of the range.
    """
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        expected = f"a whole number from {low} to {high}{unit and ' ' + unit}"
        raise ConfigurationError(f"{name}: expected {expected}, found {value!r}")


def require_share(name: str, value: Any) -> None:
    """Check that a value is a share from 0 to 1 (a percentage is divided by 100).

    Raises:
        ConfigurationError: it is none.
    """
    require_number(name, value, 0, 1)


#: Largest number of seconds that any time here may have: a hundred years.
LONGEST_SECONDS = 3.2e9


def require_seconds(name: str, value: Any, *, zero: bool = True) -> None:
    """Check a time in seconds, up to a hundred years.

    Raises:
        ConfigurationError: it is negative, longer, or 0 where `zero` is false.
    """
    require_number(name, value, 0, LONGEST_SECONDS, "s", above=not zero)
