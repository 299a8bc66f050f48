"""Averages of gradients in compressed form: the compressor of a session, what it carries, and the period it fits."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from memckpt.capture.beside.modules import fsdp1_wrappers, is_fsdp2
from memckpt.capture.copier import device_of
from memckpt.capture.live_state import LiveState
from memckpt.capture.recorder import Recorder
from memckpt.capture.taps.ddp import BucketTap
from memckpt.capture.taps.ddp_hooks import carried_by, half_encoding, half_type
from memckpt.compression.hook import reducer_for, refuse_dtypes, refuse_sparse
from memckpt.compression.reduction import Reducer
from memckpt.config import CompressionConfig, LossyConfig, MemckptConfig
from memckpt.errors import UnsupportedError
from memckpt.session.rank_state import RankState
from memckpt.session.resume.report import RestoreReport
from memckpt.state.optimizers import dtype_name
from memckpt.state.spec import RESIDUALS, encoded_bytes
from memckpt.state.tensors import is_dtensor

_log = logging.getLogger("memckpt")
#: How long redo of a window of compressed records may take at a restore.
REDO_SECONDS = 5.0
_SHORTEST, _LONGEST = 8, 512
#: Why a step cannot be repeated where residuals are dropped.
DROPPED = "what compression had left out of gradients is not kept (compression.residual)"
#: The same for torch's PowerSGD, which cannot be put back where memckpt does not see its reductions.
LATE_POWER_SGD = "torch's PowerSGD was registered before memckpt, which does not carry its errors then: attach first"
#: Name of what torch's PowerSGD carries in the rank state.
_POWER_SGD = "memckpt_power_sgd"
#: Elements that redo advances by a record in a second, on the low side: one core with Adam; an accelerator.
_REDONE_ON_HOST, _REDONE_ON_DEVICE = 1e8, 2e10
#: Seconds that a piece of a parameter takes for each record whatever its size: decoding, the optimizer's Python.
_PIECE_ON_HOST, _PIECE_ON_DEVICE = 1e-4, 3e-4


class _Carried(nn.Module):
    """Tensors that a compressor carries from step to step, as buffers: each record copies them by value."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)


def _found_instead(model: nn.Module) -> str:
    """What averages the gradients of a model without DDP, and why that cannot be compressed, in words."""
    if fsdp1_wrappers(model):
        return (
            "FullyShardedDataParallel (FSDP1): it reduces gradients of flat parameters by a reduce-scatter, of which "
            "each rank gets its shard only"
        )
    sharded = [param for param in model.parameters() if is_dtensor(param)]
    if not any(map(is_fsdp2, model.modules())):
        return f"a {type(model).__name__} without it" + (", of DTensors (parallelize_module)" if sharded else "")
    untyped: list[Any] = list(sharded)
    if any(placement.is_replicate() for param in untyped for placement in param.placements):
        return (
            "fully_shard on a mesh of two dimensions (HSDP): torch's HSDP runs its own all-reduce over the replicas, "
            "and FSDPModule.set_all_reduce_hook is called only behind it, so that this reduction cannot be replaced"
        )
    return "fully_shard (FSDP2): it reduces gradients by a reduce-scatter, of which each rank gets its shard only"


def _refuse_hooks(name: str, data_parallel: DistributedDataParallel) -> None:
    """Refuse a model whose averages another communication hook makes: torch takes one, and cannot remove it."""
    if BucketTap.available(data_parallel):
        return
    (hook, _), *_ = data_parallel._comm_hooks
    label = getattr(hook, "__qualname__", type(hook).__qualname__)
    found = f"{getattr(hook, '__module__', '')}.{label}"
    remedy = (
        "register none: memckpt registers the compressor's own (in Lightning leave out ddp_comm_hook, in Accelerate "
        "comm_hook); or leave out compression"
    )
    if label.endswith("memckpt_tap"):
        found = "that of an earlier session"
        remedy = "wrap the model in a new DistributedDataParallel"
    raise UnsupportedError(
        f"compression={name}: expected DistributedDataParallel without a communication hook, found {found}; {remedy}"
    )


def period_for(numel: int, encoded: int, params: int, on_host: bool) -> int:
    """T, the number of steps over which everything is copied once; `encoded` is the bytes of compressed gradients.

    Anchors take 12/T bytes per parameter with Adam, and would outweigh a gradient of c bytes. So T is 12/c or more,
    unless redo at a restore, T/2 records for each of about T pieces more than there are parameters, would take longer
    than :data:`REDO_SECONDS`.
    """
    period = _SHORTEST
    while period < min(_LONGEST, 12 * numel / encoded):
        longer = 2 * period
        if longer / 2 * record_redo_seconds(numel, longer + params, on_host) > REDO_SECONDS:
            break
        period = longer
    return period


class _Settings:
    """A compressor's settings, and its state beside tensors, as rank state.

    `whole`: whether the restored state had all that was left out of gradients.
    """

    def __init__(self, config: CompressionConfig, reducer: Reducer) -> None:
        self.settings = repr(config)
        self.whole = True
        self._reducer = reducer

    def state_dict(self) -> dict[str, Any]:
        return {"settings": self.settings, "whole": self._reducer.carries_all, **self._reducer.state_dict()}

    def load_state_dict(self, held: Mapping[str, Any]) -> None:
        self.whole = held["whole"]
        if held["settings"] == self.settings:
            self._reducer.load_state_dict({key: held[key] for key in self._reducer.state_dict()})


def _by_name(carried: Mapping[str, torch.Tensor], paths: Sequence[str]) -> dict[str, torch.Tensor]:
    """Tensors of a reducer by parameters' names in place of their positions; names of buffers have no dots."""
    found = {}
    for key, tensor in carried.items():
        position, _, what = key.partition("_")
        found["-".join(filter(None, (paths[int(position)].replace(".", "/"), what)))] = tensor
    return found


class CompressedAverages:
    """The compressor of a session. Raises UnsupportedError where gradients are not averaged by DDP alone.

    Attributes:
        modules: modules with state of the compressor, by name.
        drops: why left-out parts of gradients are lost at a resume, in words; empty: they are not.
    """

    def __init__(self, config: MemckptConfig, model: nn.Module, data_parallel: DistributedDataParallel | None) -> None:
        self.modules: dict[str, nn.Module] = {}
        self.drops = ""
        self._settings: _Settings | None = None
        self._params: list[torch.Tensor] = []
        self.reducer = None
        if any(carried_by(state, torch.device("cpu")) for _, state in getattr(data_parallel, "_comm_hooks", [])):
            self.drops = LATE_POWER_SGD
        if config.compression is None:
            return
        name = type(config.compression).__name__
        if data_parallel is None:
            raise UnsupportedError(
                f"compression={name}: expected a model in DistributedDataParallel, whose averages are compressed, "
                f"found {_found_instead(model)}; leave out compression, or use DistributedDataParallel"
            )
        _refuse_hooks(name, data_parallel)
        module = data_parallel.module
        everything = list(module.named_parameters())
        named = [(path, param) for path, param in everything if param.requires_grad]
        refuse_dtypes(config.compression, named)
        refuse_sparse(module)
        self._params = params = [param for _, param in named]
        # Frozen parameters may be trained later: they have a position, too.
        self.reducer = reducer = reducer_for(
            config.compression, [param for _, param in everything], data_parallel.process_group
        )
        self._settings = _Settings(config.compression, reducer)
        if not any(map(reducer.compresses, params)) and dist.get_rank() == 0:
            _log.warning(
                "memckpt: compression=%s compresses nothing of this model: each parameter has fewer than min_elements "
                "elements, is not contiguous or, under PowerSGD, takes less than its factors; leave out compression, "
                "or lower min_elements",
                name,
            )
        carried = _by_name(reducer.carried(params), [path for path, _ in everything])
        if not carried or not isinstance(config.compression, LossyConfig):
            return
        residual = config.compression.residual
        if residual == "drop" or (residual == "auto" and config.reads_late):
            self.drops = DROPPED
        else:
            self.modules[RESIDUALS] = _Carried(carried)

    def with_period(self, config: MemckptConfig) -> MemckptConfig:
        """The settings, with an anchor period that fits compressed records where none is configured.

        It depends on nothing that differs between ranks. Where left-out parts go into records that are read late, a
        long window would take more memory than it spares.
        """
        if self.reducer is None or config.anchor_period_steps is not None or (config.reads_late and self.modules):
            return config
        numel = encoded = 0
        for param in self._params:
            encoding, dtype = self.reducer.encoding(param), dtype_name(param.dtype)
            numel += param.numel()
            encoded += param.nbytes if encoding is None else encoded_bytes(encoding, param.numel(), dtype)
        on_host = all(param.device.type == "cpu" for param in self._params)
        return replace(config, anchor_period_steps=period_for(numel, encoded, len(self._params), on_host))

    def join(self, recorder: Recorder, live: LiveState, rank_state: RankState) -> None:
        """Make the compressor's state a part of the training's."""
        self._recorder, self._live, self._rank_state = recorder, live, rank_state
        if self.drops:
            rank_state.never_repeatable = self.drops
        if self.reducer is None:
            return
        live.encoding_of = self.reducer.encoding
        names = {f"{RESIDUALS}.{name}" for module in self.modules.values() for name, _ in module.named_buffers()}
        live.growth.apart |= names
        live.growth.changing |= names
        rank_state.register(RESIDUALS, self._settings)

    def adopt_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Take a communication hook of the user's for what it is: torch's own are known."""
        carried = carried_by(state, device_of(self._live.tensors()))
        if carried is not None:
            self._rank_state.register(_POWER_SGD, carried)
        if half_type(hook) is not None:
            self._live.encoding_of = partial(half_encoding, hook)
            if self._recorder.writer is not None:
                self._recorder.fail("gradients are averaged in 16 bits from now on")

    def expect_carried(self) -> None:
        """Mark what is carried before a restore, so that :meth:`end_restore` sees what nothing restored."""
        for tensor in self._carried():
            tensor.fill_(torch.nan)

    def end_restore(self, report: RestoreReport, provided: Mapping[str, Any]) -> None:
        """End a restore: what is carried beside tensors is loaded; frameworks restore theirs, and know nothing of ours.

        The compressor begins anew, and the report is inexact, where the dead attempt was not compressed so, or dropped
        what it carried, or where another rank's state was restored.
        """
        self._rank_state.load([RESIDUALS, _POWER_SGD], provided)
        if why := self._why_not_restored(report, provided):
            if self.reducer is not None:
                self.reducer.restart()
            report.because(why)

    def _why_not_restored(self, report: RestoreReport, provided: Mapping[str, Any]) -> str:
        """Why the dead attempt's compressor would have gone on otherwise, in words; empty if it would not."""
        held = str(provided.get(RESIDUALS, {}).get("settings"))
        now = str(None if self._settings is None else self._settings.settings)
        if held != now:
            return f"compression was {held}, and is {now} now"
        if self._settings is not None and not self._settings.whole:
            return "what compression had left out of gradients of parameters that were frozen at first is not held"
        if (_POWER_SGD in provided) != self._rank_state.has(_POWER_SGD):
            return "torch's PowerSGD is registered now and was not, or was and is not: register it before restore()"
        if self.drops:
            return self.drops
        if any(bool(one.isnan().any()) for one in self._carried()) or not report.exact:
            return "what compression had left out of gradients is not held for these ranks" if self._carried() else ""
        return ""

    def _carried(self) -> list[torch.Tensor]:
        return [tensor for module in self.modules.values() for tensor in module.buffers()]


def record_redo_seconds(elements: float, pieces: float, on_host: bool) -> float:
    """Time to redo one record of a model of which nothing is measured yet, on the high side.

    `pieces` counts parameters, and pieces that are redone apart. Source: docs/compression.md, "Anchors".
    """
    rate, each = (_REDONE_ON_HOST, _PIECE_ON_HOST) if on_host else (_REDONE_ON_DEVICE, _PIECE_ON_DEVICE)
    return elements / rate + pieces * each
