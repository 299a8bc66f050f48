"""Hooks on optimizers: the only place that sees, in every framework, which step was really taken."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._compile import _disable_dynamo
from torch.optim import Optimizer

from memckpt.capture.recorder import Recorder


@_disable_dynamo
def _compiled_stepping(recorder: Recorder, number: int, optimizer: Optimizer) -> None:
    """Note that a compiled step is about to be taken; not compiled itself."""
    recorder.optimizer_stepping(number, optimizer, with_closure=True)  # its gradients are never noted


@_disable_dynamo
def _compiled_step(recorder: Recorder, number: int, optimizer: Optimizer) -> None:
    """Note that a compiled step was taken; not compiled itself."""
    recorder.compiled_step(number, optimizer)


def register_first(optimizer: Optimizer, hook: Callable[[Optimizer, Any, Any], None]) -> Any:
    """Register a step post-hook ahead of the user's, whose changes of parameters are not the step's.

    Returns its handle.
    """
    handle = optimizer.register_step_post_hook(hook)
    hooks: Any = vars(optimizer)["_optimizer_step_post_hooks"]
    hooks.move_to_end(handle.id, last=False)
    return handle


def is_followed(optimizer: Optimizer) -> bool:
    """Whether a session has hooks on an optimizer."""
    hooks: Mapping[int, Any] = vars(optimizer).get("_optimizer_step_post_hooks", {})
    return any(getattr(hook, "__module__", "") == __name__ for hook in hooks.values())


def has_closure(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a step is called with a closure; `args` as a pre-hook gets them, with the optimizer first."""
    return kwargs.get("closure", args[1] if len(args) > 1 else None) is not None


class StepHooks:
    """Tells the recorder of each step that an optimizer begins and has taken."""

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
                with self._recorder.clock.in_hook():
                    self._recorder.optimizer_stepping(number, about_to, has_closure(args, kwargs))

            self._handles += [optimizer.register_step_pre_hook(stepping), register_first(optimizer, stepped)]

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
