"""Taps: the points at which gradients are taken. Here: what a tap is, and what taps share.

A tap is installed once per session and calls the recorder; the first log line names it and the reason for its choice.
A tap never raises into the user's backward: the recorder keeps the error.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar, cast

import torch
from torch import nn

from memckpt.capture.copier import Copier
from memckpt.capture.recorder import Recorder

Method = TypeVar("Method", bound=Callable[..., None])


class Tap(Protocol):
    """Takes gradients from training and passes them to a recorder.

    Attributes:
        reductions: grows with each reduction seen; only compared, to see whether one came.
        streams: whether it stages gradients during backward.
        holds_reductions_back: whether a backward gets through its reductions only once the last commit is sent.
        in_buckets: whether gradients come in DDP's buckets, through a hook that torch cannot remove.
        layout: parameter positions by bucket in which the next backward is reduced; None without buckets, or not known.
    """

    name: str
    reductions: int = 0
    streams: bool = True
    holds_reductions_back: bool = True
    in_buckets: bool = False
    layout: list[list[int]] | None = None

    def install(self) -> None:
        """Start tapping."""

    def remove(self) -> None:
        """Remove every trace from the user's objects, as far as torch allows."""

    def resume_layout(self, layout: list[list[int]]) -> None:
        """Reduce the next backward in this layout, where gradients come in buckets."""
        return


def survives(what: str) -> Callable[[Method], Method]:
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


class OncePerBackward:
    """Asks autograd to call a function when the running backward has ended.

    A backward that raises drops its callbacks. So the id of the backward is remembered, not just that it was asked.

    Args:
        ended: the function.
        last: whether it is called after the callbacks in which DDP and fully_shard finish their reductions.
    """

    def __init__(self, ended: Callable[[], None], last: bool = False) -> None:
        # One queued from inside a callback runs after all those that are queued by then.
        self._ended = functools.partial(_at_end, ended) if last else ended
        self._asked_in = -1

    def ask(self) -> bool:
        """Queue the callback, from a hook; True on the first call in the running backward."""
        running: int = torch._C._current_graph_task_id()
        if running == self._asked_in or running == -1:
            return False
        self._asked_in = running
        _at_end(self._ended)
        return True


def _at_end(function: Callable[[], None]) -> None:
    torch.autograd.Variable._execution_engine.queue_callback(function)


class ParameterHooks(Tap):
    """A hook on each parameter, which sees its accumulated gradient as backward produces it.

    With fully_shard it fires once the gradient is reduced and sharded, and not at all while reduction is off
    (``set_requires_gradient_sync(False)``).

    Args:
        fired: called with a parameter and its gradient.
    """

    def __init__(
        self, params: Sequence[nn.Parameter], recorder: Recorder, fired: Callable[[torch.Tensor, torch.Tensor], None]
    ) -> None:
        self._params = params
        self._recorder = recorder
        self._fired = fired
        self._handles: list[Any] = []

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


class StepTap(ParameterHooks):
    """Stages nothing during backward; notes that it has run: a batch inside an accumulation is no restore point.

    `before_reduction`, where given, is called before each of these gradients gets into a reduction.
    """

    name = "step"
    streams = False

    def __init__(
        self, params: Sequence[nn.Parameter], recorder: Recorder, before_reduction: Callable[[], None] | None = None
    ) -> None:
        super().__init__(params, recorder, self._note)
        self._before_reduction = before_reduction
        self.holds_reductions_back = before_reduction is not None

    def _note(self, param: torch.Tensor, gradient: torch.Tensor) -> None:
        if self._before_reduction is not None:
            self._before_reduction()
        self._recorder.gradient_seen(param)


class StreamingTap(ParameterHooks):
    """Stages the accumulated gradient that a parameter's hook sees.

    With accumulation it fires for every micro-batch and the last firing counts.
    """

    name = "streaming"

    def __init__(self, params: Sequence[nn.Parameter], recorder: Recorder, copier: Copier) -> None:
        # Gradients may be changed in place as soon as backward has ended: copies in flight are waited for there.
        super().__init__(params, recorder, self._stage_in_flight if copier.asynchronous else recorder.stage)
        self._copier = copier
        self._at_end = OncePerBackward(self._backward_ended)

    def _stage_in_flight(self, param: torch.Tensor, gradient: torch.Tensor) -> None:
        self._recorder.stage(param, gradient)
        self._at_end.ask()

    @survives("ending a backward")
    def _backward_ended(self) -> None:
        with self._recorder.clock.in_hook():
            self._copier.wait_before_changes()
