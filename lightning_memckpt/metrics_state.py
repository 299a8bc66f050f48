"""State of logging inside an epoch, which no Lightning checkpoint holds.

It has three parts: the aggregates behind ``self.log(on_epoch=True)``, the states of torchmetrics modules, and the
dictionaries from which EarlyStopping, ModelCheckpoint and ReduceLROnPlateau read their monitored values. Without them
every epoch value of a resumed epoch would be computed from its second part only.

Captured values may share memory with live ones: the session encodes them before it returns.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection

from lightning_memckpt.internals import TrainerInternals

# The reductions that self.log() accepts. The object matters, not only its name: Lightning compares it with that of the
# next self.log() call.
_REDUCTIONS: dict[str, Callable[..., Any]] = {
    **{f"torch.{name}": getattr(torch, name) for name in ("mean", "sum", "min", "max")},
    **{f"builtins.{name}": getattr(builtins, name) for name in ("sum", "min", "max")},
}
_REDUCTION_NAMES = {function: name for name, function in _REDUCTIONS.items()}

_AGGREGATES = ("value", "cumulated_batch_size")

# MetricCollection updates only the first metric of each group of equal ones, once it has found the groups.
_GROUP_FIELDS = ("_groups", "_groups_checked")


class LoggingState:
    """Captures and restores one trainer's logging state.

    Attributes:
        left_out: names of logged values that cannot be stored; the caller logs them.
    """

    def __init__(self, trainer: pl.Trainer, pl_module: pl.LightningModule, internals: TrainerInternals) -> None:
        self._trainer = trainer
        self._pl_module = pl_module
        self._internals = internals
        self.left_out: set[str] = set()
        self._metrics: list[tuple[str, Metric]] = []
        self._collections: list[tuple[str, MetricCollection]] = []

    def find_metrics(self) -> None:
        """Find the metrics in the module; too slow for every step."""
        modules = list(self._pl_module.named_modules())
        self._metrics = [(name, module) for name, module in modules if isinstance(module, Metric)]
        self._collections = [(name, module) for name, module in modules if isinstance(module, MetricCollection)]

    def capture(self) -> dict[str, Any]:
        """The state at the end of a training batch."""
        return {
            "logger": self._internals.logger_fields(),
            "results": {
                key: captured
                for key, result in self._internals.training_results.items()
                if (captured := self._capture_result(key, result)) is not None
            },
            "metrics": {name: _capture_metric(metric) for name, metric in self._metrics},
            "groups": {
                name: {field: getattr(collection, field) for field in _GROUP_FIELDS if hasattr(collection, field)}
                for name, collection in self._collections
            },
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Restore the state; call when no batch is in progress."""
        modules = dict(self._pl_module.named_modules())
        for name, captured in state["metrics"].items():
            _restore_metric(_expect(modules, name, Metric), captured)
        for name, fields in state["groups"].items():
            collection = _expect(modules, name, MetricCollection)
            for field, value in fields.items():
                setattr(collection, field, value)
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


def accumulated_bytes(metrics: dict[str, Any]) -> dict[str, int]:
    """Bytes of each captured metric's state, by name: some metrics keep every prediction of the epoch."""
    return {name: _tensor_bytes(captured["state"]) for name, captured in metrics.items()}


def _capture_metric(metric: Metric) -> dict[str, Any]:
    return {
        "state": dict(metric.metric_state),
        "update_count": metric._update_count,
        "step_value": metric._forward_cache,
    }


def _restore_metric(metric: Metric, captured: dict[str, Any]) -> None:
    for name, value in captured["state"].items():
        setattr(metric, name, _to_device(value, metric.device))
    metric._update_count = captured["update_count"]
    metric._forward_cache = _to_device(captured["step_value"], metric.device)
    metric._computed = None


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


def _tensor_bytes(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, dict):
        return sum(map(_tensor_bytes, value.values()))
    if isinstance(value, (list, tuple)):
        return sum(map(_tensor_bytes, value))
    return 0
