"""Taps: the points at which gradients are taken.

A tap is installed once per session and calls the recorder; the first log line names it and the reason for its choice.
A tap never raises into the user's backward: the recorder keeps the error.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, cast

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import GradBucket
from torch._compile import _disable_dynamo
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from memckpt.capture.copier import Copier
from memckpt.capture.recorder import Recorder
from memckpt.capture.shards import is_fsdp2
from memckpt.errors import UnsupportedError
from memckpt.state.tensors import is_dtensor

_log = logging.getLogger("memckpt")

Method = TypeVar("Method", bound=Callable[..., None])
CommHook = Callable[[Any, GradBucket], torch.futures.Future[torch.Tensor]]


LOCAL_STEPS = (
    "its ranks step on their own between averages, so no record holds the steps of the others; average the "
    "gradients at every step (DistributedDataParallel, fully_shard)"
)


def refuse_local_sgd(*parts: object) -> None:
    """Refuse a DDP communication hook, or its state, that does not average at every step.

    Raises:
        UnsupportedError: one of `parts` belongs to local SGD.
    """
    if any("localsgd" in getattr(part, "__name__", type(part).__name__).lower() for part in parts):
        raise UnsupportedError(f"local SGD (a communication hook of DDP): {LOCAL_STEPS}")


class Tap(Protocol):
    """Takes gradients from training and passes them to a recorder.

    Attributes:
        reductions: number of gradients seen that took part in a reduction over all ranks.
    """

    name: str
    reductions: int

    def install(self) -> None:
        """Start tapping."""

    def remove(self) -> None:
        """Remove every trace from the user's objects, as far as torch allows."""


def _survives(what: str) -> Callable[[Method], Method]:
    """Decorator for code that runs inside the user's step: an exception is kept, and the record becomes void."""

    def make(method: Method) -> Method:
        @functools.wraps(method)
        def guarded(self: Any, *args: Any) -> None:
            try:
                method(self, *args)
            except Exception as error:
                self._recorder.broke(what, error)

        return cast(Method, guarded)

    return make


class _OncePerBackward:
    """Asks autograd to call a function when the running backward has ended.

    A backward that raises drops its callbacks. So the id of the backward is remembered, not just that it was asked.
    """

    def __init__(self, ended: Callable[[], None]) -> None:
        self._ended = ended
        self._asked_in = -1

    def ask(self) -> bool:
        """Queue the callback, from a hook; True on the first call in the running backward."""
        running: int = torch._C._current_graph_task_id()
        if running == self._asked_in or running == -1:
            return False
        self._asked_in = running
        torch.autograd.Variable._execution_engine.queue_callback(self._ended)
        return True


class _ParameterHooks(ABC):
    """A hook on each parameter, which sees its accumulated gradient as backward produces it.

    With fully_shard it fires once the gradient is reduced and sharded, and not at all while reduction is off
    (``set_requires_gradient_sync(False)``).
    """

    def __init__(self, params: Sequence[nn.Parameter], recorder: Recorder) -> None:
        self._params = params
        self._recorder = recorder
        self._handles: list[Any] = []
        self.reductions = 0

    def install(self) -> None:
        self._handles = [
            param.register_post_accumulate_grad_hook(self._fire) for param in self._params if param.requires_grad
        ]

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _fire(self, param: torch.Tensor) -> None:
        started = time.perf_counter()
        try:
            if not self._recorder.backward_runs():
                return
            gradient = param.grad
            if gradient is not None:  # else a user's hook has stepped and cleared it
                self.reductions += 1
                self._fired(param, gradient)
        except Exception as error:
            self._recorder.broke("handling a gradient", error)
        self._recorder.clock.hooks += time.perf_counter() - started

    @abstractmethod
    def _fired(self, param: torch.Tensor, gradient: torch.Tensor) -> None: ...


class ParameterTap(_ParameterHooks):
    """Streaming on one process: a hook on each parameter sees its accumulated gradient as backward produces it.

    With accumulation it fires for every micro-batch and the last firing counts.
    """

    name = "streaming"

    def __init__(self, params: Sequence[nn.Parameter], recorder: Recorder, copier: Copier) -> None:
        super().__init__(params, recorder)
        self._copier = copier
        self._at_end = _OncePerBackward(self._backward_ended)

    def _fired(self, param: torch.Tensor, gradient: torch.Tensor) -> None:
        self._recorder.stage(param, gradient)
        if self._copier.asynchronous:
            # Gradients may be changed in place as soon as backward has ended.
            self._at_end.ask()

    @_survives("ending a backward")
    def _backward_ended(self) -> None:
        with self._recorder.clock.in_hook():
            self._copier.wait_before_changes()


class ShardTap(ParameterTap):
    """Streaming of sharded models: FSDP2, HSDP, tensor parallel and combinations.

    With fully_shard the hooks see each parameter's reduced shard, on the stream that reduced it; the copier makes its
    own stream wait for that one.

    Args:
        model: the model with sharded modules.
        params, recorder, copier: as for :class:`ParameterTap`.
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
        self._reduction = _OncePerBackward(self._reduction_ending)

    def install(self) -> None:
        super().install()
        self._handles += [module.register_forward_hook(self._watch_reduction) for module in _outermost(self._model)]
        if not self._copier.asynchronous:
            return  # commits have been sent by the time that commit() returns
        for module in self._model.modules():
            if any(is_dtensor(param) for param in module.parameters(recurse=False)) or is_fsdp2(module):
                self._handles.append(module.register_forward_hook(self._watch_outputs))

    @_survives("inspecting a module's output")
    def _watch_reduction(self, module: nn.Module, args: Any, output: Any) -> None:
        """Detect backwards with deferred reduction (``set_requires_gradient_sync(False)``): no other hook sees them."""
        for tensor in _tensors_in(output):
            if tensor.requires_grad:
                tensor.register_hook(lambda gradient: self._backward_begins())

    @_survives("tracking a backward")
    def _backward_begins(self) -> None:
        if self._reduction.ask():
            self._reductions_before = self.reductions

    def _reduction_ending(self) -> None:
        # fully_shard reduces the rest in its own callback; one queued from inside a callback runs after it.
        torch.autograd.Variable._execution_engine.queue_callback(self._reduction_ended)

    @_survives("tracking a backward")
    def _reduction_ended(self) -> None:
        if self.reductions == self._reductions_before:
            self._recorder.pending.unreduced()

    @_survives("inspecting a module's output")
    def _watch_outputs(self, module: nn.Module, args: Any, output: Any) -> None:
        for tensor in _tensors_in(output):
            if tensor.requires_grad:
                tensor.register_hook(self._reduction_comes)

    @_survives("sending a commit before a reduction")
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

    @_survives("staging offloaded gradients")
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


@dataclass
class _HeldBucket:
    """A bucket whose reduction waits until all buckets of its backward are ready."""

    params: list[torch.Tensor]
    gradients: list[torch.Tensor]
    buffer: torch.Tensor
    future: torch.futures.Future[torch.Tensor]


class CommHookTap:
    """Streaming under DDP: the communication hook's future carries each bucket's synchronized gradients.

    DDP takes one communication hook. Ours calls the user's, if it is registered later; without one it averages as DDP
    itself does, by multiplying with 1/N (torch's stock hook divides, which gives other bits at N = 3).

    With three ranks or more the order of a sum depends on an element's position in a buffer, and DDP rebuilds its
    buckets after the first backward of a process. So the bucket layout is part of the state: the first backward after a
    resume is reduced in the layout that the uninterrupted run would have used (:attr:`layout`).
    """

    name = "streaming (DDP communication hook)"

    def __init__(
        self, model: DistributedDataParallel, recorder: Recorder, copier: Copier, before_reduction: Callable[[], None]
    ) -> None:
        self._model = model
        self._recorder = recorder
        self._copier = copier
        self._before_reduction = before_reduction
        self._users: tuple[Any, CommHook] | None = None
        self._group = model.process_group
        self._world_size = dist.get_world_size(self._group)
        self._factor = 1.0 / self._world_size
        self._removed = False
        self._at_end = _OncePerBackward(self._backward_ending)
        self._positions = {id(param): index for index, param in enumerate(model.module.parameters())}
        self._observed: list[list[int]] = []
        self._held: list[_HeldBucket] = []
        self._resumed_layout: list[list[int]] | None = None
        self._backwards = 0
        self._handles: list[Any] = []
        self.reductions = 0
        #: Parameter positions by bucket in which the next backward is reduced; None until known.
        self.layout: list[list[int]] | None = None

    @staticmethod
    def available(model: DistributedDataParallel) -> bool:
        """Whether the hook is free: torch takes only one, and the user may have registered theirs."""
        return not getattr(model, "_comm_hooks", [])

    def install(self) -> None:
        def memckpt_tap(state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
            return self._reduce(bucket)

        # Torch compares the annotations with its own classes, and does not resolve strings.
        memckpt_tap.__annotations__.clear()
        self._model.register_comm_hook(None, memckpt_tap)
        # A user's registration now reaches us and not torch, which would refuse a second hook.
        vars(self._model)["register_comm_hook"] = self._adopt
        # Under no_sync() no bucket is reduced, yet gradients are pending.
        self._handles = [
            param.register_post_accumulate_grad_hook(self._accumulated)
            for param in self._model.module.parameters()
            if param.requires_grad
        ]

    def _adopt(self, state: Any, hook: CommHook) -> None:
        if self._users is not None:
            raise RuntimeError("register_comm_hook can only be called once per DDP module")
        refuse_local_sgd(state, hook)
        self._users = (state, hook)

    def remove(self) -> None:
        """Stop tapping. Torch cannot unregister a communication hook: ours stays, and only averages from now on."""
        self._removed = True
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._model.__dict__.pop("register_comm_hook", None)

    def resume_layout(self, layout: list[list[int]] | None) -> None:
        """Reduce the next backward in this layout. Call before the first backward of the process."""
        if self._world_size > 2 and layout is not None:
            self._resumed_layout = self.layout = layout

    def _accumulated(self, param: torch.Tensor) -> None:
        started = time.perf_counter()
        try:
            if not self._copier.recording_graph():
                self._recorder.gradient_seen(param)
        except Exception as error:
            self._recorder.broke("handling a gradient", error)
        self._recorder.clock.hooks += time.perf_counter() - started

    def _reduce(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        if self._removed or not self._recorder.backward_runs():
            return self._average(bucket)
        self.reductions += 1
        self._look(bucket)
        if self._resumed_layout is not None and self._users is None:
            return self._hold(bucket, self._resumed_layout)
        params, gradients, buffer = bucket.parameters(), bucket.gradients(), bucket.buffer()

        def staged(done: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
            flat = _first(done)  # raises if the reduction failed: the user must see that
            self._stage(flat, params, gradients, buffer)
            return flat

        return self._average(bucket).then(staged)

    @_survives("handling a bucket")
    def _look(self, bucket: GradBucket) -> None:
        with self._recorder.clock.in_hook():
            if self._at_end.ask():
                self._observed, self._held = [], []  # left by a backward that raised
            self._observe(bucket)
            self._before_reduction()

    @_survives("staging a bucket")
    def _stage(
        self,
        flat: torch.Tensor,
        params: Sequence[torch.Tensor],
        gradients: Sequence[torch.Tensor],
        buffer: torch.Tensor,
    ) -> None:
        with self._recorder.clock.in_hook():
            reduced = gradients if flat.data_ptr() == buffer.data_ptr() else _placed_alike(gradients, buffer, flat)
            for param, gradient in zip(params, reduced, strict=True):
                self._recorder.stage(param, gradient)

    def _average(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        if self._users is not None:
            state, hook = self._users
            return hook(state, bucket)
        work = dist.all_reduce(bucket.buffer().mul_(self._factor), group=self._group, async_op=True)
        assert work is not None
        future: torch.futures.Future[torch.Tensor] = work.get_future().then(_first)
        return future

    def _observe(self, bucket: GradBucket) -> None:
        """Learn the layout. A process's first backward has DDP's provisional one, which is used only once."""
        self._observed.append([self._positions[id(param)] for param in bucket.parameters()])
        if bucket.is_last():
            self._backwards += 1
            if self._backwards > 1 or self._model.find_unused_parameters:
                self.layout = self._observed
            self._observed = []

    def _hold(self, bucket: GradBucket, layout: list[list[int]]) -> torch.futures.Future[torch.Tensor]:
        devices: list[int | str | torch.device] | None = (
            [bucket.buffer().device] if bucket.buffer().device.type == "cuda" else None
        )
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=devices)
        self._held.append(_HeldBucket(bucket.parameters(), bucket.gradients(), bucket.buffer(), future))
        if bucket.is_last():
            held, self._held, self._resumed_layout = self._held, [], None
            self._reduce_in(layout, held)
        return future

    def _reduce_in(self, layout: list[list[int]], held: list[_HeldBucket]) -> None:
        gradients = {
            self._positions[id(param)]: (param, gradient)
            for one in held
            for param, gradient in zip(one.params, one.gradients, strict=True)
        }
        if sorted(position for positions in layout for position in positions) != sorted(gradients):
            _log.warning("memckpt: DDP reduces other parameters than before; this step may differ in the last bits")
            layout = [[self._positions[id(param)] for param in one.params] for one in held]
        for positions in layout:
            flat = torch.cat([gradients[position][1].reshape(-1) for position in positions]).mul_(self._factor)
            dist.all_reduce(flat, group=self._group)
            offset = 0
            for position in positions:
                param, gradient = gradients[position]
                gradient.copy_(flat[offset : offset + param.numel()].view(gradient.shape))
                offset += param.numel()
                with self._recorder.clock.in_hook():
                    self._recorder.stage(param, gradient)
        for one in held:
            one.future.set_result(one.buffer)

    def _backward_ending(self) -> None:
        # DDP finalizes its buckets in its own callback; one queued from inside a callback runs after it.
        torch.autograd.Variable._execution_engine.queue_callback(self._backward_ended)

    @_survives("ending a backward")
    def _backward_ended(self) -> None:
        with self._recorder.clock.in_hook():
            self._copier.wait_before_changes()
            self._recorder.note_versions()


def _placed_alike(gradients: Sequence[torch.Tensor], buffer: torch.Tensor, flat: torch.Tensor) -> list[torch.Tensor]:
    """Views of `flat` at the positions that `gradients` have in `buffer`."""
    first, flat = buffer.storage_offset(), flat.view(-1)
    begins = [int(gradient.storage_offset() - first) for gradient in gradients]
    return [flat[begin : begin + one.numel()].view(one.shape) for begin, one in zip(begins, gradients, strict=True)]


def _first(done: torch.futures.Future[Any]) -> torch.Tensor:
    value = done.value()
    tensor = value[0] if isinstance(value, list) else value
    assert isinstance(tensor, torch.Tensor)
    return tensor


class PendingTap(_ParameterHooks):
    """Stages nothing during backward: gradients are taken after the optimizer's step. Correct for any training.

    The hooks note that a backward has run, so that a batch inside an accumulation is no restore point.
    """

    name = "step"

    def _fired(self, param: torch.Tensor, gradient: torch.Tensor) -> None:
        self._recorder.gradient_seen(param)


@_disable_dynamo
def _compiled_stepping(recorder: Recorder, number: int, optimizer: Optimizer) -> None:
    """Note that a compiled step is about to be taken; not compiled itself."""
    recorder.optimizer_stepping(number, optimizer, with_closure=True)  # its gradients are never noted


@_disable_dynamo
def _compiled_step(recorder: Recorder, number: int, optimizer: Optimizer) -> None:
    """Note that a compiled step was taken; not compiled itself."""
    recorder.compiled_step(number, optimizer)


class StepHooks:
    """Hooks on the optimizers: the only place that sees, in every framework, which step was really taken."""

    def __init__(self, optimizers: Sequence[Optimizer], recorder: Recorder) -> None:
        self._optimizers = optimizers
        self._recorder = recorder
        self._handles: list[Any] = []

    def install(self) -> None:
        for number, optimizer in enumerate(self._optimizers):
            # In a compiled step the compiler traces these hooks, and evaluates `is_compiling` to True in them.
            def stepped(stepping: Optimizer, args: Any, kwargs: Any, number: int = number) -> None:
                if torch.compiler.is_compiling():
                    _compiled_step(self._recorder, number, stepping)
                    return
                with self._recorder.clock.in_hook():
                    self._recorder.optimizer_stepped(number, stepping)

            def stepping(about_to: Optimizer, args: Any, kwargs: Any, number: int = number) -> None:
                if torch.compiler.is_compiling():
                    _compiled_stepping(self._recorder, number, about_to)
                    return
                # The step's own arguments follow the optimizer itself.
                closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
                with self._recorder.clock.in_hook():
                    self._recorder.optimizer_stepping(number, about_to, closure is not None)

            self._handles.append(optimizer.register_step_pre_hook(stepping))
            handle = optimizer.register_step_post_hook(stepped)
            # Ours first: changes that a user's hook makes to parameters are seen as made outside of the step.
            hooks: Any = vars(optimizer)["_optimizer_step_post_hooks"]
            hooks.move_to_end(handle.id, last=False)
            self._handles.append(handle)

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
