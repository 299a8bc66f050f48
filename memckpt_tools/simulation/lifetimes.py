"""Times to failure of one unit: a node, a rack, a zone, a cluster."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from memckpt_tools.planning.checks import require_number
from memckpt_tools.simulation.checks import LONGEST_SECONDS

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Exponential:
    """A rate of failures that does not depend on age.

    Attributes:
        mean_seconds: mean time between failures of one unit, in seconds.
    """

    mean_seconds: float

    def __post_init__(self) -> None:
        require_number("mean_seconds", self.mean_seconds, 0, LONGEST_SECONDS, "seconds", above=True)

    def survival(self, seconds: float) -> float:
        """Probability that a new unit has no failure in so many seconds."""
        return math.exp(-seconds / self.mean_seconds)

    def draw(self, count: int, stream: np.random.Generator) -> Floats:
        """Lives of new units, in seconds."""
        return stream.exponential(self.mean_seconds, count)

    def draw_remaining(self, count: int, stream: np.random.Generator) -> Floats:
        """What is left of the lives of units that have been in service for long, in seconds."""
        return self.draw(count, stream)


@dataclass(frozen=True)
class Weibull:
    """A rate of failures that falls with age (shape below 1: early failures) or rises (above 1: wear).

    REFT (equation 1) has the probability of survival exp(-(t / scale) ** shape), with its failure rate in the place of
    1 / scale.

    Attributes:
        shape: exponent of the survival; 1 is the exponential distribution.
        scale_seconds: time after which exp(-1) of all units survive, in seconds.
    """

    shape: float
    scale_seconds: float

    def __post_init__(self) -> None:
        require_number("shape", self.shape, 0.2, 20, "(no unit)")
        require_number("scale_seconds", self.scale_seconds, 0, LONGEST_SECONDS, "seconds", above=True)

    @classmethod
    def of_mean(cls, shape: float, mean_seconds: float) -> Weibull:
        """The distribution with a shape and a mean time between failures."""
        require_number("shape", shape, 0.2, 20, "(no unit)")
        require_number("mean_seconds", mean_seconds, 0, LONGEST_SECONDS, "seconds", above=True)
        return cls(shape, mean_seconds / math.gamma(1 + 1 / shape))

    @property
    def mean_seconds(self) -> float:
        """Mean life of a unit, in seconds."""
        return self.scale_seconds * math.gamma(1 + 1 / self.shape)

    def survival(self, seconds: float) -> float:
        """Probability that a new unit has no failure in so many seconds."""
        return math.exp(-((seconds / self.scale_seconds) ** self.shape))

    def draw(self, count: int, stream: np.random.Generator) -> Floats:
        """Lives of new units, in seconds."""
        return self.scale_seconds * stream.weibull(self.shape, count)

    def draw_remaining(self, count: int, stream: np.random.Generator) -> Floats:
        """What is left of the lives of units that have been in service for long, in seconds.

        The life that a moment falls into is longer than others in proportion to its length, and the moment is anywhere
        in it. With the density x f(x) / mean, (x / scale) ** shape has a gamma distribution of 1 + 1 / shape.
        """
        lives = self.scale_seconds * stream.gamma(1 + 1 / self.shape, size=count) ** (1 / self.shape)
        return lives * stream.uniform(size=count)


Lifetime = Exponential | Weibull
