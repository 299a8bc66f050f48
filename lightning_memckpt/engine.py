"""The engine's public interface as far as this adapter uses it, spelled out for type checkers and tests.

`attach` and `unencodable_paths` are looked up on each call, so that a test may replace them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from torch import nn
from torch.optim import Optimizer

import memckpt
from memckpt import ComparedKind
from memckpt.config import MemckptConfig, ResumeChoice
from memckpt.user_messages import Report

Resume = ResumeChoice | int


class Held(Protocol):
    """State that an earlier process left behind."""

    @property
    def step(self) -> int: ...
    @property
    def newest_step(self) -> int: ...
    @property
    def record(self) -> int: ...
    @property
    def tier(self) -> str: ...
    @property
    def rank_state(self) -> Mapping[str, Any]: ...
    @property
    def world_size(self) -> int: ...


class Session(Protocol):
    """One rank's connection to the engine, for one fit."""

    @property
    def held(self) -> Held | None: ...
    def provide(
        self,
        name: str,
        capture: Callable[[], Any],
        parts: Callable[[Any], Mapping[tuple[ComparedKind, str], Any]] | None = None,
        put_back: Callable[[Any], Any] | None = None,
    ) -> None: ...
    def unrepeatable(self, reason: str) -> None: ...
    def announce_accumulation(self, accumulates: Callable[[], bool]) -> None: ...
    def restore_tensors(self) -> Report | None: ...
    def restore_rng(self) -> None: ...
    def commit(self, *, step: int, gradients_pending: bool | None) -> bool: ...
    def metrics(self) -> dict[str, float]: ...
    def describe(self) -> str: ...
    def close(self, finished: bool) -> None: ...


class Attach(Protocol):
    """`memckpt.attach`."""

    def __call__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        *,
        run_dir: str,
        resume: Resume,
        config: MemckptConfig,
        data_parallel: nn.Module | None,
        extra_modules: dict[str, nn.Module],
        replicated: Sequence[str],
    ) -> Session: ...


def attach(*args: Any, **kwargs: Any) -> Session:
    """Connect to the engine."""
    session: Session = memckpt.attach(*args, **kwargs)
    return session


def is_encodable(value: Any) -> list[str]:
    """The paths in `value` that cannot be stored; empty if all can."""
    paths: list[str] = memckpt.unencodable_paths(value)
    return paths
