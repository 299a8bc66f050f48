"""The tap in use: chosen at the start, replaced by a later one where it does not fit."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from memckpt.capture import gradient_ops
from memckpt.capture.copier import Copier
from memckpt.capture.flat_parameters import FlatParameterTap
from memckpt.capture.live_state import LiveState
from memckpt.capture.recorder import Recorder
from memckpt.capture.shards import fsdp1_wrappers
from memckpt.capture.taps.ddp import BucketTap
from memckpt.capture.taps.shards import ShardTap
from memckpt.capture.taps.step import StepTap
from memckpt.capture.taps.streaming import StreamingTap
from memckpt.capture.taps.tap import Tap
from memckpt.compression.reduction import Reducer
from memckpt.config import MemckptConfig
from memckpt.session.compression import CompressedAverages
from memckpt.session.ranks import LocalTraining

_log = logging.getLogger("memckpt")


class GradientTap:
    """Owns the tap that stages gradients, and notes in-place changes of gradients.

    Args:
        training: training whose gradients are staged.
        data_parallel: the DDP wrapper; None without one.
        before_reduction: called before a reduction over all ranks begins.
        compression: compressor of gradients, and what is known of a user's.

    Attributes:
        reason: why this tap, in words.
        later: why gradients are taken at the optimizer's step since, in words; empty: they are not.
    """

    def __init__(
        self,
        training: LocalTraining,
        data_parallel: DistributedDataParallel | None,
        before_reduction: Callable[[], None],
        compression: CompressedAverages,
    ) -> None:
        self._live = training.live
        self._recorder = training.recorder
        self._clock = training.clock
        self.later = ""
        reducer = compression.reducer
        self._tap, self.reason = _choose_tap(
            training.config, training.live, training.recorder, training.copier, data_parallel, before_reduction, reducer
        )
        if isinstance(self._tap, BucketTap):
            self._tap.adopted = compression.adopt
        self._recorder.use_tap(self._tap.name, not isinstance(self._tap, (StepTap, FlatParameterTap)))

    @property
    def current(self) -> Tap:
        """The current tap."""
        return self._tap

    @property
    def name(self) -> str:
        return self._tap.name

    @property
    def reductions(self) -> int:
        """Number of reductions over all ranks that have been seen."""
        return self._tap.reductions

    @property
    def layout(self) -> list[list[int]] | None:
        """Bucket layout in which DDP reduces gradients; None without one."""
        return self._tap.layout if isinstance(self._tap, BucketTap) else None

    @property
    def holds_reductions_back(self) -> bool:
        """Whether the tap can hold a reduction back until the last commit has been sent."""
        return not isinstance(self._tap, StepTap)

    def install(self) -> None:
        """Hook into the training, and note changes of gradients that torch's functions make."""
        self._tap.install()
        gradient_ops.listen(self)

    def remove(self) -> None:
        """Remove all hooks, installed or not."""
        self._tap.remove()
        gradient_ops.unlisten(self)

    def reinstall(self) -> None:
        """Move hooks to the parameters that are trained now."""
        if isinstance(self._tap, (StreamingTap, StepTap)):
            self._tap.remove()
            self._tap.install()

    def take_later(self, reason: str) -> None:
        """Stage gradients at the optimizer's step from now on, on all ranks once the next generation begins.

        Args:
            reason: why the current tap does not fit, in words.
        """
        streamed = self._recorder.streams
        self._recorder.use_tap(StepTap.name if streamed else self._recorder.tap, streams=False)
        if not streamed:
            return
        self.later = reason
        self._live.growth.uncompressed = True
        self.reason = reason
        _log.warning("memckpt: gradients are now taken at the optimizer's step: %s", reason)
        if isinstance(self._tap, StreamingTap):
            self._tap.remove()
            params = [p for o in self._live.optimizers for g in o.param_groups for p in g["params"]]
            reductions, self._tap = self._tap.reductions, StepTap(params, self._recorder)
            self._tap.reductions = reductions  # it goes on counting: what was seen at the last commit is remembered
            self._tap.install()

    # Listener of gradient_ops

    def gradients_change(self, kind: str, operand: Any, params: list[torch.Tensor]) -> None:
        """Called before gradients are changed in place."""
        with self._clock.in_hook():
            self._recorder.gradients_change(kind, operand, params)

    def gradients_changed(self, params: list[torch.Tensor]) -> None:
        """Called after the change."""
        with self._clock.in_hook():
            self._recorder.note_versions(params)


def _choose_tap(
    config: MemckptConfig,
    live: LiveState,
    recorder: Recorder,
    copier: Copier,
    data_parallel: DistributedDataParallel | None,
    before_reduction: Callable[[], None],
    reducer: Reducer | None,
) -> tuple[Tap, str]:
    """Choose a streaming tap where that is possible. Returns the tap, and the reason in words."""
    params = [p for o in live.optimizers for g in o.param_groups for p in g["params"]]
    if fsdp1_wrappers(live.model):
        reason = "FullyShardedDataParallel reduces gradients of flat parameters, not those that the optimizer steps"
        return FlatParameterTap(live.model, recorder, before_reduction), reason
    if config.tap == "step":
        return StepTap(params, recorder), "as configured"
    if live.sharded:
        reason = "gradients are taken as reduced shards"
        return ShardTap(live.model, params, recorder, copier, before_reduction), reason
    if data_parallel is None:
        reason = "gradients are taken as backward produces them"
        return StreamingTap(params, recorder, copier), reason
    if BucketTap.available(data_parallel):
        reason = "gradients are taken from DDP's buckets once they are reduced"
        if reducer is not None:
            reason = "gradients are taken in compressed form, as DDP's buckets are reduced"
        return BucketTap(data_parallel, recorder, copier, before_reduction, reducer), reason
    reason = "a communication hook was registered before memckpt; attach first, then register it"
    return StepTap(params, recorder), reason
