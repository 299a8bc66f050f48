"""Checks for tests of standby replicas."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from memckpt.replication.transport.wire import NotStored, Stored
from memckpt.state.records import HeldRecords
from tests.support.cluster.standby_pair import Pair, Strict
from tests.support.trainings.engine_optimizers import Momentum

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adam": lambda params: torch.optim.Adam(params, lr=0.01),
    "own": lambda params: Momentum(params),
    "strict": lambda params: Strict(params),
}
MODES = ("lazy", "eager")


@contextmanager
def pair(*arguments: Any, **others: Any) -> Iterator[Pair]:
    one = Pair(*arguments, **others)
    try:
        yield one
    finally:
        one.close()


def refusals(one: Pair) -> list[str]:
    """Reasons for refusing records, but for those that came before the standby replica was made."""
    reasons = [answer.reason for answer in one.answers if isinstance(answer, NotStored)]
    return [reason for reason in reasons if "being reserved" not in reason]


def stored(one: Pair) -> list[int]:
    return [answer.record for answer in one.answers if isinstance(answer, Stored) and answer.record >= 0]


def check_all(one: Pair, held: Sequence[HeldRecords]) -> list[int]:
    """Check everything that the standby replica's node claims it can produce; returns these records."""
    records = [record for each in held for record in each.records]
    for record in records:
        one.check(record)
    return records
