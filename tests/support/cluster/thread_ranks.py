"""Ranks of a job that are threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any


class ThreadRanks:
    """Ranks that are threads."""

    def __init__(self, rank: int, values: list[Any], barrier: threading.Barrier) -> None:
        self.rank, self.world_size = rank, len(values)
        self.local_ranks, self.leads = (rank,), True
        self._values = values
        self._barrier = barrier

    def together(self, work: Callable[[], Any]) -> list[Any]:
        self._values[self.rank] = work()
        self._barrier.wait(60)
        found = list(self._values)
        self._barrier.wait(60)
        return found

    def gather(self, value: Any) -> list[Any]:
        return self.together(lambda: value)

    def first_alike(self, state: Any) -> int:
        return self.rank


def on_ranks(count: int, body: Callable[[Any], Any]) -> list[Any]:
    values, barrier = [None] * count, threading.Barrier(count)
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(body, [ThreadRanks(rank, values, barrier) for rank in range(count)]))
