"""Actions in one process that take turns, and are timed."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from benchmarks.harness.copies import seconds_of


def interleaved(sides: Mapping[str, Callable[[int], object]], repetitions: int) -> dict[str, list[float]]:
    """Seconds of each side; they take turns, after one untimed turn. Each is called with the number of its turn."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(repetitions + 1):
        for name, action in sides.items():
            took = seconds_of(partial(action, number))
            if number:
                times[name].append(took)
    return times


def over(times: Sequence[float], others: Sequence[float]) -> float:
    """Median of the ratios of two sides in each turn."""
    return statistics.median(one / other for one, other in zip(times, others, strict=True))
