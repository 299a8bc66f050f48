"""Phases of a training step, as far as they matter to the network."""

from __future__ import annotations

import enum
from typing import NamedTuple


class Phase(enum.IntEnum):
    """Part of a training step. Gradients are reduced over the network during BACKWARD."""

    #: From the end of the last step: fetching the next batch, and forward.
    FORWARD = 1
    #: From the first gradient of a backward to its end.
    BACKWARD = 2
    #: From the end of a backward: the optimizer's step, or another micro-batch.
    STEP = 3


class Mark(NamedTuple):
    """A rank's entry into a phase.

    Attributes:
        position: index of the rank among those of its node.
        step: number of the record that is being made.
        phase: the phase entered.
        ns: time of entry on the machine's monotonic clock, in nanoseconds.
    """

    position: int
    step: int
    phase: Phase
    ns: int
