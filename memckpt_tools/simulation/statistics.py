"""Means of repetitions, with confidence intervals."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Estimate:
    """The mean of repetitions.

    Attributes:
        mean: their mean.
        half_width: half the width of its confidence interval, by Student's t distribution; None with one repetition,
            which has no spread.
        confidence: probability with which such an interval has the true mean in it.
        repetitions: how many.
    """

    mean: float
    half_width: float | None
    confidence: float
    repetitions: int

    @classmethod
    def of(cls, values: Sequence[float], confidence: float) -> Estimate:
        mean = statistics.fmean(values)
        count = len(values)
        if count < 2:
            return cls(mean, None, confidence, count)
        error = statistics.stdev(values, mean) / math.sqrt(count)
        return cls(mean, t_quantile((1 + confidence) / 2, count - 1) * error, confidence, count)

    def holds(self, value: float) -> bool:
        """Whether a value is in the interval."""
        return self.half_width is not None and abs(value - self.mean) <= self.half_width


def t_quantile(probability: float, degrees: int) -> float:
    """The value below which Student's t distribution has a probability of 0.5 or more.

    Args:
        probability: from 0.5 to less than 1.
        degrees: degrees of freedom, 1 or more.
    """
    low, high = 0.0, 1.0
    while _t_within(high, degrees) < 2 * probability - 1:
        low, high = high, 2 * high
    while high - low > 1e-12 * high:
        middle = (low + high) / 2
        if middle in (low, high):
            break
        if _t_within(middle, degrees) < 2 * probability - 1:
            low = middle
        else:
            high = middle
    return high


def _t_within(t: float, degrees: int) -> float:
    """Probability of a value between -t and t: the finite series of Abramowitz and Stegun, 26.7.3 and 26.7.4."""
    angle = math.atan(t / math.sqrt(degrees))
    sine, square = math.sin(angle), math.cos(angle) ** 2
    if degrees % 2 == 0:
        term = total = 1.0
        for i in range(1, degrees // 2):
            term *= square * (2 * i - 1) / (2 * i)
            total += term
        return sine * total
    if degrees == 1:
        return 2 * angle / math.pi
    term = total = math.cos(angle)
    for i in range(1, (degrees - 1) // 2):
        term *= square * (2 * i) / (2 * i + 1)
        total += term
    return 2 / math.pi * (angle + sine * total)
