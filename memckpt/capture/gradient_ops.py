"""Changes of gradients between backward and the optimizer's step: clipping and unscaling.

Streaming stages gradients before they are changed in place, and records each change as a factor: staged gradient times
recorded factor equals, bit for bit, what the optimizer used. torch's functions that make such changes are wrapped while
a session is open. The check of the first records finds any other change, and the session switches to another tap.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import torch
from torch.nn.utils import clip_grad

from memckpt.state.tensors import whole


class Listener(Protocol):
    """Notified right before and right after each in-place change."""

    def gradients_change(self, kind: str, operand: Any, params: list[torch.Tensor]) -> None:
        """A change is about to be made: `kind` and `operand` as in GradientOp, to the gradients of `params`."""

    def gradients_changed(self, params: list[torch.Tensor]) -> None:
        """The change has been made."""


_lock = threading.Lock()
_listeners: weakref.WeakSet[Listener] = weakref.WeakSet()
_originals: list[tuple[Any, str, Any]] = []
#: By optimizer, the scaler that has unscaled its gradients.
scalers: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def listen(listener: Listener) -> None:
    """Notify `listener` of changes until :func:`unlisten`. The first listener installs the wrappers."""
    with _lock:
        if not _originals:
            _install()
        _listeners.add(listener)


def unlisten(listener: Listener) -> None:
    """Stop notifying `listener`. The last one to leave removes the wrappers."""
    with _lock:
        _listeners.discard(listener)
        if not _listeners:
            while _originals:
                owner, name, original = _originals.pop()
                setattr(owner, name, original)


@contextlib.contextmanager
def _telling(kind: str, operand: Any, params: Iterable[torch.Tensor]) -> Iterator[None]:
    changed = [param for param in params if param.grad is not None]
    for listener in list(_listeners):
        listener.gradients_change(kind, operand, changed)
    yield
    for listener in list(_listeners):
        listener.gradients_changed(changed)


def _wrap(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    original = getattr(owner, name, None)
    if original is None:
        return  # this torch lacks the function; the check of staged gradients finds other changes
    _originals.append((owner, name, original))
    setattr(owner, name, functools.wraps(original)(make(original)))


def _as_list(parameters: Any) -> list[torch.Tensor]:
    return [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)


def _install() -> None:
    def clip_by_norm(original: Any) -> Any:
        def wrapper(parameters: Any, max_norm: float, total_norm: torch.Tensor, foreach: bool | None = None) -> None:
            parameters = _as_list(parameters)
            with torch.no_grad():
                # The norm of DTensors is a DTensor: `whole` is collective, so it runs whether or not a record is
                # written.
                factor = torch.clamp(float(max_norm) / (whole(total_norm) + 1e-6), max=1.0)
            with _telling("mul", factor, parameters):
                original(parameters, max_norm, total_norm, foreach)

        return wrapper

    def clip_by_value(original: Any) -> Any:
        def wrapper(parameters: Any, clip_value: float, foreach: bool | None = None) -> None:
            parameters = _as_list(parameters)
            with _telling("clamp", (-float(clip_value), float(clip_value)), parameters):
                original(parameters, clip_value, foreach)

        return wrapper

    def unscale(original: Any) -> Any:
        def wrapper(self: Any, optimizer: Any, inv_scale: torch.Tensor, found_inf: Any, allow_fp16: bool) -> Any:
            scalers[optimizer] = self
            params = [param for group in optimizer.param_groups for param in group["params"]]
            with _telling("unscale", inv_scale, params):
                return original(self, optimizer, inv_scale, found_inf, allow_fp16)

        return wrapper

    # clip_grad_norm_ calls the first of these by its module global, so every way of importing it is covered.
    _wrap(clip_grad, "_clip_grads_with_norm_", clip_by_norm)
    _wrap(torch.nn.utils, "clip_grads_with_norm_", clip_by_norm)
    _wrap(clip_grad, "clip_grad_value_", clip_by_value)
    _wrap(torch.nn.utils, "clip_grad_value_", clip_by_value)
    _wrap(torch.amp.GradScaler, "_unscale_grads_", unscale)
