"""Automatic choices of a session: redo mode and tap, each with a reason for the user."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from torch.nn.parallel import DistributedDataParallel

from memckpt.capture import flat_parameters
from memckpt.capture.copier import Copier
from memckpt.capture.live_state import LiveState
from memckpt.capture.recorder import Recorder
from memckpt.capture.shards import fsdp1_wrappers
from memckpt.capture.taps.ddp import BucketTap
from memckpt.capture.taps.shards import ShardTap
from memckpt.capture.taps.step import StepTap
from memckpt.capture.taps.streaming import StreamingTap
from memckpt.capture.taps.tap import Tap
from memckpt.compression.reduction import Reducer
from memckpt.config import MemckptConfig, RedoMode
from memckpt.memory.budget import usable_cores
from memckpt.state.optimizers import attributes, is_elementwise, is_importable

_log = logging.getLogger("memckpt")
#: Size of T + D records, in bytes, up to which lazy redo is always chosen.
_SMALL_WINDOW_BYTES = 64 << 20


def _window_bytes(config: MemckptConfig, live: LiveState) -> int:
    """Approximate size of T + D records, each with all gradients and a T-th of parameters and optimizer state."""
    period = config.anchor_period("lazy")
    params = {p for o in live.optimizers for group in o.param_groups for p in group["params"]}
    nbytes = sum(p.numel() * p.element_size() for p in params)
    return int(nbytes * (1 + 3 / period) * (period + config.records_in_flight))


def _lazy_instead(config: MemckptConfig, reason: str) -> tuple[RedoMode, str]:
    if config.redo == "eager":
        _log.warning("memckpt: redo='eager' is not possible here and 'lazy' is used: %s", reason)
    return "lazy", reason


def choose_redo(
    config: MemckptConfig, live: LiveState, device: torch.device, local_ranks: int, shortage: str = ""
) -> tuple[RedoMode, str]:
    """Choose the redo mode of this rank.

    Eager where a core is free for it. Lazy where training needs all cores, where the agent could not redo exactly, and
    on an accelerator, whose own kernels redo exactly. Capture where it is configured, or where steps cannot be redone.

    Args:
        config: settings of the session.
        live: the live state.
        device: device of its tensors.
        local_ranks: number of ranks on this node.
        shortage: why some node has no memory for lazy redo; empty if all have.

    Returns:
        The mode, and the reason in words.
    """
    if config.redo == "snapshot":
        return "snapshot", "as configured"
    for index, reason in live.not_redoable.items():
        if config.redo != "auto":
            name = type(live.optimizers[index]).__qualname__
            _log.warning(
                "memckpt: redo=%r is not possible with %s and 'snapshot' is used: %s", config.redo, name, reason
            )
        return "snapshot", reason
    if not any(p.requires_grad for optimizer in live.optimizers for g in optimizer.param_groups for p in g["params"]):
        return _lazy_instead(config, "no parameter requires a gradient, so that a replica would be empty")
    for optimizer in live.optimizers:
        name = type(optimizer).__qualname__
        if not is_importable(type(optimizer)):
            return _lazy_instead(config, f"{name} cannot be imported by name in another process")
        _, dropped = attributes(optimizer)
        if dropped:
            return _lazy_instead(config, f"attribute {dropped[0]!r} of {name} cannot be given to the agent")
        stepped = [param for group in optimizer.param_groups for param in group["params"]]
        if not is_elementwise(optimizer) and not all(param.is_contiguous() for param in stepped):
            return _lazy_instead(
                config, f"{name} sums over rows, which a replica lays out otherwise than the model does"
            )
    if config.redo != "auto":
        return config.redo, "as configured"
    if device.type != "cpu":
        return ("eager", shortage) if shortage else ("lazy", "exact on an accelerator, and takes no core")
    low = next((name for name, t in live.tensors().items() if t.dtype in (torch.bfloat16, torch.float16)), None)
    if low is not None:
        return "lazy", f"{low} is in half precision, where thread counts change the bits"
    window = _window_bytes(config, live)
    if window <= _SMALL_WINDOW_BYTES:
        # With eager redo, steps of a few milliseconds would wait for the replica, and the start for an import of torch.
        return "lazy", f"the model is small: the records that lazy redo holds take {window / 2**20:.2g} MiB"
    busy = torch.get_num_threads() * local_ranks
    cores = usable_cores()
    if cores - busy >= config.agent.threads:
        return "eager", f"training uses {busy} of {cores:g} cores"
    return "lazy", f"training uses all of the {cores:g} cores"


def choose_tap(
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
        recorder.streams = False
        reason = "FullyShardedDataParallel reduces gradients of flat parameters, not those that the optimizer steps"
        return flat_parameters.FlatParameterTap(live.model, recorder, before_reduction), reason
    if config.tap == "step":
        recorder.streams = False
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
    recorder.streams = False
    reason = "a communication hook was registered before memckpt; attach first, then register it"
    return StepTap(params, recorder), reason
