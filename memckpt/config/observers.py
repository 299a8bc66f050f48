"""Observers: what other packages have each session of a training tell them. Torch-free."""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any

from memckpt.config import MemckptConfig
from memckpt.errors import ConfigurationError

if TYPE_CHECKING:
    import torch

#: Observers of the trainings that a process starts, as JSON: ``[["module:Class", argument, ...], ...]``. Set by
#: ``memckpt run`` and ``memckpt drill``.
OBSERVERS = "MEMCKPT_OBSERVERS"


@dataclass(frozen=True)
class Watched:
    """A session that begins; `tensors` returns its live tensors by name. `run_dir` is None where it is disabled."""

    model: torch.nn.Module
    optimizers: Sequence[torch.optim.Optimizer]
    tensors: Callable[[], Mapping[str, torch.Tensor]]
    run_dir: str | None
    node: str
    rank: int
    world_size: int
    agent: int | None


@dataclass(frozen=True)
class Committed:
    """A step that is committed."""

    step: int
    record: int
    parts: Callable[[], Iterable[tuple[str, str, Any]]]  #: returns kind, name and value of the rank's state
    caller: FrameType  #: frame that called ``commit``
    stalled: float  #: seconds in which protection has kept the process from training so far
    repeated: bool  #: the step was repeated as a proof
    agent: int | None
    check: tuple[str, str]  #: verdict of the resume check, and its line


class Observer:
    """Watches one session. Its methods are called behind what they are about; these here do nothing.

    `run_dir`: run directory in place of the training's own, which is always continued; None: its own.
    """

    run_dir: str | None = None

    def change_config(self, config: MemckptConfig) -> MemckptConfig:
        """The settings in place of the training's own. Called more than once, by adapters and by the engine."""
        return config

    def begin_session(self, session: Watched) -> None:
        """A session has begun."""

    def see_restored(self, step: int, record: int, tier: str, seconds: float, repeated: int | None) -> None:
        """The tensors of a state are restored; arguments as in :class:`memckpt.RestoreReport`."""

    def see_committed(self, committed: Committed) -> None:
        """A step is committed."""

    def close(self) -> None:
        """The session ends."""


def observers_from_environment(environment: Mapping[str, str] = os.environ) -> list[Observer]:
    """New observers of one session, as MEMCKPT_OBSERVERS names them. Raises ConfigurationError."""
    found = environment.get(OBSERVERS)
    if found is None:
        return []
    try:
        return [_class_of(name)(*arguments) for name, *arguments in json.loads(found)]
    except ConfigurationError:
        raise
    except (ValueError, TypeError, ImportError, AttributeError) as error:
        raise ConfigurationError(
            f"{OBSERVERS}: expected what `memckpt run` and `memckpt drill` set, found {found!r}: {error}; unset it"
        ) from error


def _class_of(name: str) -> Callable[..., Observer]:
    module, _, attribute = name.partition(":")
    found: Callable[..., Observer] = getattr(importlib.import_module(module), attribute)
    return found


def with_observer(name: str, *arguments: object, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The variable for trainings that are started: this environment's observers, and one more, ``module:Class``."""
    return {OBSERVERS: json.dumps([[name, *arguments], *json.loads(environment.get(OBSERVERS, "[]"))])}
