"""The instants of a drill's kills, drawn from a seed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from memckpt.errors import ConfigurationError

#: Who is killed: a trainer, its node's agent, both at once, or all processes of a simulated node.
Kind = Literal["trainer", "agent", "both", "node"]
KINDS: tuple[Kind, ...] = get_args(Kind)
#: Who is killed where nothing else is said: on one node, and on several.
ON_ONE, ON_SEVERAL = "trainer,agent,both", "trainer,agent,node"
#: Steps before the first kill, and behind the last one.
_FIRST, _LAST = 2, 2


@dataclass(frozen=True)
class Instant:
    """When a kill is due, and of whom.

    Attributes:
        kind: who is killed.
        record: the record that is committed by then, at least.
        fraction: how much of a step's time passes behind its commit, from 0 to 1.
    """

    kind: Kind
    record: int
    fraction: float


def parse_kinds(text: str, nodes: int = 1) -> tuple[Kind, ...]:
    """The kinds in ``"trainer,both"``.

    Args:
        text: names, with commas.
        nodes: number of simulated nodes.

    Raises:
        ConfigurationError: a name is none of them, or there is but one node.
    """
    found = [each.strip() for each in text.split(",")]
    if not set(found) <= set(KINDS):
        raise ConfigurationError(f"--kinds: expected names among {', '.join(KINDS)}, with commas, found {text!r}")
    if "node" in found and nodes < 2:
        raise ConfigurationError("--kinds node: expected --nodes N of 2 or more beside it, found one node")
    return tuple(kind for kind in KINDS if kind in found)


def draw(seed: int, kills: int, records: int, kinds: Sequence[Kind] = ("trainer",)) -> list[Instant]:
    """`kills` instants in ascending order, one in each of as many equal parts of the run.

    Args:
        seed: of the draw.
        kills: number of kills.
        records: length of the run.
        kinds: whom to kill; each in turn, in an order that is drawn.

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
    order = drawn.sample(list(kinds), len(kinds))
    turns = [order[index % len(order)] for index in range(kills)]
    return [Instant(kind, int(place), place - int(place)) for kind, place in zip(turns, places, strict=True)]
