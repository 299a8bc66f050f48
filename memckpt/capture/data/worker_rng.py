"""Taps in worker processes: they send a worker's generator states with each batch, and restore them.

All are top-level classes of plain values, so that they can be pickled for spawned workers.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from typing import Any
from weakref import WeakValueDictionary

from torch.utils.data import get_worker_info
from torch.utils.data._utils.pin_memory import pin_memory

from memckpt.capture.data.own_state import OwnObjects
from memckpt.capture.data.passes import Phase, WorkerStates
from memckpt.state import rng


class ReceivedStates:
    """Generator states that arrived from the workers of one iterator, also with batches that it discarded.

    A worker that outlives a pass has loaded ahead; the next pass discards these batches, but they moved the worker's
    generators. Only arrived states tell their position.
    """

    def __init__(self, prefetch_factor: int, states: WorkerStates) -> None:
        """`states`: initial states of workers that are not left to their seeds."""
        self.key = next(_keys)
        self._depth = prefetch_factor + 1
        self._arrivals: dict[int, deque[tuple[int, Phase]]] = {}
        for worker_id, state in states.items():
            self.add(worker_id, 0, state)
        _receivers[self.key] = self

    def add(self, worker_id: int, ordinal: int, state: Phase) -> None:
        self._arrivals.setdefault(worker_id, deque(maxlen=self._depth)).append((ordinal, state))

    def after(self, sent: list[int] | None) -> WorkerStates:
        """Each worker's state after the first ``sent[worker]`` batches of its life; the newest if None.

        A thread that pins memory receives by itself and may be ahead of that.
        """
        states: WorkerStates = {}
        for worker_id, arrivals in list(self._arrivals.items()):
            limit = None if sent is None else sent[worker_id]
            due = [state for ordinal, state in arrivals if limit is None or ordinal <= limit]
            if due:
                states[worker_id] = due[-1]
        return states


_keys = itertools.count()
_receivers: WeakValueDictionary[int, ReceivedStates] = WeakValueDictionary()


class WorkerBatch:
    """A batch with its worker's generator states after it."""

    __slots__ = ("batch", "key", "ordinal", "state", "worker_id")

    def __init__(self, batch: Any, state: Phase, worker_id: int, ordinal: int, key: int) -> None:
        self.batch = batch
        self.state = state
        self.worker_id = worker_id
        self.ordinal = ordinal
        self.key = key

    def __reduce__(self) -> tuple[Callable[..., WorkerBatch], tuple[Any, ...]]:
        return _receive, (self.batch, self.state, self.worker_id, self.ordinal, self.key)

    def pin_memory(self) -> WorkerBatch:
        """Pin the batch; the loader's pinning thread looks for a method of this name."""
        self.batch = pin_memory(self.batch)
        return self


def _receive(batch: Any, state: Phase, worker_id: int, ordinal: int, key: int) -> WorkerBatch:
    receiver = _receivers.get(key)
    if receiver is not None:
        receiver.add(worker_id, ordinal, state)
    return WorkerBatch(batch, state, worker_id, ordinal, key)


class ShippingCollate:
    """Replaces a loader's collate_fn in its workers."""

    def __init__(self, collate_fn: Callable[[Any], Any], key: int) -> None:
        self.collate_fn = collate_fn
        self._key = key
        self._ordinal = 0
        self._own: OwnObjects | None = None

    def __call__(self, samples: Any) -> Any:
        batch = self.collate_fn(samples)
        worker = get_worker_info()
        if worker is None:
            return batch
        self._ordinal += 1
        state = {"global": rng.capture(), "own": self.own(worker.dataset).capture()}
        return WorkerBatch(batch, state, worker.id, self._ordinal, self._key)

    def own(self, dataset: Any) -> OwnObjects:
        """What makes samples in this worker."""
        if self._own is None:
            self._own = OwnObjects(lambda: {"dataset": dataset, "collate_fn": self.collate_fn})
        return self._own


class RestoringInit:
    """Replaces a loader's worker_init_fn; runs last before the worker's first batch."""

    def __init__(
        self, worker_init_fn: Callable[[int], Any] | None, states: WorkerStates, collate: ShippingCollate
    ) -> None:
        self._worker_init_fn = worker_init_fn
        self._states = states
        self._collate = collate

    def __call__(self, worker_id: int) -> None:
        if self._worker_init_fn is not None:
            self._worker_init_fn(worker_id)
        state = self._states.get(worker_id)
        if state is not None:
            rng.restore(state["global"])
            worker = get_worker_info()
            assert worker is not None, "a worker_init_fn is called in workers only"
            self._collate.own(worker.dataset).restore(state["own"])
