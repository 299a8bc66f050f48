"""A stand-in for the engine: the session's interface over files, simple and slow.

It keeps whole states with torch.save in the run directory. Adapters are tested against it, so that a failure there is
the adapter's; the engine has its own tests.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from memckpt.errors import NothingHeldError
from memckpt.state import codec, rng

_KEPT_RECORDS = 3


@dataclass(frozen=True)
class FakeHeld:
    step: int
    record: int
    tier: str
    rank_state: dict[str, Any]
    world_size: int

    @property
    def newest_step(self) -> int:
        """No step is repeated."""
        return self.step

    def provided_as(self, name: str, adapter: str) -> Any:
        return self.rank_state[name]


@dataclass(frozen=True)
class FakeReport:
    step: int
    record: int
    tier: str
    seconds: float
    steps_lost: int
    repeated: int | None = None


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def _smallest(value: int) -> int:
    if not dist.is_initialized():
        return value
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return min(values)


class FakeSession:
    """See the engine's session; `commits` is the number of restore points."""

    def __init__(
        self,
        model: nn.Module,
        optimizers: list[Optimizer] | Optimizer,
        *,
        run_dir: str,
        resume: str | int,
        config: Any,
        data_parallel: nn.Module | None = None,
        extra_modules: Mapping[str, nn.Module] | None = None,
        replicated: Sequence[str] = (),
    ) -> None:
        self.replicated = tuple(replicated)
        self.logs_metrics = config is None or config.log_metrics
        self._model = model
        self._optimizers = [optimizers] if isinstance(optimizers, Optimizer) else list(optimizers)
        self._extra_modules = extra_modules if extra_modules is not None else {}
        self._directory = Path(run_dir) / f"rank{_rank()}"
        self._directory.mkdir(parents=True, exist_ok=True)
        self._captures: dict[str, Callable[[], Any]] = {}
        self.commits = 0
        self.reasons: list[str] = []
        self.closed: bool | None = None
        self._saved: dict[str, Any] | None = None
        self.held: FakeHeld | None = None
        newest = _smallest(max(self._records(), default=-1))
        if resume != "never" and newest >= 0:
            saved = torch.load(self._directory / str(newest), weights_only=False)
            self._saved = saved
            state = codec.decode(saved["rank_state"])
            self.held = FakeHeld(saved["step"], newest, "files", state, _world_size())
        if resume == "require" and self.held is None:
            raise NothingHeldError("nothing is held")
        self._backward_since_step = False
        self._handles = [
            parameter.register_post_accumulate_grad_hook(self._on_gradient)
            for parameter in model.parameters()
            if parameter.requires_grad
        ]
        self._handles += [each.register_step_post_hook(self._on_step) for each in self._optimizers]
        self._record = newest if self.held is not None else max(self._records(), default=0)

    def _on_gradient(self, parameter: Tensor) -> None:
        self._backward_since_step = True

    def _on_step(self, *_: Any) -> None:
        self._backward_since_step = False

    def _records(self) -> list[int]:
        return [int(name) for name in os.listdir(self._directory) if name.isdigit()]

    def provide(
        self, name: str, capture: Callable[[], Any], parts: Callable[[Any], Any] | None = None, put_back: Any = None
    ) -> None:
        self._captures[name] = capture
        self.parts = parts

    def unrepeatable(self, reason: str) -> None:
        self.unrepeatable_reason = reason

    def inexact(self, reason: str) -> None:
        if reason not in self.reasons:
            self.reasons.append(reason)
            logging.getLogger("memckpt").warning("memckpt: a resume of this run will not be exact: %s", reason)

    def carried(self, objects: Callable[[], Any]) -> None:
        """Does nothing: the fake looks for no objects."""

    def announce_accumulation(self, accumulates: Callable[[], bool]) -> None:
        """Does nothing: the fake copies nothing during backward anyway."""

    def _modules(self) -> dict[str, nn.Module]:
        return {"": self._model, **self._extra_modules}

    def _tensors(self) -> Iterator[tuple[tuple[str, str], Tensor]]:
        for owner, module in self._modules().items():
            for named in (module.named_parameters, module.named_buffers):
                for name, tensor in named(remove_duplicate=False):
                    yield (owner, name), tensor

    def _parameters(self) -> dict[str, nn.Parameter]:
        return dict(self._model.named_parameters(remove_duplicate=False))

    def restore_tensors(self) -> FakeReport | None:
        if self._saved is None or self.held is None:
            return None
        started = time.perf_counter()
        live = dict(self._tensors())
        with torch.no_grad():
            for key, saved in self._saved["tensors"].items():
                live[key].copy_(saved)
        parameters = self._parameters()
        for name, requires_grad in self._saved["requires_grad"].items():
            parameters[name].requires_grad_(requires_grad)
        for optimizer, saved in zip(self._optimizers, self._saved["optimizers"], strict=True):
            groups = [{**group, "params": [parameters[name] for name in group["params"]]} for group in saved["groups"]]
            optimizer.param_groups[:] = groups
            optimizer.state.clear()
            for name, state in saved["state"].items():
                optimizer.state[parameters[name]] = state
        seconds = time.perf_counter() - started
        return FakeReport(self.held.step, self.held.record, self.held.tier, seconds, 0)

    def restore_rng(self) -> None:
        if self._saved is not None:
            rng.restore(self._saved["rng"])

    def commit(self, *, step: int, gradients_pending: bool | None) -> bool:
        generators = rng.capture()
        if self._backward_since_step if gradients_pending is None else gradients_pending:
            return False
        names = {id(parameter): name for name, parameter in self._parameters().items()}
        rank_state = codec.encode({name: capture() for name, capture in self._captures.items()})
        state = {
            "step": step,
            "rank_state": rank_state,
            "rng": generators,
            "tensors": {key: tensor.detach().clone() for key, tensor in self._tensors()},
            "requires_grad": {name: each.requires_grad for name, each in self._parameters().items()},
            "optimizers": [
                {
                    "groups": [
                        {**group, "params": [names[id(each)] for each in group["params"]]}
                        for group in optimizer.param_groups
                    ],
                    "state": {names[id(each)]: state for each, state in optimizer.state.items()},
                }
                for optimizer in self._optimizers
            ],
        }
        self._record += 1
        path = self._directory / str(self._record)
        torch.save(state, path.with_suffix(".tmp"))
        os.replace(path.with_suffix(".tmp"), path)
        for old in sorted(self._records())[:-_KEPT_RECORDS]:
            (self._directory / str(old)).unlink()
        self.commits += 1
        return True

    def metrics(self) -> dict[str, float]:
        return {"stall_ms": 0.0, "lag_steps": 0.0, "drift_ulp": 0.0, "step": float(self._record)}

    def describe(self) -> str:
        return "stand-in engine"

    def close(self, finished: bool) -> None:
        self.closed = finished
        for handle in self._handles:
            handle.remove()
        if finished:
            for record in self._records():
                (self._directory / str(record)).unlink()


def attach(model: nn.Module, optimizers: Any, **arguments: Any) -> FakeSession:
    return FakeSession(model, optimizers, **arguments)
