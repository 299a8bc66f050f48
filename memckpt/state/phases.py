"""What a trainer is doing, as far as the network is concerned."""

from __future__ import annotations

import enum
from typing import NamedTuple


class Phase(enum.IntEnum):
    """Part of a training step. Gradients are reduced over the network during BACKWARD."""

    #: From the end of the last step: the next batch is fetched and goes forward.
    FORWARD = 1
    #: From the first gradient that a backward produces, to its end.
    BACKWARD = 2
    #: From the end of a backward: another micro-batch, the optimizer's step.
    STEP = 3


class Mark(NamedTuple):
    """One rank has entered a phase.

    Attributes:
        position: of the rank among those of its node.
        step: number of the record that is being made.
        phase: entered.
        ns: when, on the machine's monotonic clock, in nanoseconds.
    """

    position: int
    step: int
    phase: Phase
    ns: int
