"""Variables of a training loop: averages that nobody carries are named, and what each step makes anew is not."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from memckpt.capture.variables import LoopVariables

STEPS = 6
NAMED = "not carried"


class Average:
    """As tutorials write it: it has no state to capture."""

    def __init__(self, model: nn.Module) -> None:
        self.shadow = weights(model)

    def update(self, model: nn.Module) -> None:
        for name, param in model.named_parameters():
            self.shadow[name] = 0.9 * self.shadow[name] + 0.1 * param.detach()


class Trainer:
    """A script's own class with a loop."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.average = model, Average(model)

    def fit(self, look: Callable[[], None]) -> None:
        for _ in steps(self.model):
            self.average.update(self.model)
            look()


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: param.detach().clone() for name, param in model.named_parameters()}


def steps(model: nn.Module) -> Iterator[int]:
    """Some steps, in which all weights change."""
    for step in range(STEPS):
        with torch.no_grad():
            for param in model.parameters():
                param.mul_(0.9)
        yield step


def module_average(model: nn.Module, look: Callable[[], None]) -> None:
    average = copy.deepcopy(model)
    for _ in steps(model):
        for ours, param in zip(average.parameters(), model.parameters(), strict=True):
            ours.data.lerp_(param.data, 0.1)
        look()


def written_dict(model: nn.Module, look: Callable[[], None]) -> None:
    average = weights(model)
    for _ in steps(model):
        for name, param in model.named_parameters():
            average[name].lerp_(param.detach(), 0.1)
        look()


def late_and_nested(model: nn.Module, look: Callable[[], None]) -> None:
    held: dict[str, Any] = {"average": None}
    for step in steps(model):
        if step == 2:
            held["average"] = [*weights(model).values()]
        for average, param in zip(held["average"] or [], model.parameters(), strict=False):
            average.lerp_(param.detach(), 0.1)
        look()


def replaced_in_an_object(model: nn.Module, look: Callable[[], None]) -> None:
    average = Average(model)
    for _ in steps(model):
        average.update(model)
        look()


def of_a_trainer(model: nn.Module, look: Callable[[], None]) -> None:
    Trainer(model).fit(look)


def made_anew(model: nn.Module, look: Callable[[], None]) -> None:
    for _ in steps(model):
        before = weights(model)
        copies = [param.detach().clone() for param in model.parameters()]
        look()
        del before, copies  # what is made next may come to the same address


def of_the_model(model: nn.Module, look: Callable[[], None]) -> None:
    parameters, checkpoint = list(model.parameters()), model.state_dict()
    for _ in steps(model):
        look()
    assert len(parameters) == len(checkpoint)


def of_the_optimizer(model: nn.Module, look: Callable[[], None]) -> None:
    optimizer = torch.optim.SGD(model.parameters(), torch.tensor(0.1))
    for _ in steps(model):
        for group in optimizer.param_groups:
            group["lr"].mul_(0.9)
        look()


def of_another_shape(model: nn.Module, look: Callable[[], None]) -> None:
    history = [torch.zeros(2)]
    for step in steps(model):
        history[0][0] += step
        look()


def idle_teacher(model: nn.Module, look: Callable[[], None]) -> None:
    teacher = copy.deepcopy(model)
    for _ in steps(model):
        teacher(torch.ones(3))
        look()


def said_of(loop: Callable[[nn.Module, Callable[[], None]], None], **provided: Any) -> list[str]:
    model, said = nn.Linear(3, 2), list[str]()
    variables = LoopVariables(lambda: [model], lambda: [model], said.append)
    loop(model, lambda: variables.look(provided))
    return said


@pytest.mark.promise("an average or another module in a variable of the loop, or in an object there")
@pytest.mark.parametrize(
    ("loop", "name"),
    [
        (module_average, "the variable average of module_average(), a Linear,"),
        (written_dict, "the variable average of written_dict()"),
        (late_and_nested, "the variable held of late_and_nested()"),
        (replaced_in_an_object, "the variable average.shadow of replaced_in_an_object()"),
        (of_a_trainer, "the variable self.average.shadow of fit()"),
    ],
)
def test_an_average_is_named_once(loop: Any, name: str) -> None:
    (reason,) = said_of(loop)
    assert reason.startswith(name)
    assert NAMED in reason


@pytest.mark.parametrize("loop", [made_anew, of_the_model, of_the_optimizer, of_another_shape, idle_teacher])
def test_what_is_no_average_is_not_named(loop: Any) -> None:
    assert not said_of(loop)


def test_what_is_provided_is_carried() -> None:
    model, said = nn.Linear(3, 2), list[str]()
    variables = LoopVariables(lambda: [model], lambda: [model], said.append)
    average = weights(model)
    for _ in steps(model):
        for name, param in model.named_parameters():
            average[name] = average[name].lerp(param.detach(), 0.1)
        variables.look({"average": {name: one.clone() for name, one in average.items()}})
    assert not said


def test_what_another_session_carries_is_carried() -> None:
    model, other, said = nn.Linear(3, 2), nn.Linear(3, 2), list[str]()
    variables = LoopVariables(lambda: [model], lambda: [model], said.append)
    beside = LoopVariables(lambda: [other], lambda: [other], said.append)
    for _ in zip(steps(model), steps(other), strict=True):
        variables.look({})
        beside.look({})
    assert not said


def test_a_look_keeps_nothing_alive() -> None:
    model, said = nn.Linear(3, 2), list[str]()
    variables = LoopVariables(lambda: [model], lambda: [model], said.append)
    batch = torch.zeros(5)
    reference = weakref.ref(batch)
    variables.look({})
    del batch
    gc.collect()
    assert reference() is None


def test_a_dict_of_variables_that_the_script_has_stays_whole() -> None:
    model, said = nn.Linear(3, 2), list[str]()
    variables = LoopVariables(lambda: [model], lambda: [model], said.append)
    settings = locals()
    variables.look({})
    assert settings["model"] is model
