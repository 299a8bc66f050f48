"""The instants of a drill's kills, drawn from a seed."""

from __future__ import annotations

import random
from dataclasses import dataclass

from memckpt.errors import ConfigurationError

#: Steps before the first kill, and behind the last one.
_FIRST, _LAST = 2, 2


@dataclass(frozen=True)
class Instant:
    """When a kill is due.

    Attributes:
        record: the record that is committed by then, at least.
        fraction: how much of a step's time passes behind its commit, from 0 to 1.
    """

    record: int
    fraction: float


def draw(seed: int, kills: int, records: int) -> list[Instant]:
    """`kills` instants in ascending order, one in each of as many equal parts of the run.

    Args:
        seed: of the draw.
        kills: number of kills.
        records: length of the run.

    Raises:
        ConfigurationError: the run is too short for so many.
    """
    room = records - _FIRST - _LAST
    if room < 2 * kills:
        raise ConfigurationError(
            f"--kills: expected at most {max(0, room // 2)} in a training of {records} steps, found {kills}; drill "
            "more steps (--steps), or kill less often"
        )
    drawn = random.Random(seed)
    places = [_FIRST + (index + drawn.random() * 0.9) * room / kills for index in range(kills)]
    return [Instant(int(place), place - int(place)) for place in places]
