"""A stand-in for the engine within one process: the session's interface over whole states, simple and slow.

What adapters refuse, say and leave behind is tested against it; what they resume is tested with the engine.
"""

from __future__ import annotations

import copy
import itertools
import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import memckpt
from memckpt.errors import NothingHeldError
from memckpt.state import codec, rng


def _held(saved: dict[str, Any]) -> SimpleNamespace:
    """What a session holds; no step is repeated."""
    provided, step = codec.decode(saved["rank_state"]), saved["step"]
    held = SimpleNamespace(step=step, newest_step=step, record=saved["record"], tier="files", world_size=1)
    held.provided_as = lambda name, adapter: provided[name]
    return held


class FakeSession:
    """See the engine's session; `commits` is the number of restore points."""

    #: The newest state of each run directory.
    kept: ClassVar[dict[str, dict[str, Any]]] = {}

    def __init__(
        self,
        model: nn.Module,
        optimizers: Any,
        *,
        run_dir: Any,
        resume: Any,
        config: Any,
        replicated: Any = (),
        **_: Any,
    ) -> None:
        self.replicated = tuple(replicated)
        self._log_metrics = config is None or config.log_metrics != "none"
        self._model, self._run_dir = model, str(run_dir)
        self._optimizers = [optimizers] if isinstance(optimizers, Optimizer) else list(optimizers)
        self._captures: dict[str, Callable[[], Any]] = {}
        self._reasons: list[str] = []
        self.commits = 0
        #: What adapters have noted of the user's logs.
        self.logged: list[dict[str, Any]] = []
        self.closed: bool | None = None
        self._saved = self.kept.get(self._run_dir) if resume != "never" else None
        if self._saved is None and resume == "require":
            raise NothingHeldError("nothing is held")
        self.held = None if self._saved is None else _held(self._saved)
        self._record = 0 if self.held is None else self.held.record
        self._pending = False
        self._handles: list[Any] = [
            param.register_post_accumulate_grad_hook(lambda _: setattr(self, "_pending", True))
            for param in model.parameters()
            if param.requires_grad
        ]
        self._handles += [
            each.register_step_post_hook(lambda *_: setattr(self, "_pending", False)) for each in self._optimizers
        ]

    def provide(self, name: str, capture: Callable[[], Any], *others: Any, **more: Any) -> None:
        self._captures[name] = capture

    def unrepeatable(self, reason: str) -> None:
        """Does nothing: no step is repeated."""

    def inexact(self, reason: str) -> None:
        if reason not in self._reasons:
            self._reasons.append(reason)
            logging.getLogger("memckpt").warning("memckpt: a resume of this run will not be exact: %s", reason)

    def carried(self, objects: Callable[[], Any]) -> None:
        """Does nothing: the fake looks for no objects."""

    def announce_accumulation(self, accumulates: Callable[[], bool]) -> None:
        """Does nothing: the fake copies nothing during backward anyway."""

    def log(self, values: Any) -> None:
        self.logged.append(dict(values))

    def _tensors(self) -> dict[str, Tensor]:
        return dict(itertools.chain(self._model.named_parameters(), self._model.named_buffers()))

    def restore_tensors(self) -> memckpt.RestoreReport | None:
        if self._saved is None or self.held is None:
            return None
        with torch.no_grad():
            for name, tensor in self._tensors().items():
                tensor.copy_(self._saved["tensors"][name])
        for optimizer, state in zip(self._optimizers, self._saved["optimizers"], strict=True):
            optimizer.load_state_dict(state)
        place = {"step": self.held.step, "record": self.held.record, "tier": self.held.tier}
        return memckpt.RestoreReport(**place, seconds=0.0, steps_lost=0)

    def restore_rng(self) -> None:
        if self._saved is not None:
            rng.restore(self._saved["rng"])

    def commit(self, *, step: int, gradients_pending: bool | None) -> bool:
        generators = rng.capture()
        if self._pending if gradients_pending is None else gradients_pending:
            return False
        self.kept[self._run_dir] = {
            "step": step,
            "record": self._record + 1,
            "rank_state": codec.encode({name: capture() for name, capture in self._captures.items()}),
            "rng": generators,
            "tensors": {name: tensor.detach().clone() for name, tensor in self._tensors().items()},
            "optimizers": [copy.deepcopy(optimizer.state_dict()) for optimizer in self._optimizers],
        }
        self._record += 1
        self.commits += 1
        return True

    def metrics(self) -> dict[str, float]:
        return {"stall_ms": 0.0, "lag_steps": 0.0, "drift_ulp": 0.0, "step": float(self._record)}

    def logger_metrics(self) -> dict[str, float]:
        return {f"memckpt/{name}": value for name, value in self.metrics().items()} if self._log_metrics else {}

    def describe(self) -> str:
        return "stand-in engine"

    def close(self, finished: bool, keep_held: bool = False) -> None:
        finished = finished and not keep_held
        self.closed = finished
        for handle in self._handles:
            handle.remove()
        if finished:
            self.kept.pop(self._run_dir, None)
