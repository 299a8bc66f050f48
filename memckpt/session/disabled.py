"""A session that protects nothing: MEMCKPT_DISABLE=1 measures a script without protection, unchanged."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from memckpt.capture.live_state import LiveState
from memckpt.capture.stall_clock import StallClock
from memckpt.config import RedoMode
from memckpt.config.arguments import DISABLE
from memckpt.config.observers import Committed, Observer, Watched
from memckpt.errors import UsageError
from memckpt.processes.address import node_name
from memckpt.session.loop import LoaderT
from memckpt.session.rank_state import Parts
from memckpt.session.resume.report import HeldState, RestoreReport, ResumeCheck
from memckpt.session.session import Session

_log = logging.getLogger("memckpt")
_WORDS = f"disabled by {DISABLE}"


class DisabledSession(Session):
    """Has the members of a session, starts over always, and holds nothing. Counts steps as a session counts records.

    Args:
        model: the model.
        optimizers: its optimizers.
        extra_modules: modules outside of the model.
        observers: called behind each step.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        extra_modules: Mapping[str, nn.Module],
        observers: Sequence[Observer],
    ) -> None:
        distributed = dist.is_available() and dist.is_initialized()
        rank, world_size = (dist.get_rank(), dist.get_world_size()) if distributed else (0, 1)
        self._closed = self._stepped = False
        self._step = self._record = self._epoch = self._batch = 0
        self._nothing = StallClock()
        self._hooks = [each.register_step_post_hook(self._note_step) for each in optimizers]
        self._observers = observers
        for each in observers:
            live = LiveState(model, optimizers, extra_modules)
            each.begin(Watched(model, live.optimizers, live.tensors, None, node_name(), rank, world_size, None))
        if rank == 0:
            _log.warning("memckpt: %s: this training is not protected; it starts over, and nothing is held", _WORDS)

    def _note_step(self, *_: Any) -> None:
        self._stepped = True

    # Rank state

    def provide(
        self,
        name: str,
        capture: Callable[[], Any],
        parts: Parts | None = None,
        put_back: Callable[[Any], Any] | None = None,
    ) -> None:
        return

    def unrepeatable(self, reason: str) -> None:
        return

    def register(self, name: str, obj: object, attributes: Sequence[str] = (), parts: Parts | None = None) -> None:
        return

    def announce_accumulation(self, accumulates: Callable[[], bool]) -> None:
        return

    # Restore

    @property
    def held(self) -> HeldState | None:
        return None

    def restore(self) -> RestoreReport | None:
        return None

    def restore_tensors(self) -> RestoreReport | None:
        return None

    def restore_rng(self) -> None:
        return

    # The loop over data

    def loader(self, loader: LoaderT) -> LoaderT:
        return loader

    def epochs(self, total: int) -> Iterator[int]:
        while self._epoch < total:
            yield self._epoch
            self._epoch += 1
            self._batch = 0

    @property
    def epoch(self) -> int:
        return self._epoch

    @property
    def batch(self) -> int:
        return self._batch

    def carried(self, objects: Callable[[], Iterable[object]]) -> None:
        """Does nothing."""

    def inexact(self, reason: str) -> None:
        return

    # Commit

    def commit(
        self, step: int | None = None, gradients_pending: bool | None = None, *, epoch_over: bool = False
    ) -> bool:
        if self._closed:
            raise UsageError("commit() after close(): attach again to go on")
        self._step = self._step + 1 if step is None else step
        if gradients_pending or (gradients_pending is None and not self._stepped):
            return False
        self._stepped = False
        self._record += 1
        self._batch += 1
        for each in self._observers:
            each.see_committed(
                Committed(self._step, self._record, lambda: (), sys._getframe(1), 0.0, False, None, ("", ""))
            )
        return True

    def close(self, finished: bool = True) -> None:
        if self._closed:
            return
        self._closed = True
        for hook in self._hooks:
            hook.remove()
        for each in self._observers:
            each.close()

    # Information

    @property
    def mode(self) -> RedoMode:
        return "lazy"

    @property
    def mode_reason(self) -> str:
        return _WORDS

    @property
    def tap_reason(self) -> str:
        return _WORDS

    @property
    def check(self) -> ResumeCheck:
        return ResumeCheck("off", "off")

    @property
    def report(self) -> RestoreReport | None:
        return None

    @property
    def caveats(self) -> list[str]:
        return [_WORDS]

    @property
    def stored_step(self) -> int | None:
        return None

    @property
    def drift_ulp(self) -> float:
        return 0.0

    @property
    def logs_metrics(self) -> bool:
        return False

    def metrics(self) -> dict[str, float]:
        return {}

    @property
    def stall(self) -> StallClock:
        return self._nothing

    @property
    def agent_pid(self) -> int | None:
        return None

    def describe(self) -> str:
        return f"memckpt: protecting nothing: {_WORDS}"
