"""State that Lightning itself owns: LR schedulers, the precision plugin, a few fields of loops and trainer."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator, Mapping
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import GradientAccumulationScheduler, StochasticWeightAveraging
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import ParallelStrategy

import memckpt
from lightning_memckpt.internals import TrainerInternals
from lightning_memckpt.notes import list_callbacks
from memckpt.capture.attributes import with_live_types
from memckpt.capture.scaler import scaler_state

#: Largest hyperparameter that is stored, in pickled bytes.
_LARGE_HYPERPARAMETER = 16 << 10

# Arguments that determine a step. Changing one between two starts is allowed, but not exact.
_SETTINGS = (
    "accumulate_grad_batches",
    "world_size",
    "precision",
    "limit_train_batches",
    "limit_val_batches",
    "val_check_interval",
    "check_val_every_n_epoch",
    "gradient_clip_val",
    "gradient_clip_algorithm",
    "overfit_batches",
    "reload_dataloaders_every_n_epochs",
)


def settings(trainer: pl.Trainer) -> dict[str, str]:
    """The Trainer's arguments that an exact continuation has to share, as text."""
    return {name: str(getattr(trainer, name, None)) for name in _SETTINGS}


def changed_settings(trainer: pl.Trainer, before: Mapping[str, str]) -> Iterator[str]:
    """One line for each of them that differs."""
    for name, value in settings(trainer).items():
        if value != before.get(name, value) and not (
            name == "accumulate_grad_batches" and _schedules_accumulation(trainer)
        ):
            yield (
                f"{name} was {before[name]} when the held state was captured and is {value} now: training "
                "continues, but not bit for bit"
            )


def data_replicas(trainer: pl.Trainer) -> int:
    """Number of ranks among which the samples are divided; tensor-parallel ranks share theirs."""
    strategy = trainer.strategy
    if not isinstance(strategy, ParallelStrategy):
        return 1
    replicas: int = strategy.distributed_sampler_kwargs["num_replicas"]
    return replicas


def capture(trainer: pl.Trainer, internals: TrainerInternals) -> dict[str, Any]:
    """State beside loops, logging and user state; values may share memory with live ones until they are encoded."""
    return {
        "schedulers": [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs],
        "precision": _precision(trainer.precision_plugin),
        "loop_extras": internals.loop_extras(),
        "accumulate_grad_batches": trainer.accumulate_grad_batches,
        "should_stop": trainer.should_stop,
    }


def file_entries(trainer: pl.Trainer, pl_module: pl.LightningModule) -> dict[str, Any]:
    """Data for an export only: hyperparameters, and the keys that Lightning gives to other entries.

    Excludes hyperparameters that cannot be encoded or are large: each step stores them.
    """
    untyped: Any = trainer  # datamodule is a dynamic attribute that type checkers do not see
    found: dict[str, Any] = {}
    for each in (pl_module, untyped.datamodule):
        if each is None or not each.hparams:
            continue
        if hasattr(each, "_hparams_name"):
            found[each.CHECKPOINT_HYPER_PARAMS_NAME] = each._hparams_name
        found[each.CHECKPOINT_HYPER_PARAMS_KEY] = {
            name: copy.deepcopy(value)
            for name, value in dict(each.hparams).items()
            if not memckpt.unencodable_paths({name: value}) and len(pickle.dumps(value)) <= _LARGE_HYPERPARAMETER
        }
    return {
        "precision": type(trainer.precision_plugin).__qualname__,
        "datamodule": type(untyped.datamodule).__qualname__,
        "hyperparameters": found,
    }


def _precision(plugin: Any) -> Any:
    """The plugin's state. Mixed precision's is its gradient scaler's, which is read without waiting."""
    scaler = getattr(plugin, "scaler", None)
    if type(plugin).state_dict is MixedPrecision.state_dict:
        return {} if scaler is None else scaler_state(scaler)
    return plugin.state_dict()


def restore(trainer: pl.Trainer, internals: TrainerInternals, state: Mapping[str, Any]) -> None:
    """Restore the captured state; call after the optimizers are restored, as Lightning does."""
    _restore_schedulers(trainer, state["schedulers"])
    if state["precision"]:
        trainer.precision_plugin.load_state_dict(copy.deepcopy(state["precision"]))
    internals.set_loop_extras(state["loop_extras"])
    if _schedules_accumulation(trainer):
        # The callback sets it at an epoch's start, which a resume inside an epoch does not repeat. Without that
        # callback the Trainer's own argument, which the user may have changed, applies.
        trainer.accumulate_grad_batches = state["accumulate_grad_batches"]


def _restore_schedulers(trainer: pl.Trainer, states: list[dict[str, Any] | None]) -> None:
    configs = trainer.lr_scheduler_configs
    if any(isinstance(each, StochasticWeightAveraging) for each in list_callbacks(trainer)):
        # It puts a scheduler of its own in their place once more, at the next start of an epoch.
        alike = zip(configs, states, strict=False)
        states = [one if one and one.keys() == config.scheduler.state_dict().keys() else None for config, one in alike]
        states += [None] * (len(configs) - len(states))
    if len(configs) != len(states):
        raise ValueError(
            f"the held state has {len(states)} LR schedulers, configure_optimizers() returned {len(configs)}; "
            'resume with the same schedulers, or start over with MemCheckpoint(resume="never")'
        )
    for config, state in zip(configs, states, strict=True):
        if state is None:  # could not be stored
            continue
        scheduler: Any = config.scheduler
        scheduler.load_state_dict(with_live_types(scheduler.state_dict(), copy.deepcopy(state)))


def _schedules_accumulation(trainer: pl.Trainer) -> bool:
    return any(isinstance(each, GradientAccumulationScheduler) for each in list_callbacks(trainer))
