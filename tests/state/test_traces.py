"""Steps that are tried on copies change nothing beside the optimizer, and what would change is known by name."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn

from memckpt.capture.live_state import LiveState
from memckpt.capture.self_test import STEPS, SelfTest
from memckpt.state.optimizers import private_attributes, try_steps

CALLS, TABLE, SUM, TURNS = 0, {"steps": [0]}, torch.zeros(2), itertools.count()


class Elsewhere:
    calls = 0

    def __init__(self) -> None:
        self.calls = 0


ONE = Elsewhere()


def counted() -> None:
    """Has its number of calls in an attribute."""


def closure() -> Callable[[], int]:
    count = 0

    def inner() -> int:
        nonlocal count
        count += 1
        return count

    return inner


COUNTER = closure()


class Traced(torch.optim.SGD):
    """Its step is followed by :meth:`trace`, which leaves something behind."""

    calls = 0
    seen: list[int] = []  # noqa: RUF012  # shared by all objects, as users have it
    trace: Callable[..., Any]

    def __init__(self, params: Iterable[Any]) -> None:
        super().__init__(params, lr=0.1)

    def step(self, closure: Any = None) -> Any:
        found = super().step(closure)
        self.trace()
        return found


def class_attribute(self: Any) -> None:
    type(self).calls += 1


def shared_list(self: Any) -> None:
    self.seen.append(1)


def global_number(self: Any) -> None:
    global CALLS
    CALLS += 1


def nested(self: Any) -> None:
    TABLE["steps"].append(1)


def tensor(self: Any) -> None:
    SUM.add_(1.0)


def default(self: Any, seen: list[int] = []) -> None:  # noqa: B006  # as users have it
    seen.append(1)


def other_class(self: Any) -> None:
    Elsewhere.calls += 1


def instance(self: Any) -> None:
    ONE.calls += 1


def nonlocal_number(self: Any) -> None:
    COUNTER()


def function_attribute(self: Any) -> None:
    vars(counted)["calls"] = vars(counted).get("calls", 0) + 1


def cannot_be_put_back(self: Any) -> None:
    next(TURNS)


KINDS = [
    class_attribute,
    shared_list,
    global_number,
    nested,
    tensor,
    default,
    other_class,
    instance,
    nonlocal_number,
    function_attribute,
]


def everything(cls: Any) -> list[float]:
    """Figures that grow with each call of one of the functions above."""
    cells = [cell.cell_contents for cell in COUNTER.__closure__ or ()]
    lists = [cls.seen, TABLE["steps"], default.__defaults__[0]]  # type: ignore[index]
    numbers = [cls.calls, CALLS, float(SUM[0]), Elsewhere.calls, ONE.calls, vars(counted).get("calls", 0)]
    return [*numbers, *cells, *map(len, lists)]


def growth(before: list[float], after: list[float]) -> float:
    return sum(after) - sum(before)


def optimizer_with(trace: Callable[..., None]) -> tuple[nn.Module, Any]:
    model = nn.Linear(3, 2)
    return model, type(trace.__name__, (Traced,), {"trace": trace, "__module__": __name__})(model.parameters())


@pytest.mark.promise("an optimizer whose step changes a class attribute, a global, a default or a closure of its code")
@pytest.mark.parametrize("trace", KINDS, ids=lambda trace: trace.__name__)
def test_steps_on_copies_leave_no_trace_and_are_not_redone(trace: Callable[..., None]) -> None:
    model, optimizer = optimizer_with(trace)
    before = everything(type(optimizer))
    live = LiveState(model, [optimizer], {})
    assert everything(type(optimizer)) == before
    assert "in each step, which no record holds" in live.not_redoable[0]
    assert "and is not carried" in next(iter(live.not_carried))
    counted_steps = []
    for tested in (False, True):
        test = SelfTest(live, [0] if tested else [])
        test.install()
        before = everything(type(optimizer))
        for _ in range(STEPS):
            model(torch.ones(1, 3)).sum().backward()
            optimizer.step()
        counted_steps.append((before, everything(type(optimizer))))
        test.remove()
    (first, second), (third, last) = counted_steps
    assert second == third
    assert growth(first, second) == growth(third, last) > 0


def test_what_cannot_be_put_back_is_known_all_the_same() -> None:
    model, optimizer = optimizer_with(cannot_be_put_back)
    assert "TURNS" in LiveState(model, [optimizer], {}).not_redoable[0]


def test_what_is_made_once_is_no_trace() -> None:
    """A table of constants that the first step fills, say."""

    def fill(self: Any) -> None:
        TABLE.setdefault("constants", [1])

    model, optimizer = optimizer_with(fill)
    live = LiveState(model, [optimizer], {})
    assert (live.not_redoable, live.not_carried) == ({}, {})
    assert "constants" not in TABLE


class Sharpness(torch.optim.SGD):
    """Steps twice, as SAM does: first_step(), a second backward, step()."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                param.data = self.state[param]["old"]


def test_a_step_that_needs_a_call_before_it_is_explained() -> None:
    model = nn.Linear(3, 2)
    reason = LiveState(model, [Sharpness(model.parameters())], {}).not_redoable[0]
    assert "needs gradients alone, found Sharpness: tried on a parameter" in reason
    assert "it raised KeyError('old'), so it needs a closure, or a call before step()" in reason


def test_a_scheduler_in_an_attribute_of_its_optimizer_is_no_part_of_a_step() -> None:
    """It refers to the optimizer, so that a copy of it would be one of all state, too."""
    parameter = nn.Parameter(torch.ones(2))
    optimizer: Any = torch.optim.AdamW([parameter])
    optimizer.scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
    parameter.grad = torch.ones(2)
    optimizer.step()
    assert try_steps(optimizer) == []
    assert "scheduler" not in private_attributes(optimizer)
