"""The cases that most tests take: small trainings, each with one feature that makes per-step recovery hard."""

from __future__ import annotations

from tests.support.trainings.engine_state import SHAPES_OF_STATE
from tests.support.trainings.engine_steps import SHAPES_OF_STEPS
from tests.support.trainings.engine_training import Case, Training

PLAIN = Case("plain", Training)
SHAPE_CASES = [*SHAPES_OF_STEPS, *SHAPES_OF_STATE]
