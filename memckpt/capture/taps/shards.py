"""Streaming of sharded models: FSDP2, HSDP, tensor parallel and combinations."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from memckpt.capture.copier import Copier
from memckpt.capture.recorder import Recorder
from memckpt.capture.shards import is_fsdp2
from memckpt.capture.taps.tap import OncePerBackward, StreamingTap, survives
from memckpt.state.tensors import is_dtensor


class ShardTap(StreamingTap):
    """Stages reduced shards: with fully_shard the hooks see them on the stream that reduced them.

    The copier makes its own stream wait for that one. Backwards that reduce nothing are seen, too.

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
        super().__init__(params, recorder, copier)
        self._model = model
        self._before_reduction = before_reduction
        self._offloaded: list[torch.Tensor] = []
        self._reductions_before = 0
        self._reduction = OncePerBackward(self._reduction_ended, last=True)

    def install(self) -> None:
        super().install()
        self._handles += [module.register_forward_hook(self._watch_reduction) for module in _outermost(self._model)]
        if not self._copier.asynchronous:
            return  # commits have been sent by the time that commit() returns
        for module in self._model.modules():
            if any(is_dtensor(param) for param in module.parameters(recurse=False)) or is_fsdp2(module):
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

    @survives("tracking a backward")
    def _reduction_ended(self) -> None:
        if self.reductions == self._reductions_before:
            self._recorder.pending.unreduced()

    @survives("inspecting a module's output")
    def _watch_outputs(self, module: nn.Module, args: Any, output: Any) -> None:
        for tensor in _tensors_in(output):
            if tensor.requires_grad:
                tensor.register_hook(self._reduction_comes)

    @survives("sending a commit before a reduction")
    def _reduction_comes(self, gradient: torch.Tensor) -> None:
        with self._recorder.clock.in_hook():
            self._before_reduction()

    def _fired(self, param: torch.Tensor, gradient: torch.Tensor) -> None:
        if is_dtensor(param) and param.device.type != param.device_mesh.device_type:
            # Offloaded: the copy to the host is in flight until fully_shard's own callback has waited for it.
            self._recorder.gradient_seen(param)
            if self._at_end.ask():
                self._offloaded = []  # left by a backward that raised
            self._offloaded.append(param)
        else:
            super()._fired(param, gradient)

    @survives("staging offloaded gradients")
    def _backward_ended(self) -> None:
        offloaded, self._offloaded = self._offloaded, []
        with self._recorder.clock.in_hook():
            for param in offloaded:
                if param.grad is not None:
                    self._recorder.stage(param, param.grad)
        super()._backward_ended()


def _outermost(model: nn.Module) -> list[nn.Module]:
    """The outermost modules to which fully_shard was applied."""
    if is_fsdp2(model):
        return [model]
    return [found for child in model.children() for found in _outermost(child)]


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
