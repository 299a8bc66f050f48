"""Taps of sharded models: FSDP2, HSDP, tensor parallel and combinations; and FSDP1, with the internals relied upon.

FSDP1 flattens the parameters of each wrapped module into one, cuts it evenly, and gives each rank a shard that
corresponds to no slice of any user tensor. The optimizer steps these shards or views of them.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from memckpt.capture.beside.modules import fsdp1_wrappers, is_fsdp2
from memckpt.capture.copier import Copier
from memckpt.capture.recorder import Recorder
from memckpt.capture.taps.tap import OncePerBackward, StepTap, StreamingTap, survives
from memckpt.errors import UnsupportedError
from memckpt.state.tensors import is_dtensor, version


class ShardTap(StreamingTap):
    """Stages reduced shards: with fully_shard the hooks see them on the stream that reduced them.

    The copier makes its own stream wait for that one. Backwards that reduce nothing are seen, too. Gradients that
    fully_shard offloads to the host are taken at the end of a backward: with a hook on the parameter, torch waits for
    each of their copies.

    Args:
        model: the model with sharded modules.
        params, recorder, copier: as for :class:`StreamingTap`.
        before_reduction: called before a backward reaches its first reduction: no rank may contribute to a gradient of
            the next record before its commit of the last one is sent.
    """

    name = "streaming (reduced shards)"

    def __init__(
        self,
        model: nn.Module,
        params: Sequence[nn.Parameter],
        recorder: Recorder,
        copier: Copier,
        before_reduction: Callable[[], None],
    ) -> None:
        super().__init__([param for param in params if not _is_offloaded(param)], recorder, copier)
        self._model = model
        self._before_reduction = before_reduction
        self._offloaded = [param for param in params if _is_offloaded(param)]
        #: Their gradients at the last look, each with its version; None: there was none.
        self._looked: list[tuple[weakref.ref[torch.Tensor], int] | None] = []
        self._reductions_before = 0
        self._reduction = OncePerBackward(self._reduction_ended, last=True)

    def install(self) -> None:
        super().install()
        inner = filter(is_fsdp2, self._model.modules())  # a backward may begin in any of them
        watched = list(inner) if self._offloaded else _outermost(self._model)
        self._handles += [module.register_forward_hook(self._watch_reduction) for module in watched]
        if not self._copier.asynchronous:
            return  # commits have been sent by the time that commit() returns
        for module in _reducing(self._model):
            self._handles.append(module.register_forward_hook(self._watch_outputs))

    @survives("inspecting a module's output")
    def _watch_reduction(self, module: nn.Module, args: Any, output: Any) -> None:
        """Detect backwards with deferred reduction (``set_requires_gradient_sync(False)``): no other hook sees them."""
        for tensor in _tensors_in(output):
            if tensor.requires_grad:
                tensor.register_hook(lambda gradient: self._backward_begins())

    @survives("tracking a backward")
    def _backward_begins(self) -> None:
        if self._reduction.ask():
            self._reductions_before = self.reductions
            if self._offloaded:
                self._recorder.backward_runs()
                self._look_at_offloaded()

    @survives("tracking a backward")
    def _reduction_ended(self) -> None:
        if self._offloaded:
            self._stage_offloaded()
        if self.reductions == self._reductions_before:
            self._recorder.pending.unreduced()

    def _stage_offloaded(self) -> None:
        """Stage the offloaded gradients that this backward has made; fully_shard has waited for their copies."""
        with self._recorder.clock.in_hook():
            for param, before in zip(self._offloaded, self._looked, strict=True):
                gradient = param.grad
                same = before is not None and before[0]() is gradient is not None and before[1] == version(gradient)
                if gradient is not None and not same:
                    self.reductions += 1
                    self._recorder.stage(param, gradient)
            self._look_at_offloaded()
            self._copier.wait_before_changes()

    def _look_at_offloaded(self) -> None:
        gradients = [param.grad for param in self._offloaded]
        self._looked = [None if one is None else (weakref.ref(one), version(one)) for one in gradients]

    @survives("inspecting a module's output")
    def _watch_outputs(self, module: nn.Module, args: Any, output: Any) -> None:
        for tensor in _tensors_in(output):
            if tensor.requires_grad:
                tensor.register_hook(self._reduction_comes)

    @survives("sending a commit before a reduction")
    def _reduction_comes(self, gradient: torch.Tensor) -> None:
        with self._recorder.clock.in_hook():
            self._before_reduction()


def _is_offloaded(param: Any) -> bool:
    """Whether fully_shard keeps a parameter, and its gradient, on the host."""
    return is_dtensor(param) and param.device.type != param.device_mesh.device_type


def _outermost(model: nn.Module) -> list[nn.Module]:
    """The outermost modules to which fully_shard was applied."""
    if is_fsdp2(model):
        return [model]
    return [found for child in model.children() for found in _outermost(child)]


def _reducing(module: nn.Module, managed: bool = False) -> Iterator[nn.Module]:
    """Modules behind whose outputs a backward may reduce: fully_shard's own; elsewhere those with DTensors.

    Not those inside of fully_shard's (`managed`): they may be compiled, and a hook would break their graphs.
    """
    managed |= is_fsdp2(module)
    if is_fsdp2(module) or (not managed and any(map(is_dtensor, module.parameters(recurse=False)))):
        yield module
    for child in module.children():
        yield from _reducing(child, managed)


def _tensors_in(output: Any) -> Iterator[torch.Tensor]:
    """The tensors in a module's output."""
    if isinstance(output, torch.Tensor):
        yield output
    elif isinstance(output, Mapping):
        for value in output.values():
            yield from _tensors_in(value)
    elif isinstance(output, (list, tuple)):
        for value in output:
            yield from _tensors_in(value)
    elif dataclasses.is_dataclass(output) and not isinstance(output, type):
        for field in dataclasses.fields(output):
            yield from _tensors_in(getattr(output, field.name))


#: FSDP1's mark on parameters that are views of a flat parameter.
_MARK = "_fsdp_flattened"

FLATTENED_REMEDY = (
    "FullyShardedDataParallel (FSDP1) shards flattened parameters, which only as many ranks with the same wrapping can "
    "restore; fully_shard (FSDP2; fsdp_version: 2 in Accelerate) can be resumed by any number of ranks"
)


def is_flattened(model: nn.Module) -> bool:
    """Whether some parameters belong to FSDP1, even if its wrapper is not part of `model`."""
    return bool(fsdp1_wrappers(model)) or any(getattr(param, _MARK, False) for param in model.parameters())


def check_flattened(model: nn.Module, world_size: int) -> None:
    """Refuse models that this tap does not support.

    Raises:
        UnsupportedError: the wrapper is not part of the model, does not span the job, or lacks attributes we rely upon.
    """
    covered = {id(param) for one in fsdp1_wrappers(model) for param in one.parameters()}
    outside = [name for name, param in model.named_parameters() if getattr(param, _MARK, False)]
    if any(id(param) not in covered for param in model.parameters() if getattr(param, _MARK, False)):
        raise UnsupportedError(
            f"{outside[0]} belongs to a FullyShardedDataParallel that is not part of the model: expected the outermost "
            "wrapper as the model"
        )
    for one in fsdp1_wrappers(model):
        for name in ("_handle", "process_group"):
            if not hasattr(one, name):
                raise UnsupportedError(
                    f"memckpt relies on FullyShardedDataParallel.{name}, which torch {torch.__version__} lacks; "
                    "use fully_shard (FSDP2)"
                )
        ranks = dist.get_world_size(one.process_group)
        between = getattr(one, "_inter_node_pg", None)  # set by the hybrid strategies
        ranks *= dist.get_world_size(between) if between is not None else 1
        if ranks != world_size:
            raise UnsupportedError(
                f"FullyShardedDataParallel over {ranks} of {world_size} ranks: ranks of different groups may be steps "
                "apart; expected all ranks of the job to reduce gradients together"
            )


def _flat_parameters(model: nn.Module) -> Iterator[nn.Parameter]:
    for one in fsdp1_wrappers(model):
        if one._handle is not None:  # None if the wrapper manages no parameters itself
            yield one._handle.flat_param


class FlatParameterTap(StepTap):
    """Stages gradients at the optimizer's step, from the reduced flat gradients; stages nothing during backward.

    Flat parameters signal a backward right before their gradients are reduced.

    Args:
        model: the model, with the wrappers in it.
        recorder: the session's recorder.
        before_reduction: as for :class:`memckpt.capture.taps.shards.ShardTap`.
    """

    name = "step (flat parameters)"

    def __init__(self, model: nn.Module, recorder: Recorder, before_reduction: Callable[[], None]) -> None:
        super().__init__(list(_flat_parameters(model)), recorder, before_reduction)

    def _note(self, param: torch.Tensor, gradient: torch.Tensor) -> None:
        assert self._before_reduction is not None
        self._before_reduction()
        self._recorder.gradient_seen(None)
