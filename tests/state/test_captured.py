"""What optimizers keep beside the tensors in slots, captured and restored."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from memckpt.state import codec
from memckpt.state.captured import OptimizerCapture


class Around(Optimizer):
    """One around another, whose groups and state it shares, as Lookahead is."""

    def __init__(self, base: Optimizer) -> None:
        self.base = base
        self.defaults, self.state, self.param_groups = base.defaults, base.state, base.param_groups


def test_what_hangs_on_a_parameter_is_restored_where_one_optimizer_is_around_another() -> None:
    """Both have the parameter, and its attribute: the second reference is to what the first one was restored to."""
    trees: list[Any] = []
    for kept in (torch.arange(2.0), torch.zeros(2)):
        param = nn.Parameter(torch.ones(2))
        param.velocity = kept  # type: ignore[attr-defined]
        capture = OptimizerCapture([Around(torch.optim.SGD([param], 0.1))], {"w": param}, [])
        if trees:
            capture.restore(trees[0])
            assert param.velocity is kept, "in place"  # type: ignore[attr-defined]
            assert kept.tolist() == [0.0, 1.0]
        trees.append(codec.decode(codec.encode(capture.capture(SimpleNamespace(params=())))))  # type: ignore[arg-type]
