"""Hooks on optimizers: the only place that sees, in every framework, which step was really taken."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any

import torch
from torch._compile import _disable_dynamo
from torch.optim import Optimizer

from memckpt.capture.beside.strangers import runs_within
from memckpt.capture.recorder import Recorder


@_disable_dynamo
def _call(function: Callable[[Optimizer], None], optimizer: Optimizer) -> None:
    """Call it from a step that is being compiled; not compiled itself."""
    function(optimizer)


def is_followed(optimizer: Optimizer) -> bool:
    """Whether a session has hooks on an optimizer."""
    return any(map(_is_ours, vars(optimizer).get("_optimizer_step_post_hooks", {}).values()))


def _is_ours(hook: object) -> bool:
    return getattr(hook, "__module__", "") == __name__


def _closure_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The closure that a step is called with; `args` as a pre-hook gets them, with the optimizer first."""
    return kwargs.get("closure", args[1] if len(args) > 1 else None)


def _keep_last(optimizer: Optimizer) -> None:
    """Have our pre-hooks run behind the user's, also those registered later: they may change what the step uses."""

    def put_last() -> None:
        hooks: Any = vars(optimizer)["_optimizer_step_pre_hooks"]
        for key in [key for key, hook in hooks.items() if _is_ours(hook)]:
            hooks.move_to_end(key)

    def register(hook: Any) -> Any:
        handle = type(optimizer).register_step_pre_hook(optimizer, hook)
        put_last()
        return handle

    vars(optimizer)["register_step_pre_hook"] = register
    put_last()


class StepFollower:
    """Follows the steps of one optimizer.

    A class whose step calls that of its base class runs hooks at both: the outermost step counts.

    Args:
        optimizer: the optimizer.
        before: called at the last moment before the step changes anything; with a closure each time this has returned.
        after: called behind the step, ahead of the user's hooks, whose changes of parameters are not the step's.
        compiled: called in place of `after` where the step is compiled; None: nothing is called there.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        before: Callable[[Optimizer], None],
        after: Callable[[Optimizer], None],
        compiled: Callable[[Optimizer], None] | None = None,
    ) -> None:
        self._optimizer = optimizer
        self._before = before
        self._after = after
        self._compiled = compiled
        #: The call of the running step; that of the last one, if it raised.
        self._outermost: FrameType | None = None
        self._handles: list[Any] = []

    def install(self) -> None:
        optimizer = self._optimizer
        self._handles = [
            optimizer.register_step_pre_hook(self._stepping),
            optimizer.register_step_post_hook(self._stepped),
        ]
        hooks: Any = vars(optimizer)["_optimizer_step_post_hooks"]
        hooks.move_to_end(self._handles[1].id, last=False)
        _keep_last(optimizer)

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles, self._outermost = [], None
        if not is_followed(self._optimizer):
            vars(self._optimizer).pop("register_step_pre_hook", None)

    def _stepping(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        # In a compiled step the compiler traces these hooks, and evaluates `is_compiling` to True in them.
        if torch.compiler.is_compiling():
            if self._compiled is not None:
                _call(self._before, optimizer)
            return None
        caller = sys._getframe(1)
        if self._outermost is not None and runs_within(self._outermost, caller):
            return None
        self._outermost = caller
        closure = _closure_of(args, kwargs)
        if not callable(closure):
            self._before(optimizer)
            return None

        # Gradients are made in it (Lightning computes all of them there).
        @functools.wraps(closure)
        def followed(*values: Any, **named: Any) -> Any:
            found = closure(*values, **named)
            self._before(optimizer)
            return found

        if "closure" in kwargs:
            return args, {**kwargs, "closure": followed}
        return (args[0], followed, *args[2:]), kwargs

    def _stepped(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling():
            if self._compiled is not None:
                _call(self._compiled, optimizer)
            return
        if sys._getframe(1) is self._outermost:
            self._outermost = None
            self._after(optimizer)


class StepHooks:
    """Tells the recorder of each step that an optimizer begins and has taken."""

    def __init__(self, optimizers: Sequence[Optimizer], recorder: Recorder) -> None:
        self._recorder = recorder
        self._followers = [
            StepFollower(
                optimizer,
                *(
                    functools.partial(self._call_timed, call, number)
                    for call in (recorder.optimizer_stepping, recorder.optimizer_stepped, recorder.compiled_step)
                ),
            )
            for number, optimizer in enumerate(optimizers)
        ]

    def _call_timed(self, call: Callable[[int, Optimizer], None], number: int, optimizer: Optimizer) -> None:
        with self._recorder.clock.in_hook():
            call(number, optimizer)

    def install(self) -> None:
        for follower in self._followers:
            follower.install()

    def remove(self) -> None:
        for follower in self._followers:
            follower.remove()
