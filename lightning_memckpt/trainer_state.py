"""State that Lightning itself owns: LR schedulers, the precision plugin, fields of loops and trainer, and logging.

The state of logging inside an epoch is in no checkpoint of Lightning's: the aggregates behind
``self.log(on_epoch=True)``, and the dictionaries from which EarlyStopping, ModelCheckpoint and ReduceLROnPlateau read
their monitored values. Without it every epoch value of a resumed epoch would be computed from its second part only; the
engine carries the states of torchmetrics. Captured values may share memory with live ones until they are encoded.
"""

from __future__ import annotations

import builtins
import copy
import pickle
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import StochasticWeightAveraging
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import ParallelStrategy
from torch import Tensor, nn
from torchmetrics import Metric

import memckpt
from lightning_memckpt.internals import TrainerInternals
from lightning_memckpt.notes import list_callbacks
from memckpt.capture.beside.param_groups import scaler_state

#: Largest hyperparameter that is stored, in pickled bytes.
_LARGE_HYPERPARAMETER = 16 << 10

# Arguments that determine a step. Changing one between two starts is allowed, but not exact.
_SETTINGS = (
    "accumulate_grad_batches", "world_size", "precision", "limit_train_batches", "limit_val_batches",
    "val_check_interval", "check_val_every_n_epoch", "gradient_clip_val", "gradient_clip_algorithm",
    "overfit_batches", "reload_dataloaders_every_n_epochs",
)  # fmt: skip


#: Those that training itself may change (a callback, GradientAccumulationScheduler), and a resume puts back.
_PUT_BACK = ("accumulate_grad_batches", "gradient_clip_val", "gradient_clip_algorithm")


def settings(trainer: pl.Trainer) -> dict[str, str]:
    """The Trainer's arguments that an exact continuation has to share, as text."""
    return {name: str(getattr(trainer, name, None)) for name in _SETTINGS}


def settings_changed_by_training(trainer: pl.Trainer, began_with: Mapping[str, str]) -> dict[str, Any]:
    """The arguments that differ from those that the attempt began with: values where a resume can put them back."""
    changed = {name: value for name, value in settings(trainer).items() if value != began_with[name]}
    return {name: getattr(trainer, name) if name in _PUT_BACK else value for name, value in changed.items()}


def changed_settings(trainer: pl.Trainer, began_with: Mapping[str, str], changed: Mapping[str, Any]) -> Iterator[str]:
    """One line for each that differs from what the killed attempt began with, or that it changed for good."""
    for name, value in settings(trainer).items():
        if name in changed and value == began_with[name] and name not in _PUT_BACK:
            yield f"{name} was {changed[name]} when the held state was captured, and is {value} now"
        elif value != began_with[name]:
            yield f"{name} was {began_with[name]} in the run that is continued, and is {value} now"


def data_replicas(trainer: pl.Trainer) -> int:
    """Number of ranks among which the samples are divided; tensor-parallel ranks share theirs."""
    strategy = trainer.strategy
    if not isinstance(strategy, ParallelStrategy):
        return 1
    replicas: int = strategy.distributed_sampler_kwargs["num_replicas"]
    return replicas


def capture(trainer: pl.Trainer, internals: TrainerInternals) -> dict[str, Any]:
    """State beside loops, logging and user state."""
    return {
        "schedulers": [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs],
        "precision": _precision(trainer.precision_plugin),
        "loop_extras": internals.loop_extras(),
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


def put_settings_back(trainer: pl.Trainer, began_with: Mapping[str, str], changed: Mapping[str, Any]) -> None:
    """Set what training had changed, unless the script now begins with another value."""
    now = settings(trainer)
    for name in changed.keys() & set(_PUT_BACK):
        if now[name] == began_with[name]:
            setattr(trainer, name, changed[name])


def restore(trainer: pl.Trainer, internals: TrainerInternals, state: Mapping[str, Any]) -> None:
    """Restore the captured state; call after the optimizers are restored, as Lightning does."""
    _restore_schedulers(trainer, state["schedulers"])
    if state["precision"]:
        trainer.precision_plugin.load_state_dict(copy.deepcopy(state["precision"]))
    internals.set_loop_extras(state["loop_extras"])


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
        scheduler.load_state_dict(copy.deepcopy(state))


# The reductions that self.log() accepts. The object matters, not only its name: Lightning compares it with that of the
# next self.log() call.
_REDUCTIONS: dict[str, Callable[..., Any]] = {
    **{f"torch.{name}": getattr(torch, name) for name in ("mean", "sum", "min", "max")},
    **{f"builtins.{name}": getattr(builtins, name) for name in ("sum", "min", "max")},
}
_REDUCTION_NAMES = {function: name for name, function in _REDUCTIONS.items()}

_AGGREGATES = ("value", "cumulated_batch_size")


class LoggingState:
    """Captures and restores one trainer's logging state. `left_out`: names of logged values that cannot be stored."""

    def __init__(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        beside: Mapping[str, nn.Module],
        internals: TrainerInternals,
    ) -> None:
        self._trainer = trainer
        self._pl_module = pl_module
        self._beside = beside
        self._internals = internals
        self.left_out: set[str] = set()

    def _modules(self) -> dict[str, nn.Module]:
        roots = {"": self._pl_module, **self._beside}
        named = ((prefix, path, one) for prefix, root in roots.items() for path, one in root.named_modules())
        return {".".join(filter(None, (prefix, path))): one for prefix, path, one in named}

    def capture(self) -> dict[str, Any]:
        """The state at the end of a training batch."""
        return {
            "logger": self._internals.logger_fields(),
            "results": {
                key: captured
                for key, result in self._internals.training_results.items()
                if (captured := self._capture_result(key, result)) is not None
            },
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Restore the state; call when no batch is in progress."""
        modules = self._modules()
        for key, captured in state["results"].items():
            self._restore_result(key, captured, modules)
        self._internals.set_logger_fields(_to_device(state["logger"], self._trainer.strategy.root_device))

    def _capture_result(self, key: str, result: Any) -> dict[str, Any] | None:
        meta = result.meta
        if meta.sync.group is not None:
            self.left_out.add(f"{key} (logged with sync_dist_group, a process group cannot be stored)")
            return None
        return {
            "log": {
                "fx": meta.fx,
                "name": meta.name,
                "prog_bar": meta.prog_bar,
                "logger": meta.logger,
                "on_step": meta.on_step,
                "on_epoch": meta.on_epoch,
                "enable_graph": meta.enable_graph,
                "sync_dist": meta.sync.should,
                "add_dataloader_idx": meta.add_dataloader_idx,
                "metric_attribute": meta.metric_attribute,
                "rank_zero_only": meta.sync.rank_zero_only,
            },
            "reduction": _REDUCTION_NAMES[meta.reduce_fx],
            "aggregates": {name: getattr(result, name) for name in _AGGREGATES if hasattr(result, name)}
            if result.is_tensor
            else None,
            "update_count": result._update_count,
            "has_reset": result.has_reset,
            "step_value": result._forward_cache,
        }

    def _restore_result(self, key: str, captured: dict[str, Any], modules: dict[str, nn.Module]) -> None:
        """Log a first value exactly as the user's code did, then overwrite its aggregate."""
        strategy = self._trainer.strategy
        results = self._internals.training_results
        value: Tensor | Metric
        if captured["aggregates"] is None:
            value = _expect(modules, captured["log"]["metric_attribute"], Metric)
        else:
            value = torch.zeros((), device=strategy.root_device)
        results.log(
            value=value,
            sync_dist_fn=strategy.reduce,
            reduce_fx=_REDUCTIONS[captured["reduction"]],
            batch_size=1,
            **captured["log"],
        )
        result = results[key]
        for name, aggregate in (captured["aggregates"] or {}).items():
            setattr(result, name, aggregate.to(strategy.root_device))
        result._update_count = captured["update_count"]
        result.has_reset = captured["has_reset"]
        result._forward_cache = _to_device(captured["step_value"], strategy.root_device)
        result._computed = None


def _expect(modules: dict[str, nn.Module], name: str, kind: type[Any]) -> Any:
    module = modules.get(name)
    if not isinstance(module, kind):
        raise ValueError(
            f"the held state has a {kind.__name__} at {name!r}, this model has {type(module).__name__} there; "
            'resume with the model that was trained, or start over with MemCheckpoint(resume="never")'
        )
    return module


def _to_device(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {key: _to_device(item, device) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_to_device(item, device) for item in value)
    return value
