"""What metrics of torchmetrics keep in attributes: carried, on the model and registered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchmetrics
from torch import nn
from torchmetrics.wrappers import MetricTracker

from memckpt.capture.beside.modules import ModuleTree
from memckpt.capture.beside.objects import MetricStates, ModuleState, as_stateful
from memckpt.errors import ForeignStateError
from memckpt.state import codec


class Own(torchmetrics.MeanMetric):
    """A metric of the user's that counts in attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.seen, self.best = 0, torch.tensor(0.0)

    def update(self, value: Any, weight: Any = 1.0) -> None:
        super().update(value, weight)
        self.seen += 1
        self.best = torch.maximum(self.best, value)

    def compute(self) -> Any:
        return super().compute() * self.seen + self.best


class Counting(nn.Module):
    """A module whose state_dict() is empty."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(()), persistent=False)
        self.seen = 0

    def update(self, value: torch.Tensor) -> None:
        self.total += value
        self.seen += 1

    def compute(self) -> Any:
        return self.total / self.seen


def tracked() -> Any:
    return MetricTracker(torchmetrics.MeanMetric(), maximize=False)


def collection() -> Any:
    kinds = [torchmetrics.MeanSquaredError(), torchmetrics.MeanAbsoluteError(), torchmetrics.R2Score()]
    return torchmetrics.MetricCollection(kinds)


def feed(metric: Any, steps: range) -> list[Any]:
    """Update it as training does; the values in between."""
    seen = []
    for step in steps:
        value = torch.randn(4, generator=torch.Generator().manual_seed(step))
        if isinstance(metric, MetricTracker) and step % 2 == 0:
            metric.increment()
        if isinstance(metric, torchmetrics.MetricCollection):
            metric.update(value, value.square())
        else:
            metric.update(value.mean())
        seen.append(metric.compute())
    return seen + ([metric.compute_all()] if isinstance(metric, MetricTracker) else [])


def carrier_of(metric: nn.Module, registered: bool) -> Any:
    if registered:
        return as_stateful("metric", metric)
    tree = ModuleTree({"": nn.ModuleDict({"it": metric})})
    return MetricStates(lambda: tree.metrics, tree.modules_now, pytest.fail)


METRICS: list[Callable[[], Any]] = [
    torchmetrics.MeanMetric,
    torchmetrics.aggregation.RunningMean,
    lambda: torchmetrics.MinMaxMetric(torchmetrics.MeanMetric()),
    Own,
    collection,
    tracked,
]


@pytest.mark.promise("torchmetrics, on the model and its modules; elsewhere if registered")
@pytest.mark.parametrize("make", [*METRICS, Counting])
@pytest.mark.parametrize("registered", [True, False])
def test_a_metric_goes_on_as_if_it_had_never_been_left(make: Callable[[], Any], registered: bool) -> None:
    if make is Counting and not registered:
        pytest.skip("no metric: the model's tensors are carried elsewhere")
    ours, theirs = make(), make()
    feed(ours, range(7))
    held = codec.decode(codec.encode(carrier_of(ours, registered).state_dict()))
    expected = feed(ours, range(7, 12))
    for _ in range(2):  # the held values do not change with the metric
        carrier_of(theirs, registered).load_state_dict(held)
        assert codec.encode(feed(theirs, range(7, 12))) == codec.encode(expected)


def test_a_module_with_a_state_is_carried_by_it_alone_unless_a_metric_is_in_it() -> None:
    layer = nn.Linear(1, 1)
    assert as_stateful("layer", layer) is layer
    assert isinstance(as_stateful("both", nn.ModuleList([layer, torchmetrics.MeanMetric()])), ModuleState)


def test_metrics_that_are_missing_are_named() -> None:
    tree = ModuleTree({"beside": nn.ModuleDict({"mean": torchmetrics.MeanMetric(), "late": torchmetrics.MeanMetric()})})
    held = MetricStates(lambda: tree.metrics, tree.modules_now, pytest.fail).state_dict()
    assert list(held) == ["beside.mean", "beside.late"]
    said: list[str] = []
    fewer = ModuleTree({"beside": nn.ModuleDict({"mean": torchmetrics.MeanMetric()})})
    MetricStates(lambda: fewer.metrics, fewer.modules_now, said.append).load_state_dict(held)
    assert said == ["the metric beside.late is not there at the resume; make it before restore()"]
    two = ModuleState("two", nn.ModuleList([torchmetrics.MeanMetric(), torchmetrics.MeanMetric()])).state_dict()
    with pytest.raises(ForeignStateError, match="expected a module at '1'"):
        ModuleState("two", nn.ModuleList([torchmetrics.MeanMetric()])).load_state_dict(two)
