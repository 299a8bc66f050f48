"""The clock of what protection costs the training thread."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass
class StallClock:
    """Seconds that the training thread spent in our code, by cause.

    `hooks` covers hooks of autograd, of optimizers, and of torch's functions that change gradients. Each hook measures
    itself as a whole; functions that it calls do not.
    """

    hooks: float = 0.0
    anchors: float = 0.0
    commit: float = 0.0
    slot_wait: float = 0.0
    snapshot: float = 0.0

    @property
    def total(self) -> float:
        return self.hooks + self.anchors + self.commit + self.slot_wait + self.snapshot

    @contextlib.contextmanager
    def in_hook(self) -> Iterator[None]:
        """Measure a hook. Hooks that run per parameter skip this: it would cost more than they do."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.hooks += time.perf_counter() - started

    @contextlib.contextmanager
    def in_commit(self) -> Iterator[None]:
        """Measure a commit, without what it spends on other causes."""
        started, others = time.perf_counter(), self.total - self.commit
        try:
            yield
        finally:
            others = self.total - self.commit - others
            self.commit += time.perf_counter() - started - others
