"""Refusals of MemCheckpoint, and its warnings, before training starts, about state that cannot be exact."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    LearningRateFinder,
    ModelCheckpoint,
    ModelPruning,
    StochasticWeightAveraging,
    Timer,
)
from lightning.pytorch.strategies import (
    DDPStrategy,
    DeepSpeedStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
    SingleDeviceStrategy,
    Strategy,
)
from lightning.pytorch.strategies.single_xla import SingleDeviceXLAStrategy
from lightning.pytorch.strategies.xla import XLAStrategy

from lightning_memckpt.internals import TrainerInternals, is_tuners_own, saves_by_wall_clock

# DeepSpeed and XLA derive from the supported strategies without behaving like them.
_SUPPORTED: tuple[type[Strategy], ...] = (SingleDeviceStrategy, DDPStrategy, ModelParallelStrategy, FSDPStrategy)
_UNSUPPORTED: tuple[type[Strategy], ...] = (DeepSpeedStrategy, XLAStrategy, SingleDeviceXLAStrategy)

_REFUSED: tuple[tuple[type[pl.Callback], str], ...] = (
    (LearningRateFinder, "it trains inside on_fit_start; run lightning.pytorch.tuner.Tuner.lr_find() before fit()"),
    (
        BatchSizeFinder,
        "it trains inside on_fit_start; run lightning.pytorch.tuner.Tuner.scale_batch_size() before fit()",
    ),
    (ModelPruning, "it replaces parameters while training runs, and a fresh process does not have the new ones"),
)


def refuse(trainer: pl.Trainer, ours: int) -> None:
    """Refuse a trainer with so many callbacks of ours that cannot be protected.

    Raises TypeError or MisconfigurationException.
    """
    if not isinstance(trainer, pl.Trainer):
        raise TypeError(
            f"MemCheckpoint expects a lightning.pytorch.Trainer, found {type(trainer).__module__}."
            f"{type(trainer).__qualname__}; use `import lightning.pytorch as pl` throughout"
        )
    strategy = trainer.strategy
    if not isinstance(strategy, _SUPPORTED) or isinstance(strategy, _UNSUPPORTED):
        supported = ", ".join(each.__name__ for each in _SUPPORTED)
        raise MisconfigurationException(
            f"MemCheckpoint supports {supported}, found {type(strategy).__name__}; use one of them "
            "(ModelParallelStrategy for a model larger than a device), or remove the callback"
        )
    if ours > 1:
        raise MisconfigurationException(
            f"expected one MemCheckpoint callback on a Trainer, found {ours}; remove all but one"
        )
    callbacks = list_callbacks(trainer)
    for kind, reason in _REFUSED:
        if any(isinstance(each, kind) for each in callbacks):
            raise MisconfigurationException(f"MemCheckpoint cannot work beside {kind.__name__}: {reason}")


def is_tuning(trainer: pl.Trainer) -> bool:
    """Whether this fit is a Tuner's trial, which it undoes, and which ends before training starts."""
    return any(is_tuners_own(each) for each in list_callbacks(trainer))


def list_callbacks(trainer: pl.Trainer) -> list[Any]:
    """The trainer's callbacks; a dynamic attribute that type checkers do not see."""
    untyped: Any = trainer
    callbacks: list[Any] = untyped.callbacks
    return callbacks


def inexact(trainer: pl.Trainer, internals: TrainerInternals) -> Iterator[str]:
    """One line, with the reason, for each effect that a restart cannot repeat."""
    if internals.validates_by_wall_clock:
        yield "val_check_interval is a time: validations fall on other steps after a restart"
    for callback in list_callbacks(trainer):
        if isinstance(callback, Timer):
            yield "Timer counts wall-clock time: training may stop at another step after a restart"
        elif isinstance(callback, StochasticWeightAveraging):
            yield (
                "StochasticWeightAveraging replaces the LR scheduler while training runs: a restart after "
                "swa_epoch_start is not exact; WeightAveraging (lightning>=2.6) is"
            )


def files_by_wall_clock(trainer: pl.Trainer) -> bool:
    """Whether a restart writes checkpoint files at other steps; training itself does not depend on them."""
    return any(isinstance(each, ModelCheckpoint) and saves_by_wall_clock(each) for each in list_callbacks(trainer))


def places_of_loggers(trainer: pl.Trainer) -> list[tuple[str, int | str]]:
    """Class and version (with W&B an id) of each logger, by which its files or its page are found again."""
    loggers = trainer.loggers if trainer.is_global_zero else []
    versions = [(type(each).__name__, each.version) for each in loggers]
    return [(kind, version if isinstance(version, int) else str(version)) for kind, version in versions]


def loggers_elsewhere(held: Sequence[Sequence[Any]], now: Sequence[Sequence[Any]]) -> Iterator[str]:
    """One line for each logger that does not go on where the run that is continued has logged."""
    for (kind, before), (kind_now, version) in zip(held, now, strict=False):
        if kind == kind_now and before != version:
            yield (
                f"{kind} logs to version {version}, and before this resume to {before}: to go on in one place fix it, "
                f"as in {kind}(..., version={before!r})"
            )
