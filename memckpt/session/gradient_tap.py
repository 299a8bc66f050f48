"""How gradients are taken: the tap, replaced by a later one where it does not fit."""

from __future__ import annotations

import logging
from collections.abc import Callable

from torch.nn.parallel import DistributedDataParallel

from memckpt.capture import gradient_ops
from memckpt.capture.beside.modules import fsdp1_wrappers
from memckpt.capture.taps.ddp import BucketTap
from memckpt.capture.taps.shards import FlatParameterTap, ShardTap
from memckpt.capture.taps.tap import StepTap, StreamingTap, Tap
from memckpt.session.compressed_averages import CompressedAverages
from memckpt.session.ranks import LocalTraining

_log = logging.getLogger("memckpt")


class GradientTap:
    """Owns the tap that stages gradients, and has the recorder note in-place changes of gradients.

    `before_reduction` is called before a reduction over all ranks begins.

    Attributes:
        current: the tap.
        reason: why this tap, in words.
        at_step_because: why gradients are taken at the optimizer's step since, in words; empty: they are not.
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
        self.at_step_because = ""
        self.current, self.reason = _choose_tap(training, data_parallel, before_reduction, compression)
        self._recorder.use_tap(self.current.name, self.current.streams)

    def install(self) -> None:
        """Hook into the training, and note changes of gradients that torch's functions make."""
        self.current.install()
        gradient_ops.listen(self._recorder)

    def remove(self) -> None:
        """Remove all hooks, installed or not."""
        self.current.remove()
        gradient_ops.unlisten(self._recorder)

    def reinstall(self) -> None:
        """Move hooks to the parameters that are trained now."""
        if not self.current.in_buckets:
            self.current.remove()
            self.current.install()

    def take_at_step(self, reason: str) -> None:
        """Stage gradients at the optimizer's step from now on, on all ranks once the next generation begins."""
        streamed = self._recorder.streams
        self._recorder.use_tap(StepTap.name if streamed else self._recorder.tap, streams=False)
        if not streamed:
            return
        self.at_step_because = reason
        self._live.growth.uncompressed = True
        self.reason = reason
        _log.warning("memckpt: gradients are now taken at the optimizer's step: %s", reason)
        if not self.current.in_buckets:
            self.current.remove()
            params = [p for o in self._live.optimizers for g in o.param_groups for p in g["params"]]
            reductions, self.current = self.current.reductions, StepTap(params, self._recorder)
            self.current.reductions = reductions  # it goes on counting: what was seen at the last commit is remembered
            self.current.install()


def _choose_tap(
    training: LocalTraining,
    data_parallel: DistributedDataParallel | None,
    before_reduction: Callable[[], None],
    compression: CompressedAverages,
) -> tuple[Tap, str]:
    """Choose a streaming tap where that is possible. Returns the tap, and the reason in words."""
    live, recorder, copier, reducer = training.live, training.recorder, training.copier, compression.reducer
    params = [p for o in live.optimizers for g in o.param_groups for p in g["params"]]
    if fsdp1_wrappers(live.model):
        reason = "FullyShardedDataParallel reduces gradients of flat parameters, not those that the optimizer steps"
        return FlatParameterTap(live.model, recorder, before_reduction), reason
    # DDP reduces a bucket behind the hooks of its parameters; one in which none is used has no hook to wait in.
    waits = copier.asynchronous and data_parallel is not None and not data_parallel.find_unused_parameters
    step_tap = StepTap(params, recorder, before_reduction if waits else None)
    if training.config.tap == "step":
        return step_tap, "as configured"
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
        tap = BucketTap(data_parallel, recorder, copier, before_reduction, reducer, compression.adopt_hook)
        return tap, reason
    reason = "a communication hook was registered before memckpt; attach first, then register it"
    return step_tap, reason
